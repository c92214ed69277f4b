"""Classes that are registered as nodes of torch's pytrees: taken apart by their own functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES

from tdcopier._containers.rule import Flat, OfClass, Refused, Rule

_CXX_MODULE = "torch.utils._cxx_pytree"
_OPTREE_REGISTRY = "optree.registry"
_HEAP_TYPE = 1 << 9  # a class that is not built in; torch registers some that are, such as Size


def mark_of(cls: type) -> int:
    """Return a value that changes when the class is registered, or its registration is removed."""
    mark = id(SUPPORTED_NODES.get(cls))
    if _OPTREE_REGISTRY not in sys.modules:
        return mark
    return mark + len(getattr(sys.modules[_OPTREE_REGISTRY], "_NODETYPE_REGISTRY", ()))


def is_node(cls: type) -> bool:
    """Return whether the class is registered in torch's registry, the Python or the C++ one."""
    return bool(cls.__flags__ & _HEAP_TYPE) and _functions_of(cls) is not None


def _functions_of(cls: type) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the class's functions in the form of the Python registry."""
    node = SUPPORTED_NODES.get(cls)
    if node is not None:
        return node.flatten_fn, node.unflatten_fn
    if _CXX_MODULE not in sys.modules:
        return None
    registry: Any = sys.modules["optree"]  # which that module has imported
    entry = registry.register_pytree_node.get(cls, namespace="torch")
    if entry is None:
        return None
    return entry.flatten_func, _Reversed(entry.unflatten_func)


class _Reversed:
    """An unflatten function of the C++ registry, which takes the context first."""

    def __init__(self, unflatten: Callable[..., Any]) -> None:
        self._unflatten = unflatten

    def __call__(self, children: list[Any], context: Any) -> Any:
        return self._unflatten(context, children)


def _flatten(value: Any) -> Flat:
    functions = _functions_of(type(value))
    if functions is None:
        raise Refused(
            f"is a {type(value).__qualname__}, whose registration in torch's pytrees was removed "
            "during the walk"
        )
    flatten, unflatten = functions
    children, context, *_ = flatten(value)
    return list(children), (OfClass(type(value), unflatten, _unflatten_of), context), None


def _unflatten_of(cls: type) -> Callable[[list[Any], Any], Any]:
    functions = _functions_of(cls)
    if functions is None:
        raise TypeError(f"{cls.__qualname__} is in none of torch's pytree registries here")
    return functions[1]


def _flatten_unless_placed(value: Any, device: torch.device | None, named: bool) -> Flat | None:
    """Take a value apart, or return None if its ``.to`` changes more than its children."""
    flat = _flatten(value)
    _, (_, context), _ = flat
    return None if device is not None and _names_device(context) else flat


def _names_device(context: Any) -> bool:
    if isinstance(context, torch.device):
        return True
    if isinstance(context, dict):
        return "device" in context or any(map(_names_device, context.values()))
    return isinstance(context, (list, tuple)) and any(map(_names_device, context))


def _unflatten(children: list[Any], context: tuple[Callable[..., Any], Any]) -> Any:
    unflatten, own = context
    return unflatten(children, own)


PYTREE = Rule(_flatten, _unflatten)
PYTREE_WITH_TO = Rule(_flatten_unless_placed, _unflatten, by_target=True, own_to=True)
"""For classes that have a ``.to`` too."""
