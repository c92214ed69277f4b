"""Copies storages to the host by way of chunks that their device gathers."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tdcopier import _C
from tdcopier._park.transfers import (
    GROUP_BYTES,
    PACKED_BYTES,
    SCRATCH_BYTES,
    HostCopy,
    groups_of,
    leased_for,
)
from tdcopier._progress import Progress

_SLOT_BYTES = 64
"""Alignment of the storages in a chunk."""
_MOST_PADDING_BYTES = SCRATCH_BYTES // PACKED_BYTES * _SLOT_BYTES
"""Of a chunk of storages that are larger than `PACKED_BYTES`."""
_CHUNKS_AHEAD = 2
_GATHERED_BYTES = 8 * 1024 * 1024
"""Storages up to this size are gathered by `ScratchCopy`; larger ones are worth a transfer each."""


class ScratchCopy:
    """The bytes of storages, of which the device gathers all but the largest into scratch memory.

    A gather reads at the speed of the device's memory, so later work soon may overwrite what has
    been gathered; and there is a transfer for each chunk, not for each storage. It has the methods
    of `HostCopy`.
    """

    def __init__(
        self, storages: list[torch.Tensor], sizes_bytes: list[int], progress: Progress
    ) -> None:
        """Enqueue copies of all storages after the work on the current streams.

        These wait until the device has gathered the small storages.

        Args:
            storages: a uint8 tensor over each.
            sizes_bytes: the length of each.
            progress: of the call, in bytes whose copies are enqueued.

        Raises:
            torch.OutOfMemoryError: a device has no room for the scratch memory.
            Exception: what kept a copy from being enqueued.
        """
        self.parts = list(storages)
        self._copies: list[HostCopy] = []
        self._reads: list[_C.DeviceAccess] = []
        small: dict[torch.device, list[_Layout]] = {}
        medium: dict[torch.device, list[_Layout]] = {}
        large: list[int] = []
        for device, numbers in _by_device(storages).items():
            chosen = [i for i in numbers if sizes_bytes[i] <= PACKED_BYTES]
            small[device] = _layouts(sizes_bytes, chosen, SCRATCH_BYTES)
            chosen = [i for i in numbers if PACKED_BYTES < sizes_bytes[i] <= _GATHERED_BYTES]
            medium[device] = _layouts(sizes_bytes, chosen, SCRATCH_BYTES - _MOST_PADDING_BYTES)
            large += [i for i in numbers if sizes_bytes[i] > _GATHERED_BYTES]
        sizes_of_large = [sizes_bytes[i] for i in large]
        layouts = [each for device in small for each in (*small[device], *medium[device])]
        leased = leased_for([*(each.end for each in layouts), *sizes_of_large])
        for device in small:
            current = torch.accelerator.current_stream(device)
            # The stream of the transfers that are started while `current` is current: its order is
            # all that scratch memory needs. It is never current itself while Python code runs, of
            # which some may be a signal handler's, or a finalizer.
            reading = _C.copy_stream(device, "from_device")
            reading.wait_stream(current)
            try:
                aside = [_Chunk(storages, layout, reading) for layout in small[device]]
                if aside:
                    self._reads.append(_C.DeviceAccess(reading))
                    self._reads[-1].order()
                for chunk in aside:
                    self._send(chunk, leased, progress)
                self._send_in_turns(storages, medium[device], reading, leased, progress)
            except BaseException:
                current.wait_stream(reading)  # nothing keeps what it may still gather
                raise
        self._large = HostCopy([storages[i] for i in large], sizes_of_large, progress, leased)
        for i, part in zip(large, self._large.parts, strict=True):
            self.parts[i] = part

    def _send_in_turns(
        self,
        storages: list[torch.Tensor],
        layouts: list[_Layout],
        reading: torch.Stream,
        leased: Iterator[torch.Tensor],
        progress: Progress,
    ) -> None:
        """Gather chunks ahead of their transfers, into the scratch memory of earlier ones."""
        ahead: collections.deque[_Chunk] = collections.deque()
        for number, layout in enumerate(layouts):
            if number < _CHUNKS_AHEAD:
                n_bytes = max(each.end for each in layouts[number::_CHUNKS_AHEAD])
                scratch = _C.empty_bytes(n_bytes, reading)
            else:
                earlier = ahead.popleft()
                self._send(earlier, leased, progress)
                scratch = earlier.scratch
            ahead.append(_Chunk(storages, layout, reading, scratch))
        if ahead:
            self._reads.append(_C.DeviceAccess(reading))
        for chunk in ahead:
            self._send(chunk, leased, progress)

    def _send(self, chunk: _Chunk, leased: Iterator[torch.Tensor], progress: Progress) -> None:
        copy = HostCopy([chunk.memory], [chunk.memory.nbytes], progress, leased)
        chunk.distribute(copy.parts[0], self.parts)
        self._copies.append(copy)

    def ready(self) -> bool:
        """Return whether all bytes have arrived on the host, or a copy has failed."""
        return all(copy.ready() for copy in [*self._copies, self._large])

    def wait(self, progress: Progress) -> None:
        """Block until all bytes have arrived on the host."""
        for copy in [*self._copies, self._large]:
            copy.wait(progress)

    def before_overwriting(self) -> None:
        """Make the current streams wait until the device has read all storages."""
        for read in self._reads:
            read.order()
        self._large.before_overwriting()


class DeviceCopy:
    """The bytes of storages, copied on their devices first, so that nothing waits for the link.

    It has the methods of `HostCopy`.
    """

    def __init__(
        self, storages: list[torch.Tensor], sizes_bytes: list[int], progress: Progress
    ) -> None:
        """Enqueue copies of all storages after the work on the current streams, and let these wait.

        Args:
            storages: a uint8 tensor over each.
            sizes_bytes: the length of each.
            progress: of the call, in bytes whose copies are enqueued.

        Raises:
            torch.OutOfMemoryError: a device has no room for a copy of all storages.
            Exception: what kept a copy from being enqueued.
        """
        chunks = []
        self._reads = []
        for device, numbers in _by_device(storages).items():
            current = torch.accelerator.current_stream(device)
            for layout in _layouts(sizes_bytes, numbers, GROUP_BYTES):
                chunks.append(_Chunk(storages, layout, current, record=True))
            self._reads.append(_C.DeviceAccess(current))
        memory = [chunk.memory for chunk in chunks]
        self._copy = HostCopy(memory, [each.nbytes for each in memory], progress)
        self.parts = list(storages)
        for chunk, on_host in zip(chunks, self._copy.parts, strict=True):
            chunk.distribute(on_host, self.parts)

    def ready(self) -> bool:
        """Return whether all bytes have arrived on the host, or a copy has failed."""
        return self._copy.ready()

    def wait(self, progress: Progress) -> None:
        """Block until all bytes have arrived on the host."""
        self._copy.wait(progress)

    def before_overwriting(self) -> None:
        """Make the current streams wait for the copies on the devices.

        Those that were current in the call do so already.
        """
        for read in self._reads:
            read.order()


class _Layout(NamedTuple):
    """Where storages are in a chunk, by number in `group`."""

    group: list[int]
    sizes_bytes: list[int]
    begins: list[int]
    end: int


def _layouts(sizes_bytes: list[int], numbers: list[int], most_bytes: int) -> list[_Layout]:
    """Return chunks of at most `most_bytes` for storages, not counting the alignment."""
    made = []
    for group in groups_of(sizes_bytes, numbers, most_bytes):
        sizes = [sizes_bytes[i] for i in group]
        steps = (-(-size // _SLOT_BYTES) * _SLOT_BYTES for size in sizes)
        *begins, end = itertools.accumulate(steps, initial=0)
        made.append(_Layout(group, sizes, begins, end))
    return made


class _Chunk:
    """Storages of a device, gathered one after the other on a stream.

    Attributes:
        scratch: a uint8 tensor, which may be used again when `memory` has been read.
        memory: the part of it that has the bytes.
    """

    def __init__(
        self,
        storages: list[torch.Tensor],
        layout: _Layout,
        stream: torch.Stream,
        scratch: torch.Tensor | None = None,
        *,
        record: bool = False,
    ) -> None:
        """Enqueue the gather.

        Args:
            storages: all, of which the layout has some.
            layout: where they are gathered.
            stream: where it is enqueued, and new memory is allocated.
            scratch: memory that is large enough; None is for new one.
            record: let the allocator keep the memory of the storages until it has been read. If
                not, or if that is not the allocator's, the chunk keeps it, and the engine the chunk
                until that has been read.
        """
        self._layout = layout
        sources = [storages[i] for i in layout.group]
        self.scratch = _C.empty_bytes(layout.end, stream) if scratch is None else scratch
        self.memory = self.scratch[: layout.end]
        self.memory.gathered_from = sources  # type: ignore[attr-defined]
        if _C.pack_bytes(sources, self.memory, layout.begins, stream, record):
            del self.memory.gathered_from  # type: ignore[attr-defined]

    def distribute(self, on_host: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Set the parts of the group to parts of a copy of the chunk on the host."""
        layout = self._layout
        made = _C.parts_of_bytes(on_host, layout.begins, layout.sizes_bytes)
        for i, part in zip(layout.group, made, strict=True):
            parts[i] = part


def _by_device(storages: list[torch.Tensor]) -> dict[torch.device, list[int]]:
    """Return the numbers of the storages on each device."""
    found: dict[torch.device, list[int]] = {}
    for i, storage in enumerate(storages):
        found.setdefault(storage.device, []).append(i)
    return found
