"""Weights as messages have them: tensors by names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

Weights: TypeAlias = "nn.Module | Mapping[str, torch.Tensor]"

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def named(weights: Weights) -> dict[str, torch.Tensor]:
    """Return the tensors of a module, its parameters and buffers, or of a mapping.

    Raises:
        TypeError: it is neither, or has something else than tensors.
    """
    if isinstance(weights, nn.Module):
        return dict(weights.named_parameters()) | dict(weights.named_buffers())
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights are a module or a mapping of tensors; got {type(weights)}")
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise TypeError(f"weights have tensors by names; {name!r} is a {type(tensor).__name__}")
    return dict(weights)


def batch_of(
    version: int, names: list[str] | None, places: Sequence[int], tensors: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """Return what a message has; its layout stays the same if the places do."""
    index = torch.tensor([version, *places], dtype=torch.int64, device="cpu")
    return {"names": names, "index": index, "values": list(tensors)}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as integers, of which -0 is not 0, and NaN is NaN."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.itemsize]) if tensor.is_floating_point() else tensor


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return the bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)
