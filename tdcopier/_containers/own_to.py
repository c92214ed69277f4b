"""Objects with a ``.to(device)`` of their own, which a copy calls as per-leaf code does."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

from tdcopier import _C

OWN_TO = _C.WhyDelegated.OBJECT
"""The rule of a class that cannot be taken apart, and whose values have such a method."""

_answers: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def has_own_to(cls: type) -> bool:
    """Return whether values of the class have a method ``to`` that takes a device.

    The method must be a plain method of the class: neither an attribute of the object nor a static
    method. It must accept one positional argument that is meant for a device: ``*args``, a
    parameter with "dev" in its name or "device" in its annotation, or any parameter next to one
    that is called ``non_blocking``. Libraries also use the name for other conversions, for example
    to a time zone or a unit.
    """
    if cls not in _answers:
        _answers[cls] = _has_own_to(cls)
    return _answers[cls]


def _has_own_to(cls: type) -> bool:
    found = next((vars(base)["to"] for base in cls.__mro__ if "to" in vars(base)), None)
    if found is None or isinstance(found, (staticmethod, classmethod, type)):
        return False
    method: Any = getattr(cls, "to", None)
    if not callable(method):
        return False  # for example a property
    try:
        signature = inspect.signature(method)
        signature.bind("self", "device")
    except (TypeError, ValueError):
        return False  # takes other arguments, or is written in C and does not say which
    return _takes_device(list(signature.parameters.values()))


def _takes_device(parameters: list[inspect.Parameter]) -> bool:
    by_position = [each for each in parameters if each.kind is not each.KEYWORD_ONLY]
    first = by_position[min(1, len(by_position) - 1)]  # after self, which `*args` may contain
    return (
        first.kind is first.VAR_POSITIONAL
        or "dev" in first.name.lower()
        or "device" in str(first.annotation).lower()
        or any(each.name == "non_blocking" for each in parameters)
    )
