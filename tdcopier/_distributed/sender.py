"""The end of a channel that sends."""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any, NamedTuple

import torch
from typing_extensions import Self

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
from tdcopier._distributed.rendezvous import Options, join
from tdcopier._pack import Parcel, pack
from tdcopier._slabs import with_room


class SenderStats(NamedTuple):
    """Counts of one sender."""

    batches: int
    """That were started."""
    nbytes: int
    """Of their parcels."""
    waits: int
    """Calls that had to wait for a slot: the receiver was slower."""
    allocations: int
    """Times that a slot got new memory."""


class _Slot:
    """Memory of one message."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8, device="cpu")


class Sender:
    """Sends batches to one receiver, each as one message. Made by `sender`.

    Threads may share it. `with` closes it.
    """

    def __init__(self, options: Options, slots: int, *, checksum: bool) -> None:
        """Find the receiver."""
        found = join(options)
        self.peer = found.peer
        """The receiver's host, process and rank."""
        self._process, self._pair = os.getpid(), found.pair
        self.timeout_s, self._beat_s = options.timeout_s, found.timeout_s / BEATS
        self._checksum = checksum
        self._starting = threading.Lock()
        self._changed = threading.Condition()
        self._free: list[_Slot] = []
        self._slots, self._under_way = slots, 0
        self._lost: str | None = None
        self._is_closed = self._peer_closed = self._has_said_last = False
        self._room_of_receiver = 0
        self._batches = self._nbytes = self._waits = self._allocations = 0
        self._sending: queue.SimpleQueue[tuple[Any, torch.Tensor, _Slot | None, bool]] = (
            queue.SimpleQueue()
        )
        self._threads = [
            threading.Thread(target=target, name=f"tdcopier-{name}", daemon=True)
            for name, target in (("send", self._finish_sends), ("beat", self._hear))
        ]
        for thread in self._threads:
            thread.start()
        open_ends.add(self)

    @property
    def stats(self) -> SenderStats:
        """Counts since it was made."""
        return SenderStats(self._batches, self._nbytes, self._waits, self._allocations)

    def start(self, batch: Any, *, timeout_s: float | None = None) -> None:
        """Pack a batch, and start to send it.

        The batch may be changed as soon as the call returns. The call waits while all slots are
        full: the receiver takes batches more slowly.

        Args:
            batch: a leaf or any nesting of containers and leaves, as for `pack`; or a parcel.
            timeout_s: how long to wait for a slot; None: as long as the receiver is there.

        Raises:
            ChannelClosed: either end has closed the channel.
            PeerLost: the receiver has ended, or does not answer.
            TimeoutError: no slot became free in time; the batch is not sent.
            Exception: what `pack` raises; the batch is not sent.
        """
        self._check_process()
        with self._starting:
            slot = self._take_slot(timeout_s)
            try:
                nbytes = self._fill(slot, batch)
            except Exception:
                self._free.append(slot)
                raise
            self._send(slot, nbytes)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until the receiver's process has all batches.

        Raises:
            PeerLost: the receiver has ended, or does not answer.
            TimeoutError: that was not so in time.
        """
        with self._changed:
            self._wait_until(lambda: self._under_way <= 0, timeout_s)
            if self._lost is not None and not self._peer_closed:
                raise PeerLost(self._lost)

    def close(self, timeout_s: float | None = None) -> None:
        """Say that nothing follows, and wait until the receiver's process has all batches.

        May be repeated.

        Raises:
            PeerLost: the receiver has ended, or does not answer: batches may be lost.
            TimeoutError: it had not got them in time.
        """
        if self._process != os.getpid():  # a forked child, which has no end of it
            return
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            self._is_closed = True  # a call of another thread that waits for a slot ends
            self._changed.notify_all()
        with self._starting:
            self._say_last()
        open_ends.discard(self)
        if not has_ended(self._threads, lambda: self._lost is not None, end_s):
            raise TimeoutError(f"the receiver, {self.peer}, took no batch in {timeout_s:g} s")
        if self._lost is not None and not self._peer_closed:
            raise PeerLost(self._lost)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else "lost" if self._lost else "open"
        return f"<Sender to {self.peer}, {state}, {self._batches} batches>"

    def __reduce__(self) -> Any:
        raise TypeError("a Sender belongs to its process: make one in each")

    # ---- slots -----------------------------------------------------------------------------------

    def _take_slot(self, timeout_s: float | None) -> _Slot:
        with self._changed:
            self._check_open()
            if self._under_way >= self._slots:
                self._waits += 1
            self._wait_until(
                lambda: self._under_way < self._slots or self._peer_closed or self._is_closed,
                timeout_s,
            )
            self._check_open()
            return self._free.pop() if self._free else _Slot()

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise RuntimeError("this sender belongs to the process that forked this one")

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChannelClosed("this sender is closed")
        if self._peer_closed:
            raise ChannelClosed(f"the receiver, {self.peer}, has closed the channel")
        if self._lost is not None:
            raise PeerLost(self._lost)

    def _wait_until(self, is_so: Any, timeout_s: float | None) -> None:
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_so():
            if self._lost is not None:
                raise PeerLost(self._lost)
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"the receiver, {self.peer}, took no batch in {timeout_s:g} s")
            wait_a_piece(self._changed, left)

    # ---- messages --------------------------------------------------------------------------------

    def _fill(self, slot: _Slot, batch: Any) -> int:
        """Write a parcel to a slot; return its size."""

        def out(nbytes: int, device: torch.device) -> torch.Tensor | None:
            return self._memory(slot, nbytes, pinned=False) if device.type == "cpu" else None

        parcel = batch if isinstance(batch, Parcel) else pack(batch, out=out)
        nbytes = parcel.nbytes
        if isinstance(batch, Parcel) or parcel.device.type != "cpu":
            pinned = parcel.device.type != "cpu"
            self._memory(slot, nbytes, pinned=pinned).copy_(parcel._bytes)
        checksum = checksum_of(slot.memory[HEADER_BYTES:][:nbytes]) if self._checksum else 0
        Header(Kind.BATCH, nbytes, self._batches, checksum).write(slot.memory)
        return nbytes

    def _memory(self, slot: _Slot, nbytes: int, *, pinned: bool) -> torch.Tensor:
        if slot.memory.numel() < HEADER_BYTES + nbytes:
            slot.memory = new_memory(with_room(nbytes), pinned=pinned)
            self._allocations += 1
        return slot.memory[HEADER_BYTES : HEADER_BYTES + nbytes]

    def _send(self, slot: _Slot, nbytes: int) -> None:
        if nbytes > self._room_of_receiver:
            self._room_of_receiver = with_room(nbytes)
            self._enqueue(message(Kind.GROW, self._room_of_receiver))
        self._batches += 1
        self._nbytes += nbytes
        with self._changed:
            self._under_way += 1
        self._enqueue(slot.memory[: HEADER_BYTES + nbytes], slot)

    def _enqueue(
        self, memory: torch.Tensor, slot: _Slot | None = None, *, is_last: bool = False
    ) -> None:
        try:
            work = self._pair.send(memory)
        except RuntimeError as error:
            work = error
        self._sending.put((work, memory, slot, is_last))

    # ---- threads ---------------------------------------------------------------------------------

    def _finish_sends(self) -> None:
        """Wait for messages in their order; send a beat if there are none."""
        is_last = False
        while not is_last:
            slot: _Slot | None = None
            try:
                try:
                    work, _, slot, is_last = self._sending.get(timeout=self._beat_s)
                except queue.Empty:
                    work = self._pair.send(_BEAT)
                if isinstance(work, RuntimeError):
                    raise work
                Pair.sent(work)
            except RuntimeError as error:
                self._lose(error)
                return
            if slot is not None:
                with self._changed:
                    self._free.append(slot)
                    self._under_way -= 1
                    self._changed.notify_all()

    def _hear(self) -> None:
        """Wait for the receiver's beats, until it closes."""
        memory, kind = message(Kind.BEAT), Kind.BEAT
        try:
            while kind is not Kind.CLOSE:
                self._pair.receive(memory, self.timeout_s)
                kind = Header.read(memory).kind
        except (RuntimeError, ValueError) as error:
            self._lose(error)
            return
        with self._changed:
            self._peer_closed = True
            self._changed.notify_all()
        with self._starting:
            self._say_last()

    def _say_last(self) -> None:
        if not self._has_said_last:
            self._has_said_last = True
            self._enqueue(message(Kind.CLOSE), is_last=True)

    def _lose(self, error: Exception) -> None:
        with self._changed:
            if self._lost is None:
                self._lost = (
                    f"the receiver, {self.peer}, has ended or has not answered for "
                    f"{self.timeout_s:g} s: {first_line(error)}"
                )
            self._changed.notify_all()


_BEAT = message(Kind.BEAT)
