"""Reads the rows of a drawn index without a walk through the storage at each sample."""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.utils import expand_as_right

from tdcopier import _C, _options
from tdcopier._C import AsyncCopyHandle
from tdcopier._rows.request import RowIndex, RowReaders, leave
from tdcopier.tensordict import _rows, _walk

_OPTIONS = _options.checked_options(True, True, 16, 32 * 1024 * 1024, True)


class PlainRead:
    """Rows of a storage of nested TensorDicts whose leaves are plain pinned tensors.

    The device reads them for samples of one size, by an index that it has drawn. Fast path: a
    sample of 16 small leaves costs the host less than the walk through them. A copy of the storage
    has none.
    """

    def __init__(self, rows: Any, size: int, device: torch.device) -> None:
        """Plan the read.

        Args:
            rows: what the storage holds now.
            size: number of rows of a sample.
            device: reads them.
        """
        self._rows, self._size, self._device = rows, size, device
        nodes = _nodes_of(rows)
        self._entries = [
            (node, node._tensordict, tuple(node._tensordict), tuple(node._tensordict.values()))
            for node in nodes or ()
        ]
        taken: _walk.Taken | None = None
        if nodes is not None:
            some = torch.zeros(size, dtype=torch.int64, device="cpu")
            taken = _rows.flatten(rows, device, RowIndex(some, 1, False, (), some, False))
        self._leaves: list[Any] = [] if taken is None else taken[0]
        self._context: Any = None if taken is None else taken[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    @property
    def is_possible(self) -> bool:
        """Whether the storage is a TensorDict of plain tensors."""
        return self._context is not None

    def fits(self, rows: Any, size: int) -> bool:
        """Return whether it reads samples of this size from what the storage holds now."""
        return (
            rows is self._rows
            and size == self._size
            and all(
                node._tensordict is entries
                and tuple(entries) == keys
                and all(map(is_, entries.values(), values))
                for node, entries, keys, values in self._entries
            )
        )

    def start(self, index: torch.Tensor) -> AsyncCopyHandle[Any]:
        """Start to read the rows of an index on the device, after the current stream's work."""
        numbers = RowIndex(index, 1, False, (), index, False)
        return _C.start_gather(self._leaves, numbers, _READERS, self._device, _OPTIONS)

    def batch(self, leaves: list[Any]) -> TensorDict:
        """Return what has arrived as a TensorDict."""
        batch: TensorDict = _walk.unflatten(leaves, self._context)
        return batch

    @staticmethod
    def put_index(batch: TensorDict, index: torch.Tensor) -> None:
        """Set the index in a batch that was made here."""
        batch._tensordict["index"] = index if batch.dim() == 1 else expand_as_right(index, batch)


def _nodes_of(rows: Any) -> list[TensorDict] | None:
    """Return nested TensorDicts; None if a leaf or a node is of another class."""
    if type(rows) is not TensorDict:
        return None
    nodes = [rows]
    for node in nodes:  # grows
        for value in node._tensordict.values():
            if type(value) is TensorDict:
                nodes.append(value)
            elif type(value) is not torch.Tensor:
                return None
    return nodes


def _no_reader(leaf: Any) -> Any:
    raise ValueError("a storage's leaf is no plain tensor any more")


_READERS = RowReaders(_no_reader, leave, None)
