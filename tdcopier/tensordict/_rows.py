"""Rows of a TensorDict: the rows of each node, and its batch size and names in the result."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import UnbatchedTensor

from tdcopier._containers.delegated_parts import is_tensor_collection
from tdcopier._rows.request import RowIndex
from tdcopier._rows.row_numbers import read_rows
from tdcopier.tensordict import _walk


def flatten(
    value: Any, device: torch.device, rows: RowIndex, named: bool = False
) -> _walk.Taken | None:
    """Return tables, the context of the result, and the keys of the tables if they are wanted.

    None if the value is indexed as a whole.
    """
    return _walk.flatten_rows(value, device, _Rows(rows, device), named)


def refuse_unbatched(storage: Any) -> None:
    """Raise a ValueError that names an `UnbatchedTensor` in a storage, if there is one.

    It belongs to all rows, so tensordict replaces it as a whole where some rows are written.
    """
    left = [(storage, "storage")]
    seen: set[int] = set()
    while left:
        value, path = left.pop()
        if isinstance(value, UnbatchedTensor):
            raise ValueError(
                f"{path} is an UnbatchedTensor, which belongs to all rows: write it by itself, and "
                "exclude it from the batch and the storage"
            )
        if is_tensor_collection(type(value)):
            while hasattr(value, "_tensordict"):
                value = value._tensordict  # of a tensorclass a TensorDict, of that a dict
        if not isinstance(value, (dict, list, tuple)) or id(value) in seen:
            continue
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else enumerate(value)
        left += [(v, f"{path}[{key!r}]") for key, v in items if type(v) is not torch.Tensor]


class _Rows:
    """Applies an index of rows to the nodes of a walk."""

    __slots__ = ("_device", "_rows", "_shape")

    def __init__(self, rows: RowIndex, device: torch.device) -> None:
        self._device = device
        self._rows = rows
        self._shape = tuple(rows.numbers.shape)

    def shape_of(self, value: Any) -> tuple[torch.Size, list[str | None] | None]:
        """Return the batch size and the names of a node's rows.

        Raises:
            ValueError: The index counts rows by more dimensions than the node has.
        """
        batch_size, lead = value._batch_size, self._rows.lead
        if len(batch_size) < lead:
            raise ValueError(
                f"index counts rows by {lead} dimensions; the batch size of a "
                f"TensorDict in storage is {tuple(batch_size)}"
            )
        return torch.Size((*self._shape, *batch_size[lead:])), self._names_of(value)

    def read(self, value: Any) -> Any:
        """Return the rows of a part that only its own indexing can read."""
        return read_rows(value, self._rows, self._device)

    def _names_of(self, value: Any) -> list[str | None] | None:
        if value._td_dim_names is None or not value._has_names():
            return None
        indexed: Any = value.empty()[self._rows.key]
        return list(indexed.names) if indexed._has_names() else None
