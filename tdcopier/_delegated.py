"""What is left to its own `.to`, and what a leaf that `.to` made consists of."""

from __future__ import annotations

from typing import Any

import torch


class Mover:
    """A part of a container that the walk leaves to its `.to(device)`, and counts as delegated."""

    def to(self, device: torch.device) -> Any:
        raise NotImplementedError


def plain_parts(moved: Any) -> list[torch.Tensor]:
    """The tensors that own its memory: itself, or those inside a subclass or a collection."""
    if isinstance(moved, torch.Tensor):
        flatten = getattr(moved, "__tensor_flatten__", None)
        if flatten is None:
            return [moved]
        inner = [getattr(moved, name) for name in flatten()[0]]
    elif isinstance(moved, tuple):  # a PackedSequence
        inner = list(moved)
    elif (stacked := getattr(moved, "tensordicts", None)) is not None:
        inner = list(stacked)  # a lazy stack's own values would be new tensors
    else:
        values = getattr(moved, "values", None)
        inner = list(values()) if callable(values) else []
    return [part for value in inner for part in plain_parts(value)]
