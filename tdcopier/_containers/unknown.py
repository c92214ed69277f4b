"""The option `on_unknown`: which opaque values are plain data, and reports of those that are not.

`csrc/python/walk/unknown_values.cpp` finds the opaque values of a copy and asks here about each
class. Unknown tensor subclasses do not come here: they are delegated
(`csrc/python/walk/value_kind.h`). `registry.py` (`_find_rule`) has the order in which a class is
looked up, before its values are opaque.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import functools
import pathlib
import random
import re
import sys
import types
import uuid
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tdcopier._containers.delegated_parts import is_tensor_collection

_PACKAGE = str(Path(__file__).parent.parent) + "/"

_PLAIN: tuple[Any, ...] = (
    # numbers, text, time and names
    type(None), int, float, complex, str, bytes, bytearray, memoryview, enum.Enum, datetime.date,
    datetime.time, datetime.timedelta, datetime.tzinfo, pathlib.PurePath, uuid.UUID, re.Pattern,
    range, slice, random.Random, type(...), type(NotImplemented),
    # code
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc,
    # arrays that torch cannot take: objects, text, dates, records, masked
    np.ndarray, np.generic, np.dtype,
    torch.device, torch.dtype, torch.layout, torch.memory_format, torch.Size, torch.Generator,
    torch.Stream, torch.Event, torch.finfo, torch.iinfo,
    torch.SymInt, torch.SymFloat, torch.SymBool,
)  # fmt: skip
"""Classes whose values, and those of their subclasses, contain no tensors that could be missed;
for those that may, see `may_hold_tensors`."""

_PLAIN_IF_LOADED = {
    "decimal": ("Decimal",),
    "fractions": ("Fraction",),
    "numpy.random": ("BitGenerator", "Generator", "RandomState"),
}
"""More of these. Their modules take 6 ms to import; without the module there is no such value."""

_PLAIN_IDS = frozenset(map(id, _PLAIN))  # a class's metaclass may forbid to hash or compare it

_COMPARED_BY_IDENTITY = frozenset(map(id, (torch.SymInt, torch.SymFloat, torch.SymBool)))
"""A comparison of these adds a guard to the graph that is being traced."""

_HEAP_TYPE = 1 << 9  # a class that is not built in, such as one from a class statement

_ACCEPTED = (
    "Accepted are tensors, numpy arrays, TensorDicts, lists, tuples, dicts and their subclasses, "
    "dataclasses, objects with a .to for devices, and registered classes."
)


class UnknownTypeWarning(UserWarning):
    """A value whose class tdcopier does not know was left as it is.

    For example::

        with warnings.catch_warnings():
            warnings.simplefilter("error", tdcopier.containers.UnknownTypeWarning)
            tdcopier.copy(batch, "cuda", on_unknown="warn")

    A copy passed it through unchanged, or left an attribute with tensors beside the fields or items
    of a container; `park` left the tensors in it where they are, or `snapshot` copied them where
    they are. Only with `on_unknown="warn"`, and once for each class.
    """


UnknownTypeWarning.__module__ = "tdcopier.containers"


def is_plain(cls: type) -> bool:
    """Return whether opaque values of the class are known to be plain data."""
    if any(_is_listed(base) for base in cls.__mro__):
        return True
    if hasattr(cls, "n_sequence_fields"):
        return True  # one of the interpreter's own, such as sys.flags: others are containers
    # A non-tensor value of a TensorDict; its module is loaded if there is one.
    nodes = sys.modules.get("tdcopier.tensordict._nodes")
    return nodes is not None and cls is nodes.Data


def may_hold_tensors(cls: type) -> bool:
    """Return whether values of a plain class are looked into: arrays of objects, and slices."""
    return issubclass(cls, (np.ndarray, slice))


def is_plain_value(value: Any) -> bool:
    """Return whether an opaque value is plain data, with no tensor in it as far as is known."""
    return is_plain(type(value)) and not (_is_holder(value) and _holds_tensors(value))


def may_have_leaves(value: Any) -> bool:
    """Return whether a value is a tensor or an array, or may have some in it."""
    return _holds_tensors(value, _is_array_or_unknown)


def has_tensors(value: Any) -> bool:
    """Return whether a value is a tensor, or has some in lists, tuples and dicts."""
    return _holds_tensors(value, lambda part: False)


def _is_holder(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return bool(value.dtype.hasobject)
    return isinstance(value, slice)


def _is_unknown(value: Any) -> bool:
    return not is_plain(type(value))


def _is_array_or_unknown(value: Any) -> bool:
    return isinstance(value, np.ndarray) or _is_unknown(value)


def _holds_tensors(value: Any, or_is: Callable[[Any], bool] = _is_unknown) -> bool:
    """Return whether a tensor, or a part for which `or_is` is true, is in lists and the like.

    By default also for objects of unknown classes, since a copy does not look into them.
    """
    parts = [value]
    met = set()  # a list may contain itself
    while parts:
        part = parts.pop()
        if isinstance(part, torch.Tensor) or is_tensor_collection(type(part)):
            return True
        if id(part) in met:
            continue
        met.add(id(part))
        if isinstance(part, list):  # of a subclass, too, but past its methods
            parts += list.__iter__(part)
        elif isinstance(part, tuple):
            parts += tuple.__iter__(part)
        elif isinstance(part, dict):
            parts += dict.values(part)
        elif or_is(part):
            return True
        elif isinstance(part, slice):
            parts += [part.start, part.stop, part.step]
        elif _is_holder(part):
            parts += part.ravel().tolist()
    return False


def compares_as_plain_data(cls: type) -> bool:
    """Return whether ``==`` of the class, known to be plain data, is that of such a class.

    It is not if a subclass overrides it in Python.
    """
    if any(id(base) in _COMPARED_BY_IDENTITY for base in cls.__mro__) or not is_plain(cls):
        return False
    definer = next(base for base in cls.__mro__ if "__eq__" in vars(base))
    return _is_listed(definer) or not definer.__flags__ & _HEAP_TYPE


def _is_listed(cls: type) -> bool:
    if id(cls) in _PLAIN_IDS:
        return True
    return any(
        cls is getattr(sys.modules.get(module), name, None)
        for module, names in _PLAIN_IF_LOADED.items()
        for name in names
    )


def is_to_be_told(value: Any, only_once: bool) -> bool:
    """Return whether a value is to be reported: it is unknown, and its class is news."""
    return not (is_plain_value(value) or (only_once and id(type(value)) in _told))


def warn(path: str, value: Any) -> None:
    """Warn of the value at this path, and not again of its class."""
    warn_once(
        type(value),
        f"{path} is {found(value)}: the result has the same object, and tensors in it stay on "
        f"their device. {_remedy(value)}",
    )


def warn_once(cls: type, text: str) -> None:
    """Warn of a value of this class, unless a warning of the class has been given."""
    if id(cls) not in _told:
        warnings.warn(text, UnknownTypeWarning, stacklevel=_levels_to_caller())
        _note_told(cls)  # after the warning, which a filter may turn into an error


def refuse(path: str, value: Any) -> None:
    """Raise a TypeError that names the value."""
    loss = "nothing would be copied" if path == "data" else "tensors in it would not be copied"
    raise TypeError(
        f'{path} is {found(value)}: {loss}. {_remedy(value)} With on_unknown="ignore" it is '
        "passed through unchanged; tdcopier.explain() lists what a copy does with each value"
    )


def refuse_root(name: str, value: Any) -> None:
    """Raise a TypeError if the value is all of a tree, by this name, and its class is unknown."""
    if not is_plain_value(value):
        raise TypeError(f"{name} is {found(value)}: nothing would be copied. {_remedy(value)}")


def found(value: Any) -> str:
    """Return what an unknown value is, in words."""
    name = class_name(type(value))
    if _is_holder(value):
        what = "" if name == "slice" else " of objects"
        return f"a {name}{what} that has tensors in it, or values that may"
    if isinstance(value, (set, frozenset)):
        return f"a {name}, whose values have no order"
    if isinstance(value, _VIEWS):
        return f"a view of a dict ({name})"
    if _is_iterator(value):
        return f"an iterator ({name}), which can be read only once"
    article = "an" if name[0] in "aeiou" else "a"
    return f"{article} {name}, a class that tdcopier does not know"


def _remedy(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"Pass its tolist(), or torch.stack() of it. {_ACCEPTED}"
    if isinstance(value, slice):
        return "Pass a tuple of its bounds."
    if is_without_order(value):
        return f"Pass list(...) of it. {_ACCEPTED}"
    register = f"{_ACCEPTED} Register the class with tdcopier.containers.register."
    if hasattr(type(value), "keys") and hasattr(type(value), "__getitem__"):
        return f"Pass dict(...) of it. {register}"
    return register


def is_without_order(value: Any) -> bool:
    """Return whether this is a set, a view of a dict, or an iterator: a list of it is known."""
    return isinstance(value, (set, frozenset, *_VIEWS)) or _is_iterator(value)


def _is_iterator(value: Any) -> bool:
    return hasattr(type(value), "__next__")  # isinstance(_, Iterator) would hash the class


_VIEWS: tuple[type, ...] = (type({}.values()), type({}.keys()), type({}.items()))


def class_name(cls: type) -> str:
    """Return `set`, `collections.ChainMap`, `torch.nn.Linear` and so on."""
    if cls.__module__ in ("builtins", "__main__"):
        return cls.__qualname__
    if cls is torch.nn.Parameter:  # it is defined in torch.nn.parameter
        return "torch.nn.Parameter"
    return f"{cls.__module__}.{cls.__qualname__}"


# ---- once for each class -------------------------------------------------------------------------

_told: dict[int, weakref.ref[type]] = {}
"""By id of the class, because a class may have no hash; without classes that have been dropped."""


def _note_told(cls: type) -> None:
    key = id(cls)
    _told[key] = weakref.ref(cls, functools.partial(_forget, key))


def _forget(key: int, reference: weakref.ref[type]) -> None:
    if _told.get(key) is reference:
        del _told[key]


def _levels_to_caller() -> int:
    """Return the level of the innermost frame outside this package, for `warnings.warn`."""
    levels = 1
    frame = sys._getframe(1)
    # `contextlib` enters the blocks that are generators of this package.
    inside = (_PACKAGE, contextlib.__file__)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
        levels += 1
    return levels
