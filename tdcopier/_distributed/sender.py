"""The end of a channel that sends."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from tdcopier._distributed.ends import ChannelClosedError, Deadline, End, PeerLostError
from tdcopier._distributed.link import Link
from tdcopier._distributed.messages import Packer, checksum_of
from tdcopier._distributed.rendezvous import Options, join
from tdcopier._pack import Parcel


class SenderStats(NamedTuple):
    """Counts of one sender.

    For example::

        tx = tdcopier.distributed.sender(store=store)
        tx.start(batch)
        print(f"{tx.stats.nbytes / tx.stats.batches} bytes per batch, {tx.stats.waits} waits")

    Attributes:
        batches: That were started.
        nbytes: Of their parcels.
        waits: Calls that had to wait until the receiver had memory, because it was slower.
        allocations: Times that a batch got new memory.
    """

    batches: int
    nbytes: int
    waits: int
    allocations: int


class Sender(End):
    """Sends batches to one receiver, each as one message. Made by `sender`.

    For example::

        tx = tdcopier.distributed.sender(store=store, slots=4)
        tx.start(batch, timeout_s=10)
        tx.flush()  # the receiver's process has the batch
        tx.close()

    Threads may share it. `with` closes it.
    """

    _what = "sender"
    _peer_is = "receiver"

    def __init__(self, options: Options, slots: int, *, checksum: bool) -> None:
        """Find the receiver."""
        super().__init__(options.peer_timeout_s)
        found = join(options, self._peer_is)
        self._link = Link(found, self._bell, options.peer_timeout_s, self._peer_is)
        self._checksum = checksum
        self._starting = threading.RLock()
        self._slots, self._packer = slots, Packer(slots)
        self._nbytes = self._waits = 0
        self._opened()

    @property
    def peer(self) -> str:
        """The receiver's host, process and rank."""
        return self._link.peer

    @property
    def stats(self) -> SenderStats:
        """Counts since it was made."""
        self._check_process()
        return SenderStats(self._link.sent, self._nbytes, self._waits, self._packer.allocations)

    def start(self, batch: Any, *, timeout_s: float | None = None) -> None:
        """Pack a batch, and start to send it.

        The batch may be changed as soon as the call returns. The call waits while all slots of the
        receiver are full: it takes batches more slowly.

        Args:
            batch: a leaf or any nesting of containers and leaves, as for `pack`; or a parcel.
            timeout_s: how long to wait for other threads and the receiver together; None: as long
                as it is there.

        Raises:
            ChannelClosedError: either end has closed the channel.
            PeerLostError: the receiver has ended, or does not answer.
            TimeoutError: the receiver took no batch in time; this one is not sent.
            Exception: what `pack` raises; the batch is not sent.
        """
        self._check_process()
        deadline = Deadline(timeout_s)
        with self._alone(deadline):
            if not self._may_send():
                self._waits += 1
                self._wait_until(self._may_send, deadline)
            self._wait_until(lambda: self._link.unwritten < self._slots, deadline)
            parcel = self._packer.pack(batch)
            self._check(parcel)
            checksum = checksum_of(parcel._bytes) if self._checksum else 0
            if not self._link.send(parcel, checksum):
                self._check_open()
                raise PeerLostError(f"the {self._peer_is}, {self.peer}, is gone")
            self._nbytes += parcel.nbytes

    def flush(self, *, timeout_s: float | None = None) -> None:
        """Wait until the receiver's process has all batches.

        Args:
            timeout_s: how long to wait; None: until the receiver has them, or is lost.

        Raises:
            ChannelClosedError: the receiver has closed before it had all of them.
            PeerLostError: the receiver has ended, or does not answer.
            TimeoutError: it has not said so in time.
        """
        self._check_process()
        self._link.ask()
        deadline = Deadline(timeout_s)
        self._wait_until(lambda: self._link.all_have_arrived or self._link.has_ended, deadline)
        if self._is_lost():
            raise PeerLostError(self._link.why_lost)
        if not self._link.all_have_arrived:
            raise ChannelClosedError(f"the {self._peer_is}, {self.peer}, has closed the channel")

    def close(self, *, timeout_s: float | None = None) -> None:
        """Say that nothing follows, and wait until the receiver's process has all batches.

        A receiver that has closed takes no more of them. May be repeated.

        Args:
            timeout_s: how long to wait; None: until the receiver has answered, or is lost.

        Raises:
            PeerLostError: the receiver has ended, or does not answer: batches may be lost.
            TimeoutError: it has not answered in time.
        """
        if self._is_forked():  # it has no end of it
            return
        deadline = Deadline(timeout_s)
        self._is_closed = True
        self._bell.ring()  # a call of another thread that waits ends
        with self._alone(deadline):
            self._link.close()
        self._wait_until(lambda: self._link.has_ended, deadline)
        self._end()
        if self._is_lost():
            raise PeerLostError(self._link.why_lost)

    def __del__(self) -> None:
        """Send what was started: a sender that is dropped closes, and waits as at exit."""
        is_open = getattr(self, "_is_open", False)  # no receiver may have come
        if is_open and not self._is_closed and not self._is_forked():
            with contextlib.suppress(TimeoutError, ConnectionError):  # no one could be told
                self.close(timeout_s=self._peer_timeout_s)

    def _state(self) -> str:
        state = "closed" if self._is_closed else "lost" if self._is_lost() else "open"
        return f"to {self.peer}, {state}, {self._link.sent} batches"

    # ---- messages --------------------------------------------------------------------------------

    def _check(self, parcel: Parcel) -> None:
        """Raise an error if a parcel must not be sent."""

    def _may_send(self) -> bool:
        self._check_open()
        return self._link.may_send

    def _wait_until(self, is_so: Callable[[], bool], deadline: Deadline) -> None:
        if not self._wait(is_so, deadline.left_s):
            raise self._late(deadline)

    def _late(self, deadline: Deadline) -> TimeoutError:
        return TimeoutError(
            f"the {self._peer_is}, {self.peer}, took no batch in {deadline.timeout_s or 0.0:g} s"
        )

    @contextlib.contextmanager
    def _alone(self, deadline: Deadline) -> Iterator[None]:
        """Let no other thread send."""
        try:
            left_s = deadline.left_s
            if not self._starting.acquire(timeout=-1 if left_s is None else left_s):
                raise self._late(deadline)
            yield
        finally:
            if self._starting._is_owned():  # type: ignore[attr-defined]  # an interrupt may come
                self._starting.release()

    # ---- the other end ---------------------------------------------------------------------------

    def _all_links(self) -> Sequence[Link]:
        return [self._link]

    def _is_lost(self) -> bool:
        return self._link.lost is not None

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChannelClosedError("this sender is closed")
        if self._link.peer_closes:
            raise ChannelClosedError(f"the {self._peer_is}, {self.peer}, has closed the channel")
        if self._is_lost():
            raise PeerLostError(self._link.why_lost)
