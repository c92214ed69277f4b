"""The public calls: argument checks in Python, everything else in the native module."""

from __future__ import annotations

import atexit
import operator
import os
from functools import lru_cache
from typing import Any, TypeAlias, TypedDict

import torch  # its libraries must be loaded before the native module
from typing_extensions import Unpack

from tdcopier import _C
from tdcopier._C import AsyncCopyHandle, InternalError
from tdcopier._checking import SourceCheck, checked, checking_from_environment

__all__ = [
    "AsyncCopyHandle",
    "CopyOptions",
    "Device",
    "InternalError",
    "async_to",
    "copy",
    "copy_into",
    "set_run_ahead_limit",
    "set_staging_limit_bytes",
    "staging_bytes",
    "start_copy",
    "to",
]

Device: TypeAlias = "str | torch.device | int"

_STAGING_LIMIT_VARIABLE = "TDCOPIER_STAGING_LIMIT_BYTES"
_GATHER_VARIABLE = "TDCOPIER_GATHER"
_WORKERS_VARIABLE = "TDCOPIER_WORKERS"
_MOST_WORKERS = 256
_LARGEST_ALIGNMENT_BYTES = 1 << 30
_LARGEST_CHUNK_BYTES = 1 << 62


class _LimitsInForce:
    """What the engine was told last, since it takes limits and does not tell them."""

    staging_limit_bytes = _C.DEFAULT_STAGING_LIMIT_BYTES
    run_ahead_batches = 4


limits_in_force = _LimitsInForce()


def start_copy(
    data: Any,
    device: Device,
    *,
    use_pinned_staging: bool = True,
    pack_cpu_tensors: bool = True,
    min_packed_alignment_bytes: int = 16,
    max_packed_chunk_bytes: int = 32 * 1024 * 1024,
    use_background_thread: bool = True,
) -> AsyncCopyHandle:
    """Begin to copy every tensor and array of `data` to `device`; return at once with a handle.

    The result equals what `Tensor.to(device)` gives for every leaf, in containers of the same
    classes: same values, dtypes, shapes, strides. Containers are `list`, `tuple` and `dict`, their
    subclasses (named tuples, `OrderedDict`, `defaultdict` and so on), dataclasses, and what
    `register_container` was told; tensors and numpy arrays are leaves, and arrays become tensors;
    everything else is opaque and comes back as it is. Leaves on `device` already come back as the
    same objects. TensorDicts and tensorclasses, anywhere in the tree, are containers too: see
    `async_to`.

    Leaves come from the host, from other devices, or both, and go to a device or to the host, where
    they arrive in pinned memory. Those up to 256 KiB travel packed: leaves of one dtype share a
    chunk, and are gathered on their device first if they come from one. Larger ones have a chunk
    each. On the way to a device the device reads large pinned leaves in place, without staging; so
    it does small ones of one dtype that follow one another in a pinned tensor, where they are as
    large together. Whatever
    cannot be copied as plain bytes (leaves that need gradients, sparse tensors, subclasses,
    conjugate views, any leaf under a torch mode) is left to its own `.to`, inside this call, and
    counted in `stats`.

    **Until the copy is done** (`get` returned, or `ready` is true) the caller may drop the sources
    and the handle, but may not modify or resize a source in place. `wait_staged` and, for a device
    as the target, `wait` allow that earlier: host sources, pinned ones too, may be written when
    they return, and device sources by work that is enqueued on the current stream from then on.
    With the environment variable `TDCOPIER_CHECK=1` the handle looks for
    modified sources and raises a `SourceModifiedError` that names them. Sources on a device are
    read after the work that their current stream has at the call; a pinned host source that a
    stream is still writing must be synchronised before it. A copy from the host waits for no
    stream.

    One output that is alive keeps its whole chunk, and `torch.save` of it writes the whole chunk;
    growing one in place (`resize_`, `out=`) writes over its neighbours. `clone()` an output that
    you keep for long, save alone, or grow.

    Args:
        data: a leaf, or any nesting of containers and leaves, up to 1000 containers deep.
        device: the target, as for `Tensor.to`. "cuda" is the current CUDA device.
        use_pinned_staging: stage through pinned memory, so that transfers run beside the host, and
            let what arrives on the host be pinned. Without it, transfers read or write pageable
            memory and block the thread that makes them.
        pack_cpu_tensors: let small leaves share chunks, on whatever device they are. Without it
            each leaf has its own allocation and transfer.
        min_packed_alignment_bytes: the place of every packed leaf, counted from its chunk's
            beginning, is a multiple of the larger of this and its element size, rounded up to a
            multiple of its element size. The chunk's address is a multiple of the largest power of
            two that divides this alignment.
        max_packed_chunk_bytes: most bytes that the leaves of one chunk span, padding included. (The
            allocation is larger where an alignment above 64 bytes calls for it.)
        use_background_thread: leave large work to worker threads and return at once. Up to
            512 KiB of the host are staged in the call all the same, since that is faster, unless
            they would have to wait for a staging buffer. Gathers and transfers from a device are
            enqueued in the call too. (The first results of a size that arrive on the host take as
            long as pinning memory does.)

    Returns:
        The handle. `get()` waits for the result; `wait()` gives it at once, ordered on a stream.

    Raises:
        TypeError: an option or the device is of the wrong type; an array's numbers have a type
            that torch cannot take; a container cannot be rebuilt (messages name the path).
        ValueError: no such device; a size option that is not positive, an alignment above 1 GiB; a
            tensor that reaches beyond its storage (the message names its path).
        RecursionError: containers nested more than 1000 deep, or containing themselves.
        RuntimeError: the current stream of the target's or a source's device is capturing a CUDA
            graph; a container changed while it was walked.
        Exception: what a registered container's `flatten` raises.

    A failure of the copy itself (such as `torch.OutOfMemoryError`, or what the `.to` of a delegated
    leaf or a container's `unflatten` raises) is raised by `get` and `wait`.
    """
    check = SourceCheck.of_copy(data, device) if _CHECKING else None
    handle = _C.start_copy(
        data,
        device,
        checked_options(
            use_pinned_staging,
            pack_cpu_tensors,
            min_packed_alignment_bytes,
            max_packed_chunk_bytes,
            use_background_thread,
        ),
    )
    return handle if check is None else checked(handle, check)


