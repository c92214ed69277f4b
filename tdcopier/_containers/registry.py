"""Rules for container classes other than `list`, `tuple` and `dict`, built in or registered."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import os
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from tdcopier._containers.delegated_parts import DelegatedPart
from tdcopier._containers.rule import Flat, Refused, Rule

T = TypeVar("T")

DELEGATED = "delegated"
"""The rule of a class whose values have a ``.to`` of their own, which moves everything in them."""


_KNOWN_TO_THE_WALK = {list, tuple, dict, int, str, float, bool, bytes, type(None)}

_NOT_INSTANTIABLE = 1 << 7  # flags of the interpreter's types
_HEAP_TYPE = 1 << 9  # a class that is not built in, such as one from a class statement

_lock = threading.RLock()  # reentrant: a look-up may run the code of a class's metaclass
os.register_at_fork(
    before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
)
_registered: weakref.WeakKeyDictionary[type, Rule] = weakref.WeakKeyDictionary()
_found: weakref.WeakKeyDictionary[type, Rule | str | None] = weakref.WeakKeyDictionary()


def register_container(
    cls: type[T],
    flatten: Callable[[T], tuple[Iterable[Any], Any]],
    unflatten: Callable[[list[Any], Any], T],
) -> None:
    """Register a class as a container, so that its children are copied; else its values are opaque.

    Args:
        cls: the class. Subclasses are not included, because `unflatten` would not return their
            class.
        flatten: takes a value and returns `(children, context)`. Children may be leaves, containers
            or opaque values. The context must not contain references to the children.
        unflatten: takes the moved children, as a list in the same order, and the context, and
            returns a new value. It may be called before the copy is done, so it must not read the
            children's data on the host.

    Raises:
        TypeError: `cls` is not a class, or is one that the engine handles itself (`list`, `tuple`,
            `dict`, tensors, arrays); or a function is not callable.
        ValueError: `cls` is registered already.
    """
    if not isinstance(cls, type):
        raise TypeError(f"cls must be a class; got {cls!r}")
    if cls in _KNOWN_TO_THE_WALK or _is_leaf_class(cls):
        raise TypeError(f"{cls.__qualname__} is known to the engine and cannot be registered")
    for name, function in (("flatten", flatten), ("unflatten", unflatten)):
        if not callable(function):
            raise TypeError(f"{name} must be callable; got {function!r}")

    def flatten_checked(value: Any) -> Flat:
        answer: Any = flatten(value)
        if isinstance(answer, tuple) and len(answer) == 2 and _may_be_children(answer[0]):
            return list(answer[0]), answer[1], None
        raise Refused(
            f"is a {cls.__qualname__}, whose flatten function must return a pair (children, "
            f"context); it returned {answer!r}"
        )

    with _lock:
        if cls in _registered:
            raise ValueError(f"{cls.__qualname__} is registered already")
        _found.clear()  # cleared first, so that an interrupt in between changes nothing
        _registered[cls] = Rule(flatten_checked, unflatten)


def _may_be_children(value: Any) -> bool:
    """Return false for an iterable that is a single child, for example a tensor."""
    one = (torch.Tensor, str, bytes, Mapping)
    return isinstance(value, Iterable) and not isinstance(value, one) and not _is_array(value)


def _is_array(value: Any) -> bool:
    return hasattr(type(value), "__array_interface__")


def rule_of(cls: type) -> Rule | str | None:
    """Return the rule of a class, `DELEGATED`, or None if its values are opaque."""
    if type(cls).__hash__ is None:
        return None  # a class that cannot be hashed cannot be registered
    with _lock:  # without it, a rule found before a registration could be stored after it
        if cls not in _found:
            _found[cls] = _registered.get(cls) or _find_rule(cls)
        rule: Rule | str | None = _found[cls]
        return rule


def _find_rule(cls: type) -> Rule | str | None:
    if _is_jagged(cls):
        from tdcopier._containers.jagged import (
            JAGGED,  # torch has imported its dependencies already
        )

        return JAGGED
    if _is_tensor_collection(cls):
        from tdcopier.tensordict._walk import COLLECTION  # tensordict is imported already

        return COLLECTION
    if issubclass(cls, (PackedSequence, DelegatedPart)):
        return DELEGATED
    if issubclass(cls, (enum.Enum, torch.nn.Module)):
        return None  # enum members are compared by identity; a module's ``.to`` works in place
    if cls in _EXACT_MAPPINGS:
        return _EXACT_MAPPINGS[cls]
    bases: set[type] = set(cls.__mro__)
    if bases & {dict, collections.UserDict}:
        return _MAPPINGS
    if tuple in bases:
        return _tuple_rule(cls)
    if bases & {list, collections.deque}:
        return _SEQUENCES
    if dataclasses.is_dataclass(cls) and _is_plain_object(cls):
        return _DATACLASSES
    return None


def _is_plain_object(cls: type) -> bool:
    """Return whether values of the class have attributes only, unlike for example exceptions."""
    return not _builtin_bases(cls)


def _builtin_bases(cls: type) -> set[type]:
    """Return the base classes that are written in C, except `object`."""
    return {base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE} - {object}


def _is_leaf_class(cls: type) -> bool:
    bases = {f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__}
    return not bases.isdisjoint({"torch.Tensor", "numpy.ndarray"})


def _is_jagged(cls: type) -> bool:
    """Return whether this is the class of jagged nested tensors, without importing it."""
    module = sys.modules.get("torch.nested._internal.nested_tensor")
    return module is not None and cls is getattr(module, "NestedTensor", None)


def _is_tensor_collection(cls: type) -> bool:
    """Return whether this is a TensorDict or a tensorclass, without importing tensordict.

    tensordict's `is_tensor_collection` would keep a reference to every class passed to it.
    """
    base = getattr(sys.modules.get("tensordict"), "TensorDictBase", None)
    return base is not None and (issubclass(cls, base) or getattr(cls, "_is_tensorclass", False))


# ---- mappings ------------------------------------------------------------------------------------


def _flatten_ordered(value: collections.OrderedDict[Any, Any]) -> Flat:
    """Flatten an `OrderedDict`, which may have attributes: a state dict has `_metadata`."""
    keys = list(value)
    return list(value.values()), (keys, dict(vars(value))), keys


def _unflatten_ordered(children: list[Any], context: tuple[list[Any], dict[str, Any]]) -> Any:
    keys, attributes = context
    rebuilt = collections.OrderedDict(zip(keys, children, strict=True))
    vars(rebuilt).update(attributes)
    return rebuilt


def _flatten_default(value: collections.defaultdict[Any, Any]) -> Flat:
    keys = list(value)
    return list(value.values()), (value.default_factory, keys), keys


def _unflatten_default(children: list[Any], context: tuple[Any, list[Any]]) -> Any:
    factory, keys = context
    return collections.defaultdict(factory, zip(keys, children, strict=True))


def _flatten_mapping(value: Any) -> Flat:
    """Flatten any other mapping; a shallow copy without the children is the context."""
    items = _stored(value)
    keys = list(items)
    shell = _shell_of(value, "mapping")
    if list(_stored(shell)) != keys:
        raise _not_rebuildable(value, "mapping", "its copy has other keys")
    for key in keys:
        try:
            shell[key] = None  # drops the child, and tests whether it can be replaced
        except Exception as error:
            raise _not_rebuildable(value, "mapping", f"{type(error).__name__}: {error}") from error
    return list(items.values()), (shell, keys), keys


def _stored(value: Any) -> dict[Any, Any]:
    """Return the stored items of a mapping, without calling methods that a subclass overrides."""
    if isinstance(value, dict):
        base: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        return dict(base.items(value))
    stored: dict[Any, Any] = dict(value.data)
    return stored


def _unflatten_mapping(children: list[Any], context: tuple[Any, list[Any]]) -> Any:
    shell, keys = context
    rebuilt = _shallow_copy(shell)
    for key, child in zip(keys, children, strict=True):
        rebuilt[key] = child
    return rebuilt


_MAPPINGS = Rule(_flatten_mapping, _unflatten_mapping, "key")
_EXACT_MAPPINGS: dict[type, Rule] = {
    collections.OrderedDict: Rule(_flatten_ordered, _unflatten_ordered, "key"),
    collections.defaultdict: Rule(_flatten_default, _unflatten_default, "key"),
}


# ---- sequences -----------------------------------------------------------------------------------


def _flatten_sequence(value: Any) -> Flat:
    base: Any = list if isinstance(value, list) else collections.deque
    children = list(base.__iter__(value))  # the stored items: a subclass may override __iter__
    shell = _shell_of(value, "sequence")
    if len(shell) != len(children):
        raise _not_rebuildable(value, "sequence", "its copy has another length")
    for index in range(len(children)):
        try:
            shell[index] = None
        except Exception as error:
            raise _not_rebuildable(value, "sequence", f"{type(error).__name__}: {error}") from error
    return children, shell, None


def _unflatten_sequence(children: list[Any], shell: Any) -> Any:
    rebuilt = _shallow_copy(shell)
    for index, child in enumerate(children):
        rebuilt[index] = child
    return rebuilt


_SEQUENCES = Rule(_flatten_sequence, _unflatten_sequence)


# ---- tuples --------------------------------------------------------------------------------------


def _tuple_rule(cls: type) -> Rule | None:
    if hasattr(cls, "n_sequence_fields"):  # for example torch.return_types.max
        no_more_of_them = bool(cls.__flags__ & _NOT_INSTANTIABLE)  # for example sys.version_info
        return None if no_more_of_them else _STRUCTS
    if _builtin_bases(cls) != {tuple}:
        return None  # for example torch.Size, which contains no tensors
    named = isinstance(getattr(cls, "_fields", None), tuple)
    return _NAMED_TUPLES if named else _TUPLES


def _flatten_tuple(value: tuple[Any, ...]) -> Flat:
    children = list(tuple.__iter__(value))  # the stored items: a subclass may override __iter__
    return children, (type(value), dict(getattr(value, "__dict__", {}))), None


def _flatten_named_tuple(value: Any) -> Flat:
    children, context, _ = _flatten_tuple(value)
    return children, context, list(value._fields) if len(value._fields) == len(children) else None


def _unflatten_tuple(children: list[Any], context: tuple[type, dict[str, Any]]) -> Any:
    cls, attributes = context
    rebuilt: Any = tuple.__new__(cls, children)  # the class's own __new__ may take other arguments
    if attributes:
        rebuilt.__dict__.update(attributes)
    return rebuilt


def _flatten_struct(value: Any) -> Flat:
    _, (_, hidden) = value.__reduce__()
    return list(value), (type(value), hidden), None


def _unflatten_struct(children: list[Any], context: tuple[Any, dict[str, Any]]) -> Any:
    cls, hidden = context
    return cls(children, hidden)


_STRUCTS = Rule(_flatten_struct, _unflatten_struct)
_TUPLES = Rule(_flatten_tuple, _unflatten_tuple)
_NAMED_TUPLES = Rule(_flatten_named_tuple, _unflatten_tuple, "attribute")


# ---- dataclasses ---------------------------------------------------------------------------------


def _flatten_dataclass(value: Any) -> Flat:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    slots = [name for base in type(value).__mro__ for name in vars(base) if _is_slot(base, name)]
    attributes = [
        name for name in [*slots, *getattr(value, "__dict__", {})] if hasattr(value, name)
    ]
    others = {name: getattr(value, name) for name in attributes if name not in set(names)}
    return [getattr(value, name) for name in names], (type(value), names, others), names


def _unflatten_dataclass(
    children: list[Any], context: tuple[type, list[str], dict[str, Any]]
) -> Any:
    """Rebuild without `__init__`, which may take other arguments and has run once already."""
    cls, names, others = context
    rebuilt: Any = object.__new__(cls)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(rebuilt, name, child)  # works for frozen dataclasses too
    for name, other in others.items():
        object.__setattr__(rebuilt, name, other)
    return rebuilt


def _is_slot(cls: type, name: str) -> bool:
    return isinstance(vars(cls)[name], types.MemberDescriptorType)


_DATACLASSES = Rule(_flatten_dataclass, _unflatten_dataclass, "attribute")


# ---- shallow copies ------------------------------------------------------------------------------


def _shell_of(value: Any, kind: str) -> Any:
    try:
        shell = _shallow_copy(value)
    except Exception as error:
        raise _not_rebuildable(value, kind, f"{type(error).__name__}: {error}") from error
    if type(shell) is not type(value) or shell is value:
        raise _not_rebuildable(value, kind, f"copy.copy gave a {type(shell).__name__}")
    return shell


def _shallow_copy(value: Any) -> Any:
    made = copy.copy(value)
    attributes = getattr(value, "__dict__", None)
    if attributes is value:  # a dict that is its own __dict__
        made.__dict__ = made
    elif attributes and not made.__dict__:  # copying a deque loses them
        made.__dict__.update(attributes)
    return made


def _not_rebuildable(value: Any, kind: str, reason: str) -> Refused:
    return Refused(
        f"is a {type(value).__name__}, a {kind} that cannot be rebuilt ({reason}): "
        "register it with tdcopier.register_container"
    )
