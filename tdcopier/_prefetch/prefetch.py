"""`prefetch`: reads the batches of a source and copies them ahead of the loop that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, overload

from typing_extensions import Unpack

from tdcopier._C import AsyncCopyHandle, Parcel
from tdcopier._compile import keep_out_of_graphs
from tdcopier._options import CopyOptions, Device
from tdcopier._prefetch.prefetcher import Prefetcher

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.utils.data import DataLoader

__all__ = ["prefetch"]

T = TypeVar("T")


@overload
def prefetch(
    source: DataLoader[Any],
    device: Device,
    *,
    depth: int = 2,
    threaded: bool | None = None,
    pack_in_workers: bool = True,
    **options: Unpack[CopyOptions],
) -> Prefetcher[Any]: ...
@overload
def prefetch(
    source: Iterable[AsyncCopyHandle[T]] | Callable[[], AsyncCopyHandle[T]],
    device: Device,
    *,
    depth: int = 2,
    threaded: bool | None = None,
    pack_in_workers: bool = True,
    **options: Unpack[CopyOptions],
) -> Prefetcher[T]: ...
@overload
def prefetch(
    source: Iterable[np.ndarray[Any, Any]] | Callable[[], np.ndarray[Any, Any]],
    device: Device,
    *,
    depth: int = 2,
    threaded: bool | None = None,
    pack_in_workers: bool = True,
    **options: Unpack[CopyOptions],
) -> Prefetcher[torch.Tensor]: ...
@overload
def prefetch(
    source: Iterable[Parcel] | Callable[[], Parcel],
    device: Device,
    *,
    depth: int = 2,
    threaded: bool | None = None,
    pack_in_workers: bool = True,
    **options: Unpack[CopyOptions],
) -> Prefetcher[Any]: ...
@overload
def prefetch(
    source: Iterable[T] | Callable[[], T],
    device: Device,
    *,
    depth: int = 2,
    threaded: bool | None = None,
    pack_in_workers: bool = True,
    **options: Unpack[CopyOptions],
) -> Prefetcher[T]: ...
@keep_out_of_graphs("prefetch()")
def prefetch(
    source: Iterable[Any] | Callable[[], Any],
    device: Device,
    *,
    depth: int = 2,
    threaded: bool | None = None,
    pack_in_workers: bool = True,
    **options: Unpack[CopyOptions],
) -> Prefetcher[Any]:
    """Read batches of a source and start their copies ahead of the loop that uses them.

    For example::

        for batch in tdcopier.prefetch(loader, "cuda"):
            train_step(batch)

    Each batch is read from `source` and passed to `start_copy`, up to `depth` batches ahead of the
    loop. The loop gets what `handle.wait()` returns: the tree on `device`, ordered on the stream
    that is current where the loop asks for it. Instead of a batch, a source may return the handle
    of a copy that it has started itself, for example with `start_gather`. Then no Python code runs
    for each leaf of a batch, and the device and options of that call apply. A batch with other
    batches ahead of it in the queue is staged early, and the loop's own thread sends it in
    `next()`. The reader stages alone while the loop is the slower one, and with the engine's
    workers otherwise. The memory of each batch has been read before the source is asked for the
    next one, so the source may fill the same buffers each time.

    The source is read in a thread of its own (see `threaded`). That thread takes over the gradient
    mode, the inference mode, the current device and the current streams of the thread that starts
    the pass, as they are at that moment. So work that the source enqueues on a device is ordered as
    if the starting thread had enqueued it. Leaves that are on `device` already are handed over
    unchanged, ordered after the work that was on the reader's current stream when the batch had
    been read. Other thread state (autocast, torch modes, context variables) is not taken over.

    **Errors.** An error in the source is raised after all batches before it, and ends the pass. A
    copy that fails raises its error in place of its batch, and the pass continues with the next
    one. Ctrl-C ends the call that it interrupts, which may lose one batch, and the pass continues.

    Args:
        source: an iterable, for example a `DataLoader` or a generator; or a callable without
            arguments, for example `buffer.sample`, that returns the next batch until it raises
            StopIteration; where it returns None, the pass ends with a TypeError. An iterable that
            is also callable is iterated. The thread that starts a pass calls `iter(source)`; only
            the reader reads batches, one at a time. A list or tuple is taken for a sequence of
            batches. Refused is what is probably a mistake: a single batch, since iterating it gives
            keys, fields or rows (a dict or another mapping, a named tuple, a tensor, an array, a
            TensorDict; `iter(batch)` gives rows); text and bytes; a set, which has no order; an
            `AsyncCopyHandle`, which is one copy; a module and a class, since calling them returns
            no batch; a dataset without `__iter__`, whose items are samples; a generator function
            that was not called; anything asynchronous.
        device: the target, as for `start_copy`. "cuda" is the CUDA device that is current where a
            pass starts.
        depth: maximum number of batches that have been or are being read, and have not been
            yielded. They are on the device or on their way there.
        threaded: by default, a thread of its own reads the source, unless that is a `DataLoader`
            without workers. Such a loader draws from torch's global random numbers, as the loop
            does: read by a thread, the same seed would not give the same batches. If False, the
            loop's own thread reads the source when it asks for a batch. When it returns one,
            `depth` more batches are in flight or wait to be sent. Their sources may still be in
            use: if the loop itself writes to memory that the source reads, the source should first
            call `wait_staged()` on its handle. No other thread competes with the loop for the GIL.
            `async for` is refused. This suits a source that takes little time and a loop that keeps
            the host busy, for example one that samples rows with `start_gather` for a learner of
            many small kernels. The source then sees the state of the loop's thread. If it raises an
            error that is not an `Exception`, for example KeyboardInterrupt, the error is raised at
            once.
        pack_in_workers: let the workers of a torch `DataLoader` pack each batch into a parcel (see
            :func:`~tdcopier.pack`), which reaches this process as one message and not leaf by leaf.
            The loader's collate function runs as before, in the worker. The pass iterates a copy of
            the loader, with `pin_memory` off; your own iteration is not changed. (A loader with
            `collate_fn=packed(...)` is iterated itself.) A batch that
            cannot be packed is sent as torch sends it. `stats` says how many came packed, and why
            others did not: for example, the loader has no workers, an `__iter__` of its own, or a
            state.
        **options: see `CopyOptions`.

    Raises:
        TypeError: `source` is neither iterable nor callable without arguments, or is refused as
            above; `depth` is not an int; an option belongs to the `DataLoader`, such as
            `num_workers`; as `start_copy`.
        ValueError: `depth` is less than 1; as `start_copy`.
        RuntimeError: the current stream of `device` is capturing a CUDA graph.

    Nothing is read before the first `for` or `next()`.

    Type checkers take the type of the batches from the source. That of a `DataLoader` depends on
    its `collate_fn`, so annotate it: ``batches: Prefetcher[Batch] = prefetch(loader, "cuda")``.
    """
    return Prefetcher(source, device, depth, threaded, pack_in_workers, options)
