"""The reader of a prefetched source: a thread that starts copies, and its line to the consumer."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import torch

from tdcopier import _C
from tdcopier._prefetch_source import (
    Batch,
    Failure,
    Item,
    Sign,
    Source,
    Tally,
    is_last,
    send_staged,
)

_SOURCE_GRACE_S = (
    1.0  # how long the end of the interpreter waits for a reader that is in its source
)
_COPY_GRACE_S = 10.0  # and for the engine, which a reader leaves in bounded time


class Line:
    """What a reader and its consumers share: batches in order, and room for more.

    Thread: any. Made of `SimpleQueue`s and no lock, since `close` may be called by the collection
    of garbage, which may happen in a thread that is in a method of the same line.
    """

    def __init__(self, depth: int, tally: Tally) -> None:
        self.tally = tally
        self.is_over = False  # the end was told, or the failure that is the last
        self.is_waited_for = False  # by a `close` that raises `failure_of_close`
        self.failure_of_close: BaseException | None = None
        self.why_closed: str | None = None
        self._source: Source | None = None
        self._thread: threading.Thread | None = None
        self._forks = forks()
        self._unused = depth  # room that was never taken: the reader's own
        self._room: SimpleQueue[None] = SimpleQueue()  # what was given back
        self._items: SimpleQueue[Item] = SimpleQueue()
        self._held: deque[_C.AsyncCopyHandle] = deque()  # to be sent by consumers, in their order

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked since, and has no such reader."""
        return self._forks != forks()

    @property
    def is_copying(self) -> bool:
        """Whether the reader is in the engine."""
        source = self._source
        return source is not None and source.is_copying

    def start(self, source: Source) -> None:
        """Let a reader of this line begin, in the surroundings of the calling thread."""
        self._source = source
        self._thread = threading.Thread(
            target=_run,
            args=(source, Surroundings(), self),
            name="tdcopier-prefetch",
            daemon=True,
        )
        _lines.add(self)
        try:
            self._thread.start()
        except BaseException:
            _lines.discard(self)
            raise

    # ---- the reader's side ----

    def take_room(self) -> bool:
        """Wait until one batch more may be in flight; False once the line is closed. Blocks."""
        if self._unused > 0:
            self._unused -= 1
        elif self.why_closed is None:
            began = time.perf_counter_ns()
            self._room.get()
            self.tally.idle_ns += time.perf_counter_ns() - began
        return self.why_closed is None

    def sending(self) -> _C.Sending:
        """Who is to send the next batch: consumers, if they have another one to go on with."""
        return _C.Sending.HELD if self._items.qsize() > 0 else _C.Sending.AT_ONCE

    def put(self, item: Item) -> None:
        """Give the consumers one more."""
        if isinstance(item, Batch):
            self._held.append(item.handle)
        self._items.put(item)
        if self.why_closed is not None:
            self._drop_items()

    def forget_source(self) -> None:
        """For the reader that leaves it."""
        self._source = None

    # ---- the consumers' side ----

    def take(self) -> Any:
        """The next batch, ordered on the current stream. Blocks.

        Raises:
            StopIteration: there is none.
            RuntimeError: the line is closed, or the parent's.
            BaseException: what the source or the copy has raised.
        """
        if self.is_of_parent:
            refuse_in_child()
        began = time.perf_counter_ns()
        is_late = self._items.empty()
        item = self._items.get()
        if isinstance(item, Sign):
            self._items.put(item)
            if item is Sign.CLOSED and not self.is_over:
                raise RuntimeError(f"this pass was closed: {self.why_closed}")
            self.is_over = True
            raise StopIteration
        if isinstance(item, Failure):
            if item.is_last:
                self.is_over = True
                self._items.put(Sign.END)
            else:
                self._room.put(None)
            try:
                raise item.error
            finally:
                del item  # which the traceback would keep, and it the traceback
        try:
            batch = item.hand_over()
        finally:
            self._room.put(None)
            send_staged(self._held)
        self.tally.count_batch(is_late, began)
        return batch

    def close(self, why: str) -> None:
        """Drop what nobody took, and let the reader and all consumers end. Waits for nobody."""
        if self.is_of_parent or self.why_closed is not None:
            return
        self.why_closed = why
        self._room.put(None)
        self._drop_items()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the reader, unless the reader itself asks. Blocks."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _drop_items(self) -> None:
        self._held.clear()
        try:
            while True:
                self._items.get_nowait()
        except Empty:
            self._items.put(Sign.CLOSED)


class Surroundings:
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


def _run(source: Source, surroundings: Surroundings, line: Line) -> None:
    """What the thread does."""
    try:
        with surroundings.entered():
            try:
                _read_all(source, line)
            finally:
                _close_generator(source, line)
    except BaseException as error:
        if line.why_closed is not None:
            raise  # nobody listens but `threading.excepthook`
        line.put(Failure(error, is_last=True))
    finally:
        line.forget_source()
        _lines.discard(line)


def _read_all(source: Source, line: Line) -> None:
    """Until the source ends or fails, or the line is closed."""
    while line.take_room():
        item = source.begin(lambda: line.why_closed is None, line.sending())
        if item is None:
            return
        is_over = is_last(item)
        line.put(item)
        del item  # the consumer's alone
        if is_over:
            return


def _close_generator(source: Source, line: Line) -> None:
    if line.why_closed is None:
        return
    try:
        source.close_generator()
    except BaseException as error:
        if not line.is_waited_for:
            raise
        line.failure_of_close = error


_lines: set[Line] = set()
"""Those whose reader runs."""

_forks = 0


def forks() -> int:
    """How often this process, and those that it comes from, were forked."""
    return _forks


def refuse_in_child() -> NoReturn:
    """Say that a child has no reader."""
    raise RuntimeError(
        "this prefetcher was made before the process was forked, and the thread that reads its "
        "source is the parent's: make another one in the child"
    )


def _forget_the_parents_readers() -> None:
    global _forks
    _forks += 1
    _lines.clear()


def _end_readers() -> None:
    """Before the interpreter ends: a thread that it ends within C++ would take the process down."""
    lines = list(_lines)
    for line in lines:
        line.close("the interpreter ends")
    deadline = time.monotonic() + _SOURCE_GRACE_S
    for line in lines:
        line.join(max(0.0, deadline - time.monotonic()))
        if line.is_copying:
            line.join(_COPY_GRACE_S)


os.register_at_fork(after_in_child=_forget_the_parents_readers)
atexit.register(_end_readers)  # after the engine's own, and so called before it
