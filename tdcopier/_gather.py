"""Rows of a storage, gathered into packed chunks on their way to a device."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tdcopier import _C, _copy
from tdcopier._C import AsyncCopyHandle
from tdcopier._copy import Device
from tdcopier._delegated import Mover
from tdcopier._row_index import read_rows, row_index
from tdcopier._row_request import RowIndex, RowReaders

__all__ = ["start_gather"]


def start_gather(
    storage: Any,
    index: Any,
    device: Device,
    *,
    use_pinned_staging: bool = True,
    pack_cpu_tensors: bool = True,
    min_packed_alignment_bytes: int = 16,
    max_packed_chunk_bytes: int = 32 * 1024 * 1024,
    use_background_thread: bool = True,
) -> AsyncCopyHandle:
    """Begin to copy rows of every leaf of `storage` to `device`; return at once with a handle.

    The result equals `storage[index]` moved by `.to(device)`, or, of containers other than
    TensorDicts, `leaf[index].to(device)` for every leaf: new memory always, also where an index
    would give a view. Rows are read by native threads, straight from the storage into the pinned
    memory that the transfers read. A storage in memory-mapped files is read in place; one on a
    device is indexed there.

    The index is copied in the call. **Until `wait_gathered` has returned** the call may read rows:
    do not write to those that are asked for, nor resize the storage. After it, a writer may go on,
    while the transfer is still under way. (`TDCOPIER_CHECK=1` does not look at storages.)

    What the engine cannot read as rows of plain memory is left to its own indexing, inside this
    call, and counted in `stats.fallbacks`: leaves on a device, leaves that need gradients, whose
    rows are not contiguous, or that repeat memory; parts of a TensorDict such as lazy stacks.

    Args:
        storage: a TensorDict or a tensorclass, or any nesting of containers whose leaves have the
            rows as their leading dimension, or two: tensors and arrays in RAM, memory-mapped or
            pinned. Opaque values come back as they are.
        index: rows, as torch takes them: a tensor of integers of any shape, an array, a list, a
            range, a slice with a positive step, one row, or a mask of one dimension or two; a pair
            of these (at most one mask or list of numbers each) for two leading dimensions. Negative
            numbers count from the end; rows may repeat.
        device: the target, as for `start_copy`. On "cpu" rows arrive in chunks by dtype, which a
            later copy can send as they are. They are pinned where the accelerator is already
            initialised in this process; a process that only samples never initialises it.
        use_pinned_staging: as for `start_copy`, like the next four.
        pack_cpu_tensors: see there.
        min_packed_alignment_bytes: see there.
        max_packed_chunk_bytes: see there.
        use_background_thread: see there.

    Raises:
        IndexError: a row that is not there, or a mask of another shape; nothing has been read.
        ValueError: leaves differ in how many rows they have (the message names the path); an index
            that is not on the host; see `start_copy` for the rest.
        TypeError: no index of rows; see `start_copy` for the rest.
        Exception: as `start_copy`.
    """
    options = _copy.checked_options(
        use_pinned_staging,
        pack_cpu_tensors,
        min_packed_alignment_bytes,
        max_packed_chunk_bytes,
        use_background_thread,
    )
    if str(device) == "meta":  # which has no memory to gather into
        return _copy.start_copy(start_gather(storage, index, "cpu").get(), device)
    rows = row_index(index, storage)
    return _C.start_gather(storage, rows, _readers(rows, device), device, options)


class Whole(Mover):
    """A tensor in a storage that goes with the rows, in their chunk, as it is."""


def _readers(rows: RowIndex, device: Device) -> RowReaders:
    def read(leaf: Any) -> Any:
        if isinstance(leaf, Whole):
            return leaf.value
        if isinstance(leaf, Mover):
            return leaf
        return read_rows(leaf, rows, device)

    if "tensordict" not in sys.modules:  # so there is no collection of its
        return RowReaders(read, _leave, None)
    from tdcopier.tensordict._rows import flatten
    from tdcopier.tensordict._walk import unflatten

    def flatten_rows(value: Any, device: torch.device, named: bool) -> Any:
        return flatten(value, device, rows)

    return RowReaders(read, flatten_rows, unflatten)


def _leave(value: Any, device: torch.device, named: bool) -> None:
    """Of a collection that torch has itself: it is indexed by its own code."""
