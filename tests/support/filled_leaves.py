"""Leaves filled with one value each, in sizes that take different paths through the engine."""

from __future__ import annotations

import torch
from each_case import together

from tdcopier import _C

PACKED, MANY, LARGE = [100, 50], [*range(3, 23)], [1 << 18, 3]
BEYOND_STAGING = [2 * _C.STAGING_BUFFER_BYTES // 4 + 5, 3]
"""More than is staged at a time, where there is one staging buffer."""
SIZES = {"packed": [100, 50], "in place": [100], "alone": [70_000], "both": [1 << 18, 3]}
sizes = together("elements", SIZES.values(), ids=list(SIZES))


def filled(value: float, elements: list[int], device: str) -> list[torch.Tensor]:
    return [torch.full((n,), float(value)).to(device) for n in elements]


def refill(leaves: list[torch.Tensor], value: float) -> None:
    """Enqueues writes of a new value on the current stream."""
    for leaf in leaves:
        leaf.copy_(torch.full(leaf.shape, float(value)).pin_memory(), non_blocking=True)


def values_of(leaves: list[torch.Tensor]) -> set[float]:
    """Returns the least and the greatest value of each leaf: one, if one value fills them all."""
    return {value.item() for leaf in leaves if leaf.numel() for value in leaf.cpu().aminmax()}
