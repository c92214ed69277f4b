"""An example batch for prepared copies."""

from __future__ import annotations

from typing import Any

import torch
from container_classes import Pair


def example(seed: int = 0) -> dict[str, Any]:
    """Makes a batch of the same layout for every seed, with other values."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    return {
        "boxes": [leaf(7, 4), leaf(5, 4)],
        "image": leaf(2, 3, 8).permute(0, 2, 1),
        "crop": leaf(9, 9)[1:5, ::2],
        "array": leaf(4, 6).numpy(),
        "reversed": leaf(12).numpy()[::-1],
        "large": leaf(70_000),
        "empty": leaf(0, 3),
        "spectrum": torch.complex(leaf(3), leaf(3)),
        "name": f"batch {seed}",
        "pair": Pair(leaf(3), seed),
        "label": torch.tensor(seed),
    }
