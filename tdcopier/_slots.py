"""Slots of a chunk that torch allocates: their offsets, and light tensors over them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_MIN_ALIGNMENT_BYTES = 16


class Slots:
    """Places leaves one after the other, with the default alignment of `start_copy`."""

    __slots__ = ("chunk_bytes",)

    def __init__(self) -> None:
        """Start without leaves."""
        self.chunk_bytes = 0

    def place(self, dtype: torch.dtype, shape: Sequence[int]) -> int:
        """Return the offset of the next leaf, in bytes from the beginning of the chunk."""
        if math.prod(shape) == 0:
            return 0  # a tensor without elements has memory of its own
        alignment = max(_MIN_ALIGNMENT_BYTES, dtype.itemsize)
        offset = -(-self.chunk_bytes // alignment) * alignment
        self.chunk_bytes = offset + math.prod(shape) * dtype.itemsize
        return offset


def light_tensor(
    chunk: torch.UntypedStorage,
    offset_bytes: int,
    dtype: torch.dtype,
    shape: Sequence[int],
    strides: Sequence[int] = (),
) -> torch.Tensor:
    """Return a tensor over one slot of a chunk that is not a view of its neighbours.

    A tensor without elements has memory of its own, so growing it overwrites nothing.

    Args:
        chunk: the memory that contains the slot.
        offset_bytes: offset of the slot from the beginning of the chunk.
        dtype: dtype of the elements.
        shape: shape of the tensor.
        strides: in elements; empty for a contiguous tensor.
    """
    if math.prod(shape) == 0:
        empty = torch.empty(shape, dtype=dtype, device=chunk.device)
        return empty.as_strided(shape, strides) if strides else empty
    light = torch.empty(0, dtype=dtype, device=chunk.device)
    return light.set_(chunk, offset_bytes // dtype.itemsize, shape, strides)
