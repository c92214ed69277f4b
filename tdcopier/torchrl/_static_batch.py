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

    Work that reads or fills it goes in the order of one stream at a time.
    """

    def __init__(
        self,
        rows: TensorDict,
        keys: Sequence[Any] | None,
        batch_size: int,
        device: torch.device,
        info: dict[Any, torch.Tensor] | None,
    ) -> None:
        """Args:
        rows: all rows of the storage.
        keys: those to read; None: all.
        batch_size: number of rows, if `info` is None.
        device: where the batch is.
        info: the sampler's info with its index; None if the index is drawn on the device.
        """
        self.of = rows
        self._tables = rows if keys is None else rows.select(*keys)
        self.info: dict[Any, torch.Tensor] | None = None
        if info is None:
            self.index = torch.zeros(batch_size, dtype=torch.int64, device=device)
        else:
            self.info = {key: torch.empty_like(part, device=device) for key, part in info.items()}
            self.index = self.info["index"].flatten()  # samplers of slices give a column
        lead = self.index.shape
        self._rows = TensorDict(
            {
                key: torch.empty((*lead, *leaf.shape[1:]), dtype=leaf.dtype, device=device)
                for key, leaf in self._tables.items(include_nested=True, leaves_only=True)
            },
            batch_size=lead,
            device=device,
        )
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._in_use = 0

    def fits(self, info: dict[Any, torch.Tensor] | None) -> bool:
        """Return whether a sampler's info has the keys, shapes and dtypes of this batch."""
        if info is None or self.info is None:
            return info is self.info
        if info.keys() != self.info.keys():
            return False
        pairs = ((part, self.info[key]) for key, part in info.items())
        return all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)

    def set_rows_in_use(self, count: int) -> None:
        """Tell the device how many rows it may draw, in the order of the current stream."""
        if count != self._in_use:
            self._count.fill_(count)
            self._in_use = count

    def take(self, info: dict[Any, torch.Tensor]) -> None:
        """Send a sampler's info to the batch, in the order of the current stream."""
        _into.start_copy_into(info, self.info).wait()

    def draw(self, generator: torch.Generator | None) -> None:
        """Draw the index on the device."""
        draw(self.index, self._count, generator)

    def read(self) -> AsyncCopyHandle[Any]:
        """Start to read the rows that the index names; the current stream has them."""
        handle = start_gather(self._tables, self.index, out=self._rows)
        handle.wait()
        return handle

    def batch(self) -> TensorDict:
        """Return the rows in a TensorDict of their own, to which keys may be added."""
        return self._rows.copy()

    def put_info_into(self, batch: Any) -> None:
        """Set index and info as `PackedTensorDictReplayBuffer.sample` does."""
        from tdcopier.torchrl._buffer import put_into

        put_into(batch, {"index": self.index} if self.info is None else self.info)


def as_tensors(info: dict[Any, Any]) -> dict[Any, torch.Tensor]:
    """Return the info of a sampler as tensors, wherever they are."""
    return {key: as_tensor(key, value) for key, value in info.items()}
