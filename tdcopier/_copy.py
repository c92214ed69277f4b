"""Public copy functions and process-wide limits: checks arguments, then calls the native module."""

from __future__ import annotations

import atexit
import operator
import os
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypedDict

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
    "OnUnknown",
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
OnUnknown: TypeAlias = Literal["ignore", "warn", "raise"] | None

_STAGING_LIMIT_VARIABLE = "TDCOPIER_STAGING_LIMIT_BYTES"
_GATHER_VARIABLE = "TDCOPIER_GATHER"
_WORKERS_VARIABLE = "TDCOPIER_WORKERS"
_MOST_WORKERS = 256
_LARGEST_ALIGNMENT_BYTES = 1 << 30
_LARGEST_CHUNK_BYTES = 1 << 62


class _LimitsInForce:
    """The limits last passed to the engine, which has no getters for them."""

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
    on_unknown: OnUnknown = None,
) -> AsyncCopyHandle:
    """Start to copy every tensor and array in `data` to `device`, and return a handle at once.

    For example::

        import torch
        import tdcopier

        batch = [{"boxes": torch.rand(12, 4), "ids": torch.arange(12), "name": "front"}]
        handle = tdcopier.start_copy(batch, "cuda")  # returns at once
        result = handle.wait()  # makes the current stream wait for the copy
        result[0]["boxes"].sum()  # runs after the copy

    Each leaf of the result equals `leaf.to(device)`: same values, dtype, shape and strides. The
    containers of the result have the same classes as those of `data`. Containers are `list`,
    `tuple` and `dict`, their subclasses (named tuples, `OrderedDict`, `defaultdict` and so on),
    dataclasses, TensorDicts and tensorclasses (see `async_to`), graphs of torch_geometric, nodes of
    torch's pytrees, and classes passed to `register_container`. Leaves are tensors and numpy
    arrays; arrays become tensors. Any other object with a ``.to(device)`` of its own is moved by
    it. All other values are opaque: the result has the same objects. Leaves that are on `device`
    already are reused: the result has the same objects. `explain` lists what a copy does with each
    value.

    Leaves may come from the host, from devices, or from both. They go to a device, or to the host,
    where they arrive in pinned memory. Leaves of up to 256 KiB are packed: those of one dtype share
    a chunk, and leaves on a device are gathered there first. Each larger leaf has a chunk of its
    own. On the way to a device, large pinned leaves are not staged: the device reads them in place.
    The same applies to small leaves of one dtype that follow one another in a pinned tensor and are
    larger than 256 KiB together. Leaves that cannot be copied as plain bytes (leaves that need
    gradients, sparse tensors, conjugate views, subclasses other than `torchvision.tv_tensors` and
    those passed to `register_tensor_subclass`, any leaf under a torch mode) and objects are
    delegated to their own ``.to``, inside this call, and counted in `stats`.

    **Until the copy is done** (`get` has returned, or `ready` is true) you may drop the sources and
    the handle, but you must not modify or resize a source in place. `wait_staged` and, if the
    target is a device, `wait` allow writes earlier: when they return, you may write to host
    sources, pinned ones included, and work that you then enqueue on the current stream may write to
    device sources. With the environment variable `TDCOPIER_CHECK=1` the handle detects modified
    sources and raises a `SourceModifiedError` that names the leaf.

    Sources on a device are read after all work that is on the current stream of that device at the
    call. If a stream is still writing a pinned host source, synchronise that stream before the
    call. A copy from the host waits for no stream.

    An output that is alive keeps its whole chunk alive. On a device, outputs share the storage of
    their chunk: `torch.save` of one writes the whole chunk, and growing one in place (`resize_`,
    `out=`) overwrites its neighbours. `clone()` an output that you keep for long, or that you save
    alone or grow on a device.

    Args:
        data: a leaf, or any nesting of containers and leaves, up to 1000 containers deep.
        device: the target, as for `Tensor.to`. "cuda" is the current CUDA device.
        use_pinned_staging: stage through pinned memory. `CopyOptions` describes this and the other
            options in full.
        pack_cpu_tensors: let small leaves share chunks.
        min_packed_alignment_bytes: alignment of packed leaves within their chunk.
        max_packed_chunk_bytes: maximum size of a chunk that leaves share.
        use_background_thread: leave large copies to worker threads.
        on_unknown: what to do with opaque values whose class is unknown.

    Returns:
        The handle. `get()` blocks until the result has arrived. `wait()` returns the result earlier
        if the target is a device, ordered on a stream.

    Raises:
        TypeError: an option or the device has the wrong type; an array has a number type that torch
            does not support; a container cannot be rebuilt; `data` itself is of an unknown class,
            for example a set or a generator, so that nothing would be copied; with
            ``on_unknown="raise"``, a value in it is (the last four messages name the path).
        ValueError: there is no such device; a size option is out of range; a tensor reaches beyond
            its storage (the message names its path).
        RecursionError: containers are nested more than 1000 deep, or contain themselves.
        RuntimeError: the current stream of the target or of a source's device is capturing a CUDA
            graph; a container changed during the walk.
        Exception: an error from the `flatten` function of a registered container.

    If the copy itself fails (for example with `torch.OutOfMemoryError`, or with an error from the
    ``.to`` of a delegated leaf or a container's `unflatten`), `get` and `wait` raise the error.
    """
    check = SourceCheck.of_copy(data, device) if _CHECKING else None
    options = checked_options(
        use_pinned_staging,
        pack_cpu_tensors,
        min_packed_alignment_bytes,
        max_packed_chunk_bytes,
        use_background_thread,
    )
    if on_unknown is not None:
        options = options_for_unknown(options, on_unknown)
    handle = _C.start_copy(data, device, options)
    return handle if check is None else checked(handle, check)


