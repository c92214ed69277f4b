"""The public calls that copy to new memory: each checks its arguments and calls the native module.

A result has the type of its source, except that arrays in it have become tensors.
"""

from __future__ import annotations

import atexit
from typing import Any, TypeVar, overload

import numpy as np
import torch  # its libraries must be loaded before the native module
from typing_extensions import Unpack

from tdcopier import _C, _checking
from tdcopier._C import AsyncCopyHandle
from tdcopier._compile import keep_out_of_graphs
from tdcopier._mistaken_use import say_what_to_use
from tdcopier._options import (
    SENDING,
    CopyOptions,
    Device,
    OnUnknown,
    checked_options,
    options_for_results,
    options_for_unknown,
    refuse_unknown_options,
)

__all__ = ["async_to", "copy", "start_copy", "to"]

T = TypeVar("T")


@overload
def start_copy(
    data: np.ndarray[Any, Any], device: Device, **options: Unpack[CopyOptions]
) -> AsyncCopyHandle[torch.Tensor]: ...
@overload
def start_copy(data: T, device: Device, **options: Unpack[CopyOptions]) -> AsyncCopyHandle[T]: ...
@keep_out_of_graphs("start_copy()")
def start_copy(
    data: Any,
    device: Device,
    *,
    use_pinned_staging: bool = True,
    pack_cpu_tensors: bool = True,
    min_packed_alignment_bytes: int = 16,
    max_packed_chunk_bytes: int = 32 * 1024 * 1024,
    use_background_thread: bool = True,
    require_pinned_results: bool = False,
    on_unknown: OnUnknown = None,
) -> AsyncCopyHandle[Any]:
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
    torch's pytrees, and classes passed to `containers.register`. Leaves are tensors and numpy
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
        require_pinned_results: fail if results on the host cannot be pinned.
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
    check = _checking.SourceCheck.of_copy(data, device) if _checking.enabled else None
    options = checked_options(
        use_pinned_staging,
        pack_cpu_tensors,
        min_packed_alignment_bytes,
        max_packed_chunk_bytes,
        use_background_thread,
    )
    if require_pinned_results is not False:
        options = options_for_results(options, use_pinned_staging, require_pinned_results)
    if on_unknown is not None:
        options = options_for_unknown(options, on_unknown)
    options = SENDING.apply(options)
    handle = _C.start_copy(data, device, options)
    return handle if check is None else _checking.checked(handle, check)


@overload
def copy(
    data: np.ndarray[Any, Any], device: Device, **options: Unpack[CopyOptions]
) -> torch.Tensor: ...
@overload
def copy(data: T, device: Device, **options: Unpack[CopyOptions]) -> T: ...
@keep_out_of_graphs("copy()", "the tree that it returns")
def copy(data: Any, device: Device, **options: Unpack[CopyOptions]) -> Any:
    """Return `data` with every leaf on `device`, and block until it has arrived.

    This is `start_copy(...).get()`. Leaves that are on `device` already come back as the same
    objects: `copy(batch, "cpu")` of tensors on the host copies nothing.

    Args:
        data: as for `start_copy`.
        device: as for `start_copy`.
        **options: see `CopyOptions`.

    Raises:
        Exception: as `start_copy`, and an error of the copy itself.
    """
    if options:
        refuse_unknown_options("copy", options)
    return start_copy(data, device, **options).get()


@overload
def async_to(
    data: np.ndarray[Any, Any], device: Device, **options: Unpack[CopyOptions]
) -> AsyncCopyHandle[torch.Tensor]: ...
@overload
def async_to(data: T, device: Device, **options: Unpack[CopyOptions]) -> AsyncCopyHandle[T]: ...
@keep_out_of_graphs("async_to()")
def async_to(data: Any, device: Device, **options: Unpack[CopyOptions]) -> AsyncCopyHandle[Any]:
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
    if options:
        refuse_unknown_options("async_to", options)
    return start_copy(data, device, **options)


@overload
def to(
    data: np.ndarray[Any, Any], device: Device, **options: Unpack[CopyOptions]
) -> torch.Tensor: ...
@overload
def to(data: T, device: Device, **options: Unpack[CopyOptions]) -> T: ...
@keep_out_of_graphs("to()", "the tree that it returns")
def to(data: Any, device: Device, **options: Unpack[CopyOptions]) -> Any:
    """Move a TensorDict to `device` and block until it has arrived: `async_to(...).get()`.

    Takes the options in `CopyOptions`. There is no `non_blocking`, since `async_to` is that, and no
    `dtype`, since a copy keeps dtypes.
    """
    if options:
        refuse_unknown_options("to", options)
    return start_copy(data, device, **options).get()


for _class in (AsyncCopyHandle, _checking.CheckedHandle):
    say_what_to_use(
        _class,
        "the handle of a copy that has been started",
        "call its wait() or get(), and use what that returns",
        "give what its wait() or get() returns",
    )
atexit.register(_C.shut_down)
