"""Reads and writes `__dict__` and slots of an object past the code of its class."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Mapping
from typing import Any

from tdcopier._containers.unknown import may_have_leaves

_HEAP_TYPE = 1 << 9  # a class that is not built in, such as one from a class statement
_METHODS = (
    types.FunctionType, staticmethod, classmethod, functools.partialmethod,
    functools.singledispatchmethod,
)  # fmt: skip


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the object's `__dict__` itself; a new dict if it has none, or is its own."""
    attributes = getattr(value, "__dict__", None)
    return {} if attributes is None or attributes is value else attributes


_slots: weakref.WeakKeyDictionary[type, tuple[tuple[int, str], ...]] = weakref.WeakKeyDictionary()
"""By class, the name of each slot and the index in the method resolution order of its class."""


def slots_of(value: Any) -> dict[str, Any]:
    """Return what the object has in slots."""
    cls = type(value)
    found: dict[str, Any] = {}
    for index, name in slots_of_class(cls):
        with contextlib.suppress(AttributeError):  # it is empty
            found[name] = vars(cls.__mro__[index])[name].__get__(value)
    return found


def slots_of_class(cls: type) -> tuple[tuple[int, str], ...]:
    """Return the name of each slot, after the index of its class in the method resolution order."""
    slots = _slots.get(cls)
    if slots is None:
        slots = _slots[cls] = _find_slots(cls)
    return slots


def _find_slots(cls: type) -> tuple[tuple[int, str], ...]:
    found: dict[str, int] = {}
    for index, base in enumerate(cls.__mro__):
        if base.__flags__ & _HEAP_TYPE:  # others have members, such as the factory of a defaultdict
            for name, slot in vars(base).items():
                if isinstance(slot, types.MemberDescriptorType):
                    found.setdefault(name, index)
    return tuple((index, name) for name, index in found.items())


def put_in_slot(value: Any, name: str, new: Any) -> None:
    """Fill a slot of the object, which may be frozen."""
    found = (vars(base).get(name) for base in type(value).__mro__)
    next(each for each in found if isinstance(each, types.MemberDescriptorType)).__set__(value, new)


def without_caches(cls: type, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes without those that a cached property keeps and that may have leaves.

    The next read of the property computes them of the moved tensors.
    """
    return {name: value for name, value in attributes.items() if not is_cache(cls, name, value)}


def is_cache(cls: type, name: str, value: Any) -> bool:
    """Return whether an attribute of an object in its `__dict__` is such a cache.

    A property that keeps its value under its own name has no `__set__`. Nor has a method, of which
    an attribute may have the name.
    """
    found = type(class_attribute(cls, name))
    return (
        found.__flags__ & _HEAP_TYPE != 0
        and hasattr(found, "__get__")
        and not hasattr(found, "__set__")
        and not issubclass(found, _METHODS)
        and may_have_leaves(value)
    )


def class_attribute(cls: type, name: str) -> Any:
    """Return what the class has under this name, or None, without running a descriptor's code."""
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def drop_caches(copied: Any, value: Any) -> None:
    """Delete such caches from a copy of a value, unless both have one `__dict__`."""
    attributes = attributes_of(copied)
    if attributes and attributes is not attributes_of(value):
        for name in attributes.keys() - without_caches(type(copied), attributes).keys():
            del attributes[name]
