"""Which rows of a storage an index selects, in the form that the engine reads."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection

from tdcopier._rows.request import RowIndex


class Request(NamedTuple):
    rows: Any
    """All rows that the engine may read; each leaf has the same number."""
    numbers: RowIndex


def alike(tree: Any, in_use: torch.Size, is_full: bool) -> Any:
    """Return a tree whose leaves all have the same rows; None if the engine cannot read it.

    torchrl gives each leaf of a tree a capacity of its own if the storage has several dimensions,
    and indexes the rows in use.
    """
    leaves = _leaves(tree)
    if not leaves:
        return None
    lead = len(in_use)
    sizes = {tuple(leaf.shape[:lead]) for leaf in leaves}
    if len(sizes) == 1:
        return tree
    if is_full or any(size[1:] != in_use[1:] or size[0] < in_use[0] for size in sizes):
        return None  # torchrl counts negative numbers from the end of each leaf
    return narrowed(tree, in_use[0])


def _leaves(tree: Any) -> list[Any] | None:
    """Return the leaves, if the engine takes the tree apart as torchrl does, otherwise None."""
    if isinstance(tree, torch.Tensor) or is_tensor_collection(tree):
        return [tree]
    if type(tree) in (dict, OrderedDict):
        tree = list(tree.values())
    if type(tree) not in (list, tuple):
        return None
    parts = [_leaves(part) for part in tree]
    return None if None in parts else [leaf for part in parts for leaf in part or ()]


def narrowed(tree: Any, rows: int) -> Any:
    """Return the same containers with views of the first rows of each leaf."""
    if isinstance(tree, dict):
        return type(tree)((key, narrowed(part, rows)) for key, part in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(narrowed(part, rows) for part in tree)
    return tree[:rows]


def gives_view(index: Any) -> bool:
    """Return whether torch answers an index with a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None
        or isinstance(part, (int, np.integer, slice, str, type(...)))
        or (isinstance(part, torch.Tensor) and part.dim() == 0 and part.dtype != torch.bool)
        for part in parts
    )


def rows_in_use(index: Any, in_use: torch.Size) -> RowIndex | None:
    """Return the rows that an index selects among those in use; None for any other index.

    `_rows/row_numbers.py` converts the indices of `start_gather`; this one leaves to torchrl what
    torchrl's own samplers do not make, and counts from the end of what is in use.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not 1 <= len(parts) <= min(2, len(in_use)):
        return None
    found: list[torch.Tensor] = []
    for part, size in zip(parts, in_use, strict=False):
        numbers = _wrapped(part, size)
        if numbers is None:
            return None
        found.append(numbers)
    if len(found) == 1:
        return RowIndex(found[0], 1, True, (), found[0], False)
    try:
        numbers = (found[0] * in_use[1] + found[1]).contiguous()
    except RuntimeError:
        return None  # torchrl says which shapes cannot be broadcast together
    return RowIndex(numbers, 2, True, (), tuple(found), False)


def _wrapped(part: Any, size: int) -> torch.Tensor | None:
    """Return row numbers, of `size` in use, as the engine takes them; None for any other index."""
    if isinstance(part, (list, range)):
        if not all(type(number) is int for number in part):
            return None
        part = torch.tensor(list(part), dtype=torch.int64, device="cpu")
    elif isinstance(part, np.ndarray) and part.dtype in (np.int64, np.int32):
        part = torch.from_numpy(part.copy())
    if not isinstance(part, torch.Tensor) or part.dtype not in (torch.int64, torch.int32):
        return None
    if part.dim() == 0 or part.device.type != "cpu":
        return None
    if part.numel() == 0:
        return part.long()
    low, high = (int(bound) for bound in part.aminmax())
    if low < -size or high >= size:
        return None  # torchrl says what is wrong
    numbers = part.detach().long().contiguous()
    return numbers if low >= 0 else torch.where(numbers < 0, numbers + size, numbers)
