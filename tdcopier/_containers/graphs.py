"""Graphs of torch_geometric (`Data`, `HeteroData`, their batches) in the walk, store by store.

`Data.to` moves the tensors of the graph it is called on. A copy gives a new graph instead, equal to
``copy.copy(graph).to(device)``, and leaves the source as it is.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import PackedSequence

from tdcopier import _C
from tdcopier._containers.own_to import has_own_to
from tdcopier._containers.rule import Carrier, Flat, Rule

_LIBRARY = "torch_geometric"
_METHODS = ("to", "apply", "__copy__", "stores")
"""What a copy stands for. A subclass that overrides one is left to its own ``.to``."""


def is_graph(cls: type) -> bool:
    """Return whether this is a class of graphs, without importing torch_geometric."""
    base = getattr(sys.modules.get(f"{_LIBRARY}.data.data"), "BaseData", None)
    return base is not None and issubclass(cls, base)


def is_plain_graph(cls: type) -> bool:
    """Return whether graphs of the class move as those of torch_geometric do."""
    return all(map(_is_of_library, (inspect.getattr_static(cls, name) for name in _METHODS)))


def _is_of_library(method: Any) -> bool:
    function = method.fget if isinstance(method, property) else method
    return str(getattr(function, "__module__", "")).split(".")[0] == _LIBRARY


class _Kept(Carrier):
    """A value that ``Data.to`` leaves alone inside a list or a mapping, such as a numpy array."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class _Place(NamedTuple):
    """Where a child belongs in the graph."""

    store: int
    key: str
    has_kept: bool


def _flatten(graph: Any) -> Flat:
    """Take all tensors out of a shallow copy of the graph, which is the context."""
    shell = copy.copy(graph)
    stores = list(shell.stores)
    by_store: list[dict[str, Any]] = []
    places = []
    for number, store in enumerate(stores):
        children: dict[str, Any] = {}
        for key, value in list(store.items()):
            kept: list[_Kept] = []
            child = _as_moved(value, kept)
            if isinstance(child, (_Kept, str, int, float)):
                continue  # stays in the shell
            children[key] = child
            places.append(_Place(number, key, bool(kept)))
            store[key] = ()  # drops the child, and keeps the order
        by_store.append(children)
    if len(stores) == 1:
        return list(by_store[0].values()), (shell, places), list(by_store[0])
    return by_store, (shell, places), [getattr(store, "_key", None) for store in stores]


def _as_moved(value: Any, kept: list[_Kept]) -> Any:
    """Return what ``Data.to`` makes of a value, with leaves that the walk still has to move."""
    if isinstance(value, (torch.Tensor, PackedSequence, str)):
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[_as_moved(each, kept) for each in value])
    if isinstance(value, Sequence):
        return [_as_moved(each, kept) for each in value]
    if isinstance(value, Mapping):
        return {key: _as_moved(value[key], kept) for key in value}
    if type(value) in (int, float, bool) or is_graph(type(value)) or has_own_to(type(value)):
        return value
    kept.append(_Kept(value))
    return kept[-1]


def _unflatten(children: list[Any], context: tuple[Any, list[_Place]]) -> Any:
    shell, places = context
    graph = copy.copy(shell)
    stores = list(graph.stores)
    moved = children if len(stores) == 1 else [each for one in children for each in one.values()]
    for place, child in zip(places, moved, strict=True):
        stores[place.store][place.key] = _unwrapped(child) if place.has_kept else child
    return graph


def _unwrapped(value: Any) -> Any:
    if isinstance(value, _Kept):
        return value.value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_unwrapped, value))
    if type(value) is list:
        return [_unwrapped(each) for each in value]
    if type(value) is dict:
        return {key: _unwrapped(each) for key, each in value.items()}
    return value


GRAPH = Rule(_flatten, _unflatten, _C.Step.KEY)
