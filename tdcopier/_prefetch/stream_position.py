"""StreamPosition: the point in a stream after which a batch may be read by other streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tdcopier import _C
from tdcopier._containers.delegated_parts import plain_parts


@dataclass(frozen=True)
class StreamPosition:
    """A point in the work of a stream of one device."""

    device: torch.device
    stream: torch.Stream
    access: _C.DeviceAccess
    """Of the stream's work; unlike torch's events, a forked child may drop it."""

    @classmethod
    def current(cls, device: torch.device) -> StreamPosition:
        """Return the point after all work on the calling thread's current stream of `device`."""
        stream = torch.accelerator.current_stream(device)
        return cls(device, stream, _C.DeviceAccess(stream))

    def hand_over(self, batch: Any) -> None:
        """Make the calling thread's current stream wait for this point, and let it use `batch`.

        Records the batch's memory on that stream, so that the allocator does not reuse it too
        early.
        """
        stream = torch.accelerator.current_stream(self.device)
        if stream == self.stream:
            return
        self.access.order()
        recorded = set()
        for _, leaf in _C.leaves_with_paths(batch, self.device):
            for part in plain_parts(leaf):
                for owner in _owners(part):
                    address = owner.untyped_storage().data_ptr()
                    if owner.device == self.device and address not in recorded:
                        recorded.add(address)
                        _C.record_stream(owner, stream)


def _owners(part: torch.Tensor) -> list[torch.Tensor]:
    """Return the strided tensors that own a tensor's memory."""
    if part.layout is torch.strided:
        return [part]
    if part.layout is torch.sparse_coo:
        return [part._indices(), part._values()]
    if part.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [part.crow_indices(), part.col_indices(), part.values()]
    return [part.ccol_indices(), part.row_indices(), part.values()]
