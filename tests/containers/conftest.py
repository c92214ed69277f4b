"""A leaf for containers whose classes matter, not their tensors."""

from __future__ import annotations

import pytest
import torch
from catalogue import ramp


@pytest.fixture
def leaf() -> torch.Tensor:
    return ramp("cpu", 3)
