"""What the engine is told of the rows that a call asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class RowIndex(NamedTuple):
    """What the engine needs to know of an index."""

    numbers: torch.Tensor
    """Rows, int64, on the host, contiguous; their shape stands in the result for the leads."""
    lead: int
    """How many leading dimensions of a leaf count rows."""
    counted: bool
    """Whether no number is negative or out of range."""
    sizes: tuple[int, ...]
    """Of these dimensions; empty where nobody has looked yet."""
    key: Any
    """What gives the same rows of one leaf, as `leaf[key]`."""
    is_view: bool
    """Whether `leaf[key]` is a view, with strides of its own."""


class RowReaders(NamedTuple):
    """What the walk does with leaves and collections that are not the engine's."""

    read: Callable[[Any], Any]
    """Of a leaf: its rows, or what moves as it is."""
    flatten: Callable[[Any, torch.device, bool], Any]
    """Of a collection, as its container is taken apart; None leaves it to `read`."""
    unflatten: Callable[[list[Any], Any], Any] | None
    """What makes it from its parts."""
