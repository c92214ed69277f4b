"""Gathers rows of a storage into packed chunks on their way to a device.

`csrc/python/walk/sort_leaves.cpp` chooses how each leaf is read: the device reads rows of pinned
memory (`csrc/kernels/move_rows.cu`), host threads gather those of other host memory
(`csrc/base/row_copy.cpp`), and `row_numbers.py` indexes all others. With `out`, that is
`csrc/python/walk/sort_pairs.cpp`.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar, overload

import numpy as np
import torch
from typing_extensions import Unpack

from tdcopier import _C, _checking, _copy, _options
from tdcopier._C import AsyncCopyHandle
from tdcopier._compile import keep_out_of_graphs
from tdcopier._containers.delegated_parts import DelegatedPart
from tdcopier._into import finished
from tdcopier._options import CopyOptions, Device, OnUnknown
from tdcopier._rows.checking import GatherCheck
from tdcopier._rows.request import RowIndex, RowReaders, leave
from tdcopier._rows.row_numbers import read_rows, row_index

__all__ = ["gather", "start_gather"]

T = TypeVar("T")

_NO_DEVICE = "{0}() needs a device, or existing memory as out=: call {0}(storage, index, device)"


@overload
def start_gather(
    storage: np.ndarray[Any, Any],
    index: Any,
    device: Device | None,
    *,
    out: None = None,
    **options: Unpack[CopyOptions],
) -> AsyncCopyHandle[torch.Tensor]: ...
@overload
def start_gather(
    storage: T,
    index: Any,
    device: Device | None,
    *,
    out: None = None,
    **options: Unpack[CopyOptions],
) -> AsyncCopyHandle[T]: ...
@overload
def start_gather(
    storage: Any,
    index: Any,
    device: Device | None = None,
    *,
    out: T | None,
    **options: Unpack[CopyOptions],
) -> AsyncCopyHandle[T]: ...
@keep_out_of_graphs("start_gather()")
def start_gather(
    storage: Any,
    index: Any,
    device: Device | None = None,
    *,
    out: Any = None,
    use_pinned_staging: bool = True,
    pack_cpu_tensors: bool = True,
    min_packed_alignment_bytes: int = 16,
    max_packed_chunk_bytes: int = 32 * 1024 * 1024,
    use_background_thread: bool = True,
    require_pinned_results: bool = False,
    on_unknown: OnUnknown = None,
) -> AsyncCopyHandle[Any]:
    """Start to copy rows of every leaf of `storage` to `device`, and return a handle at once.

    For example::

        storage = {"obs": torch.rand(100_000, 17), "action": torch.rand(100_000, 6)}
        handle = tdcopier.start_gather(storage, torch.randint(100_000, (256,)), "cuda")
        batch = handle.wait()
        handle.wait_gathered()
        storage["obs"][:512] = 0  # all rows of the batch have been read

    The result equals `storage[index].to(device)` for a TensorDict. For other containers, each leaf
    equals `leaf[index].to(device)`. It is new memory, even if the index would give a view; or it is
    `out`, whose leaves are filled. From pinned leaves (see `pin_memory_`) a CUDA device reads the
    rows itself. From others, native threads read them directly into the pinned memory that the
    transfers read. A storage in memory-mapped files is read in place. A storage on a device is
    indexed there.

    The call copies the index. **Until `wait_gathered` has returned** rows may still be read: do not
    write to the rows that the index names, and do not resize the storage. After it returns you may
    write, even while the transfer is still in flight. With the environment variable
    `TDCOPIER_CHECK=1` the handle detects rows that were modified too early, and the call waits for
    an index on the device, except in a CUDA graph.

    **An index on the device** is read there, in the order of the current stream: the host does not
    wait for it, and neither does `wait`. Every leaf on the host must then be pinned, and its rows
    and those of `out` contiguous, because torch indexes no host tensor so. The device checks the
    numbers: a row that is out of range is not read, and its place in the result has any
    value. `get` and `wait_gathered` raise the `IndexError` then; if neither is called, a later
    call that moves rows does.

    **In a CUDA graph**, give `out`: the call adds the reads to the graph that the current stream is
    capturing, and each replay reads the rows that the index names by then, if it is on the device.
    `wait()` returns `out`. Keep the handle as long as the graph: it keeps the memory alive, and its
    `get` raises the `IndexError` of a replay that is done: synchronise first. The storage must stay
    pinned.

    Leaves and parts that the engine cannot read as rows of plain memory are delegated to their own
    indexing, inside this call, and counted in `stats.fallbacks`: leaves on a device, leaves that
    need gradients, leaves whose rows are not contiguous or that repeat memory, and parts of a
    TensorDict such as lazy stacks. An `UnbatchedTensor` in a TensorDict belongs to all rows and is
    copied whole.

    Args:
        storage: a TensorDict or a tensorclass, or any nesting of containers. The leading dimension
            of each leaf, or its two leading dimensions, count the rows. Leaves are tensors and
            arrays in RAM, memory-mapped or pinned. Opaque values come back unchanged:
            of an array of dates, text or objects, all rows.
        index: rows, as torch takes them: a tensor of integers of any shape, an array, a list, a
            range, a slice with a positive step, one row, or a mask of one or two dimensions; for
            two leading dimensions, a pair of these (each with at most one mask or list of numbers).
            Negative numbers count from the end; rows may repeat. A nested list is one tensor, as in
            ``leaf[torch.tensor(index)]``; torch's deprecated form, which takes it for a tuple, is
            not meant. A pair is always a tuple.
        device: the target, as for `start_copy`; None is where the leaves of `out` are. On "cpu" the
            rows arrive in chunks by dtype, which a later copy can send without packing them again.
            They are pinned if this process has initialised the accelerator already; a process that
            only samples never initialises it.
        out: an existing tree with the shapes and dtypes of the result, filled as by
            `start_copy_into`, which has the rules for order and version counters. The options for
            packing do not apply. Opaque values are left as they are.
        use_pinned_staging: see `CopyOptions`, as for the next five. False also keeps a device from
            reading the rows itself.
        pack_cpu_tensors: see `CopyOptions`.
        min_packed_alignment_bytes: see `CopyOptions`.
        max_packed_chunk_bytes: see `CopyOptions`.
        use_background_thread: see `CopyOptions`.
        require_pinned_results: see `CopyOptions`.
        on_unknown: see `CopyOptions`.

    Raises:
        IndexError: a row is out of range, or a mask has the wrong shape; nothing has been read.
        ValueError: leaves differ in their number of rows (the message names the path); the index is
            on a device that cannot read a leaf, or is a mask there; a leaf of `out` does not have
            the shape or dtype of its rows, or is not on `device`; and as `start_copy`.
        TypeError: `index` is not an index of rows; neither `device` nor `out` is given; and as
            `start_copy`.
        Exception: as `start_copy`.
    """
    options = _options.checked_options(
        use_pinned_staging,
        pack_cpu_tensors,
        min_packed_alignment_bytes,
        max_packed_chunk_bytes,
        use_background_thread,
    )
    if require_pinned_results is not False:
        options = _options.options_for_results(options, use_pinned_staging, require_pinned_results)
    if on_unknown is not None:
        options = _options.options_for_unknown(options, on_unknown)
    options = _options.SENDING.apply(options)
    if out is not None:
        return _start_into(storage, index, device, out, options)
    if device is None:
        raise TypeError(_NO_DEVICE.format("start_gather"))
    if device == "meta" or getattr(device, "type", None) == "meta":  # has no memory to gather into
        rows_on_host = start_gather(storage, index, "cpu", on_unknown=on_unknown).get()
        return _copy.start_copy(rows_on_host, device, on_unknown="ignore")  # checked by the gather
    rows = row_index(index, storage)
    check = GatherCheck.of_gather(storage, rows, device) if _checking.enabled else None
    handle = _C.start_gather(storage, rows, _readers(rows, device), device, options)
    return handle if check is None else _checking.checked(handle, check)


@overload
def gather(
    storage: np.ndarray[Any, Any],
    index: Any,
    device: Device | None,
    *,
    out: None = None,
    **options: Unpack[CopyOptions],
) -> torch.Tensor: ...
@overload
def gather(
    storage: T,
    index: Any,
    device: Device | None,
    *,
    out: None = None,
    **options: Unpack[CopyOptions],
) -> T: ...
@overload
def gather(
    storage: Any,
    index: Any,
    device: Device | None = None,
    *,
    out: T | None,
    **options: Unpack[CopyOptions],
) -> T: ...
@keep_out_of_graphs("gather()", "the tree that it returns")
def gather(
    storage: Any,
    index: Any,
    device: Device | None = None,
    *,
    out: Any = None,
    **options: Unpack[CopyOptions],
) -> Any:
    """Return rows of every leaf of `storage` on `device`, and block until they have arrived.

    For example::

        batch = tdcopier.gather(storage, torch.randint(100_000, (256,)), "cuda")

    This is `start_gather(...).get()`, which describes the arguments and the errors.
    """
    if options:
        _options.refuse_unknown_options("gather", options)
    if device is None and out is None:
        raise TypeError(_NO_DEVICE.format("gather"))
    handle = start_gather(storage, index, device, out=out, **options)
    return handle.get() if out is None else finished(handle)


def _start_into(
    storage: Any, index: Any, device: Device | None, out: T, options: _C.CopyOptions
) -> AsyncCopyHandle[T]:
    rows = row_index(index, storage)
    if "tensordict" in sys.modules:
        from tdcopier.tensordict._rows import refuse_unbatched

        refuse_unbatched(storage)
    if device is not None:
        _check_devices(out, torch.empty(0, device=device).device)

    def fill(leaf: torch.Tensor, table: torch.Tensor) -> None:
        leaf.copy_(read_rows(table, rows, leaf.device))

    check = GatherCheck.of_gather_into(storage, rows, out) if _checking.enabled else None
    handle = _C.start_gather_into(storage, out, rows, fill, options)
    return handle if check is None else _checking.checked(handle, check)


def _check_devices(out: Any, device: torch.device) -> None:
    for path, leaf in _C.leaves_with_paths(out, device):
        place = getattr(leaf, "device", torch.device("cpu"))
        if isinstance(place, torch.device) and place != device:
            raise ValueError(f"out{path.removeprefix('data')} is on {place}, and not on {device}")


class Whole(DelegatedPart):
    """A tensor that is copied whole, in the same chunks as the rows."""


def _readers(rows: RowIndex, device: Device) -> RowReaders:
    def read(leaf: Any) -> Any:
        if isinstance(leaf, Whole):
            return leaf.value
        if isinstance(leaf, DelegatedPart):
            return leaf
        return read_rows(leaf, rows, device)

    if "tensordict" not in sys.modules:  # then the storage has no TensorDict
        return RowReaders(read, leave, None)
    from tdcopier.tensordict._rows import flatten
    from tdcopier.tensordict._walk import unflatten

    def flatten_rows(value: Any, device: torch.device, named: bool) -> Any:
        return flatten(value, device, rows)

    return RowReaders(read, flatten_rows, unflatten)
