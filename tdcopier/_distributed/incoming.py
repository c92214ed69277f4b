"""The link with a sender, and the memory that is given for its messages."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from tdcopier._distributed.link import BATCHES, Link
from tdcopier._distributed.pair import (
    HEADER_BYTES,
    Header,
    Kind,
    checksum_of,
    clear,
    finish,
    has_come,
    message_bytes,
)
from tdcopier._distributed.rendezvous import Found
from tdcopier._pack import Parcel

_FIRST_BYTES = 64 * 1024
_FEWEST, _MOST, _BYTES_OF_MANY = 4, 16, 8 << 20
"""Slots of a sender, if there is no number: many while they take no more bytes than that."""


class _Slot:
    """Memory for one message. It is free if that was taken, and nothing else has the storage."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.view = memoryview(b"")
        self.work: Any = None
        """Of the message that it was given for, until it has come."""
        self.is_full = False
        self._uses = self._count()

    def resize(self, nbytes: int, *, pinned: bool) -> None:
        """Get other memory, for a parcel of that size."""
        size = message_bytes(nbytes)
        # Not empty: where the memory had a message of an earlier channel, its end would still be.
        self.memory = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        self.view = self.memory.numpy().data
        self._uses = self._count()

    def is_in_use(self) -> bool:
        """Return whether the device, or a result on the host, may still read it."""
        return self._count() > self._uses

    def _count(self) -> int:
        count: int = torch._C._storage_Use_Count(self.memory.untyped_storage()._cdata)
        return count


class Arrived(NamedTuple):
    """A message with a parcel, in a slot."""

    peer: str
    slot: _Slot
    header: Header

    def parcel(self, *, allow_pickle: bool) -> Parcel:
        """Return the parcel.

        Raises:
            ValueError: it cannot be read.
        """
        whole = self.slot.memory[HEADER_BYTES : HEADER_BYTES + self.header.nbytes]
        if self.header.checksum and checksum_of(whole) != self.header.checksum:
            raise ValueError("the bytes are not those that were sent: their checksum differs")
        return Parcel.from_buffer(whole, allow_pickle=allow_pickle)

    def free(self) -> None:
        """Let the next message come, as soon as nothing else reads this one."""
        self.slot.is_full = False


class Incoming(Link):
    """The link with one sender, and its slots."""

    def __init__(
        self,
        found: Found,
        timeout_s: float,
        lock: AbstractContextManager[Any],
        slots: int | None,
        *,
        pinned: bool,
        what: str = "sender",
    ) -> None:
        super().__init__(found, timeout_s, what, lock)
        self.allocations = 0
        self._most_slots = slots
        self._away: deque[_Slot] = deque()
        """Those whose messages have come, until memory is given again."""
        self._given: deque[_Slot] = deque()
        """Those that gloo writes to, in their order."""
        self._pinned, self._room, self._begin = pinned, _FIRST_BYTES, 0
        self._count = self._told_count = self._messages = self._next = 0
        self.receive(deque())

    def receive(self, arrived: deque[Arrived]) -> None:
        """Take the messages that have come, and give memory for further ones."""
        try:
            while self._given and has_come(self._given[0].view):
                slot = self._given.popleft()
                self._away.append(slot)
                work, slot.work = slot.work, None
                finish(work, self.timeout_s)
                self._messages += 1
                self._read(slot, arrived)
            self._give_memory()
        except (RuntimeError, ValueError, MemoryError) as error:
            self.lose(error)

    def check_whole(self) -> None:
        """Lose the sender, which has closed, unless all that it has sent is here."""
        if not self.is_closing and self._messages != self.their.messages:
            self.lose(ValueError(f"{self._messages} of {self.their.messages} messages have come"))

    def _read(self, slot: _Slot, arrived: deque[Arrived]) -> None:
        header = Header.read(slot.view)
        self.is_heard(header.heard)
        if header.kind is Kind.GROW:
            if header.room > self._room:
                self._room, self._begin = header.room, self._count
            return
        if header.kind is not Kind.BATCH or header.number < self._next:
            raise ValueError(f"{header.kind.name} {header.number} came, not batch {self._next}")
        self._next = header.number + 1
        if not self.is_closing:
            slot.is_full = True
            arrived.append(Arrived(self.peer, slot, header))

    def _give_memory(self) -> None:
        if self.is_closing or self.peer_closes or self.has_ended:
            return
        most = self._most_slots or min(
            max(_BYTES_OF_MANY // message_bytes(self._room), _FEWEST), _MOST
        )
        for slot in [each for each in self._away if not each.is_full]:
            if not slot.is_in_use():
                self._away.remove(slot)
                if len(self._given) + len(self._away) < most:  # else they are larger now, and fewer
                    self._give_slot(slot)
        while len(self._given) + len(self._away) < most:
            self._give_slot(_Slot())
        # Results on the host may be kept for long, where the device is about to end.
        if not (self._given or self._pinned or any(slot.is_full for slot in self._away)):
            self._away.popleft()
            self._give_slot(_Slot())
        # The sender is told of several together, before it has used those that it knows of.
        new, left = self._count - self._told_count, self._told_count - self._messages
        if new and left <= most // 2 and (new >= most // 4 or left <= 1):
            self._told_count = self._count
            self.tell(room=self._room, begin=self._begin, messages=self._count)

    def _give_slot(self, slot: _Slot) -> None:
        if len(slot.view) < message_bytes(self._room):
            slot.resize(self._room, pinned=self._pinned)
            self.allocations += 1
        clear(slot.view)
        slot.work = self.pair.receive(slot.memory, BATCHES)
        self._given.append(slot)
        self._count += 1
