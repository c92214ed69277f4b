"""Two processes that send messages to each other, over a gloo group of their own.

A group of many ranks ends when one of them dies, and no other can join it. A group of two ends
alone. Gloo writes a message to memory that the other end has given before, without a thread of
Python there; the first bytes of that memory then say that it comes. Waiting for gloo itself with a
time limit closes the pair when that has passed, and without one cannot be interrupted: so nothing
waits for a message that has not come.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import struct
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_dist: Any = torch.distributed  # which does not export what it has to type checkers

HEADER_BYTES = 64
"""Before each parcel, which then begins at a multiple of this too."""
STAMP_BYTES = 8
"""After each parcel."""
_VERSION = 2
_FIELDS = struct.Struct("<4sBBHIIQQQQQ4s")
_STAMP = struct.Struct("<Q")
_BEGIN, _END = b"tdch", b"hcdt"
_NEVER_SENT, _NOTHING = 15, torch.empty(1, dtype=torch.uint8, device="cpu")
"""A tag of messages that never come, and memory for them."""


class Kind(enum.IntEnum):
    """What a message is."""

    BATCH = 1
    GROW = 2  # in place of a batch that needs `room`
    STATE = 3
    CLOSE = 4  # a state that is the last


class Header(NamedTuple):
    """The begin of a message; a state has nothing else."""

    kind: Kind
    number: int = 0
    """Of the batch, or the state, from 0."""
    nbytes: int = 0
    """Of the parcel that follows."""
    checksum: int = 0
    """Of the parcel; 0: it has none."""
    heard: int = 0
    """States of the other end that this one has read."""
    room: int = 0
    """Of a receiver: bytes of a parcel that it has memory for. Of `GROW`: those that are needed."""
    begin: int = 0
    """The first message for which there is that room."""
    messages: int = 0
    """Messages that a sender has sent; those that a receiver has had memory for."""

    def write(self, memory: memoryview) -> None:
        """Write it to the first bytes of a message."""
        _FIELDS.pack_into(
            memory,
            0,
            _BEGIN,
            _VERSION,
            self.kind,
            0,
            self.checksum,
            self.heard,
            self.number,
            self.nbytes,
            self.room,
            self.begin,
            self.messages,
            _END,
        )

    @classmethod
    def read(cls, memory: memoryview) -> Header:
        """Read it from the first bytes of a message.

        Raises:
            ValueError: these bytes are none, or there are fewer than it says.
        """
        found = _FIELDS.unpack_from(memory)
        mark, version, kind, _, checksum, heard, number, nbytes, room, begin, messages, end = found
        if (mark, version, end) != (_BEGIN, _VERSION, _END):
            raise ValueError("a message of a channel begins in another way: another version?")
        if kind not in _KINDS or (kind == Kind.BATCH and message_bytes(nbytes) > len(memory)):
            raise ValueError("a message of a channel has a damaged header")
        return cls(_KINDS[kind], number, nbytes, checksum, heard, room, begin, messages)


_KINDS = {int(kind): kind for kind in Kind}


def message_bytes(nbytes: int) -> int:
    """Return the size of a message with a parcel of that size."""
    return HEADER_BYTES + nbytes + STAMP_BYTES


def write_stamp(memory: memoryview, header: Header) -> None:
    """Write the last bytes of a batch's message, which say that it is whole."""
    _STAMP.pack_into(memory, HEADER_BYTES + header.nbytes, header.number + 1)


def clear(memory: memoryview) -> None:
    """Write to memory that no message has come."""
    memory[:HEADER_BYTES] = bytes(HEADER_BYTES)


def has_come(memory: memoryview) -> bool:
    """Return whether a message seems to be there, so that waiting for it does not take long."""
    if not memory[0] or bytes(memory[_FIELDS.size - 4 : _FIELDS.size]) != _END:
        return False
    _, _, kind, _, _, _, number, nbytes, *_ = _FIELDS.unpack_from(memory)
    if kind != Kind.BATCH or message_bytes(nbytes) > len(memory):  # read() says what is wrong
        return True
    stamp: int = _STAMP.unpack_from(memory, HEADER_BYTES + nbytes)[0]
    return stamp == int(number) + 1


def checksum_of(memory: torch.Tensor) -> int:
    """Return a checksum that is not 0."""
    return zlib.crc32(memory.numpy().data) or 1


class Address(NamedTuple):
    """Where a process can be reached by others, as `torch.distributed` takes it."""

    host: str | None = None
    interface: str | None = None

    def check(self) -> None:
        """Raise a ValueError if this host has no such address."""
        try:
            _device(_dist.ProcessGroupGloo, self)
        except RuntimeError as error:
            raise ValueError(f"host or interface: {error}") from None


class Pair:
    """One end of a pair. Threads may share it."""

    def __init__(
        self, store: Store, name: str, rank: int, address: Address, timeout_s: float
    ) -> None:
        """Wait for the other end.

        Args:
            store: of the processes.
            name: of the pair in the store, used only once.
            rank: 0 or 1.
            address: of this process.
            timeout_s: how long to wait.

        Raises:
            RuntimeError: it has not come.
        """
        gloo = _dist.ProcessGroupGloo
        options = gloo._Options()
        options._threads = 1
        options._timeout = datetime.timedelta(seconds=timeout_s)
        options._devices = [_device(gloo, address)]
        self._group = gloo(_dist.PrefixStore(name, store), rank, 2, options)
        self._other = 1 - rank

    def send(self, memory: torch.Tensor, tag: int) -> Any:
        """Start to send bytes, which must stay as they are until the result's `wait`.

        Raises:
            RuntimeError: the pair is closed.
        """
        return self._group.send([memory], self._other, tag)

    def receive(self, memory: torch.Tensor, tag: int) -> Any:
        """Give memory for the next message with a tag, which may be smaller.

        Raises:
            RuntimeError: the pair is closed.
        """
        return self._group.recv([memory], self._other, tag)

    def is_closed(self) -> bool:
        """Return whether it is closed, or the other end has closed it."""
        try:
            self.receive(_NOTHING, _NEVER_SENT)
        except RuntimeError:
            return True
        return False

    def close(self) -> None:
        """Send nothing more, and write to no memory that was given."""
        with contextlib.suppress(RuntimeError):  # which says that it has closed the pair
            self.receive(_NOTHING, _NEVER_SENT).wait(datetime.timedelta(milliseconds=1))


def finish(work: Any, timeout_s: float) -> None:
    """Wait for a message.

    Raises:
        RuntimeError: it has not been sent, or received, in time, or the pair is closed. It is
            closed then.
    """
    work.wait(datetime.timedelta(seconds=timeout_s))


def _device(gloo: Any, address: Address) -> Any:
    if address.interface is not None:
        return gloo.create_device(interface=address.interface)
    if address.host is not None:
        return gloo.create_device(hostname=address.host)
    return gloo.create_default_device()
