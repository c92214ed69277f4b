"""The link with a receiver: what is sent has memory there."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from tdcopier._distributed.link import BATCHES, Link
from tdcopier._distributed.pair import (
    HEADER_BYTES,
    Header,
    Kind,
    checksum_of,
    finish,
    message_bytes,
    write_stamp,
)
from tdcopier._distributed.rendezvous import Found
from tdcopier._pack import Parcel, pack
from tdcopier._slabs import with_room


class Outgoing(Link):
    """The link with a receiver."""

    def __init__(
        self,
        found: Found,
        timeout_s: float,
        lock: AbstractContextManager[Any],
        what: str = "receiver",
    ) -> None:
        super().__init__(found, timeout_s, what, lock)
        self.messages = 0
        """That were sent."""
        self._grows: list[Any] = []

    def may_send(self, nbytes: int = 0) -> bool:
        """Return whether the receiver has given memory for the next message, with such a parcel."""
        their = self.their
        has_room = self.messages >= their.begin and their.room >= nbytes
        return self.messages < their.messages and (has_room or not nbytes)

    def may_send_or_grows(self, nbytes: int) -> bool:
        """Return the same. If there is less memory, use it up: the receiver then gives more."""
        if self.may_send() and not self.may_send(nbytes):
            self._grows.clear()
        while self.may_send() and not self.may_send(nbytes):
            memory = torch.zeros(message_bytes(0), dtype=torch.uint8, device="cpu")
            header = Header(Kind.GROW, room=with_room(nbytes), heard=self.say_heard())
            header.write(memory.numpy().data)
            self._grows.append((memory, self.send(memory)))
        return self.may_send(nbytes)

    def send(self, memory: torch.Tensor) -> Any:
        """Start to send a message; return what `finish` waits for. Needs no lock."""
        self.messages += 1
        try:
            return self.pair.send(memory, BATCHES)
        except RuntimeError as error:
            self.lose(error)

    def finish(self, work: Any) -> None:
        """Wait until gloo has read a message. There is memory for it, so that is not long.

        Needs no lock.
        """
        if work is None or self.lost is not None:  # then the pair is closed
            return
        try:
            finish(work, self.timeout_s)
        except RuntimeError as error:
            self.lose(error)

    def lose(self, error: Exception) -> None:
        with self.lock:
            self.hear()  # it may have closed
            if not self.peer_closes:
                super().lose(error)


class Message:
    """Memory for a message with a parcel."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.nbytes = 0
        """Of the parcel."""
        self.allocations = 0
        self._view = memoryview(b"")

    def fill(self, batch: Any) -> None:
        """Write a parcel."""

        def out(nbytes: int, device: torch.device) -> torch.Tensor | None:
            return self._parcel(nbytes, pinned=False) if device.type == "cpu" else None

        with torch.inference_mode(False):  # the memory is used in other modes too
            parcel = batch if isinstance(batch, Parcel) else pack(batch, out=out)
            self.nbytes = parcel.nbytes
            if isinstance(batch, Parcel) or parcel.device.type != "cpu":
                pinned = parcel.device.type != "cpu"
                self._parcel(self.nbytes, pinned=pinned).copy_(parcel._bytes)

    def _parcel(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        if len(self._view) < message_bytes(nbytes):
            size = message_bytes(with_room(nbytes))
            self.memory = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            self._view = self.memory.numpy().data
            self.allocations += 1
        return self.memory[HEADER_BYTES : HEADER_BYTES + nbytes]

    def parcel(self) -> torch.Tensor:
        """Return the bytes of the parcel."""
        return self.memory[HEADER_BYTES : HEADER_BYTES + self.nbytes]

    def whole(self, number: int, *, heard: int = 0, checksum: bool = False) -> torch.Tensor:
        """Return the message, with its header and its end."""
        checked = checksum_of(self.parcel()) if checksum else 0
        header = Header(Kind.BATCH, number, self.nbytes, checked, heard)
        header.write(self._view)
        write_stamp(self._view, header)
        return self.memory[: message_bytes(self.nbytes)]