@lru_cache(maxsize=64, typed=True)
def checked_options(
    use_pinned_staging: bool,
    pack_cpu_tensors: bool,
    min_packed_alignment_bytes: int,
    max_packed_chunk_bytes: int,
    use_background_thread: bool,
) -> _C.CopyOptions:
    """The options of a copy as the native module takes them.

    Raises:
        TypeError, ValueError: as `start_copy` says.
    """
    return _C.CopyOptions(
        bool(use_pinned_staging),
        bool(pack_cpu_tensors),
        _size_option(
            "min_packed_alignment_bytes", min_packed_alignment_bytes, _LARGEST_ALIGNMENT_BYTES
        ),
        _size_option("max_packed_chunk_bytes", max_packed_chunk_bytes, _LARGEST_CHUNK_BYTES),
        bool(use_background_thread),
    )


@lru_cache(maxsize=16, typed=True)
def options_for_filling(use_pinned_staging: bool, use_background_thread: bool) -> _C.CopyOptions:
    """The same of a copy into memory that exists: how to pack is not asked."""
    return checked_options(
        use_pinned_staging, True, 16, _LARGEST_CHUNK_BYTES, use_background_thread
    )


class CopyOptions(TypedDict, total=False):
    """The options of `start_copy`, which its other forms take as well."""

    use_pinned_staging: bool
    pack_cpu_tensors: bool
    min_packed_alignment_bytes: int
    max_packed_chunk_bytes: int
    use_background_thread: bool


def copy(data: Any, device: Device, **options: Unpack[CopyOptions]) -> Any:
    """The blocking form of `start_copy`: the tree on `device`, arrived. Takes the same options."""
    return start_copy(data, device, **options).get()


