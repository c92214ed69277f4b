"""Trees of priorities in Python, in place of torchrl's compiled ones.

torchrl's compiled part does not load with every torch. Its prioritized sampler works with these
too, and makes the same calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrl.data.replay_buffers.samplers import prioritized


class _Tree:
    """Values by row. `_NEUTRAL` is the value of a row that was never written."""

    _NEUTRAL: float
    _DTYPE = torch.float32

    def __init__(self, capacity: int) -> None:
        self.values = torch.full((capacity,), self._NEUTRAL, dtype=self._DTYPE)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.values[index] = torch.as_tensor(value, device="cpu").to(self._DTYPE)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.values[index].clone()


class SumTree(_Tree):
    _NEUTRAL = 0.0

    def query(self, first: int, last: int) -> float:
        return float(self.values[first:last].sum())

    def scan_lower_bound(self, mass: Any) -> torch.Tensor:
        sums = self.values.double().cumsum(0)
        return torch.searchsorted(sums, torch.as_tensor(mass).double(), right=True)


class MinTree(_Tree):
    _NEUTRAL = float("inf")

    def query(self, first: int, last: int) -> float:
        return float(self.values[first:last].min())


def use_trees_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torchrl's prioritized sampler use the trees of this module."""
    for dtype in ("Fp32", "Fp64"):
        monkeypatch.setattr(prioritized, f"SumSegmentTree{dtype}", SumTree)
        monkeypatch.setattr(prioritized, f"MinSegmentTree{dtype}", MinTree)
