"""Copies whole storages between device memory and pinned host memory, all enqueued in the call."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tdcopier import _C
from tdcopier import _pinned_pool as pinned
from tdcopier._options import checked_options, options_for_filling

PACKED_BYTES = 256 * 1024
"""Storages up to this size are packed by the engine; larger ones are transferred from where they
are. `kMaxPackedLeafBytes` of the engine."""
GROUP_BYTES = 256 * 1024 * 1024
"""Transfers are enqueued in groups of about this size, as soon as a group has pinned memory: while
memory is pinned for the first time, the groups before are on their way."""
_SLOT_BYTES = 64
"""Alignment of the storages in a chunk."""
_SCRATCH_BYTES = 32 * 1024 * 1024
"""Storages are gathered into device memory of at most this size, and small ones scattered from it.
It takes the link 0.6 ms, and the device's memory 20 us."""
_CHUNKS_AHEAD = 2
_GATHERED_BYTES = 8 * 1024 * 1024
"""Storages up to this size are gathered by `ScratchCopy`; larger ones are worth a transfer each."""


class HostCopy:
    """The bytes of storages, on their way to pinned memory.

    Attributes:
        parts: a uint8 tensor for each storage, in pinned memory.
        handles: of the copies. Each fails at the call that makes it, or with the device.
    """

    def __init__(self, storages: list[torch.Tensor], sizes_bytes: list[int]) -> None:
        """Enqueue copies of all storages, in their order, after the work on the current streams.

        Args:
            storages: a uint8 tensor over each.
            sizes_bytes: the length of each.

        Raises:
            Exception: what kept a copy from being enqueued. Nothing needs to be undone: the engine
                keeps all memory that a device still reads or writes.
        """
        self.parts: list[torch.Tensor] = list(storages)
        self.handles: list[_C.AsyncCopyHandle[Any]] = []
        sizes = sizes_bytes
        _C.reclaim()  # of the copy before, whose pinned memory can be leased again
        large = [size for size in sizes if size > PACKED_BYTES]
        leased = iter(pinned.lease(large)) if large else iter(())
        for group in _groups(sizes, range(len(sizes)), GROUP_BYTES):
            self._start_small(storages, [i for i in group if sizes[i] <= PACKED_BYTES])
            self._start_large(storages, [i for i in group if sizes[i] > PACKED_BYTES], leased)

    def _start_small(self, storages: list[torch.Tensor], which: list[int]) -> None:
        if not which:
            return
        options = checked_options(True, True, 16, _SCRATCH_BYTES, True)
        handle = _C.start_copy([storages[i] for i in which], "cpu", options)
        self.handles.append(handle)
        for i, part in zip(which, handle._enqueued(), strict=True):
            self.parts[i] = part

    def _start_large(
        self, storages: list[torch.Tensor], which: list[int], leased: Iterator[torch.Tensor]
    ) -> None:
        if not which:
            return
        parts = list(itertools.islice(leased, len(which)))
        options = options_for_filling(True, False)  # large ones are only enqueued in the call
        handle = _C.start_copy_into([storages[i] for i in which], parts, options, False)
        self.handles.append(handle)
        handle._enqueued()
        for i, part in zip(which, parts, strict=True):
            self.parts[i] = part

    def ready(self) -> bool:
        """Return whether all bytes have arrived, or a copy has failed. Never blocks."""
        return all(handle.ready() for handle in self.handles)

    def wait(self) -> None:
        """Block until all bytes have arrived.

        Raises:
            Exception: the device's error; every time.
        """
        for handle in self.handles:
            handle.get()
        self.handles = []  # they refer to the pinned memory

    def before_overwriting(self) -> None:
        """Make the current streams wait until the device has read all storages."""
        for handle in list(self.handles):
            handle.wait_staged()


