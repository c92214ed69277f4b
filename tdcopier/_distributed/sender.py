"""The end of a channel that sends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tdcopier._distributed.ends import ChannelClosed, End, PeerLost, Uninterrupted
from tdcopier._distributed.link import Link
from tdcopier._distributed.outgoing import Message, Outgoing
from tdcopier._distributed.rendezvous import Options, join


class SenderStats(NamedTuple):
    """Counts of one sender."""

    batches: int
    """That were started."""
    nbytes: int
    """Of their parcels."""
    waits: int
    """Calls that had to wait until the receiver had memory: it was slower."""
    allocations: int
    """Times that a slot got new memory."""


class _Slot:
    """A message, and what was sent of it."""

    def __init__(self) -> None:
        self.message = Message()
        self.work: Any = None


class Sender(End):
    """Sends batches to one receiver, each as one message. Made by `sender`.

    Threads may share it. `with` closes it.
    """

    _what = "sender"

    def __init__(self, options: Options, slots: int, *, checksum: bool) -> None:
        """Find the receiver."""
        super().__init__(options.timeout_s)
        self._link = Outgoing(join(options), options.timeout_s, self._lock)
        self._checksum = checksum
        self._starting = threading.Lock()
        self._slots = [_Slot() for _ in range(slots)]
        self._batches = self._nbytes = self._waits = 0
        self._begin()

    @property
    def peer(self) -> str:
        """The receiver's host, process and rank."""
        return self._link.peer

    @property
    def stats(self) -> SenderStats:
        """Counts since it was made."""
        allocations = sum(slot.message.allocations for slot in self._slots)
        return SenderStats(self._batches, self._nbytes, self._waits, allocations)

    def start(self, batch: Any, *, timeout_s: float | None = None) -> None:
        """Pack a batch, and start to send it.

        The batch may be changed as soon as the call returns. The call waits while all slots of the
        receiver are full: it takes batches more slowly.

        Args:
            batch: a leaf or any nesting of containers and leaves, as for `pack`; or a parcel.
            timeout_s: how long to wait for the receiver; None: as long as it is there.

        Raises:
            ChannelClosed: either end has closed the channel.
            PeerLost: the receiver has ended, or does not answer.
            TimeoutError: the receiver took no batch in time; this one is not sent.
            Exception: what `pack` raises; the batch is not sent.
        """
        self._check_process()
        with self._alone(timeout_s):
            if not self._may_send():
                self._waits += 1
                self._wait_for_room(self._may_send, timeout_s)
            slot = self._slots[self._batches % len(self._slots)]
            self._finish(slot)
            slot.message.fill(batch)
            nbytes = slot.message.nbytes
            if not self._may_send(nbytes):
                self._wait_for_room(lambda: self._may_send(nbytes), timeout_s)
            self._send(slot)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the receiver's process has all batches.

        Raises:
            PeerLost: the receiver has ended, or does not answer.
            TimeoutError: a `start` of another thread has not ended in time.
        """
        self._check_process()
        with self._alone(timeout_s):
            self._finish_all()
        if self._is_lost():
            raise PeerLost(self._link.lost)

    def close(self, timeout_s: float | None = None) -> None:
        """Say that nothing follows, and wait until the receiver's process has all batches.

        May be repeated.

        Raises:
            PeerLost: the receiver has ended, or does not answer: batches may be lost.
            TimeoutError: it has not answered in time.
        """
        if self._is_forked():  # it has no end of it
            return
        self._is_closed = True  # a call of another thread that waits ends
        with self._alone(timeout_s):
            self._finish_all()
        with self._lock:
            self._link.close(self._link.messages)
        if not self._wait(self._is_over, timeout_s):
            raise TimeoutError(self._says_late(timeout_s))
        self._end()
        if self._is_lost():
            raise PeerLost(self._link.lost)

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "lost" if self._link.lost else "open"
        return f"<Sender to {self.peer}, {state}, {self._batches} batches>"

    # ---- messages --------------------------------------------------------------------------------

    def _may_send(self, nbytes: int = 0) -> bool:
        with self._lock:
            self._link.hear()
            self._check_open()
            return self._link.may_send_or_grows(nbytes) if nbytes else self._link.may_send()

    def _wait_for_room(self, is_so: Callable[[], bool], timeout_s: float | None) -> None:
        if not self._wait(is_so, timeout_s):
            raise TimeoutError(self._says_late(timeout_s))

    def _send(self, slot: _Slot) -> None:
        link = self._link
        with Uninterrupted():
            heard = link.say_heard()
            whole = slot.message.whole(self._batches, heard=heard, checksum=self._checksum)
            self._batches += 1
            self._nbytes += slot.message.nbytes
            slot.work = link.send(whole)

    def _finish(self, slot: _Slot) -> None:
        if slot.work is None:
            return
        with Uninterrupted():
            work, slot.work = slot.work, None
            self._link.finish(work)

    @contextlib.contextmanager
    def _alone(self, timeout_s: float | None) -> Iterator[None]:
        """Let no other thread send."""
        acquired: list[bool] = []

        def acquire() -> bool:  # within a block that no interrupt ends between the two
            if self._starting.acquire(blocking=False):
                acquired.append(True)
            return bool(acquired)

        try:
            if not self._wait(acquire, timeout_s):
                raise TimeoutError(self._says_late(timeout_s))
            yield
        finally:
            if acquired:
                self._starting.release()

    def _finish_all(self) -> None:
        for slot in self._slots:
            self._finish(slot)

    # ---- the other end ---------------------------------------------------------------------------

    def _all_links(self) -> Sequence[Link]:
        return [self._link]

    def _turn(self) -> None:
        self._link.turn()
        if self._link.peer_closes:
            self._link.close()
        self._has_ended(self._link)

    def _is_over(self) -> bool:
        self._turn()
        return self._link.has_ended

    def _is_lost(self) -> bool:
        return self._link.lost is not None and not self._link.peer_closes

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChannelClosed("this sender is closed")
        if self._link.peer_closes:
            raise ChannelClosed(f"the receiver, {self.peer}, has closed the channel")
        if self._link.lost is not None:
            raise PeerLost(self._link.lost)

    def _says_late(self, timeout_s: float | None) -> str:
        return f"the receiver, {self.peer}, took no batch in {timeout_s or 0.0:g} s"
