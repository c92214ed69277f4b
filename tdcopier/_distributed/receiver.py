"""The end of a channel that receives, from one sender or from all that come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from tdcopier._C import AsyncCopyHandle
from tdcopier._copy import start_copy
from tdcopier._distributed.ends import ChannelClosed, PeerLost
from tdcopier._distributed.hub import Hub
from tdcopier._distributed.incoming import Arrived, Incoming
from tdcopier._distributed.rendezvous import Found, Listener, Options


class ReceiverStats(NamedTuple):
    """Counts of one receiver."""

    batches: int
    """That were taken."""
    nbytes: int
    """Of their parcels."""
    waiting: int
    """Batches that have arrived, and were not taken yet."""
    refused: int
    """Batches that could not be read, or had another checksum."""
    allocations: int
    """Times that a slot got new memory: it was too small, or results on the host were kept."""
    open_peers: int
    """Senders now."""
    closed_peers: int
    """Senders that have closed their end."""
    lost_peers: int
    """Senders that have ended without it, or did not answer."""


class Receiver(Hub):
    """Takes batches that senders have sent, each by one copy from pinned memory.

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
        super().__init__(options.timeout_s)
        self._device, self._slots, self._allow_pickle = device, slots, allow_pickle
        self._pinned = torch.device(device).type not in ("cpu", "meta")
        torch.empty(1, pin_memory=self._pinned)  # raises here, and not where senders come
        self._is_for_one = is_for_one
        self._arrived: deque[Arrived] = deque()
        self._batches = self._nbytes = self._refused = self._allocations = 0
        self._has_met = False
        self._begin()
        self._listener = Listener(options, self._meet)

    @property
    def stats(self) -> ReceiverStats:
        """Counts since it was made."""
        self._check_process()
        with self._lock:
            return ReceiverStats(
                self._batches,
                self._nbytes,
                len(self._arrived),
                self._refused,
                self._allocations + sum(link.allocations for link in self._links),
                len(self._links),
                self._closed_peers,
                len(self._lost),
            )

    # ---- batches ---------------------------------------------------------------------------------

    def next(self, timeout_s: float | None = None) -> AsyncCopyHandle[Any]:
        """Return the copy of the next batch to the device, which has been started.

        Batches of one sender come in its order.

        Args:
            timeout_s: how long to wait for one; None: without limit.

        Raises:
            ChannelClosed: this end is closed; or there is one sender, which has closed.
            PeerLost: there is one sender, which has ended or does not answer.
            TimeoutError: no batch has come in time.
            ValueError: this batch cannot be read; for example it needs a pickle, and `allow_pickle`
                is false, or its checksum differs. The next one can be taken.
        """
        self._check_process()
        taken: list[Arrived] = []

        def take() -> bool:
            if self._has_arrived():
                taken.append(self._arrived.popleft())
            return bool(taken)

        try:
            if not self._wait(take, timeout_s):
                raise TimeoutError(f"no batch has come in {timeout_s:g} s")
            return self._start_copy(taken[0])
        finally:
            for arrived in taken:
                arrived.free()

    def _start_copy(self, arrived: Arrived) -> AsyncCopyHandle[Any]:
        number, nbytes = arrived.header.number, arrived.header.nbytes
        try:
            parcel = arrived.parcel(allow_pickle=self._allow_pickle)
            handle = start_copy(parcel, self._device)
        except Exception as error:
            self._refused += 1
            if isinstance(error, ValueError):
                raise ValueError(f"batch {number} of {arrived.peer}: {error}") from None
            raise
        with self._lock:
            self._batches += 1
            self._nbytes += nbytes
        return handle

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, until the channel is closed."""
        while True:
            try:
                handle = self.next()
            except ChannelClosed:
                return
            yield handle.wait()

    def _has_arrived(self) -> bool:
        if not self._is_closed:  # also if one has come: the senders go on meanwhile
            for link in self._links:
                link.receive(self._arrived)
        if not self._arrived or self._is_closed:
            self._check_open()
        return bool(self._arrived)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChannelClosed("this receiver is closed")
        if self._is_for_one and self._lost:
            raise PeerLost(self._lost[0])
        if self._is_for_one and self._has_met and not self._links:
            raise ChannelClosed("the sender has closed the channel")

    # ---- the end ---------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Tell the senders that no batch is taken any more, and drop those that have come.

        Results stay as they are. May be repeated.

        Raises:
            TimeoutError: a sender has not answered in time.
        """
        if self._is_forked():  # it has no end of it
            return
        self._listener.close(timeout_s)
        with self._lock:
            self._is_closed = True
            self._arrived.clear()
            for link in self._links:
                link.close()
        if not self._wait(self._is_alone, timeout_s):
            raise TimeoutError(f"a sender has not answered in {timeout_s:g} s")
        self._end()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._links)} senders"
        return f"<Receiver on {self._device}, {state}, {self._batches} batches>"

    # ---- senders ---------------------------------------------------------------------------------

    def _meet(self, found: Found) -> None:
        link = Incoming(found, self.timeout_s, self._lock, self._slots, pinned=self._pinned)
        with self._lock:
            is_asked_for = not (self._is_for_one and self._has_met)
            self._has_met = True
            self._links.append(link)
            if self._is_closed or not is_asked_for:
                link.close()
        if self._is_for_one and is_asked_for:
            self._listener.close()

    def _turn(self) -> None:
        for link in list(self._links):
            link.turn()
            link.receive(self._arrived)
            if link.peer_closes:
                link.check_whole()
                link.close()
            if self._removed(link):
                self._allocations += link.allocations