@lru_cache(maxsize=64, typed=True)
def checked_options(
    use_pinned_staging: bool,
    pack_cpu_tensors: bool,
    min_packed_alignment_bytes: int,
    max_packed_chunk_bytes: int,
    use_background_thread: bool,
) -> _C.CopyOptions:
    """Validate the options of a copy and return them as the native module takes them.

    Raises:
        TypeError, ValueError: as documented for `CopyOptions`.
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


def options_for_unknown(options: _C.CopyOptions, on_unknown: OnUnknown) -> _C.CopyOptions:
    """Return the options with this `on_unknown`. Separate, so that the default costs nothing.

    Raises:
        TypeError, ValueError: as documented for `CopyOptions`.
    """
    message = f'on_unknown must be "ignore", "warn", "raise" or None; got {on_unknown!r}'
    if on_unknown is not None and not isinstance(on_unknown, str):
        raise TypeError(message)
    if on_unknown not in _ON_UNKNOWN:
        raise ValueError(message)
    return options.with_on_unknown(_ON_UNKNOWN[on_unknown])


@lru_cache(maxsize=16, typed=True)
def options_for_filling(use_pinned_staging: bool, use_background_thread: bool) -> _C.CopyOptions:
    """Return the options of a copy into existing memory, where the packing options do not apply."""
    return checked_options(
        use_pinned_staging, True, 16, _LARGEST_CHUNK_BYTES, use_background_thread
    )


class CopyOptions(TypedDict, total=False):
    """Keyword options of `start_copy` and of every function that passes options on to it.

    `copy`, `async_to`, `to`, `prepare`, `prefetch`, `start_gather` and `torchrl.ToDevice` take all
    of them. `copy_into` and `start_scatter` take `use_pinned_staging` and `use_background_thread`.
    A size of the wrong type raises a `TypeError`, and a size out of range a `ValueError`.
    """

    use_pinned_staging: bool
    """Stage through pinned memory, so that transfers run in parallel with the host, and put results
    on the host into pinned memory. If False, transfers read or write pageable memory and block the
    thread that makes them. Copies within the host or between devices are never staged. Default:
    True."""
    pack_cpu_tensors: bool
    """Let small leaves share chunks, whether they are on the host or on a device. If False, each
    leaf has its own allocation and transfer. Default: True."""
    min_packed_alignment_bytes: int
    """Alignment of packed leaves, from 1 byte to 1 GiB. The offset of each packed leaf from the
    beginning of its chunk is a multiple of the larger of this and its element size, rounded up to a
    multiple of its element size. The address of the chunk is a multiple of the largest power of two
    that divides this alignment. Default: 16."""
    max_packed_chunk_bytes: int
    """Maximum number of bytes that the leaves of one chunk span, padding included; at least 1. (The
    allocation is larger if an alignment above 64 bytes requires it.) Default: 32 MiB."""
    use_background_thread: bool
    """Leave large copies to worker threads and return at once. Up to 512 KiB of host data are
    staged in the call even so, because that is faster, unless they would have to wait for a staging
    buffer. Gathers and transfers from a device are enqueued in the call too. (The first results of
    a size that arrive on the host take as long as it takes to pin their memory.) If False, all
    staging happens in the call. Default: True."""
    on_unknown: OnUnknown
    """What to do with opaque values whose class tdcopier does not know to be plain data: objects of
    any other class, sets, iterators, views of dicts, modules. Tensors in them stay on their device.
    None: raise a `TypeError` if the data itself is such a value, since nothing would be copied, and
    pass those in a container through. "ignore": pass all of them through. "warn": also warn, with
    an `UnknownTypeWarning` for each class once per process, with a path. "raise": raise a
    `TypeError` for the first one, with its path. Plain data are numbers, text, bytes, None, dates,
    paths, members of enumerations, functions, classes, Python modules, numpy scalars, arrays that
    torch cannot take, and torch's own small values (`torch.Size`, devices, dtypes, generators,
    streams). Default: None."""


def copy(data: Any, device: Device, **options: Unpack[CopyOptions]) -> Any:
    """Copy `data` to `device` and block until it has arrived: `start_copy(...).get()`.

    Takes the options in `CopyOptions`.
    """
    return start_copy(data, device, **options).get()


def copy_into(
    source: Any,
    destination: Any,
    *,
    use_pinned_staging: bool = True,
    use_background_thread: bool = True,
) -> AsyncCopyHandle:
    """Start to copy the values of one tree into an existing one, and return a handle at once.

    Each leaf of `source` is copied into the leaf of `destination` at the same place. Both are
    tensors or numpy arrays, on the host (pageable, pinned or memory-mapped) or on devices, strided
    or not, in any combination. `get()` and `wait()` return `destination` itself. No memory is
    allocated for the result, so tensors keep their addresses, as CUDA graphs require. If the
    destination is a result that `start_copy` delivered to a device, each of its chunks is filled by
    one transfer.

    The trees must have the same structure: containers have the same keys, the same attributes or
    the same number of children (their classes may differ), and leaves have the same shape and
    dtype. Opaque values must be at the same places; they are not changed. A leaf that is the same
    memory as its destination counts as reused and is not written. The version counters of written
    tensors increase.

    **Order.** Sources on a device are read after all work that is on the current stream of that
    device at the call. Destinations on a device are written after all work that is on the current
    stream of that device at the call. Work that is enqueued on a stream after `get()`, or after a
    `wait()` for that stream, sees the new values. In between, do not read or write the
    destinations. Copies into memory of one device run in the order of their calls, independently of
    copies to new memory there. Destinations on the host are written at any time from the call until
    `get()` or `wait()` returns or `ready()` is true. If a stream is still reading a pinned
    destination, synchronise that stream before the call. The rules of `start_copy` for sources
    apply here too. You may drop both trees: the copy keeps the leaves that it needs.

    Leaves that cannot be copied as plain bytes (a source that needs a gradient, sparse tensors,
    subclasses, conjugate views, any leaf under a torch mode) are delegated to `copy_`, inside this
    call and before the other leaves are written, and counted as delegated. Leaves of up to 256 KiB
    count as packed, larger ones as alone.

    Args:
        source: a leaf, or any nesting of containers and leaves.
        destination: a tree of the same structure, to copy into.
        use_pinned_staging: stage through pinned memory; see `CopyOptions`.
        use_background_thread: leave large copies, and all copies that arrive in host memory, to
            worker threads and return at once.

    Raises:
        ValueError: the trees differ in structure, or a leaf in shape or dtype; a destination
            requires a gradient while gradients are enabled, is a read-only array, shares memory
            between its elements, or shares memory with another leaf that is read or written (leaves
            with gaps are compared up to a million rows); a tensor reaches beyond its storage.
            Messages name the first such leaf by its path, and nothing has been written.
        TypeError: an array has a number type that torch does not support; a container is of a kind
            that cannot be taken apart.
        RecursionError: containers are nested more than 1000 deep, or contain themselves.
        RuntimeError: the current stream of a device involved is capturing a CUDA graph; a
            destination was made in inference mode, and the call is not in inference mode; a
            container changed during the walk.
        Exception: an error from the `flatten` function of a registered container.

    If the copy itself fails, `get` and `wait` raise the error, every time. The values of the
    destinations are then undefined. They are also undefined if Ctrl-C interrupts this call, which
    raises once nothing writes to the destinations any more.
    """
    check = SourceCheck.of_filling(source, destination) if _CHECKING else None
    options = options_for_filling(use_pinned_staging, use_background_thread)
    handle = _C.copy_into(source, destination, options)
    return handle if check is None else checked(handle, check)


def async_to(data: Any, device: Device, **options: Unpack[CopyOptions]) -> AsyncCopyHandle:
    """Start to move a TensorDict to `device`, and return a handle at once.

    `get()` and `wait()` return what `data.to(device)` would return: a collection of the same class,
    with `device` set on every node (so entries that you set later move there too), and with the
    same batch sizes, names, lock and non-tensor data. The leaves are packed, however they are
    nested: in TensorDicts and their subclasses, lazy stacks, tensorclasses, typed TensorDicts. A
    collection that is on the device already comes back as the same object.

    Parts that are not made of plain memory are delegated to their own ``.to``, inside this call,
    and counted in `stats`: consolidated and persistent TensorDicts, `TensorDictParams`,
    sub-TensorDicts, lazy views, tensorclasses with a `__post_init__` (which may read the values),
    and the leaves that `start_copy` delegates. You may change the structure as soon as the call has
    returned. For the leaves, the rules of `start_copy` for sources apply.

    Args:
        data: a TensorDict or a tensorclass; or any tree, with or without TensorDicts in it, since
            this is `start_copy` under the name that users of TensorDict expect.
        device: the target, as for `TensorDict.to`.
        **options: see `CopyOptions`.

    Raises:
        Exception: as `start_copy`.
    """
    return start_copy(data, device, **options)


def to(data: Any, device: Device, **options: Unpack[CopyOptions]) -> Any:
    """Move a TensorDict to `device` and block until it has arrived: `async_to(...).get()`.

    Takes the options in `CopyOptions`.
    """
    return start_copy(data, device, **options).get()


def set_staging_limit_bytes(limit_bytes: int) -> None:
    """Set the limit on the pinned memory that stages copies to one device; default 64 MiB.

    The limit applies to each device separately. A copy that finds every staging buffer (2 MiB each)
    in use waits for one. Copies into existing memory of the device use at most half of the buffers,
    and copies from the device into existing memory of the host at most a quarter, so that copies
    that wait for no kernel can proceed. Each of the three uses may always have one buffer, so up to
    6 MiB are used even if the limit is lower. A lower limit takes effect as buffers are returned.
    Batches that `prefetch` stages ahead have pinned memory of their own, up to four times this
    limit; batches that do not fit there are sent at once. The environment variable
    `TDCOPIER_STAGING_LIMIT_BYTES` sets the limit at import.

    Raises:
        ValueError: the limit is less than one buffer.
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
    """Return the number of bytes of pinned memory that currently stage copies to and from `device`.

    Prefetched batches that wait to be sent have memory of their own, which is not counted here: see
    `set_staging_limit_bytes`.
    """
    return _C.staging_bytes(device)


def set_run_ahead_limit(batches: int) -> None:
    """Set how many handed-over batches the host may be ahead of the device; default 4.

    A dropped batch keeps its device memory until the device has read it, so without a bound a loop
    that is limited by the device would accumulate memory. `start_copy` therefore waits until the
    device has reached all but `batches - 1` of the earlier hand-overs (`get` or `wait`).

    Raises:
        ValueError: `batches` is less than 1.
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


_ON_UNKNOWN: dict[OnUnknown, _C.OnUnknown] = {
    None: _C.OnUnknown.REFUSE_ROOT,
    "ignore": _C.OnUnknown.IGNORE,
    "warn": _C.OnUnknown.WARN,
    "raise": _C.OnUnknown.RAISE,
}


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
