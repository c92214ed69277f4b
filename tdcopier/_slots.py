"""Slots of chunks that torch allocates: their offsets, and light tensors over them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

ALIGNMENT_BYTES = 16


class Slots:
    """Places leaves in one chunk per dtype, since torch saves a storage as elements of one dtype.

    Each slot and the length of each chunk are multiples of 16 bytes, hence of any element.
    """

    __slots__ = ("chunk_bytes",)

    def __init__(self) -> None:
        """Start without leaves."""
        self.chunk_bytes: dict[torch.dtype, int] = {}

    def place(self, dtype: torch.dtype, shape: Sequence[int]) -> int:
        """Return the offset of the next leaf, in bytes from the beginning of its dtype's chunk."""
        if math.prod(shape) == 0:
            return 0  # a tensor without elements has memory of its own
        offset = self.chunk_bytes.get(dtype, 0)
        bytes_ = math.prod(shape) * dtype.itemsize
        self.chunk_bytes[dtype] = offset + -(-bytes_ // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return offset


def light_tensor(
    chunk: torch.UntypedStorage,
    offset_bytes: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int] = (),
) -> torch.Tensor:
    """Return a tensor over one slot of a chunk that is not a view of its neighbours.

    On the host it has a storage of its own, which cannot grow; in shared memory and on a device, it
    shares the chunk's.

    Args:
        chunk: the memory that contains the slot.
        offset_bytes: offset of the slot from the beginning of the chunk.
        dtype: dtype of the elements.
        shape: shape of the tensor, with at least one element.
        strides: in elements, without gaps; empty for a contiguous tensor.
    """
    if chunk.device.type == "cpu" and not chunk.is_shared():
        chunk = chunk[offset_bytes : offset_bytes + math.prod(shape) * dtype.itemsize]
        offset_bytes = 0
    light = torch.empty(0, dtype=dtype, device=chunk.device)
    return light.set_(chunk, offset_bytes // dtype.itemsize, shape, strides)


def new_tensor(
    device: torch.device, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int] = ()
) -> torch.Tensor:
    """Return a tensor with memory of its own, for a leaf without elements or without a chunk."""
    if not strides:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)
