"""Batches of a source, read and copied to a device ahead of the loop that uses them."""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from typing_extensions import Self, Unpack

from tdcopier._copy import CopyOptions, Device, start_copy
from tdcopier._prefetch_in_loop import LoopPass
from tdcopier._prefetch_queue import BatchQueue, forks, refuse_in_child
from tdcopier._prefetch_reader import ReaderPass
from tdcopier._prefetch_source import PrefetchCounters, Source

__all__ = ["PrefetchStats", "Prefetcher", "prefetch"]


@dataclass(frozen=True)
class PrefetchStats:
    """What all passes of a `Prefetcher` have come to so far. Times add up, in microseconds.

    A `waited_us` that is small beside the duration of the loop needs no tuning. If it is not, and
    `idle_us` is near 0, the reader never rests: the source, or the copy, is too slow for the loop,
    and no `depth` helps. If both are large, batches come unevenly: try a larger `depth`. (Without a
    reader there is no `idle_us`.)
    """

    batches: int
    """Batches that were yielded."""
    late_batches: int
    """Those of them that had not been read yet when they were asked for."""
    waited_us: float
    """Consumers were held up for these batches: until they had been read and, where they go to the
    host, until they had arrived. Without a thread of its own, what the next two count is in it."""
    read_us: float
    """The source took to give its batches."""
    copy_us: float
    """The reader was held up by starting copies, and by waiting until their sources were read."""
    idle_us: float
    """The reader was waiting for room, `depth` batches being in flight."""


class Prefetcher:
    """What `prefetch` returns: gives the batches of a source on a device, in their order.

    `for` begins a pass. If an earlier one is unfinished, a source that can be iterated again (a
    list, a `DataLoader`) begins anew, and the earlier pass is closed; a source that cannot (a
    generator, any other iterator, a callable) goes on with the next batch, also with those that
    were read already. `next()` of the prefetcher itself gives the next batch of the pass that is
    under way, and begins the first one; after the end it raises StopIteration until there is a new
    pass.

    Any thread may use it, and several may share an iterator of it, `iter(prefetcher)`: each batch
    goes to one of them.

    Used in `with`, it is closed at the end. If it is dropped instead, its reader ends as well,
    after the batch that it is reading.
    """

    def __init__(
        self,
        source: Any,
        device: Device,
        depth: int,
        threaded: bool,
        options: CopyOptions,
        /,
    ) -> None:
        """Use `prefetch`."""
        self._is_callable = _is_callable(source)
        self._source: Iterable[Any] | Callable[[], Any] = source
        self._device: Device = device
        self._depth = _checked_depth(depth)
        self._is_threaded = _checked_threaded(threaded)
        self._options = options
        start_copy(None, device, **options)  # raises what is wrong with the device or an option
        self._counters = PrefetchCounters()
        self._starting = threading.RLock()
        self._queue: BatchQueue | None = None
        self._begins_anew = False
        self._is_closed = False
        self._forks = forks()

    def __iter__(self) -> Iterator[Any]:
        """Begin a pass, or go on with one; see the class.

        Raises:
            RuntimeError: the prefetcher is closed, or was made before the process was forked.
            Exception: what `iter(source)` raises, and what the generator of a pass that is closed
                raises meanwhile.
        """
        return _Pass(self, self._pass(is_wanted_anew=True))

    def __next__(self) -> Any:
        """The next batch on the device, ordered on the current stream.

        Raises:
            StopIteration: there is none.
            RuntimeError: as for `iter()`; or the pass was closed by another thread.
            BaseException: what the source has raised, or the copy of this batch.
        """
        return self._pass(is_wanted_anew=False).take()

    def __len__(self) -> int:
        """The length of the source.

        Raises:
            TypeError: it has none.
        """
        if self._is_callable:
            raise TypeError("a prefetcher of a callable has no len()")
        return len(self._source)  # type: ignore[arg-type]  # it raises what is to be raised

    def close(self) -> None:
        """End the pass for good: drop what was read, close a generator, wait for the reader.

        It blocks while the source does. A second call does nothing, as does one in a forked child.

        Raises:
            Exception: what a generator raises when it is closed.
        """
        if self._forks != forks():
            return
        with self._starting:
            self._is_closed = True
            if self._queue is not None:
                self._queue.end("so was its prefetcher")

    def __del__(self) -> None:
        """Its reader ends too. (There is no queue where `__init__` has raised.)"""
        queue = getattr(self, "_queue", None)
        if queue is not None and not sys.is_finalizing():
            queue.close("the prefetcher was dropped")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def stats(self) -> PrefetchStats:
        """Counts and times so far, of all passes."""
        counters = self._counters
        return PrefetchStats(
            counters.batches,
            counters.late_batches,
            counters.waited_ns / 1000,
            counters.read_ns / 1000,
            counters.copy_ns / 1000,
            counters.idle_ns / 1000,
        )

    def _pass(self, *, is_wanted_anew: bool) -> BatchQueue:
        """The pass that is under way, or one that begins."""
        if self._forks != forks():
            refuse_in_child()
        with self._starting:
            if self._is_closed:
                raise RuntimeError("this prefetcher is closed: make another one")
            queue = self._queue
            if queue is None or self._is_to_end(queue, is_wanted_anew=is_wanted_anew):
                if queue is not None:
                    queue.end("another one over the source has begun")
                # Before it starts: a reader that an interrupt hides has its queue here.
                self._queue = queue = self._new_queue()
            queue.start()
            return queue

    def _is_to_end(self, queue: BatchQueue, *, is_wanted_anew: bool) -> bool:
        if queue.is_ending:  # and an interrupt came meanwhile
            return True
        return is_wanted_anew and (queue.is_over or self._begins_anew)

    def _new_queue(self) -> BatchQueue:
        generator = None
        if self._is_callable:
            read: Callable[[], Any] = self._source  # type: ignore[assignment]
        else:
            iterator = iter(self._source)  # type: ignore[arg-type]
            self._begins_anew = iterator is not self._source
            read = partial(next, iterator)
            if isinstance(iterator, Generator):
                generator = iterator
        source = Source(
            read,
            generator,
            self._device,
            self._options,
            self._counters,
            has_reader=self._is_threaded,
        )
        make: type[BatchQueue] = ReaderPass if self._is_threaded else LoopPass
        return make(self._depth, self._counters, source)


