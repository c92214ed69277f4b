"""A pass whose source is read by a thread of its own, which starts copies ahead of the loop."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue

import torch

from tdcopier import _C
from tdcopier._prefetch_queue import BatchQueue
from tdcopier._prefetch_source import EndOfPass, Item, PrefetchCounters, Source

# How long the end of the interpreter waits for a reader that is in its source, and for one that is
# in the engine, which it leaves in bounded time.
_SOURCE_GRACE_S = 1.0
_COPY_GRACE_S = 10.0
# A signal that comes just before a wait does not end it: a consumer looks this often.
_INTERRUPT_CHECK_S = 0.05


class Wakeup:
    """Wakes one waiting thread, which then looks at what it waits for.

    Made of a `SimpleQueue`, which the garbage collector may enter while the same thread is in it.
    """

    def __init__(self) -> None:
        self._tokens: SimpleQueue[None] = SimpleQueue()

    def set(self) -> None:
        if self._tokens.empty():
            self._tokens.put(None)

    def wait(self, within_s: float | None = None) -> None:
        """Return after the next `set`, or after one that no wait has answered yet. Blocks.

        Returns after ``within_s`` seconds at the latest.
        """
        with suppress(Empty):
            self._tokens.get(timeout=within_s)


class ReaderPass(BatchQueue):
    """A thread reads while there is room; consumers wait for what it puts into the queue."""

    def __init__(self, depth: int, counters: PrefetchCounters, source: Source) -> None:
        super().__init__(depth, counters, source)
        self._is_started = False
        self._unclaimed = [None]  # empty when a reader has begun
        self._threads: list[threading.Thread] = []  # of which one reads
        self._arrival = Wakeup()
        self._room = Wakeup()

    @property
    def is_copying(self) -> bool:
        """Whether the reader is in the engine."""
        source = self._source
        return source is not None and source.is_copying

    def start(self) -> None:
        """Let a reader begin, in the state of the calling thread.

        An interrupt may hide whether one has begun. So each call that follows starts another one,
        and the first of them to come is the reader.
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
        """Wait for the end of the reader, unless the reader itself asks. Blocks."""
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(timeout_s)

    # ---- the reader's side ----

    def claim(self) -> bool:
        """Whether the calling thread is the first one, and reads."""
        try:
            self._unclaimed.pop()
        except IndexError:
            return False
        return True

    def wait_for_room(self) -> bool:
        """Wait until one batch more may be in flight; False once the pass is closed. Blocks."""
        while len(self._items) >= self._depth and self.why_closed is None:
            began = time.perf_counter_ns()
            self._room.wait()
            self._counters.idle_ns += time.perf_counter_ns() - began
        return self.why_closed is None

    def sending(self) -> _C.Sending:
        """Consumers send the next batch, if they have another one to go on with."""
        return _C.Sending.HELD if self._items else _C.Sending.AT_ONCE

    def put(self, item: Item) -> None:
        """Give the consumers one more."""
        self._put(item)
        self._arrival.set()
        if self.why_closed is not None:
            self._drop_all()

    def close_generator(self) -> None:
        if self.why_closed is not None:
            self._close_generator()

    def forget_source(self) -> None:
        """For the reader that leaves it."""
        self._source = None

    # ---- the consumers' side ----

    def _bring_first(self) -> None:
        self._room.set()  # an interrupt may have come before the reader was told
        while not self._items and self.why_closed is None:
            self._arrival.wait(_INTERRUPT_CHECK_S)

    def _take_out(self, item: Item) -> None:
        super()._take_out(item)
        self._room.set()


class ThreadState:
    """The state of torch of the thread that begins a pass, for the thread that reads."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._device_index: int | None = None
        self._streams: list[torch.Stream] = []
        if _is_accelerator_in_use():
            self._device_index = torch.accelerator.current_device_index()
            every = map(torch.accelerator.current_stream, range(torch.accelerator.device_count()))
            # To set a stream is to use its device: those that are left alone are a thread's first.
            self._streams = [stream for stream in every if stream.stream_id != 0]

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within it the calling thread has the same state. It keeps devices and streams."""
        for stream in self._streams:
            torch.accelerator.set_stream(stream)
        index = self._device_index
        if index is not None and index != torch.accelerator.current_device_index():
            torch.accelerator.set_device_index(index)
        with torch.inference_mode(self._inference), torch.set_grad_enabled(self._grad):
            yield


def _is_accelerator_in_use() -> bool:
    """A process that has not touched its accelerator yet is not made to, so that it may fork."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and bool(torch.get_device_module(accelerator).is_initialized())


def _run(source: Source | None, state: ThreadState, queue: ReaderPass) -> None:
    """What the thread does."""
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
            raise  # to `threading.excepthook`: there is no consumer
        queue.put(EndOfPass(error))
    finally:
        queue.forget_source()
        _passes.discard(queue)


def _read_all(source: Source, queue: ReaderPass) -> None:
    """Until the source ends or fails, or the pass is closed."""
    while queue.wait_for_room():
        item = source.begin(lambda: queue.why_closed is None, queue.sending())
        if item is None:
            return
        is_over = isinstance(item, EndOfPass)
        queue.put(item)
        del item  # the consumer's alone
        if is_over:
            return


_passes: weakref.WeakSet[ReaderPass] = weakref.WeakSet()
"""Those whose reader runs, or may begin."""


def _end_readers() -> None:
    """Before the interpreter ends: a thread that it ends within C++ would take the process down."""
    passes = list(_passes)
    for each in passes:
        each.close("the interpreter ends")
    deadline = time.monotonic() + _SOURCE_GRACE_S
    for each in passes:
        each.join(max(0.0, deadline - time.monotonic()))
        if each.is_copying:
            each.join(_COPY_GRACE_S)


os.register_at_fork(after_in_child=_passes.clear)
atexit.register(_end_readers)  # after the engine's own, and so called before it
