"""Shared by the gather tests: the number of rows, and the expected result of a gather."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

ROWS = 50


def rows_of(tree: Any, index: Any, device: str) -> Any:
    """Returns the expected result of a gather."""
    if isinstance(index, range):
        index = list(index)
    elif isinstance(index, np.ndarray):
        index = index.astype(index.dtype.newbyteorder("="))

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = torch.as_tensor(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf[index].to(device, copy=True)

    return tree_map(of_leaf, tree)
