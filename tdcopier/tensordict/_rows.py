"""Rows of a TensorDict: taken apart into its tables, rebuilt with the batch size of the result."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from tdcopier import _C
from tdcopier._row_index import RowIndex, read_rows
from tdcopier.tensordict import _kinds, _nodes
from tdcopier.tensordict._nodes import Node
from tdcopier.tensordict._walk import MovedByItself, _inside, _state_of


def flatten(value: Any, device: torch.device, rows: RowIndex) -> tuple[list[Any], Any, None] | None:
    """Leaves, and what else it takes to build the result; None: it is indexed as a whole."""
    if type(value) is not TensorDict and not _kinds.is_plain_tensorclass(type(value)):
        return None
    leaves: list[Any] = []
    node = _Taking(rows, leaves, device).take(value)
    return leaves, (node, device), None


def unflatten(leaves: list[Any], context: tuple[Node, torch.device]) -> Any:
    """The collection anew, with the rows that have arrived."""
    node, device = context
    return node.build(iter(leaves), device)


class _Taking:
    """One walk through a collection."""

    __slots__ = ("_device", "_leaves", "_rows", "_shape")

    def __init__(self, rows: RowIndex, leaves: list[Any], device: torch.device) -> None:
        self._device = device
        self._rows = rows
        self._shape = tuple(rows.numbers.shape)
        self._leaves = leaves

    def take(self, value: Any) -> Node:
        cls = type(value)
        if cls is TensorDict:
            return self._take_dense(value)
        if cls in _kinds.NON_TENSOR_CLASSES:
            return self._take_data(value)
        if _kinds.is_plain_tensorclass(cls):
            return self._take_tensorclass(value)
        return self._read(value)

    def _take_dense(self, value: Any) -> Node:
        entries: dict[str, Any] = value._tensordict
        self._check_rows(value)
        if _C.is_dict_of_tensors(entries):
            self._leaves.append(entries)  # taken and given back by the walk, in one go
            return _nodes.Flat(self._size_of(value), self._names_of(value))
        keys, values = tuple(entries), list(entries.values())
        others = []
        for index, each in enumerate(values):
            if _kinds.is_leaf(type(each)):
                self._leaves.append(each)
            else:
                others.append(index)
        nested = [(index, self.take(values[index])) for index in others]
        names = self._names_of(value)
        return _nodes.Dense(keys, len(values) - len(others), nested, self._size_of(value), names)

    def _check_rows(self, value: Any) -> None:
        if len(value._batch_size) < self._rows.lead:
            raise ValueError(
                f"index counts rows by {self._rows.lead} dimensions; the batch size of a "
                f"TensorDict in storage is {tuple(value._batch_size)}"
            )

    def _take_tensorclass(self, value: Any) -> Node:
        state = _state_of(value)
        inner = self.take(state["_tensordict"])
        return _nodes.Wrapped(type(value), inner, dict(state["_non_tensordict"]))

    def _take_data(self, value: Any) -> Node:
        state = _state_of(value)
        inner, fields = state["_tensordict"], state["_non_tensordict"]
        if type(inner) is not TensorDict or inner._tensordict or "data" not in fields:
            return self._read(value)
        node = _nodes.Data(type(value), fields["data"], self._size_of(inner), self._names_of(inner))
        self._leaves.append(node)  # opaque to the walk, and counted as such
        return node

    def _read(self, value: Any) -> Node:
        """A part of which only its own code knows what its rows are."""
        rows = read_rows(value, self._rows, self._device)
        self._leaves.append(MovedByItself(rows, _inside(rows).batch_size))
        return _nodes.WHOLE

    def _size_of(self, value: Any) -> torch.Size:
        return torch.Size((*self._shape, *value._batch_size[self._rows.lead :]))

    def _names_of(self, value: Any) -> list[str | None] | None:
        if not value._has_names():
            return None
        indexed: Any = value.empty()[self._rows.key]
        return list(indexed.names) if indexed._has_names() else None
