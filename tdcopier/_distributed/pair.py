"""Two processes that send messages to each other, over a gloo group of their own.

A group of many ranks ends when one of them dies, and no other can join it. A group of two ends
alone. Gloo holds a message back until the other end has memory for it, so the number of those
memories limits what is under way. A receive that has timed out closes the pair, and everything that
waits on it raises: so each end sends a beat when it has sent nothing else, and times its receives.
"""

from __future__ import annotations

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
_MAGIC = b"tdch"
_VERSION = 1
_FIELDS = struct.Struct("<4sBBHIQQ")
_FOREVER = datetime.timedelta(days=3650)


class Kind(enum.IntEnum):
    """What a message is."""

    BATCH = 1
    GROW = 2  # the next batch needs memory of `nbytes`
    BEAT = 3
    CLOSE = 4  # nothing follows


class Header(NamedTuple):
    """The begin of a message."""

    kind: Kind
    nbytes: int = 0
    """Of the parcel that follows; of `GROW`, of one that will."""
    number: int = 0
    """Of the batch, from 0."""
    checksum: int = 0
    """Of the parcel; 0: it has none."""

    def write(self, memory: torch.Tensor) -> None:
        """Write it to the first bytes of a message."""
        _FIELDS.pack_into(
            memory.numpy().data,
            0,
            _MAGIC,
            _VERSION,
            self.kind,
            0,
            self.checksum,
            self.nbytes,
            self.number,
        )

    @classmethod
    def read(cls, memory: torch.Tensor) -> Header:
        """Read it from the first bytes of a message.

        Raises:
            ValueError: these bytes are none, or there are fewer than it says.
        """
        magic, version, kind, _, checksum, nbytes, number = _FIELDS.unpack_from(memory.numpy().data)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError("a message of a channel begins in another way: another version?")
        too_long = kind == Kind.BATCH and HEADER_BYTES + nbytes > memory.numel()
        if kind not in Kind.__members__.values() or too_long:
            raise ValueError("a message of a channel has a damaged header")
        return cls(Kind(kind), nbytes, number, checksum)


def checksum_of(memory: torch.Tensor) -> int:
    """Return a checksum that is not 0."""
    return zlib.crc32(memory.numpy().data) or 1


class Address(NamedTuple):
    """Where a process can be reached by others, as `torch.distributed` takes it."""

    host: str | None = None
    interface: str | None = None


class Pair:
    """One end of a pair. Sends, and receives, may be under way at once; each in one thread."""

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

    def send(self, memory: torch.Tensor) -> Any:
        """Start to send bytes, which must stay as they are; `sent` waits for the result."""
        return self._group.send([memory], self._other, 0)

    @staticmethod
    def sent(work: Any) -> None:
        """Wait until bytes have been sent.

        If the pair is closed when a part of them has been, gloo never returns: let no other thread
        wait for one that does this.

        Raises:
            RuntimeError: the pair is closed.
        """
        work.wait(_FOREVER)

    def receive(self, memory: torch.Tensor, timeout_s: float) -> None:
        """Wait for a message of at most the size of the memory.

        Raises:
            RuntimeError: it has not come in time, or the pair is closed. It is closed then.
        """
        self._group.recv([memory], self._other, 0).wait(datetime.timedelta(seconds=timeout_s))


def _device(gloo: Any, address: Address) -> Any:
    if address.interface is not None:
        return gloo.create_device(interface=address.interface)
    if address.host is not None:
        return gloo.create_device(hostname=address.host)
    return gloo.create_default_device()
