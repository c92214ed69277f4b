"""Copies into existing memory: the calls, which pairs are refused, and the delegated leaves."""

from __future__ import annotations

import sys
import time
from typing import Any, TypeVar

import numpy as np
import torch

from tdcopier import _C, _checking
from tdcopier._C import AsyncCopyHandle
from tdcopier._compile import keep_out_of_graphs
from tdcopier._containers.arrays import as_tensor
from tdcopier._containers.registry import is_wrapped
from tdcopier._options import bool_option, options_for_filling

__all__ = ["copy_into", "start_copy_into"]

T = TypeVar("T")


@keep_out_of_graphs("start_copy_into()")
def start_copy_into(
    source: Any,
    destination: T,
    *,
    use_pinned_staging: bool = True,
    use_background_thread: bool = True,
    copy_opaque: bool = False,
) -> AsyncCopyHandle[T]:
    """Start to copy the values of one tree into an existing one, and return a handle at once.

    For example::

        tdcopier.start_copy_into(batch, static).wait()
        graph.replay()  # reads the memory of `static`

    Each leaf of `source` is copied into the leaf of `destination` at the same place. Both are
    tensors or numpy arrays, on the host (pageable, pinned or memory-mapped) or on devices, strided
    or not, in any combination. `get()` and `wait()` return `destination` itself. No memory is
    allocated for the result, so tensors keep their addresses, as CUDA graphs require. If the
    destination is a result that `start_copy` delivered to a device, each of its chunks is filled by
    one transfer.

    The trees must have the same structure: containers have the same keys, the same attributes or
    the same number of children (their classes may differ), and leaves have the same shape and
    dtype. A TensorDict or a tensorclass has its entries by key, like a dict, at any depth; a lazy
    stack has its members by index, like a list. A leaf that is the same memory as its destination
    counts as reused and is not written. The version counters of written tensors increase.

    **Tied leaves**, such as two names of one weight, may be the same memory in `destination` if
    they are the same memory in `source` too: address, shape, strides and dtype agree on both sides.
    They are written once; the others count as reused. Those that are delegated to `copy_` are
    copied one after the other.

    **Opaque values**, such as the learning rate in an optimizer's state, must be at the same
    places. By default they are not changed, and `stats.opaque_differences` counts those that
    differ. Plain data (see `on_unknown` of `CopyOptions`) differ if their classes do, or if ``==``
    says so; NaN equals NaN. Other values differ unless they are the same object. Non-tensor data of
    a TensorDict stand for their value beside a dict. With `copy_opaque`, the destination gets the
    source's objects where they differ. Attributes of containers, such as the `_metadata` of a state
    dict, are neither compared nor copied.

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
        copy_opaque: replace opaque values of the destination that differ: items of dicts and lists,
            fields of dataclasses, non-tensor data of TensorDicts. A tuple of opaque values only,
            such as `betas`, is replaced as a whole. Opaque values are new when the call returns,
            leaves only after `get()` or `wait()`. If the call refuses one, it changes none.

    Raises:
        ValueError: the trees differ in structure, or a leaf in shape or dtype; a destination
            requires a gradient while gradients are enabled, is a read-only array, shares memory
            between its elements, or shares memory with another leaf that is read or written, except
            for tied leaves (leaves with gaps are compared up to a million rows); a tensor reaches
            beyond its storage. With `copy_opaque`: a value that differs is in a container that
            cannot be changed (a tuple with leaves or containers in it, a frozen dataclass, a locked
            TensorDict, a dict or list that is non-tensor data, a registered class), or one place in
            the destination stands for values of the source that differ. Messages name the first
            such leaf by its path, and nothing has been written.
        TypeError: an array has a number type that torch does not support; a container is of a kind
            that cannot be taken apart; both trees are objects of unknown classes, so that nothing
            would be copied.
        RecursionError: containers are nested more than 1000 deep, or contain themselves.
        RuntimeError: the current stream of a device involved is capturing a CUDA graph; a
            destination was made in inference mode, and the call is not in inference mode; a
            container changed during the walk.
        Exception: an error from the `flatten` function of a registered container.

    If the copy itself fails, `get` and `wait` raise the error, every time. The values of the
    destinations are then undefined. They are also undefined if Ctrl-C interrupts this call, which
    raises once nothing writes to the destinations any more.
    """
    return _start(
        source,
        destination,
        use_pinned_staging=use_pinned_staging,
        use_background_thread=use_background_thread,
        copy_opaque=copy_opaque,
    )


def _start(
    source: Any,
    destination: T,
    *,
    use_pinned_staging: bool,
    use_background_thread: bool,
    copy_opaque: bool,
    in_place: bool = False,
) -> AsyncCopyHandle[T]:
    options = options_for_filling(use_pinned_staging, use_background_thread)
    if in_place:
        options = options.reading_pinned_in_place()
    copies_opaque = bool_option("copy_opaque", copy_opaque)
    check = _checking.SourceCheck.of_filling(source, destination) if _checking.enabled else None
    handle = _C.start_copy_into(source, destination, fill, options, copies_opaque)
    return handle if check is None else _checking.checked(handle, check)