class ScratchCopy:
    """The bytes of storages, of which the device gathers all but the largest into scratch memory.

    A gather reads at the speed of the device's memory, so later work soon may overwrite what has
    been gathered; and there is a transfer for each chunk, not for each storage. It has the methods
    of `HostCopy`.
    """

    def __init__(self, storages: list[torch.Tensor], sizes_bytes: list[int]) -> None:
        """Enqueue copies of all storages after the work on the current streams.

        These wait until the device has gathered the small storages.

        Args:
            storages: a uint8 tensor over each.
            sizes_bytes: the length of each.

        Raises:
            torch.OutOfMemoryError: a device has no room for the scratch memory.
            Exception: what kept a copy from being enqueued.
        """
        self.parts = list(storages)
        self._copies: list[HostCopy] = []
        self._are_gathered: list[tuple[torch.device, torch.Event]] = []
        large: list[int] = []
        for device, numbers in _by_device(storages).items():
            small = [i for i in numbers if sizes_bytes[i] <= PACKED_BYTES]
            medium = [i for i in numbers if PACKED_BYTES < sizes_bytes[i] <= _GATHERED_BYTES]
            large += [i for i in numbers if sizes_bytes[i] > _GATHERED_BYTES]
            current = torch.accelerator.current_stream(device)
            # The stream of the transfers that are started while `current` is current: its order is
            # all that scratch memory needs.
            reading = _C.copy_stream(device, "from_device")
            reading.wait_stream(current)
            try:
                with reading:
                    aside = _chunks(storages, sizes_bytes, small, _SCRATCH_BYTES)
                    if aside:
                        self._are_gathered.append(_event_on(device))
                        current.wait_event(self._are_gathered[-1][1])
                for chunk in aside:
                    self._send(chunk)
                self._send_in_turns(storages, sizes_bytes, medium, reading)
            except BaseException:
                current.wait_stream(reading)  # nothing keeps what it may still gather
                raise
        self._large = HostCopy([storages[i] for i in large], [sizes_bytes[i] for i in large])
        for i, part in zip(large, self._large.parts, strict=True):
            self.parts[i] = part

    def _send_in_turns(
        self,
        storages: list[torch.Tensor],
        sizes_bytes: list[int],
        numbers: list[int],
        reading: torch.Stream,
    ) -> None:
        """Gather chunks ahead of their transfers, two at a time in the same scratch memory."""
        padding = _SCRATCH_BYTES // PACKED_BYTES * _SLOT_BYTES
        ahead: collections.deque[_Chunk] = collections.deque()
        for group in _groups(sizes_bytes, numbers, _SCRATCH_BYTES - padding):
            free = None
            if len(ahead) == _CHUNKS_AHEAD:
                oldest = ahead.popleft()
                self._send(oldest)
                free = oldest.scratch
            with reading:
                ahead.append(_Chunk(storages, sizes_bytes, group, free, _SCRATCH_BYTES))
        if ahead:
            with reading:
                self._are_gathered.append(_event_on(reading.device))
        for chunk in ahead:
            self._send(chunk)

    def _send(self, chunk: _Chunk) -> None:
        copy = HostCopy([chunk.memory], [chunk.memory.nbytes])
        chunk.distribute(copy.parts[0], self.parts)
        self._copies.append(copy)

    def ready(self) -> bool:
        """Return whether all bytes have arrived on the host, or a copy has failed."""
        return all(copy.ready() for copy in [*self._copies, self._large])

    def wait(self) -> None:
        """Block until all bytes have arrived on the host."""
        for copy in [*self._copies, self._large]:
            copy.wait()

    def before_overwriting(self) -> None:
        """Make the current streams wait until the device has read all storages."""
        _wait_for(self._are_gathered)
        self._large.before_overwriting()


class DeviceCopy:
    """The bytes of storages, copied on their devices first, so that nothing waits for the link.

    It has the methods of `HostCopy`.
    """

    def __init__(self, storages: list[torch.Tensor], sizes_bytes: list[int]) -> None:
        """Enqueue copies of all storages after the work on the current streams, and let these wait.

        Args:
            storages: a uint8 tensor over each.
            sizes_bytes: the length of each.

        Raises:
            torch.OutOfMemoryError: a device has no room for a copy of all storages.
            Exception: what kept a copy from being enqueued.
        """
        by_device = _by_device(storages)
        chunks = [
            chunk
            for numbers in by_device.values()
            for chunk in _chunks(storages, sizes_bytes, numbers, GROUP_BYTES)
        ]
        self._are_made = [_event_on(device) for device in by_device]
        memory = [chunk.memory for chunk in chunks]
        self._copy = HostCopy(memory, [each.nbytes for each in memory])
        self.parts = list(storages)
        for chunk, on_host in zip(chunks, self._copy.parts, strict=True):
            chunk.distribute(on_host, self.parts)

    def ready(self) -> bool:
        """Return whether all bytes have arrived on the host, or a copy has failed."""
        return self._copy.ready()

    def wait(self) -> None:
        """Block until all bytes have arrived on the host."""
        self._copy.wait()

    def before_overwriting(self) -> None:
        """Make the current streams wait for the copies on the devices.

        Those that were current in the call do so already.
        """
        _wait_for(self._are_made)


