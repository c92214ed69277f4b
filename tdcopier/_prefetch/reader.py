"""A pass whose source is read by a reader thread, which starts copies ahead of the loop.

The thread waits for room in the queue; without a thread, `in_loop.py` decides how far to read. An
error of the loader is an item of the queue too: `source.py` makes it, and `queue.py` raises it in
its turn.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any

import torch

from tdcopier import _C
from tdcopier._asyncio import Pauses
from tdcopier._prefetch.queue import BatchQueue, forks, refuse_in_child
from tdcopier._prefetch.source import EndOfPass, Item, Source
from tdcopier._prefetch.stats import PrefetchCounters

# How long the interpreter's exit waits for a reader that is in its source, and for one that is in
# the engine, whose calls return in bounded time.
_SOURCE_GRACE_S = 1.0
_COPY_GRACE_S = 10.0
# A signal that arrives just before a wait does not end it, so consumers check at this interval.
_INTERRUPT_CHECK_S = 0.05


class Wakeup:
    """Wakes one waiting thread, which then checks its condition.

    Uses a `SimpleQueue`, which is reentrant: the garbage collector may enter it in a thread that is
    inside it.
    """

    def __init__(self) -> None:
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        if self._tokens.empty():
            self._tokens.put(None)

    def wait(self, within_s: float | None = None) -> None:
        """Return after the next `set`, or at once if a `set` has not been consumed. Blocks.

        Returns after ``within_s`` seconds at the latest.
        """
        with suppress(Empty):
            self._tokens.get(timeout=within_s)


class ReaderPass(BatchQueue):
    """A pass in which a thread reads while there is room, and consumers wait for its items."""

    def __init__(self, depth: int, counters: PrefetchCounters, source: Source) -> None:
        super().__init__(depth, counters, source)
        self._is_started = False
        self._has_waited = False  # for room, before the batch that is read now
        self._unclaimed = [None]  # empty once a thread has become the reader
        self._threads: list[threading.Thread] = []  # one of them is the reader
        self._arrival = Wakeup()
        self._room = Wakeup()

    @property
    def is_copying(self) -> bool:
        """Whether the reader is inside the engine."""
        source = self._source
        return source is not None and source.is_copying

    def start(self) -> None:
        """Start a reader, with the state of the calling thread.

        An interrupt may hide whether a reader has started. So each later call starts another
        thread, and the first thread to run becomes the reader.
        """
        if self._is_started:
            return
        thread = threading.Thread(
            target=_run,
            args=(self._source, ThreadState(), self),
            name="tdcopier-prefetch",
            daemon=True,
        )
        self._threads.append(thread)
        _passes.add(self)
        thread.start()
        self._is_started = True

    def close(self, why: str) -> None:
        super().close(why)
        self._room.set()
        self._arrival.set()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait until the reader has ended, unless the caller is the reader. Blocks."""
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(timeout_s)

    # ---- the reader's side ----

    def claim(self) -> bool:
        """Return whether the calling thread is the first one, and so becomes the reader."""
        try:
            self._unclaimed.pop()
        except IndexError:
            return False
        return True

    def wait_for_room(self) -> bool:
        """Wait until one more batch may be in flight; false once the pass is closed. Blocks."""
        self._has_waited = self._is_full()
        while self._is_full() and self.why_closed is None:
            began = time.perf_counter_ns()
            self._room.wait()
            self._counters.idle_ns += time.perf_counter_ns() - began
        return self.why_closed is None

    def sending(self) -> _C.Sending:
        """Return how the next batch is sent: by consumers, if they have another to work on.

        A reader that is faster than the loop stages alone. Several threads would not serve the loop
        sooner, but take processors from it, and locks of the process's memory: with batches of 64
        MB from a loader's workers, a step of Mask R-CNN took 3 to 5 % longer (benchmarks/trainers,
        an H100 and 16 processors).
        """
        if not self._items:
            return _C.Sending.AT_ONCE
        return _C.Sending.DEFERRED_ALONE if self._has_waited else _C.Sending.DEFERRED

    def put(self, item: Item) -> None:
        """Append an item for the consumers."""
        self._put(item)
        self._arrival.set()
        if self.why_closed is not None:
            self._drop_all()

    def close_generator(self) -> None:
        if self.why_closed is not None:
            self._close_generator()

    def forget_source(self) -> None:
        """Drop the source; called by the reader when it ends."""
        self._source = None

    # ---- the consumers' side ----

    async def take_in_event_loop(self) -> Any:
        """Return the next batch as `take` does, and let the event loop run until it is there.

        Raises:
            StopAsyncIteration: the pass has ended.
            RuntimeError: as for `take`; no event loop is running.
            BaseException: an error from the source or the copy.
        """
        if self._forks != forks():
            refuse_in_child()
        pauses = Pauses("`for`")
        began = time.perf_counter_ns()
        is_late = not self._items
        await asyncio.sleep(0)  # other tasks run between two batches, however early
        while True:
            try:
                if self._is_first_instant():
                    with self._turn:  # held by a thread for a moment only: an item is there
                        if self._is_first_instant():
                            batch = self._hand_over_first()
                            self._counters.count_batch(is_late, began)
                            return batch
            except StopIteration:
                raise StopAsyncIteration from None
            except StopAsyncIteration as error:  # would look like the end of the pass
                raise RuntimeError("the source raised StopAsyncIteration") from error
            await pauses.pause()

    async def reader_ended(self) -> None:
        """Let the event loop run until `join` would not block.

        Raises:
            RuntimeError: no event loop is running.
        """
        pauses = Pauses("close()")
        while any(map(threading.Thread.is_alive, self._threads)):
            await pauses.pause()

    def _is_first_instant(self) -> bool:
        """Return whether the first item can be handed over, or is missing for good."""
        self._room.set()  # in case an interrupt came before the reader was woken
        try:
            return self._items[0].is_hand_over_instant()
        except IndexError:
            return self.why_closed is not None

    def _bring_first(self) -> None:
        self._room.set()  # in case an interrupt came before the reader was woken
        while not self._items and self.why_closed is None:
            self._arrival.wait(_INTERRUPT_CHECK_S)

    def _take_out(self, item: Item) -> None:
        super()._take_out(item)
        self._room.set()


