"""Pinned host memory for the bytes of storages."""

from __future__ import annotations

import torch


def lease(sizes_bytes: list[int]) -> list[torch.Tensor]:
    """Return a uint8 tensor in pinned memory for each size, of shape (bytes,).

    Raises:
        RuntimeError: the host can pin no more memory.
    """
    return [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes_bytes]
