"""Memory of random programs: tensors with unique values on every place, and junk.

Every leaf is cut from one table of random bytes, so no two leaves of a program share bytes.
"""

from __future__ import annotations

import tempfile

import numpy as np
import torch
from scenario_world import READ_IN_PLACE

DEVICES = ("sim:0", "sim:1")
PLACES = ("cpu", *DEVICES)
JUNK = 0x77

_TABLE_BYTES = 1 << 16
_LARGEST_CUT_BYTES = 1 << 12
_MAPPED_BYTES = 1 << 21
_JUNK_BYTES = _LARGEST_CUT_BYTES  # at the beginning of a table


def bytes_of(leaf: torch.Tensor) -> bytes:
    """Returns the bytes of a tensor on the host, in the order of its indices."""
    if leaf.numel() == 0:
        return b""
    dense = torch.empty(leaf.shape, dtype=leaf.dtype).copy_(leaf.detach())
    return dense.reshape(-1).view(torch.uint8).numpy().tobytes()


class Tables:
    """The random bytes, on each place, that all leaves are cut from."""

    def __init__(self) -> None:
        random = np.random.default_rng(0).integers(0, 256, _TABLE_BYTES, dtype=np.uint8)
        random[:_JUNK_BYTES] = JUNK
        host = torch.from_numpy(random)
        self.by_place = {place: host.to(place) for place in PLACES}

    def cut(self, place: str, dtype: torch.dtype, begin: int, elements: int) -> torch.Tensor:
        """Returns flat values. A leaf larger than most repeats its first elements."""
        if elements * dtype.itemsize <= _LARGEST_CUT_BYTES:
            size = elements * dtype.itemsize
            return self.by_place[place][begin : begin + size].view(dtype)
        period = next(n for n in (16, 10, 6, 5, 4, 3, 2, 1) if elements % n == 0)
        first = self.cut(place, dtype, begin, period)
        return first.expand(elements // period, period)

    def junk(self, dtype: torch.dtype, place: str = "cpu") -> torch.Tensor:
        """Returns one element of junk."""
        return self.cut(place, dtype, 0, 1)[0]


class MappedFile:
    """Hands out pieces of a memory-mapped file, each once."""

    def __init__(self) -> None:
        with tempfile.NamedTemporaryFile() as file:  # the mapping outlives the file's name
            file.truncate(_MAPPED_BYTES)
            self._all = torch.from_file(
                file.name, shared=True, size=_MAPPED_BYTES, dtype=torch.uint8
            )
        self._begin = 0

    def take(self, size: int) -> torch.Tensor:
        begin, self._begin = self._begin, self._begin + -(-size // 64) * 64
        if self._begin > _MAPPED_BYTES:
            return torch.empty(size, dtype=torch.uint8)
        return self._all[begin : begin + size]


class Memory:
    """Hands out memory, and values that are unique in the program."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._next_begin = _JUNK_BYTES
        self._mapped = MappedFile()

    def overwrite_tensor(self, leaf: torch.Tensor) -> None:
        """Writes junk, on the current stream if it is on a device, without waiting."""
        if leaf.numel() == 0:
            return
        place = str(leaf.device)
        junk = self.tables.junk(leaf.dtype, place)
        leaf.copy_(junk.expand(leaf.shape), non_blocking=True)
        if place != "cpu":
            # It may be freed while this write is pending on a stream other than its own.
            leaf.record_stream(torch.sim.current_stream(place))

    def _unique(self, size: int) -> int:
        """Returns where a leaf of this many bytes begins in the tables."""
        size = min(size, _LARGEST_CUT_BYTES)
        begin = self._next_begin
        if begin + size > _TABLE_BYTES:
            begin = _JUNK_BYTES
        self._next_begin = begin + -(-size // 16) * 16
        return begin

    def memory(self, place: str, dtype: torch.dtype, elements: int, kind: str) -> torch.Tensor:
        """Allocates a flat, uninitialized tensor."""
        if place != "cpu":
            return torch.empty(elements, dtype=dtype, device=place)
        if kind == "mapped" and elements:
            return self._mapped.take(elements * dtype.itemsize).view(dtype)
        return torch.empty(elements, dtype=dtype, pin_memory=kind == "pinned")

    def fill(self, flat: torch.Tensor) -> torch.Tensor:
        """Writes unique values, on the current stream if on a device; returns them on the host."""
        if flat.numel() == 0:
            return torch.empty(0, dtype=flat.dtype)
        begin = self._unique(flat.numel() * flat.itemsize)
        values = self.tables.cut(str(flat.device), flat.dtype, begin, flat.numel())
        flat.view(values.shape).copy_(values, non_blocking=True)
        return self.tables.cut("cpu", flat.dtype, begin, flat.numel()).reshape(-1)

    def is_read_in_place(self, base: torch.Tensor, memory: str) -> bool:
        """Whether the device reads the memory in place, if one leaf spans all of it."""
        if base.device.type != "cpu" or memory != "pinned":
            return False
        return base.nbytes > 4 * (READ_IN_PLACE - 16)
