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
        device: torch.device,
        info: dict[Any, Any] | int,
    ) -> None:
        """Read some rows, whatever they are: the first batch has the layout of all.

        Args:
            rows: all rows of the storage, which has at least one in use.
            keys: those to read; None: all.
            device: where the batch is.
            info: the sampler's info with its index; or, if the index is drawn on the device, the
                number of rows.
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
        draw(self.index, self._count, generator)

    def read(self) -> AsyncCopyHandle[Any]:
        """Start to read the rows that the index names; the current stream has them."""
        handle = start_gather(self._tables, self.index, out=self._rows)
        handle.wait()
        return handle

    def batch(self) -> Any:
        """Return the rows in a TensorDict of their own, to which keys may be added."""
        return self._rows.copy()

    def put_info_into(self, batch: Any) -> None:
        """Set index and info as `PackedTensorDictReplayBuffer.sample` does."""
        from tdcopier.torchrl._buffer import put_into

        put_into(batch, self._info)


def as_tensors(info: dict[Any, Any]) -> dict[Any, torch.Tensor]:
    """Return the info of a sampler as tensors, wherever they are."""
    return {key: as_tensor(key, value) for key, value in info.items()}


def _layout_of(info: dict[Any, Any] | int) -> Any:
    if isinstance(info, int):
        return info
    return {key: (part.shape, part.dtype) for key, part in as_tensors(info).items()}