@keep_out_of_graphs("copy_into()", "the tree that it returns")
def copy_into(
    source: Any,
    destination: T,
    *,
    use_pinned_staging: bool = True,
    use_background_thread: bool = True,
    copy_opaque: bool = False,
) -> T:
    """Copy the values of one tree into an existing one, block until they are there, and return it.

    For example::

        static = tdcopier.copy(batch, "cuda")
        for batch in loader:
            train_step(tdcopier.copy_into(batch, static))

    This is `start_copy_into(...).get()`, which describes the arguments and the errors. `source` is
    read, and `destination` written, only within this call: Ctrl-C raises after the last write, and
    at once when pressed again. So the device reads large pinned sources where they are.
    """
    handle = _start(
        source,
        destination,
        use_pinned_staging=use_pinned_staging,
        use_background_thread=use_background_thread,
        copy_opaque=copy_opaque,
        in_place=True,
    )
    return finished(handle)


def finished(handle: AsyncCopyHandle[T]) -> T:
    """Return what `get()` returns; an interrupt raises once nothing is written any more."""
    try:
        return handle.get()
    except BaseException:
        while not handle.ready():
            time.sleep(0.001)
        raise


def is_plain_class(cls: type) -> bool:
    """Return whether tensors of this class are read and written in memory like plain tensors."""
    return cls is torch.nn.Parameter or is_mapped_class(cls) or is_wrapped(cls)


def is_mapped_class(cls: type) -> bool:
    """Return whether this is tensordict's class of tensors over a mapped file."""
    mapped = getattr(sys.modules.get("tensordict.memmap"), "MemoryMappedTensor", None)
    return mapped is not None and cls is mapped


def mismatch(
    source: Any, destination: Any, rows: list[int] | None, are_read: bool = False
) -> str | None:
    """Return why the source cannot be copied into the destination, or None if it can.

    Args:
        source: a leaf.
        destination: the leaf that the source is copied into.
        rows: the shape of the selected rows if one of the two is a table, else None.
        are_read: the table is the source.

    Returns:
        The reason, with `{source}` and `{destination}` as placeholders for their paths.
    """
    if isinstance(destination, np.ndarray):
        if not destination.flags.writeable:
            return (
                "{destination} is a read-only array: give one that may be written, such as a copy"
            )
    elif not hasattr(destination, "copy_"):
        name = type(destination).__qualname__
        return f"{{destination}} is a {name}, which cannot be filled: give the tensors in it"
    elif getattr(destination, "requires_grad", False) and torch.is_grad_enabled():
        return (
            "{destination} requires a gradient, and writing in place would break it: make the call "
            "within torch.no_grad(), or give detach()"
        )
    if isinstance(destination, torch.Tensor | np.ndarray) and not hasattr(source, "dtype"):
        name = type(source).__qualname__
        target = type(destination).__qualname__
        return f"{{source}} is a {name}, but {{destination}} is a {target}: give the tensors in it"
    want = _shape(destination) if rows is None else tuple(rows)
    have = _shape(destination if are_read else source)
    if have is not None and want is not None and have != want:
        if are_read:
            return f"{{destination}} has shape {have}, and the rows of {{source}} have {want}"
        if rows is not None:
            return f"{{source}} has shape {have}, and the rows that it is for have {want} together"
        return (
            f"{{source}} has shape {have}, but {{destination}} has shape {want}: both must have "
            "the same"
        )
    dtype, target_dtype = _dtype(source), _dtype(destination)
    if dtype is not None and target_dtype is not None and dtype != target_dtype:
        return (
            f"{{source}} has dtype {dtype}, but {{destination}} has dtype {target_dtype}: both "
            "must have the same; convert one with to() first"
        )
    return None


def fill(destination: Any, source: Any) -> None:
    """Copy the source's values into the destination, under the calling thread's torch state."""
    values = as_tensor(source) if isinstance(source, np.ndarray) else source
    if not isinstance(destination, np.ndarray):
        destination.copy_(values)
        return
    plain = values.detach().cpu().resolve_conj().resolve_neg()
    np.copyto(destination, plain.numpy())


def _shape(leaf: Any) -> tuple[Any, ...] | None:
    if getattr(leaf, "is_nested", False) or not hasattr(leaf, "shape"):
        return None  # `copy_` checks these
    return tuple(leaf.shape)


def _dtype(leaf: Any) -> torch.dtype | None:
    if isinstance(leaf, np.ndarray):
        return as_tensor(np.empty(0, leaf.dtype.newbyteorder("="))).dtype
    dtype: torch.dtype | None = getattr(leaf, "dtype", None)
    return dtype
