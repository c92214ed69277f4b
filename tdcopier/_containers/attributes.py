"""Reads and writes `__dict__` and slots of an object past the code of its class."""

from __future__ import annotations

import contextlib
import types
from typing import Any


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the object's `__dict__` itself; a new dict if it has none, or is its own."""
    attributes = getattr(value, "__dict__", None)
    return {} if attributes is None or attributes is value else attributes


def slots_of(value: Any) -> dict[str, Any]:
    """Return what the object has in slots."""
    found: dict[str, Any] = {}
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and name not in found:
                with contextlib.suppress(AttributeError):  # it is empty
                    found[name] = slot.__get__(value)
    return found


def put_in_slot(value: Any, name: str, new: Any) -> None:
    """Fill a slot of the object, which may be frozen."""
    found = (vars(base).get(name) for base in type(value).__mro__)
    next(each for each in found if isinstance(each, types.MemberDescriptorType)).__set__(value, new)
