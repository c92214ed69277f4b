"""What a tensor that `Tensor.to` made consists of."""

from __future__ import annotations

import torch


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that own its memory: itself, or those inside a wrapper subclass."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    names, _ = flatten()
    return [part for name in names for part in plain_parts(getattr(tensor, name))]
