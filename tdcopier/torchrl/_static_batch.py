"""A batch whose memory stays: the index of its rows, the rows, and the sampler's info."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict

from tdcopier import _into
from tdcopier._C import AsyncCopyHandle
from tdcopier._rows.gather import start_gather
from tdcopier.torchrl._current_sample import as_tensor
from tdcopier.torchrl._samplers import draw


class StaticBatch:
    """Rows of a storage on a device, read again and again into the same memory.

    Work that reads or fills it goes in the order of one stream at a time. If it reads ahead, the
    rows that are drawn and read are those of the next batch, which `advance` makes the current one.
    """

    def __init__(
        self,
        rows: TensorDict,
        keys: Sequence[Any] | None,
        device: torch.device,
        info: dict[Any, Any] | int,
        *,
        reads_ahead: bool = False,
    ) -> None:
        """Read some rows, whatever they are: the first batch has the layout of all.

        Args:
            rows: all rows of the storage, which has at least one in use.
            keys: those to read; None: all.
            device: where the batch is.
            info: the sampler's info with its index; or, if the index is drawn on the device, the
                number of rows.
            reads_ahead: whether the next batch has memory of its own; `info` is a number then.
        """
        self._tables = rows if keys is None else rows.select(*keys)
        self._layout = _layout_of(info)
        if isinstance(info, int):
            self.index = torch.zeros(info, dtype=torch.int64, device=device)
            self._info = {"index": self.index}
        else:
            self._info = {
                key: torch.zeros(part.shape, dtype=part.dtype, device=device)
                for key, part in as_tensors(info).items()
            }
            is_column = isinstance(info["index"], tuple)  # as samplers of slices give it
            self.index = self._info["index"].squeeze(-1) if is_column else self._info["index"]
        self._rows: Any = start_gather(self._tables, self.index, device).get()
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._in_use = 0
        self.reads_ahead, self.has_next = reads_ahead, False
        self._next_index, self._next_rows = self.index, self._rows
        self._memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        """That of the batch and of the next one, in pairs."""
        if reads_ahead:
            self._next_index = torch.zeros_like(self.index)
            self._next_rows, self._memory = _twin_of(self._rows)
            self._memory.append((self.index, self._next_index))

    def fits(self, info: dict[Any, Any] | int) -> bool:
        """Return whether a sampler's info has the keys, shapes and dtypes of this batch."""
        return bool(_layout_of(info) == self._layout)

    def set_rows_in_use(self, count: int) -> None:
        """Tell the device how many rows it may draw, in the order of the current stream."""
        if count != self._in_use:
            self._count.fill_(count)
            self._in_use = count

    def take(self, info: dict[Any, Any]) -> None:
        """Send a sampler's info to the batch, in the order of the current stream."""
        _into.start_copy_into(as_tensors(info), self._info).wait()

    def draw(self, generator: torch.Generator | None) -> None:
        """Draw the index on the device."""
        draw(self._next_index, self._count, generator)

    def read(self) -> AsyncCopyHandle[Any]:
        """Start to read the rows that the index names; the current stream has them."""
        handle = start_gather(self._tables, self._next_index, out=self._next_rows)
        handle.wait()
        self.has_next = True
        return handle

    def advance(self) -> None:
        """Make the batch that was read ahead the current one."""
        for current, following in self._memory:
            current.copy_(following)

    def batch(self) -> Any:
        """Return the rows in a TensorDict of their own, to which keys may be added."""
        return self._rows.copy()

    def put_info_into(self, batch: Any) -> None:
        """Set index and info as `PackedTensorDictReplayBuffer.sample` does."""
        from tdcopier.torchrl._buffer import put_into

        put_into(batch, self._info)


def _twin_of(rows: Any) -> tuple[Any, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return rows whose memory has the same layout, and the memory of both, in pairs of bytes."""
    memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def twin(leaf: torch.Tensor) -> torch.Tensor:
        storage = leaf.untyped_storage()
        if storage.data_ptr() not in memory:
            bytes_of = torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(storage)
            memory[storage.data_ptr()] = bytes_of, torch.empty_like(bytes_of)
        other = memory[storage.data_ptr()][1].untyped_storage()
        return torch.empty(0, dtype=leaf.dtype, device=leaf.device).set_(
            other, leaf.storage_offset(), leaf.shape, leaf.stride()
        )

    return rows.apply(twin, filter_empty=False), list(memory.values())


def as_tensors(info: dict[Any, Any]) -> dict[Any, torch.Tensor]:
    """Return the info of a sampler as tensors, wherever they are."""
    return {key: as_tensor(key, value) for key, value in info.items()}


def _layout_of(info: dict[Any, Any] | int) -> Any:
    if isinstance(info, int):
        return info
    return {key: (part.shape, part.dtype) for key, part in as_tensors(info).items()}
