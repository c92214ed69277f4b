"""The queue of a pass: batches in flight, and the consumers that take them in order.

`depth` bounds how many copies are begun ahead, by `reader.py` (a thread) and by `in_loop.py`.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, NoReturn

from tdcopier import _C
from tdcopier._prefetch.source import Batch, EndOfPass, Item, Source
from tdcopier._prefetch.stats import PrefetchCounters


class BatchQueue(ABC):
    """Base of both kinds of passes: keeps the batches in order, up to a depth.

    Thread: any. The garbage collector may call `close`, in any thread.

    Note [Interrupts]
    Ctrl-C may end a consumer's call after any of its steps, and later calls must still work. So an
    item stays in the queue until it was handed over, and the length of the queue tells whether
    there is room: there is no token that an interrupted call could keep. Every other step may be
    repeated, and each call repeats the steps that an interrupted call may have missed.
    """

    def __init__(self, depth: int, counters: PrefetchCounters, source: Source) -> None:
        self.is_over = False  # a consumer has taken the end of the pass
        self.is_ending = False  # `end` was called, which raises `_failure_of_close`
        self.why_closed: str | None = None
        self._failure_of_close: BaseException | None = None
        self._depth = depth
        self._counters = counters
        self.state: Any = source.state()
        """Of the source, as of the last item that was taken."""
        self._source: Source | None = source  # None once it has ended or is no longer read
        self._forks = forks()
        self._turn = threading.RLock()  # held by one consumer at a time
        self._items: deque[Item] = deque()
        # Copies that consumers may have to send.
        self._unsent: deque[_C.AsyncCopyHandle[Any]] = deque()

    def _is_full(self, *, requested: int = 0) -> bool:
        """Return whether `depth` batches are ahead, those that a consumer asked for not counted."""
        return len(self._items) - requested >= self._depth

    @abstractmethod
    def start(self) -> None:
        """Start to read. May be called again, for example after an interrupt."""

    def take(self) -> Any:
        """Return the next batch, ordered on the current stream. Blocks.

        Raises:
            StopIteration: the pass has ended.
            RuntimeError: the pass is closed, or was started before the process forked.
            BaseException: an error from the source or the copy.
        """
        if self._forks != forks():
            refuse_in_child()
        began = time.perf_counter_ns()
        with self._turn:
            is_late = not self._items
            self._bring_first()
            batch = self._hand_over_first()
            self._counters.count_batch(is_late, began)
            return batch

    def close(self, why: str) -> None:
        """Drop the batches that were not taken, and tell the reader and all consumers to end."""
        if self._forks != forks():
            return
        if self.why_closed is None:
            self.why_closed = why
        self._drop_all()

    @abstractmethod
    def join(self) -> None:
        """Wait until no thread reads the source, except the calling one. Blocks."""

    def tell_to_end(self, why: str) -> None:
        """Close the pass as `end` does, but do not wait. `end` must follow."""
        self.is_ending = True
        self.close(why)

    def end(self, why: str) -> None:
        """Close the pass, and wait until no thread reads the source. Blocks.

        Raises:
            BaseException: an error that a generator raised when it was closed.
        """
        self.tell_to_end(why)
        self.join()
        failure, self._failure_of_close = self._failure_of_close, None
        if failure is not None:
            raise failure

    @abstractmethod
    def _bring_first(self) -> None:
        """Wait for a first item, unless the pass is closed. Needs the turn. Blocks."""

    def _put(self, item: Item) -> None:
        self._items.append(item)
        if isinstance(item, Batch):
            self._unsent.append(item.handle)

    def _drop_all(self) -> None:
        self._unsent.clear()
        self._items.clear()

    def _hand_over_first(self) -> Any:
        try:
            item = self._items[0]
        except IndexError:
            if self.is_over:
                raise StopIteration from None
            raise RuntimeError(f"this pass was closed: {self.why_closed}") from None
        try:
            batch = item.hand_over()
        except StopIteration as error:
            self._take_out(item)
            if isinstance(item, EndOfPass):
                raise
            raise RuntimeError("the copy of this batch raised StopIteration") from error
        except BaseException as error:
            # Any other error is an interrupt: the item stays in the queue for the next call.
            if isinstance(error, Exception) or error is getattr(item, "error", None):
                self._take_out(item)
            raise
        else:
            self._take_out(item)
            return batch
        finally:
            del item  # avoids a reference cycle between the item's error and its traceback

    def _take_out(self, item: Item) -> None:
        """Remove the first item, which was handed over. The end stays, for other consumers."""
        self.state = item.state
        if isinstance(item, EndOfPass):
            self.is_over = True
            item.error = None
            return
        try:
            self._items.popleft()
        except IndexError:  # the pass was closed meanwhile
            return
        self._send_staged()

    def _send_staged(self) -> None:
        """Send the copies that have been staged, up to the first one that has not."""
        try:
            while self._unsent and self._unsent[0]._send_if_staged():
                self._unsent.popleft()
        except IndexError:  # the pass was closed meanwhile
            return

    def _close_generator(self) -> None:
        """Close the generator of a closed pass. Called by the reading thread, outside the
        generator.
        """
        source = self._source
        if source is None:
            return
        try:
            source.close_generator()
        except BaseException as error:
            is_interrupt = not (source.has_reader or isinstance(error, Exception))
            if is_interrupt or not self.is_ending:
                raise
            self._failure_of_close = error
        self._source = None


_forks = 0


def forks() -> int:
    """Return the number of forks that led to this process."""
    return _forks


def refuse_in_child() -> NoReturn:
    """Raise an error: a forked child cannot continue a pass."""
    raise RuntimeError(
        "this prefetcher was made before the process was forked, and the thread that reads its "
        "source is the parent's: make another one in the child"
    )


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)
