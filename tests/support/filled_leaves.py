"""Leaves filled with one value each, in sizes that take different paths through the engine."""

from __future__ import annotations

import pytest
import torch

SIZES = {"packed": [100, 50], "in place": [100], "alone": [70_000], "both": [1 << 18, 3]}
sizes = pytest.mark.parametrize("elements", SIZES.values(), ids=list(SIZES))


def filled(value: float, elements: list[int], device: str) -> list[torch.Tensor]:
    return [torch.full((n,), float(value)).to(device) for n in elements]


def refill(leaves: list[torch.Tensor], value: float) -> None:
    """Enqueues writes of a new value on the current stream."""
    for leaf in leaves:
        leaf.copy_(torch.full(leaf.shape, float(value)).pin_memory(), non_blocking=True)


def values_of(leaves: list[torch.Tensor]) -> set[float]:
    return {value for leaf in leaves for value in leaf.unique().tolist()}