def copy_into(
    source: Any,
    destination: Any,
    *,
    use_pinned_staging: bool = True,
    use_background_thread: bool = True,
) -> AsyncCopyHandle:
    """Begin to fill an existing tree with the values of another; return at once with a handle.

    Each leaf of `source` is copied into the leaf of `destination` at the same place. Both are
    tensors or numpy arrays, anywhere: on the host (pageable, pinned or memory-mapped) or on
    devices, strided or not, in any mixture. `get()` and `wait()` give `destination` itself. Nothing
    is allocated for the result, so tensors keep their addresses, as CUDA graphs need it; where the
    destination is what `start_copy` has once delivered to a device, each of its chunks is filled by
    one transfer.

    The trees must have the same structure: containers have the same keys, the same attributes or
    the same number of children (their classes may differ), and leaves the same shape and dtype.
    Opaque values must be at the same places; they are left alone. A leaf that is the very memory of
    its destination counts as reused and is not touched. Version counters of the tensors that are
    written move.

    **Order.** Sources on a device are read after the work that their current stream has at the
    call. Destinations on a device are written after the work that their current stream has at the
    call, and work that a stream is given after `get()`, or after a `wait()` for it, sees the new
    values. In between, destinations may be neither read nor written. Copies into memory of one
    device run in the order of their calls, apart from copies to new memory there. Destinations on
    the host are written at any time from the call on, until `get()` or `wait()` returns or
    `ready()` is true; one that is pinned and that a stream still reads must be synchronised before
    the call. What `start_copy` says of sources holds here too. The caller may drop both trees: what
    is copied is kept.

    Whatever cannot be copied as plain bytes (a source that needs a gradient, sparse tensors,
    subclasses, conjugate views, any leaf under a torch mode) is left to `copy_`, inside this call
    and before the others are written, and counted as delegated. Leaves up to 256 KiB count as
    packed, larger ones as alone.

    Args:
        source: a leaf, or any nesting of containers and leaves.
        destination: a tree of the same structure, to be filled.
        use_pinned_staging: stage through pinned memory, so that transfers run beside the host.
            Without it, transfers read or write pageable memory and block the thread that makes
            them. What stays on the host, or goes from device to device, is never staged.
        use_background_thread: leave large work, and whatever arrives in host memory, to worker
            threads and return at once.

    Raises:
        ValueError: the trees differ in structure, or a leaf in shape or dtype; a destination
            requires a gradient while gradients are enabled, is a read-only array, shares memory
            between its elements, or with another leaf that is read or written (leaves with gaps are
            compared up to a million rows); a tensor reaches beyond its storage. Messages name the
            first such leaf by its path, and nothing has been written.
        TypeError: an array's numbers have a type that torch cannot take; a container of a kind
            that cannot be taken apart.
        RecursionError: containers nested more than 1000 deep, or containing themselves.
        RuntimeError: the current stream of a device in question is capturing a CUDA graph; a
            destination was made in inference mode, and this is not; a container changed while it
            was walked.
        Exception: what a registered container's `flatten` raises.

    A failure of the copy itself is raised by `get` and `wait`, every time. The values of the
    destinations are undefined after it, and after an interrupt (Ctrl-C) of this call, which is
    raised when nothing writes to them any more.
    """
    check = SourceCheck.of_filling(source, destination) if _CHECKING else None
    options = options_for_filling(use_pinned_staging, use_background_thread)
    handle = _C.copy_into(source, destination, options)
    return handle if check is None else checked(handle, check)


def async_to(data: Any, device: Device, **options: Unpack[CopyOptions]) -> AsyncCopyHandle:
    """Begin to move a TensorDict to `device`; return at once with a handle.

    `get()` and `wait()` give what `data.to(device)` would have given: a collection of the same
    class, with `device` set on every node, so that entries set later move there too; the same batch
    sizes, names, lock and non-tensor data. Its leaves travel packed, whatever they are nested in:
    TensorDicts and their subclasses, lazy stacks, tensorclasses, typed ones. A collection that is
    on the device already comes back as the same object.

    What is not made of plain memory is left to its own `.to`, inside this call, and counted in
    `stats`: consolidated and persistent TensorDicts, `TensorDictParams`, sub-TensorDicts, lazy
    views, tensorclasses with a `__post_init__` (it may read what it is given), and leaves that
    `start_copy` leaves to theirs. The structure may be changed as soon as the call has returned;
    what `start_copy` says of modified sources holds for the leaves.

    Args:
        data: a TensorDict or a tensorclass; or any tree, with or without TensorDicts in it: this is
            `start_copy` under the name that users of TensorDict expect.
        device: the target, as for `TensorDict.to`.
        **options: those of `start_copy`.

    Raises:
        Exception: as `start_copy`.
    """
    return start_copy(data, device, **options)


