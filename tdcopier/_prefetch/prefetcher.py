"""`Prefetcher`: the passes over a source, and the loops that take its batches.

At most `depth` batches are ahead. `reader.py` has the thread that reads, which waits while that
many are ready or in flight; `in_loop.py` reads in the loop's thread when it takes a batch. Each
decides which batches are sent at once, and which stay staged on the host.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from typing_extensions import Self

from tdcopier._compile import keep_out_of_graphs
from tdcopier._copy import start_copy
from tdcopier._options import CopyOptions, Device, bool_option
from tdcopier._prefetch.checking import (
    batches_of_call,
    checked_depth,
    has_draws_in_this_process,
    is_to_be_called,
    refuse_other_options,
)
from tdcopier._prefetch.in_loop import LoopPass
from tdcopier._prefetch.of_source import AttributesOfSource
from tdcopier._prefetch.packing_workers import Packing
from tdcopier._prefetch.queue import BatchQueue, forks, refuse_in_child
from tdcopier._prefetch.reader import ReaderPass
from tdcopier._prefetch.source import NoState, Source, copier_of_state
from tdcopier._prefetch.stats import PrefetchCounters, PrefetchStats

__all__ = ["Prefetcher"]

T_co = TypeVar("T_co", covariant=True)

_BEGUN_ANEW = "another one over the source has begun; make a second prefetcher for a second loop"


class Prefetcher(AttributesOfSource, Generic[T_co]):
    """Yields the batches of a source on a device, in order; made by `prefetch`.

    For example::

        batches = tdcopier.prefetch(loader, "cuda", depth=3)
        for epoch in range(10):
            for batch in batches:
                train_step(batch)
        print(f"waited {batches.stats.waited_us / 1e6:.1f} s for batches")

    `for` starts a pass. If an earlier pass is unfinished, the type of the source decides. A source
    that can be iterated again (for example a list or a `DataLoader`) starts again from the
    beginning, and the earlier pass is closed. A source that cannot (a generator, any other
    iterator, a callable) continues with the next batch, including batches that were read already.
    `next()` on the prefetcher itself returns the next batch of the current pass, and starts the
    first pass if there is none. After the end of a pass it raises StopIteration until a new pass
    starts.

    Any thread may use a prefetcher, and several threads may share one iterator, `iter(prefetcher)`:
    each batch goes to one of them.

    `async for` in an asyncio event loop takes the batches without blocking the loop.

    Public attributes that a prefetcher does not have are those of its source, to be read:
    `dataset`, `batch_size`, `sampler` and so on of a `DataLoader`, and `set_epoch` of a loader that
    has it. `state_dict` and `load_state_dict`, of a source that has them, are as of the last batch
    that was yielded, although the source is ahead of the loop.

    A `with` or `async with` block closes the prefetcher at its end. If the prefetcher is dropped
    instead, its reader also ends, after the batch that it is reading.
    """

    _instead_in_a_tree = "give the batches that it yields"

    def __init__(
        self,
        source: Any,
        device: Device,
        depth: int,
        threaded: bool | None,
        pack_in_workers: bool,
        options: CopyOptions,
        /,
    ) -> None:
        """Do not call this: use `prefetch`."""
        self._is_callable = is_to_be_called(source)
        self._source: Any = source
        self._device: Device = device
        self._depth = checked_depth(depth)
        if threaded is None:
            self._is_threaded = not has_draws_in_this_process(source)
        else:
            self._is_threaded = bool_option("threaded", threaded)
        self._may_have_reader = threaded is None or self._is_threaded
        self._options = options
        refuse_other_options(options)
        start_copy(None, device, **options)  # raises if the device or a value is wrong
        self._counters = PrefetchCounters()
        self._packing = Packing(
            source,
            device,
            is_wanted=bool_option("pack_in_workers", pack_in_workers),
            inspects=options.get("on_unknown") not in (None, "ignore"),
            counters=self._counters,
        )
        self._counters.why_unpacked = self._packing.why_not
        self._copy_state = copier_of_state(source)
        self._starting = threading.RLock()
        self._queue: BatchQueue | None = None
        self._begins_anew = False
        self._is_closed = False
        self._forks = forks()

    @keep_out_of_graphs("next() on the prefetcher", "the batch")
    def __iter__(self) -> Iterator[T_co]:
        """Start a pass or continue one, as described for the class.

        Raises:
            RuntimeError: the prefetcher is closed, or was made before the process forked.
            Exception: an error from `iter(source)`, or from a generator whose pass is closed by
                this call.
        """
        return _Pass(self, self._pass(is_wanted_anew=True))

    @keep_out_of_graphs("next() on the prefetcher", "the batch")
    def __next__(self) -> T_co:
        """Return the next batch on the device, ordered on the current stream.

        Raises:
            StopIteration: the pass has ended.
            RuntimeError: as for `iter()`; or another thread closed the pass.
            BaseException: an error from the source, or from the copy of this batch.
        """
        batch: T_co = self._pass(is_wanted_anew=False).take()
        return batch

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Return an iterator for `async for` in an asyncio event loop.

        The task that asks for its first batch starts a pass or continues one, as described for the
        class; `iter(source)` is called there. While a batch is read and copied, and also between
        two batches, the event loop runs.

        Raises:
            TypeError: without a reader thread, the event loop would have to read the source.
        """
        if not self._may_have_reader:
            raise TypeError(
                "`async for` needs a reader thread: with threaded=False the event loop would have "
                "to read the source, and stop meanwhile; make the prefetcher with threaded=True"
            )
        return _AsyncPass(self)

    async def __anext__(self) -> T_co:
        """Return what `next()` returns, without blocking the event loop.

        Raises:
            StopAsyncIteration: the pass has ended.
            TypeError: there is no reader thread.
            RuntimeError: as for `next()`; or no event loop is running in this thread.
            BaseException: an error from the source, or from the copy of this batch.
        """
        aiter(self)  # refuses a prefetcher without a reader
        await self._earlier_reader_ended(is_wanted_anew=False)
        batch: T_co = await self._reader_pass(is_wanted_anew=False).take_in_event_loop()
        return batch

    def __len__(self) -> int:
        """Return the length of the source.

        Raises:
            TypeError: the source has no length.
        """
        if self._is_callable:
            raise TypeError("a prefetcher of a callable has no len()")
        return len(self._source)  # raises TypeError itself

    if not TYPE_CHECKING:  # a type checker knows that there are no items

        def __getitem__(self, index: object) -> NoReturn:
            """Say how to get batches."""
            raise TypeError(
                "a prefetcher has no items: loop over it, or call next(prefetcher) for one batch"
            )

    def __repr__(self) -> str:
        """Return the class of the source, and where its batches go."""
        return (
            f"<tdcopier.Prefetcher: {type(self._source).__name__} to {self._device}, depth "
            f"{self._depth}, batches so far: {self._counters.batches}, "
            f"{'closed' if self._is_closed else 'open'}>"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be copied or pickled: the copy would share the pass, or lose its batches."""
        raise TypeError(
            "a prefetcher cannot be copied or pickled: make another one over the source"
        )

    def close(self) -> None:
        """End the pass for good: drop unused batches, close a generator, wait for the reader.

        Blocks: until the source returns from the batch that it is reading. A second call does
        nothing, and neither does a call in a forked child.

        Raises:
            Exception: an error that a generator raises when it is closed.
        """
        if self._forks != forks():
            return
        with self._starting:
            self._is_closed = True
            if self._queue is not None:
                self._queue.end("so was its prefetcher")

    async def aclose(self) -> None:
        """Do what `close` does, and let the event loop run until the reader has ended.

        Without a reader thread, this is `close`.
        """
        queue = self._queue
        if isinstance(queue, ReaderPass):
            with self._starting:
                self._is_closed = True
                queue.tell_to_end("so was its prefetcher")
            await queue.reader_ended()
        self.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the reader too. (If `__init__` raised, there is no queue.)

        Python empties modules when it ends, so this keeps what it calls then.
        """
        queue = getattr(self, "_queue", None)
        if queue is not None and not is_finalizing():
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

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.aclose()

    @property
    def stats(self) -> PrefetchStats:
        """Counts and times of all passes so far."""
        return self._counters.stats()

    @property
    def state_dict(self) -> Callable[[], Any]:
        """Returns a copy of the state of a source that has `state_dict` and `load_state_dict`.

        It is as of the last batch that was yielded, and not as of those that were read ahead. The
        reader asks the source after each batch. It raises a RuntimeError if the source could not
        answer.
        """
        if self._copy_state is None:
            raise AttributeError("the source has no state")  # `__getattr__` says so
        return partial(self._state, self._copy_state)

    @property
    def load_state_dict(self) -> Callable[[Any], None]:
        """Ends the pass, and passes a state on to such a source, from which the next pass goes on.

        Blocks: until the source returns from the batch that it is reading.
        """
        if self._copy_state is None:
            raise AttributeError("the source has no state")
        return self._load_state

    def _state(self, copy_state: Callable[[], Any]) -> Any:
        with self._starting:
            state = copy_state() if self._queue is None else self._queue.state
        if isinstance(state, NoState):
            raise RuntimeError(f"state_dict() of the source failed: {state.why}")
        return state

    def _load_state(self, state: Any) -> None:
        if self._forks != forks():
            refuse_in_child()
        with self._starting:
            if self._is_closed:
                raise RuntimeError("this prefetcher is closed: make another one")
            queue, self._queue = self._queue, None
            if queue is not None:
                queue.end("another state has been loaded")
            self._source.load_state_dict(state)

    def _pass(self, *, is_wanted_anew: bool, needs_reader: bool = False) -> BatchQueue:
        """Return the current pass, or start one."""
        if self._forks != forks():
            refuse_in_child()
        with self._starting:
            if self._is_closed:
                raise RuntimeError("this prefetcher is closed: make another one")
            queue = self._queue
            if queue is None or self._is_to_end(queue, is_wanted_anew=is_wanted_anew):
                if queue is not None:
                    queue.end(_BEGUN_ANEW)
                # Stored before it starts: an interrupt may end `start` after the reader has begun.
                self._queue = queue = self._new_queue(needs_reader or self._is_threaded)
            queue.start()
            return queue

    def _reader_pass(self, *, is_wanted_anew: bool) -> ReaderPass:
        queue = self._pass(is_wanted_anew=is_wanted_anew, needs_reader=True)
        if not isinstance(queue, ReaderPass):
            raise TypeError(
                "this pass is read by the loop that began it, and not by a thread: begin another "
                "one with `async for`"
            )
        return queue

    async def _earlier_reader_ended(self, *, is_wanted_anew: bool) -> None:
        """End a pass that `_pass` would end, and let the event loop run until it has ended."""
        queue = self._queue
        if isinstance(queue, ReaderPass) and self._is_to_end(queue, is_wanted_anew=is_wanted_anew):
            queue.tell_to_end(_BEGUN_ANEW)
            await queue.reader_ended()

    def _is_to_end(self, queue: BatchQueue, *, is_wanted_anew: bool) -> bool:
        if queue.is_ending:  # and an interrupt stopped the call that was ending it
            return True
        return is_wanted_anew and (queue.is_over or self._begins_anew)

    def _new_queue(self, is_threaded: bool) -> BatchQueue:
        generator = None
        if self._is_callable:
            read = batches_of_call(self._source)
        else:
            iterator = self._packing.begin()
            self._begins_anew = iterator is not self._source
            read = partial(self._packing.read, iterator)
            if isinstance(iterator, Generator):
                generator = iterator
        source = Source(
            read,
            generator,
            self._device,
            self._options,
            self._counters,
            self._copy_state,
            in_callers_order=self._depth > 1 and self._packing.why_not is None,
            has_reader=is_threaded,
        )
        make: type[BatchQueue] = ReaderPass if is_threaded else LoopPass
        return make(self._depth, self._counters, source)


class _Pass(Generic[T_co]):
    """The iterator of a `for` loop over a prefetcher; it keeps the prefetcher alive."""

    __slots__ = ("_prefetcher", "_queue")

    def __init__(self, prefetcher: Prefetcher[T_co], queue: BatchQueue) -> None:
        self._prefetcher = prefetcher
        self._queue = queue

    def __iter__(self) -> Self:
        return self

    @keep_out_of_graphs("next() on the prefetcher", "the batch")
    def __next__(self) -> T_co:
        batch: T_co = self._queue.take()
        return batch


class _AsyncPass(Generic[T_co]):
    """The iterator of an `async for` loop over a prefetcher; it keeps the prefetcher alive."""

    __slots__ = ("_prefetcher", "_queue")

    def __init__(self, prefetcher: Prefetcher[T_co]) -> None:
        self._prefetcher = prefetcher
        self._queue: ReaderPass | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T_co:
        if self._queue is None:
            await self._prefetcher._earlier_reader_ended(is_wanted_anew=True)
        if self._queue is None:  # no other task has started it meanwhile
            self._queue = self._prefetcher._reader_pass(is_wanted_anew=True)
        batch: T_co = await self._queue.take_in_event_loop()
        return batch
