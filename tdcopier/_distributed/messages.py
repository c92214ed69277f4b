"""Messages with a parcel: those that are sent, and one that has arrived."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import torch

from tdcopier import _C
from tdcopier._pack import Parcel


class Arrived(NamedTuple):
    """A message that has come."""

    memory: torch.Tensor
    """Its bytes, and no more."""
    number: int
    """Among those of its sender, from 0."""
    checksum: int
    """That the sender has made; 0: none."""

    def parcel(self, *, allow_pickle: bool) -> Parcel:
        """Return the parcel.

        Raises:
            ValueError: it cannot be read.
        """
        if self.checksum and checksum_of(self.memory) != self.checksum:
            raise ValueError("the bytes are not those that were sent: their checksum differs")
        return Parcel.from_buffer(self.memory, allow_pickle=allow_pickle)


class Packer:
    """Packs batches into memory that is used again when their messages were written."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._pools = {False: _C.MessagePool(slots, pinned=False)}
        """By whether they are pinned: that of batches on a device is."""

    @property
    def allocations(self) -> int:
        """Times that a message got new memory."""
        return sum(pool.allocations for pool in self._pools.values())

    def pack(self, batch: Any) -> Parcel:
        """Return a parcel on the host, of its own."""
        with torch.inference_mode(False):  # the memory is used in other modes too
            parcel = batch if isinstance(batch, Parcel) else _C.pack(batch, self._pools[False])
            if parcel is not batch and parcel.device.type == "cpu":
                return parcel
            pinned = parcel.device.type != "cpu"
            if pinned not in self._pools:
                self._pools[pinned] = _C.MessagePool(self._slots, pinned=pinned)
            memory = self._pools[pinned].take(parcel.nbytes)
            memory.copy_(parcel._bytes)
            return Parcel.from_buffer(memory, allow_pickle=True)  # it is of this process


def checksum_of(memory: torch.Tensor) -> int:
    """Return a checksum that is not 0."""
    return zlib.crc32(memory.numpy().data) or 1
