"""Slots of a chunk that torch allocates: where leaves go, and light tensors over them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_MIN_ALIGNMENT_BYTES = 16


class Slots:
    """Places leaves one behind the other, each aligned as `start_copy` aligns them by default."""

    __slots__ = ("chunk_bytes",)

    def __init__(self) -> None:
        """None so far."""
        self.chunk_bytes = 0

    def place(self, dtype: torch.dtype, shape: Sequence[int]) -> int:
        """Where the next leaf begins, in bytes from the chunk's beginning."""
        if math.prod(shape) == 0:
            return 0  # it has memory of its own
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
    """A tensor over one slot, and no view of its neighbours.

    One without elements has memory of its own, so that to grow it writes over nothing.

    Args:
        chunk: what it lies in.
        offset_bytes: where, from the chunk's beginning.
        dtype: of its elements.
        shape: its shape.
        strides: in elements; none for those of a contiguous tensor.
    """
    if math.prod(shape) == 0:
        empty = torch.empty(shape, dtype=dtype, device=chunk.device)
        return empty.as_strided(shape, strides) if strides else empty
    light = torch.empty(0, dtype=dtype, device=chunk.device)
    return light.set_(chunk, offset_bytes // dtype.itemsize, shape, strides)
