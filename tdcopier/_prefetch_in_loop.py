"""A pass whose source is read by the thread that asks for a batch, beside no other thread."""

from __future__ import annotations

from tdcopier import _C
from tdcopier._copy import AsyncCopyHandle
from tdcopier._prefetch_queue import BatchQueue
from tdcopier._prefetch_source import Batch, EndOfPass, PrefetchCounters, Source


class LoopPass(BatchQueue):
    """Consumers read: the one whose turn it is starts batches until the depth is reached."""

    def __init__(self, depth: int, counters: PrefetchCounters, source: Source) -> None:
        super().__init__(depth, counters, source)
        self._unread: AsyncCopyHandle | None = None  # the newest: its sources may not be touched

    def start(self) -> None:
        """Nothing is read before the first batch is asked for."""

    def close(self, why: str) -> None:
        """Drop what was not taken, and close a generator, when no other thread reads. Blocks.

        Where the garbage collector calls it, there is no consumer that could have the turn: it
        would have kept the prefetcher.
        """
        super().close(why)
        self.join()

    def join(self) -> None:
        with self._turn:
            self._finish_close()

    def _bring_first(self) -> None:
        """Start the batch that is asked for, unless it was, and `depth` batches after it."""
        try:
            if not self._items:
                self._begin(_C.Sending.AT_ONCE)
            while self._items and self._has_room():
                # The loop goes on with what is before it, and sends it meanwhile.
                is_needed_next = len(self._items) == 1
                self._begin(_C.Sending.AT_ONCE if is_needed_next else _C.Sending.HELD_STAGED)
        finally:
            _C.set_sending(_C.Sending.AT_ONCE)  # once more, see Note [Interrupts]
            self._finish_close()

    def _has_room(self) -> bool:
        is_open = self._source is not None and self.why_closed is None
        return is_open and len(self._items) <= self._depth

    def _begin(self, sending: _C.Sending) -> None:
        """Read one batch more, unless there is none."""
        if self._source is None or self.why_closed is not None:
            return
        self._wait_read()
        item = self._source.begin(lambda: self.why_closed is None, sending)
        if isinstance(item, Batch):
            self._unread = item.handle
        if item is None or self.why_closed is not None:
            return
        self._put(item)
        if isinstance(item, EndOfPass):
            self._source = None
        del item  # or an error would keep the frames that keep it

    def _wait_read(self) -> None:
        """Wait until all batches have been read: then the source may do anything with memory."""
        if self._unread is not None:
            self._unread.wait_staged()
            self._unread = None

    def _finish_close(self) -> None:
        """For the consumer whose turn it is, if the pass is closed."""
        is_reading = self._source is not None and self._source.is_generator_running()
        if self.why_closed is None or is_reading:  # by this thread, in a call further out
            return
        self._drop_all()
        self._wait_read()
        self._close_generator()
