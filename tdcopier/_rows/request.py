"""Row requests as the engine takes them: the index of the rows, and functions that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class RowIndex(NamedTuple):
    """An index of rows in the engine's form."""

    numbers: torch.Tensor
    """Rows: int64 on the host, or signed integers of 2 to 8 bytes on a device; contiguous. Their
    shape replaces the leading dimensions in the result."""
    lead: int
    """Number of leading dimensions of a leaf that count rows."""
    counted: bool
    """Whether it is known that no number is negative or out of range."""
    sizes: tuple[int, ...]
    """Sizes of these dimensions; empty if they are not known yet."""
    key: Any
    """The index for which `leaf[key]` gives the same rows of a leaf."""
    is_view: bool
    """Whether `leaf[key]` is a view, with strides of its own."""


class RowReaders(NamedTuple):
    """Functions that the walk calls for leaves and collections that the engine cannot read."""

    read: Callable[[Any], Any]
    """Takes a leaf and returns its rows, or the value that is moved whole."""
    flatten: Callable[[Any, torch.device, bool], Any]
    """Takes a collection apart, like the rule of a container; None leaves it to `read`."""
    unflatten: Callable[[list[Any], Any], Any] | None
    """Rebuilds a collection from its parts."""


def leave(value: Any, device: torch.device, named: bool) -> None:
    """Leave a collection of a class of torch's own to its own indexing."""
