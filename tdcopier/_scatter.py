"""Rows of a storage, written from a batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tdcopier import _C, _arrays
from tdcopier._C import AsyncCopyHandle
from tdcopier._copy import options_for_filling
from tdcopier._row_index import row_index

__all__ = ["start_scatter"]


def start_scatter(
    batch: Any,
    storage: Any,
    index: Any,
    *,
    use_pinned_staging: bool = True,
    use_background_thread: bool = True,
) -> AsyncCopyHandle:
    """Begin to write a batch into rows of `storage`; return at once with a handle.

    As `storage[index] = batch`, leaf by leaf, for a batch on a device: its leaves are gathered
    there, sent in one transfer for each staging buffer, and written to their rows by native
    threads. `get()` and `wait()` give `storage` itself when every row is written; until then its
    rows may be neither read nor written. What `copy_into` says of order, of sources and of version
    counters holds here too.

    What cannot be written as rows of plain memory (a storage on a device or whose rows are not
    contiguous; leaves of the batch with gaps, or that need gradients) is left to torch's own
    indexing, inside this call, and counted as delegated.

    Args:
        batch: a tree of the same structure as `storage`: its leaves have the index's shape in place
            of the dimensions that count rows, and the same dtypes. On a device, or on the host.
        storage: as for `start_gather`, on the host: in RAM, pinned or memory-mapped.
        index: as for `start_gather`; no row may be in it twice.
        use_pinned_staging: as for `copy_into`.
        use_background_thread: as for `copy_into`.

    Raises:
        IndexError: a row that is not there, or a mask of another shape.
        ValueError: a row is in the index twice; the trees differ in structure, or a leaf has
            another shape or dtype than the rows that it is for; leaves share memory. Messages name
            the leaf by its path, and nothing has been written.
        TypeError: no index of rows.
        Exception: as `copy_into`.
    """
    rows = row_index(index, storage)

    def fill(table: torch.Tensor, values: torch.Tensor) -> None:
        table[rows.key] = values.to(table.device)

    return _C.start_scatter(
        batch,
        storage,
        rows,
        fill,
        options_for_filling(use_pinned_staging, use_background_thread),
    )


def as_tensor(leaf: Any, written: bool) -> torch.Tensor | str:
    """A tensor of an array's values, over its memory if it is written; or why there is none."""
    if not isinstance(leaf, np.ndarray):
        return f" is a {type(leaf).__name__}: give the tensors in it"
    if written and not (leaf.flags.writeable and leaf.dtype.isnative):
        return " is an array that torch cannot write to: it is read-only, or of another byte order"
    made = _arrays.as_tensor(leaf)
    if written and leaf.size and made.data_ptr() != leaf.__array_interface__["data"][0]:
        return " is an array with strides that no tensor has: give a contiguous one"
    return made
