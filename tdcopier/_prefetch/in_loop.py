"""A pass without a reader thread: the thread that asks for a batch also reads the source."""

from __future__ import annotations

from typing import Any

from tdcopier import _C
from tdcopier._C import AsyncCopyHandle
from tdcopier._options import SENDING
from tdcopier._prefetch.queue import BatchQueue
from tdcopier._prefetch.source import Batch, EndOfPass, Source
from tdcopier._prefetch.stats import PrefetchCounters


class LoopPass(BatchQueue):
    """A pass in which consumers read: the one with the turn starts batches up to the depth."""

    def __init__(self, depth: int, counters: PrefetchCounters, source: Source) -> None:
        super().__init__(depth, counters, source)
        # The newest copy, whose sources may still be read.
        self._unread: AsyncCopyHandle[Any] | None = None

    def start(self) -> None:
        """Do nothing: the first batch is read when a consumer asks for it."""

    def close(self, why: str) -> None:
        """Drop the batches that were not taken; close a generator that no other thread reads.
        Blocks.

        If the garbage collector calls this, no consumer can have the turn: it would have kept the
        prefetcher alive.
        """
        super().close(why)
        self.join()

    def join(self) -> None:
        with self._turn:
            self._finish_close()

    def _bring_first(self) -> None:
        """Start the requested batch, unless it is started already, and `depth` batches after it."""
        try:
            if not self._items:
                self._begin(_C.Sending.AT_ONCE)
            while self._items and self._has_room():
                # Later batches are only staged; the loop sends them as it takes those before them.
                is_needed_next = len(self._items) == 1
                self._begin(_C.Sending.AT_ONCE if is_needed_next else _C.Sending.DEFERRED_STAGED)
        finally:
            SENDING.end()  # repeated: see Note [Interrupts]
            self._finish_close()

    def _has_room(self) -> bool:
        is_open = self._source is not None and self.why_closed is None
        return is_open and not self._is_full(requested=1)

    def _begin(self, sending: _C.Sending) -> None:
        """Read one more batch, unless the source has ended."""
        if self._source is None or self.why_closed is not None:
            return
        self._wait_read()
        item = self._source.begin(lambda: self.why_closed is None, sending)
        if isinstance(item, Batch) and item.may_be_written:
            self._unread = item.handle
        if item is None or self.why_closed is not None:
            return
        self._put(item)
        if isinstance(item, EndOfPass):
            self._source = None
        del item  # avoids a reference cycle through an error's traceback

    def _wait_read(self) -> None:
        """Wait until all batches have been read; the source may then reuse their memory."""
        if self._unread is not None:
            self._unread.wait_staged()
            self._unread = None

    def _finish_close(self) -> None:
        """Finish closing a closed pass. The caller must have the turn."""
        is_reading = self._source is not None and self._source.is_generator_running()
        if self.why_closed is None or is_reading:  # this thread reads, further up its stack
            return
        self._drop_all()
        self._wait_read()
        self._close_generator()