class ThreadState:
    """The torch state of the thread that starts a pass, to be applied in the reader thread."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._device_index: int | None = None
        self._streams: list[torch.Stream] = []
        if _is_accelerator_in_use():
            self._device_index = torch.accelerator.current_device_index()
            every = map(torch.accelerator.current_stream, range(torch.accelerator.device_count()))
            # Setting a stream initialises its device. A new thread has the default streams anyway.
            self._streams = [stream for stream in every if stream.stream_id != 0]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Apply the state to the calling thread. Device and streams stay after the block."""
        for stream in self._streams:
            torch.accelerator.set_stream(stream)
        index = self._device_index
        if index is not None and index != torch.accelerator.current_device_index():
            torch.accelerator.set_device_index(index)
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            yield


def _is_accelerator_in_use() -> bool:
    """Return whether the accelerator is initialised. Never initialises it, so forks stay safe.

    False if torch is built for an accelerator that this machine does not have.
    """
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return False
    module = torch.get_device_module(accelerator)
    return bool(getattr(module, "is_initialized", torch.accelerator.is_available)())


def _run(source: Source | None, state: ThreadState, queue: ReaderPass) -> None:
    """Run the reader thread."""
    if source is None or not queue.claim():
        return
    try:
        with state.entered():
            try:
                _read_all(source, queue)
            finally:
                queue.close_generator()
    except BaseException as error:
        if queue.why_closed is not None:
            raise  # goes to `threading.excepthook`: the pass has no consumer any more
        queue.put(EndOfPass(error))
    finally:
        queue.forget_source()
        _passes.discard(queue)


def _read_all(source: Source, queue: ReaderPass) -> None:
    """Read until the source ends or fails, or the pass is closed."""
    while queue.wait_for_room():
        item = source.begin(lambda: queue.why_closed is None, queue.sending())
        if item is None:
            return
        is_over = isinstance(item, EndOfPass)
        queue.put(item)
        del item  # leaves the consumer with the only reference
        if is_over:
            return


_passes: weakref.WeakSet[ReaderPass] = weakref.WeakSet()
"""Passes whose reader is running or may start."""


def _end_readers() -> None:
    """End all readers before the interpreter exits.

    Otherwise the interpreter would end a thread inside C++ code, which aborts the process.
    """
    passes = list(_passes)
    for each in passes:
        each.close("the interpreter ends")
    deadline = time.monotonic() + _SOURCE_GRACE_S
    for each in passes:
        each.join(max(0.0, deadline - time.monotonic()))
        if each.is_copying:
            each.join(_COPY_GRACE_S)


os.register_at_fork(after_in_child=_passes.clear)
atexit.register(_end_readers)  # registered after the engine's handler, so it runs first
