"""The end of a channel that receives, from one sender or from all that come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tdcopier._C import AsyncCopyHandle
from tdcopier._copy import start_copy
from tdcopier._distributed.ends import ChannelClosedError, Deadline, PeerLostError
from tdcopier._distributed.hub import Hub
from tdcopier._distributed.link import Link
from tdcopier._distributed.messages import Arrived
from tdcopier._distributed.rendezvous import Found, Listener, Options


class ReceiverStats(NamedTuple):
    """Counts of one receiver.

    For example::

        rx = tdcopier.distributed.receiver(store=store)
        print(f"{rx.stats.waiting} batches of {rx.stats.open_peers} senders are waiting")

    Attributes:
        batches: That were taken.
        nbytes: Of their parcels.
        waiting: Batches that have arrived, and were not taken yet.
        refused: Batches that could not be read, or had another checksum.
        allocations: Times that a batch got new memory, because it was larger or results on the host
            were kept.
        open_peers: Senders now.
        closed_peers: Senders that have closed their end.
        lost_peers: Senders that have ended without it, or did not answer.
    """

    batches: int
    nbytes: int
    waiting: int
    refused: int
    allocations: int
    open_peers: int
    closed_peers: int
    lost_peers: int


class Receiver(Hub):
    """Takes batches that senders have sent, each by one copy from pinned memory.

    For example::

        with tdcopier.distributed.receiver(device="cuda", store=store) as rx:
            first = rx.next(timeout_s=60).wait()
            for batch in rx:
                learn(batch)

    Made by `receiver`. Iterating gives the batches on the device. Threads may share it. `with`
    closes it.
    """

    _what = "receiver"

    def __init__(
        self,
        options: Options,
        device: Any,
        slots: int | None,
        *,
        is_for_one: bool,
        allow_pickle: bool,
    ) -> None:
        """Begin to listen for senders, or for one."""
        super().__init__(options.peer_timeout_s)
        self._device, self._slots, self._allow_pickle = device, slots, allow_pickle
        start_copy(None, device)  # raises here, and not where a batch has come
        self._pinned = torch.device(device).type not in ("cpu", "meta")
        torch.empty(1, pin_memory=self._pinned)  # raises here, and not where senders come
        self._is_for_one = is_for_one
        self._batches = self._nbytes = self._refused = self._allocations = 0
        self._first, self._has_met = 0, False
        self._listener = Listener(options, self._meet, self._what)
        self._opened()

    @property
    def stats(self) -> ReceiverStats:
        """Counts since it was made."""
        self._check_process()
        with self._lock:
            open_peers = len(self._open_links())
            return ReceiverStats(
                self._batches,
                self._nbytes,
                sum(link.waiting for link in self._links),
                self._refused,
                self._allocations + sum(link.allocations for link in self._links),
                open_peers,
                self._closed_peers,
                self._lost_peers,
            )

    # ---- batches ---------------------------------------------------------------------------------

    def next(self, *, timeout_s: float | None = None) -> AsyncCopyHandle[Any]:
        """Return the copy of the next batch to the device, which has been started.

        Batches of one sender come in its order.

        Args:
            timeout_s: how long to wait for one; None: without limit.

        Raises:
            ChannelClosedError: this end is closed; or there is one sender, which has closed.
            PeerLostError: there is one sender, which has ended or does not answer.
            TimeoutError: no batch has come in time.
            ValueError: this batch cannot be read; for example it needs a pickle, and `allow_pickle`
                is false, or its checksum differs. The next one can be taken.
        """
        self._check_process()
        taken: list[Any] = []
        if not self._wait(lambda: self._take_into(taken), timeout_s):
            raise TimeoutError(f"no batch has come in {timeout_s:g} s")
        return self._start_copy(taken[1], Arrived(*taken[0]))

    def _start_copy(self, peer: str, arrived: Arrived) -> AsyncCopyHandle[Any]:
        try:
            parcel = arrived.parcel(allow_pickle=self._allow_pickle)
            handle = start_copy(parcel, self._device)
        except Exception as error:
            self._refused += 1
            if isinstance(error, ValueError):
                raise ValueError(f"batch {arrived.number} of {peer}: {error}") from None
            raise
        with self._lock:
            self._batches += 1
            self._nbytes += arrived.memory.nbytes
        return handle

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, until the channel is closed."""
        while True:
            try:
                handle = self.next()
            except ChannelClosedError:
                return
            yield handle.wait()

    def _take_into(self, taken: list[Any]) -> bool:
        """Append the next message, and whose it is, to a list. The senders take turns."""
        with self._lock:
            if not self._is_closed:
                for place in range(len(self._links)):
                    link = self._links[(self._first + place) % len(self._links)]
                    if link.take_into(taken):
                        self._first = (self._first + place + 1) % len(self._links)
                        taken.append(link.peer)
                        return True
            self._check_open(self._open_links())
        return False

    def _check_open(self, links: Sequence[Link]) -> None:
        if self._is_closed:
            raise ChannelClosedError("this receiver is closed")
        if not self._is_for_one:
            return
        if self._lost:
            raise PeerLostError(self._lost[0])
        if self._closed_peers and not links:
            raise ChannelClosedError("the sender has closed the channel")

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, *, timeout_s: float | None = None) -> None:
        """Tell the senders that no batch is taken any more, and drop those that have come.

        Results stay as they are. May be repeated.

        Args:
            timeout_s: how long to wait for the senders; None: until each has answered, or is lost.

        Raises:
            TimeoutError: a sender has not answered in time.
        """
        if self._is_forked():  # it has no end of it
            return
        deadline = Deadline(timeout_s)
        self._listener.close(timeout_s)
        with self._lock:
            self._is_closed = True
            for link in self._links:
                link.close()
        self._bell.ring()  # a call of another thread that waits ends
        if not self._wait(self._is_alone, deadline.left_s):
            raise TimeoutError(f"a sender has not answered in {timeout_s:g} s")
        self._end()

    def _state(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._open_links())} senders"
        return f"on {self._device}, {state}, {self._batches} batches"

    # ---- senders ---------------------------------------------------------------------------------

    def _meet(self, found: Found) -> None:
        with self._lock:
            if self._is_for_one and self._has_met:
                raise ConnectionError("this receiver has its sender already")
            link = Link(
                found,
                self._bell,
                self._peer_timeout_s,
                "sender",
                receives=True,
                slots=self._slots,
                pinned=self._pinned,
            )
            self._has_met = True
            self._links.append(link)
            if self._is_closed:
                link.close()
        self._bell.ring()

    def _is_left(self, link: Link) -> bool:
        return link.waiting > 0 and not self._is_closed

    def _note_removed(self, link: Link) -> None:
        self._allocations += link.allocations
