"""Writes a batch into rows of a storage."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np
import torch

from tdcopier import _C, _checking
from tdcopier._C import AsyncCopyHandle
from tdcopier._compile import keep_out_of_graphs
from tdcopier._containers import arrays
from tdcopier._into import finished
from tdcopier._options import options_for_filling
from tdcopier._rows.row_numbers import key_for_torch, row_index

__all__ = ["scatter", "start_scatter"]

T = TypeVar("T")


@keep_out_of_graphs("start_scatter()")
def start_scatter(
    batch: Any,
    storage: T,
    index: Any,
    *,
    use_pinned_staging: bool = True,
    use_background_thread: bool = True,
) -> AsyncCopyHandle[T]:
    """Start to write a batch into rows of `storage`, and return a handle at once.

    For example::

        handle = tdcopier.start_scatter({"obs": obs, "action": action}, storage, torch.arange(64))
        act()  # while the rows are on their way
        handle.get()

    Has the effect of `storage[index] = batch`, leaf by leaf. To pinned leaves (see `pin_memory_`) a
    CUDA device that has the batch writes the rows itself. To others, the leaves of a batch on a
    device are gathered there, sent in one transfer per staging buffer, and written to their rows by
    native threads. `get()` and `wait()` return `storage` itself once every row is written; until
    then, do not read or write those rows. The rules of `start_copy_into` for order, sources and
    version counters apply here too.

    The index may be on the device of the batch, as for `start_gather`, which also says how to use
    both in a CUDA graph. Then the device checks it: a row out of range is not written, and of a row
    that is in the index twice, the last one is kept.

    Leaves that cannot be written as rows of plain memory (a storage on a device or with rows that
    are not contiguous; leaves of the batch with gaps, or that need gradients) are delegated to
    torch's own indexing, inside this call, and counted as delegated.

    Args:
        batch: a tree of the same structure as `storage`, on a device or on the host. In the shapes
            of its leaves, the index's shape replaces the dimensions that count rows. The dtypes are
            the same.
        storage: as for `start_gather`, on the host: in RAM, pinned or memory-mapped.
        index: as for `start_gather`. Without repeated rows, if it is on the host.
        use_pinned_staging: as for `start_copy_into`.
        use_background_thread: as for `start_copy_into`.

    Raises:
        IndexError: a row is out of range, or a mask has the wrong shape.
        ValueError: a row is in the index twice; the trees differ in structure; a leaf does not have
            the shape or dtype of its rows; leaves share memory, except for tied ones (see
            `start_copy_into`); a TensorDict in the storage has an `UnbatchedTensor`, which belongs
            to all rows. Messages name the leaf by its path, and nothing has been written.
        TypeError: `index` is not an index of rows.
        Exception: as `start_copy_into`.
    """
    _C.raise_bad_rows()  # of a handle that was dropped; reads do so in C++
    options = options_for_filling(use_pinned_staging, use_background_thread)
    return enqueue_scatter(batch, storage, index, options)


def enqueue_scatter(
    batch: Any, storage: T, index: Any, options: _C.CopyOptions
) -> AsyncCopyHandle[T]:
    """Do what `start_scatter` does, but do not raise errors of earlier calls."""
    rows = row_index(index, storage)
    if "tensordict" in sys.modules:
        from tdcopier.tensordict._rows import refuse_unbatched

        refuse_unbatched(storage)

    def fill(table: torch.Tensor, values: torch.Tensor) -> None:
        table[key_for_torch(rows)] = values.to(table.device)

    check = _checking.SourceCheck.of_scatter(batch, storage) if _checking.enabled else None
    handle = _C.start_scatter(batch, storage, rows, fill, options)
    return handle if check is None else _checking.checked(handle, check)


@keep_out_of_graphs("scatter()")
def scatter(
    batch: Any,
    storage: T,
    index: Any,
    *,
    use_pinned_staging: bool = True,
    use_background_thread: bool = True,
) -> T:
    """Write a batch into rows of `storage`, block until they are written, and return `storage`.

    For example::

        tdcopier.scatter(rollout, storage, range(512, 1024))  # rows 512 to 1023 are new

    This is `start_scatter(...).get()`, which describes the arguments and the errors. Ctrl-C raises
    after the last write, and at once when pressed again.
    """
    handle = start_scatter(
        batch,
        storage,
        index,
        use_pinned_staging=use_pinned_staging,
        use_background_thread=use_background_thread,
    )
    return finished(handle)


def as_tensor(leaf: Any, written: bool) -> torch.Tensor | str:
    """Return a tensor with an array's values, or the reason why there is none.

    If `written` is true, the tensor shares the array's memory.
    """
    if not isinstance(leaf, np.ndarray):
        return f" is a {type(leaf).__name__}: give the tensors in it"
    if written and not (leaf.flags.writeable and leaf.dtype.isnative):
        return " is an array that torch cannot write to: it is read-only, or of another byte order"
    made = arrays.as_tensor(leaf)
    if written and leaf.size and made.data_ptr() != leaf.__array_interface__["data"][0]:
        return " is an array with strides that no tensor has: give a contiguous one"
    return made