class _Pass:
    """What `for` goes through: it is its own iterator, and keeps the prefetcher."""

    __slots__ = ("_prefetcher", "_queue")

    def __init__(self, prefetcher: Prefetcher, queue: BatchQueue) -> None:
        self._prefetcher = prefetcher
        self._queue = queue

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self._queue.take()


def prefetch(
    source: Iterable[Any] | Callable[[], Any],
    device: Device,
    *,
    depth: int = 2,
    threaded: bool = True,
    **options: Unpack[CopyOptions],
) -> Prefetcher:
    """Read batches and start their copies ahead of the loop, which iterates over the result.

    Each batch is read from `source` and given to `start_copy`, up to `depth` of them ahead of the
    loop, which gets what `handle.wait()` gives: the tree on `device`, ordered on the stream that is
    current where the loop asks for it. A source may also begin a copy itself and give its handle,
    such as `start_gather` of a storage: then no Python code runs for each leaf of a batch, and the
    batch goes where that call said, with its options. A batch that has others before it is staged
    ahead, and sent by the loop's own thread in `next()`. Before the source is asked for the next
    batch, its memory has been read: it may fill the same buffers each time.

    The source is read in a thread of its own, under the gradient mode and inference mode of the
    thread that begins the pass, with its current device and streams, all as they are then. What the
    source does on a device is ordered as if that thread had done it. Leaves that are on `device`
    already are handed through, ordered after what the reader's current stream has when the batch
    was read. Other state of the thread (autocast, torch modes, context variables) is not taken
    along.

    **Errors.** What the source raises comes out after all batches before it, and ends the pass. A
    failure of a copy comes out in place of its batch; the pass goes on with the next one. Ctrl-C
    ends the call that it comes in, which may lose one batch, and the pass goes on as well.

    Args:
        source: an iterable, such as a `DataLoader` or a generator, or a callable without arguments
            that returns the next batch, such as `buffer.sample`, until it raises StopIteration.
            What is both is iterated over. `iter(source)` is called by the thread that begins a
            pass; batches are read by the reader alone, one at a time.
        device: the target, as for `start_copy`. "cuda" is the CUDA device that is current where a
            pass begins.
        depth: most batches that have been read, or are being read, and were not yet yielded. They
            are on the device, or on their way.
        threaded: False reads the source in the loop's own thread, when it asks for a batch: `depth`
            batches are on their way then, or wait to be sent, when it has returned one. Their
            sources may still be read: before the loop itself writes to memory that the source
            reads, the source should call `wait_staged()` of its handle. No thread competes with the
            loop for the interpreter. It is best where the source takes little time and the loop's
            host is busy: rows are drawn and `start_gather` is called, say, for a learner of many
            small kernels. The source then sees the state of the loop's thread; an exception of it
            that is no `Exception`, such as KeyboardInterrupt, comes out at once.
        **options: those of `start_copy`.

    Raises:
        TypeError: `source` is neither iterable nor callable; `depth` is no int; as `start_copy`.
        ValueError: `depth` is less than 1; as `start_copy`.
        RuntimeError: the current stream of `device` is capturing a CUDA graph.

    Nothing is read before the first `for` or `next()`.
    """
    return Prefetcher(source, device, depth, threaded, options)


def _is_callable(source: Any) -> bool:
    """Whether it is to be called, not iterated over."""
    if isinstance(source, Iterable) or hasattr(type(source), "__getitem__"):
        return False
    if callable(source):
        return True
    raise TypeError(
        "source must be an iterable of batches, or a callable without arguments that returns the "
        f"next one; got {type(source).__name__}"
    )


def _checked_threaded(threaded: bool) -> bool:
    if not isinstance(threaded, bool):
        raise TypeError(f"threaded must be a bool; got {threaded!r}")
    return threaded


def _checked_depth(depth: int) -> int:
    if isinstance(depth, bool) or not hasattr(depth, "__index__"):
        raise TypeError(f"depth must be a positive int; got {depth!r}")
    depth = operator.index(depth)
    if depth < 1:
        raise ValueError(f"depth must be at least 1; got {depth}")
    return depth
