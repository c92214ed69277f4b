"""The end of a channel that receives, from one sender or from all that come."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

from tdcopier._C import AsyncCopyHandle
from tdcopier._copy import start_copy
from tdcopier._distributed.ends import (
    BEATS,
    ChannelClosed,
    PeerLost,
    first_line,
    has_ended,
    message,
    new_memory,
    open_ends,
    wait_a_piece,
)
from tdcopier._distributed.pair import HEADER_BYTES, Header, Kind, Pair, checksum_of
from tdcopier._distributed.rendezvous import Found, Listener, Options
from tdcopier._pack import Parcel

_LOOKS_S, _BLOCKED_S, _HELD_S = 0.0005, 0.1, 0.05
"""Between two looks at slots that are in use; at slots with batches that are not taken; and until a
slot that is in use is replaced."""
_FIRST_BYTES = 64 * 1024


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


class _Slot:
    """Memory for one message. It is free if that was taken, and nothing else has the storage."""

    def __init__(self, nbytes: int, *, pinned: bool) -> None:
        self.memory = new_memory(nbytes, pinned=pinned)
        self._uses = self._count()
        self.is_full = False

    def _count(self) -> int:
        count: int = torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata)
        return count

    def is_free(self) -> bool:
        return not self.is_full and self._count() == self._uses


class _Arrived(NamedTuple):
    """A batch in a slot."""

    link: _Link
    slot: _Slot
    header: Header


class Receiver:
    """Takes batches that senders have sent, each by one copy from pinned memory.

    Made by `receiver`. Iterating gives the batches on the device. Threads may share it. `with`
    closes it.
    """

    def __init__(
        self,
        options: Options,
        device: Any,
        slots: int,
        *,
        is_for_one: bool,
        allow_pickle: bool,
    ) -> None:
        """Begin to listen for senders, or for one."""
        self.timeout_s, self._process = options.timeout_s, os.getpid()
        self._device, self._slots, self._allow_pickle = device, slots, allow_pickle
        self._pinned = torch.device(device).type not in ("cpu", "meta")
        self._is_for_one = is_for_one
        self._changed = threading.Condition()
        self._arrived: deque[_Arrived] = deque()
        self._links: list[_Link] = []
        self._ending: list[_Link] = []
        """Links with senders that are gone, whose threads may be at their last lines."""
        self._is_closed = False
        self._batches = self._nbytes = self._refused = self._allocations = 0
        self._closed_peers = 0
        self._has_met = False
        self._lost: list[str] = []
        self._listener = Listener(options, self._meet)
        open_ends.add(self)

    @property
    def stats(self) -> ReceiverStats:
        """Counts since it was made."""
        with self._changed:
            return ReceiverStats(
                self._batches,
                self._nbytes,
                len(self._arrived),
                self._refused,
                self._allocations,
                len(self._links),
                self._closed_peers,
                len(self._lost),
            )

    @property
    def peers(self) -> list[str]:
        """Host and process of each sender."""
        with self._changed:
            return [link.peer for link in self._links]

    @property
    def problems(self) -> list[str]:
        """Why senders were lost, or could not join, in words."""
        with self._changed:
            return [*self._lost, *self._listener.failures]

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
        arrived = self._take(timeout_s)
        link, slot, header = arrived
        try:
            whole = slot.memory[HEADER_BYTES : HEADER_BYTES + header.nbytes]
            if header.checksum and checksum_of(whole) != header.checksum:
                raise ValueError("the bytes are not those that were sent: their checksum differs")
            parcel = Parcel.from_buffer(whole, allow_pickle=self._allow_pickle)
            handle = start_copy(parcel, self._device)
        except Exception as error:
            with self._changed:
                self._refused += 1
            if isinstance(error, ValueError):
                raise ValueError(f"batch {header.number} of {link.peer}: {error}") from None
            raise
        finally:
            slot.is_full = False
        with self._changed:
            self._batches += 1
            self._nbytes += header.nbytes
        return handle

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, until the channel is closed."""
        while True:
            try:
                handle = self.next()
            except ChannelClosed:
                return
            yield handle.wait()

    def _take(self, timeout_s: float | None) -> _Arrived:
        if self._process != os.getpid():
            raise RuntimeError("this receiver belongs to the process that forked this one")
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._arrived:
                self._check_open()
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"no batch has come in {timeout_s:g} s")
                wait_a_piece(self._changed, left)
            if self._is_closed:
                self._check_open()
            arrived = self._arrived.popleft()
            self._changed.notify_all()
        return arrived

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
        if self._process != os.getpid():  # a forked child, which has no end of it
            return
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        open_ends.discard(self)
        self._listener.close()
        with self._changed:
            self._is_closed = True
            while self._arrived:
                self._arrived.popleft().slot.is_full = False
            links = [*self._links, *self._ending]
            self._changed.notify_all()
        for link in links:
            link.close()
        if not all(link.has_ended(end_s) for link in links):
            raise TimeoutError(f"a sender has not answered in {timeout_s:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"{len(self._links)} senders"
        return f"<Receiver on {self._device}, {state}, {self._batches} batches>"

    def __reduce__(self) -> Any:
        raise TypeError("a Receiver belongs to its process: make one in each")

    # ---- for links -------------------------------------------------------------------------------

    def _meet(self, found: Found) -> None:
        link = _Link(self, found)
        with self._changed:
            is_asked_for = not (self._is_for_one and self._has_met)
            is_late = self._is_closed or not is_asked_for
            self._has_met = True
            self._links.append(link)
        link.start()
        if is_late:
            link.close()
        if self._is_for_one and is_asked_for:
            self._listener.close()


class _Link:
    """One sender: its pair, its slots, and the threads that receive and send beats."""

    def __init__(self, receiver: Receiver, found: Found) -> None:
        self.peer = found.peer
        self._receiver, self._pair, self._beat_s = receiver, found.pair, found.timeout_s / BEATS
        self._changed = receiver._changed
        self._room = _FIRST_BYTES
        self._used: list[_Slot] = []
        self._closing, self._is_lost = threading.Event(), False
        self._threads = [
            threading.Thread(target=target, name=f"tdcopier-{name}", daemon=True)
            for name, target in (("receive", self._receive), ("beat", self._beat))
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Tell the sender that nothing more is taken."""
        self._closing.set()

    def is_alive(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def has_ended(self, end_s: float | None) -> bool:
        return has_ended(self._threads, lambda: self._is_lost, end_s)

    def _receive(self) -> None:
        number, lost = 0, None
        try:
            while True:
                slot = self._slot()
                self._pair.receive(slot.memory, self._receiver.timeout_s)
                header = Header.read(slot.memory)
                if header.kind is Kind.CLOSE:
                    break
                if header.kind is Kind.GROW:
                    self._room, self._used = header.nbytes, []
                elif header.kind is Kind.BATCH:
                    if header.number != number:
                        raise ValueError(f"batch {header.number} came, and not {number}")
                    number += 1
                    self._hand_over(_Arrived(self, slot, header))
        except (RuntimeError, ValueError, MemoryError) as error:
            lost = (
                f"the sender, {self.peer}, has ended or has not answered for "
                f"{self._receiver.timeout_s:g} s: {first_line(error)}"
            )
        with self._changed:
            receiver = self._receiver
            receiver._links.remove(self)
            receiver._ending = [link for link in receiver._ending if link.is_alive()] + [self]
            if lost is None:
                receiver._closed_peers += 1
            else:
                receiver._lost.append(lost)
                self._is_lost = True
            self._changed.notify_all()
        self._closing.set()  # now the sender is told, and may ask for the counts

    def _hand_over(self, arrived: _Arrived) -> None:
        with self._changed:
            if not self._receiver._is_closed:
                arrived.slot.is_full = True
                self._receiver._arrived.append(arrived)
                self._changed.notify_all()

    def _slot(self) -> _Slot:
        """Return memory that nothing reads, when there is some."""
        begin = time.monotonic()
        receiver = self._receiver
        while True:
            for slot in self._used:
                if slot.is_free():
                    return slot
            if len(self._used) < receiver._slots:
                break
            full = sum(slot.is_full for slot in self._used)
            if not full and time.monotonic() - begin > _HELD_S:  # results on the host are kept
                self._used.pop(0)
                break
            with self._changed:
                self._changed.wait(_LOOKS_S if full < receiver._slots else _BLOCKED_S)
        slot = _Slot(self._room, pinned=receiver._pinned)
        with self._changed:
            receiver._allocations += 1
        self._used.append(slot)
        return slot

    def _beat(self) -> None:
        """Send beats until this end closes, and say so."""
        with contextlib.suppress(RuntimeError):  # the other thread learns it too
            while not self._closing.wait(self._beat_s):
                Pair.sent(self._pair.send(_BEAT))
            Pair.sent(self._pair.send(_CLOSE))


_BEAT, _CLOSE = message(Kind.BEAT), message(Kind.CLOSE)