class _Chunk:
    """Storages of a device, gathered one after the other on its current stream.

    Attributes:
        scratch: a uint8 tensor, which may be used again when `memory` has been read.
        memory: the part of it that has the bytes. The engine keeps it until it has been read, and
            it keeps what it is gathered from.
    """

    def __init__(
        self,
        storages: list[torch.Tensor],
        sizes_bytes: list[int],
        group: list[int],
        scratch: torch.Tensor | None = None,
        least_bytes: int = 0,
    ) -> None:
        """Enqueue the gather of a group, by number, into memory that is large enough.

        Without `scratch`, that is new memory, of `least_bytes` or more.
        """
        self._group = group
        self._sizes = [sizes_bytes[i] for i in group]
        steps = (-(-size // _SLOT_BYTES) * _SLOT_BYTES for size in self._sizes)
        *self._begins, end = itertools.accumulate(steps, initial=0)
        sources = [storages[i] for i in group]
        if scratch is None:
            n_bytes = max(end, least_bytes)
            scratch = torch.empty(n_bytes, dtype=torch.uint8, device=sources[0].device)
        self.scratch = scratch
        self.memory = scratch[:end]
        self.memory.gathered_from = sources  # type: ignore[attr-defined]
        _C.pack_bytes(sources, self.memory, self._begins)

    def distribute(self, on_host: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """Set the parts of the group to parts of a copy of the chunk on the host."""
        made = _C.parts_of_bytes(on_host, self._begins, self._sizes)
        for i, part in zip(self._group, made, strict=True):
            parts[i] = part


def _chunks(
    storages: list[torch.Tensor], sizes_bytes: list[int], numbers: list[int], most_bytes: int
) -> list[_Chunk]:
    groups = _groups(sizes_bytes, numbers, most_bytes)
    return [_Chunk(storages, sizes_bytes, group) for group in groups]


def _by_device(storages: list[torch.Tensor]) -> dict[torch.device, list[int]]:
    """Return the numbers of the storages on each device."""
    found: dict[torch.device, list[int]] = {}
    for i, storage in enumerate(storages):
        found.setdefault(storage.device, []).append(i)
    return found


def _event_on(device: torch.device) -> tuple[torch.device, torch.Event]:
    """Return a device, and an event that its current stream reaches after its present work."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return device, event


def _wait_for(events: list[tuple[torch.device, torch.Event]]) -> None:
    """Make the current streams wait for the events of their devices."""
    for device, event in events:
        torch.accelerator.current_stream(device).wait_event(event)


def copy_to_device(
    parts: Sequence[torch.Tensor | None],
    sizes_bytes: Sequence[int],
    devices: Sequence[torch.device],
    *,
    block: bool,
) -> list[torch.Tensor | None]:
    """Copy bytes from pinned memory to new memory of the current streams.

    Those streams wait for the copies. The engine keeps the pinned memory until it has been read.

    Args:
        parts: uint8 tensors; None is passed through.
        sizes_bytes: the length of each.
        devices: the device of each.
        block: also wait on the host until the bytes have arrived.

    Raises:
        torch.OutOfMemoryError: the device has too little memory.
        Exception: what kept a copy from being enqueued.
    """
    made: list[torch.Tensor | None] = [
        None if part is None else torch.empty(size, dtype=torch.uint8, device=device)
        for part, size, device in zip(parts, sizes_bytes, devices, strict=True)
    ]
    sizes = [0 if part is None else size for part, size in zip(parts, sizes_bytes, strict=True)]
    large = [i for i, size in enumerate(sizes) if size > PACKED_BYTES]
    small = [i for i, size in enumerate(sizes) if 0 < size <= PACKED_BYTES]
    in_place = options_for_filling(True, False).reading_pinned_in_place()
    staged = options_for_filling(True, True)
    copies = [(large, in_place)] if large else []
    copies += [(group, staged) for group in _groups(sizes, small, _SCRATCH_BYTES)]
    for which, options in copies:
        handle = _C.start_copy_into(
            [parts[i] for i in which], [made[i] for i in which], options, False
        )
        handle.wait()  # for the staging of small ones, which then use the same scratch memory
        if block:
            handle.get()
    return made


def _groups(sizes: Sequence[int], which: Sequence[int], most_bytes: int) -> Iterator[list[int]]:
    """Yield consecutive numbers of storages, each time at least one, and up to `most_bytes`."""
    group: list[int] = []
    total = 0
    for i in which:
        if group and total + sizes[i] > most_bytes:
            yield group
            group, total = [], 0
        group.append(i)
        total += sizes[i]
    if group:
        yield group
