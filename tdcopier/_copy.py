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
def start_copy(
    data: _C.Parcel, device: Device, **options: Unpack[CopyOptions]
) -> AsyncCopyHandle[Any]: ...
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

    The result has the containers of `data`, and each leaf, a tensor or a numpy array, equals
    `leaf.to(device)`. Objects with a ``.to(device)`` are moved by it; other values come back as
    they are. `explain` tells what happens to each; `containers.register` takes your own classes.

    Until the copy is done (`get` has returned, or `ready` is true) you may drop the sources and the
    handle, but must not write to a source. After `wait_staged`, and if the target is a device after
    `wait`, you may write to host sources, and enqueue writes to device sources. If a stream is
    still writing a pinned source, synchronise it before the call. One live output keeps its chunk:
    `clone()` one that you keep for long, or that you save alone or grow on a device.

    Args:
        data: a leaf, or any nesting of containers and leaves, up to 1000 containers deep.
        device: the target, as for `Tensor.to`. "cuda" is the current CUDA device.
        use_pinned_staging: as the other options, see `CopyOptions`.
        pack_cpu_tensors: let small leaves share chunks.
        min_packed_alignment_bytes: alignment of packed leaves within their chunk.
        max_packed_chunk_bytes: maximum size of a chunk that leaves share.
        use_background_thread: leave large copies to worker threads.
        require_pinned_results: fail if results on the host cannot be pinned.
        on_unknown: what to do with opaque values whose class is unknown.

    Raises:
        TypeError: an option, the device or a value has a type that cannot be taken.
        ValueError: no such device; an option is out of range; a tensor exceeds its storage.
        RecursionError: containers are nested too deep, or contain themselves.
        RuntimeError: a current stream is capturing a graph; a container changed meanwhile.

    Errors of the copy itself, and of delegated leaves, are raised by `get` and `wait`.
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
def copy(data: _C.Parcel, device: Device, **options: Unpack[CopyOptions]) -> Any: ...
@overload
def copy(data: T, device: Device, **options: Unpack[CopyOptions]) -> T: ...
@keep_out_of_graphs("copy()", "the tree that it returns")
def copy(data: Any, device: Device, **options: Unpack[CopyOptions]) -> Any:
    """Return `data` with every leaf on `device`, and block until it has arrived.

    For example::

        labels = tdcopier.copy({"boxes": boxes, "ids": ids}, "cuda")
        labels["boxes"].mean()

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
def async_to(
    data: _C.Parcel, device: Device, **options: Unpack[CopyOptions]
) -> AsyncCopyHandle[Any]: ...
@overload
def async_to(data: T, device: Device, **options: Unpack[CopyOptions]) -> AsyncCopyHandle[T]: ...
@keep_out_of_graphs("async_to()")
def async_to(data: Any, device: Device, **options: Unpack[CopyOptions]) -> AsyncCopyHandle[Any]:
    """Start to move a TensorDict to `device`, and return a handle at once.

    For example::

        handle = tdcopier.async_to(td, "cuda")
        losses = loss_module(handle.wait())

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
def to(data: _C.Parcel, device: Device, **options: Unpack[CopyOptions]) -> Any: ...
@overload
def to(data: T, device: Device, **options: Unpack[CopyOptions]) -> T: ...
@keep_out_of_graphs("to()", "the tree that it returns")
def to(data: Any, device: Device, **options: Unpack[CopyOptions]) -> Any:
    """Move a TensorDict to `device` and block until it has arrived: `async_to(...).get()`.

    For example::

        moved = tdcopier.to(td, "cuda:0")
        assert moved.device == torch.device("cuda:0")

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