def to(data: Any, device: Device, **options: Unpack[CopyOptions]) -> Any:
    """The blocking form of `async_to`: the TensorDict on `device`, arrived."""
    return start_copy(data, device, **options).get()


def set_staging_limit_bytes(limit_bytes: int) -> None:
    """Bound the pinned memory that copies to one device are staged in; all devices, default 64 MiB.

    A copy that finds every staging buffer (2 MiB each) in use waits for one. Copies into existing
    memory of the device use at most half of the buffers, and those from the device into existing
    memory of the host at most a quarter, so that copies which wait for no kernel can go on. Each of
    the three uses may have one buffer in any case: 6 MiB, where the limit is lower. A lower limit
    is reached as buffers come back. Batches of `prefetch` that are staged ahead have pinned memory
    of their own, up to four times this limit, and are sent at once where that is not enough. The
    environment variable `TDCOPIER_STAGING_LIMIT_BYTES` sets the limit at import.

    Raises:
        ValueError: less than one buffer.
    """
    limit = operator.index(limit_bytes)
    if limit < _C.STAGING_BUFFER_BYTES:
        raise ValueError(
            f"limit_bytes must be at least {_C.STAGING_BUFFER_BYTES} (one buffer); got {limit}"
        )
    limit = min(limit, _LARGEST_CHUNK_BYTES)
    _C.set_staging_limit_bytes(limit)
    limits_in_force.staging_limit_bytes = limit


def staging_bytes(device: Device) -> int:
    """Bytes of pinned memory that stage copies to and from `device` at present.

    Prefetched batches that wait to be sent have memory of their own, which is not counted here: see
    `set_staging_limit_bytes`.
    """
    return _C.staging_bytes(device)


def set_run_ahead_limit(batches: int) -> None:
    """Bound how many handed-over batches the host may be ahead of the device; default 4.

    A batch that was dropped keeps its device memory until the device has read it, so a loop that is
    bound by the device would hold ever more of them. `start_copy` therefore waits until the device
    has reached all but `batches - 1` of the earlier hand-overs (`get` or `wait`).

    Raises:
        ValueError: less than 1.
    """
    limit = operator.index(batches)
    if limit < 1:
        raise ValueError(f"batches must be at least 1; got {limit}")
    limit = min(limit, 0xFFFFFFFF)
    _C.set_run_ahead_limit(limit)
    limits_in_force.run_ahead_batches = limit


def _size_option(name: str, value: int, largest: int) -> int:
    if type(value) is not int:  # the common case costs one comparison
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be a positive int; got {value!r}")
        value = operator.index(value)
    if not 0 < value <= largest:
        raise ValueError(f"{name} must be a positive int of at most {largest}; got {value}")
    return value


def _limit_from_environment() -> None:
    text = os.environ.get(_STAGING_LIMIT_VARIABLE)
    if text is None:
        return
    try:
        set_staging_limit_bytes(int(text))
    except ValueError as error:
        raise ValueError(f"{_STAGING_LIMIT_VARIABLE}={text!r}: {error}") from None


def _workers_from_environment() -> None:
    text = os.environ.get(_WORKERS_VARIABLE)
    if text is None:
        return
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_WORKERS:
        raise ValueError(f"{_WORKERS_VARIABLE}={text!r}: give a number from 1 to {_MOST_WORKERS}")
    _C.set_most_workers(int(text))


def _gather_from_environment() -> None:
    text = os.environ.get(_GATHER_VARIABLE, "kernel")
    if text not in ("kernel", "portable"):
        raise ValueError(f'{_GATHER_VARIABLE}={text!r}: give "kernel" or "portable"')
    _C.use_segment_kernel(text == "kernel")


_CHECKING = checking_from_environment()
_limit_from_environment()
_gather_from_environment()
_workers_from_environment()
atexit.register(_C.shut_down)
