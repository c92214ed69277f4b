"""A pass whose source is read by whoever asks for a batch: no thread competes with the loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

from tdcopier import _C
from tdcopier._copy import AsyncCopyHandle
from tdcopier._prefetch_reader import forks, refuse_in_child
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


class LoopPass:
    """What consumers share who read for themselves: batches that have begun, in order.

    Thread: any. `close` may be called by the collection of garbage, in a thread that is in another
    method: it waits for nobody.
    """

    def __init__(self, depth: int, tally: Tally, source: Source) -> None:
        self.is_over = False  # the end was told, or the failure that is the last
        self.is_waited_for = False  # by a `close` that raises `failure_of_close`
        self.failure_of_close: BaseException | None = None
        self.why_closed: str | None = None
        self._depth = depth
        self._tally = tally
        self._source: Source | None = source  # None: it has ended
        self._forks = forks()
        self._lock = threading.RLock()  # of whoever reads
        self._is_reading = False
        self._ahead: deque[Item] = deque()
        self._unread: AsyncCopyHandle | None = None  # the newest: what it copies may not be touched
        self._held: deque[AsyncCopyHandle] = deque()

    def take(self) -> Any:
        """The next batch, ordered on the current stream. Blocks.

        Raises:
            StopIteration: there is none.
            RuntimeError: the pass is closed, or the parent's.
            BaseException: what the source or the copy has raised.
        """
        if self._forks != forks():
            refuse_in_child()
        began = time.perf_counter_ns()
        with self._lock:
            is_late = not self._ahead
            try:
                self._fill()
            finally:
                self._close_generator_if_closed()
            item = self._first()
        if isinstance(item, Sign):
            self.is_over = True
            raise StopIteration
        if isinstance(item, Failure):
            self.is_over |= item.is_last
            try:
                raise item.error
            finally:
                del item  # which the traceback would keep, and it the traceback
        try:
            batch = item.hand_over()
        finally:
            send_staged(self._held)
        self._tally.count_batch(is_late, began)
        return batch

    def close(self, why: str) -> None:
        """Drop what nobody took. A generator is closed here, or by the thread that reads it."""
        if self._forks != forks() or self.why_closed is not None:
            return
        self.why_closed = why
        self._ahead.clear()
        self._held.clear()
        if self._lock.acquire(blocking=False):  # else whoever reads does it
            try:
                self._close_generator_if_closed()
            finally:
                self._lock.release()

    def join(self) -> None:
        """Wait until nobody reads, unless the calling thread does. Blocks."""
        with self._lock:
            self._close_generator_if_closed()

    def _fill(self) -> None:
        """Begin what is asked for, unless it has begun, and `depth` batches behind it."""
        if not self._ahead:
            self._begin(_C.Sending.AT_ONCE)
        while self._ahead and self._is_room():
            # The loop goes on with what is before it, and sends it meanwhile.
            is_needed_next = len(self._ahead) == 1
            self._begin(_C.Sending.AT_ONCE if is_needed_next else _C.Sending.HELD_STAGED)

    def _is_room(self) -> bool:
        is_open = self._source is not None and self.why_closed is None
        return is_open and len(self._ahead) <= self._depth

    def _first(self) -> Item:
        try:
            return self._ahead.popleft()
        except IndexError:
            if self.why_closed is None or self.is_over:
                return Sign.END
            raise RuntimeError(f"this pass was closed: {self.why_closed}") from None

    def _begin(self, sending: _C.Sending) -> None:
        """Read one batch more, unless there is none."""
        if self._source is None or self.why_closed is not None:
            return
        self._wait_read()
        self._is_reading = True
        try:
            item = self._source.begin(lambda: self.why_closed is None, sending)
        finally:
            self._is_reading = False
        if isinstance(item, Batch):
            self._unread = item.handle
        if item is None or self.why_closed is not None:
            return
        if is_last(item):
            self._source = None
        if item is Sign.END:
            return
        if isinstance(item, Batch):
            self._held.append(item.handle)
        self._ahead.append(item)
        del item  # or an error would keep the frames that keep it

    def _wait_read(self) -> None:
        """Until all batches have been read: the source may do with their memory what it likes."""
        if self._unread is not None:
            self._unread.wait_staged()
            self._unread = None

    def _close_generator_if_closed(self) -> None:
        if self.why_closed is None or self._is_reading:  # by this thread, in a call further out
            return
        self._ahead.clear()
        self._held.clear()
        self._wait_read()
        source, self._source = self._source, None
        try:
            if source is not None:
                source.close_generator()
        except BaseException as error:
            if not self.is_waited_for:
                raise
            self.failure_of_close = error
