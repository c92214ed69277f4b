"""Copies whole storages between device memory and pinned host memory, all enqueued in the call."""

from __future__ import annotations

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
"""Small storages are scattered from device memory of at most this size."""


class HostCopy:
    """The bytes of storages, on their way to pinned memory.

    Attributes:
        parts: a uint8 tensor for each storage, in pinned memory.
        handles: of the copies. Each fails at the call that makes it, or with the device.
    """

    def __init__(
        self, storages: list[torch.Tensor], sizes_bytes: list[int], *, small_first: bool
    ) -> None:
        """Enqueue copies of all storages, in their order, after the work on the current streams.

        Args:
            storages: a uint8 tensor over each.
            sizes_bytes: the length of each.
            small_first: enqueue the copies of all small storages before those of the large ones,
                and let the current streams wait until the device has gathered them.

        Raises:
            Exception: what kept a copy from being enqueued. Nothing needs to be undone: the engine
                keeps all memory that a device still reads or writes.
        """
        self.parts: list[torch.Tensor] = list(storages)
        self.handles: list[_C.AsyncCopyHandle[Any]] = []
        sizes = sizes_bytes
        _C.reclaim()  # of the copy before, whose pinned memory can be leased again
        if small_first:
            small = [i for i, size in enumerate(sizes) if size <= PACKED_BYTES]
            self._start_small(storages, small)
            for handle in self.handles:
                handle.wait_staged()
        large = [size for size in sizes if size > PACKED_BYTES]
        leased = iter(pinned.lease(large)) if large else iter(())
        for group in _groups(sizes, range(len(sizes)), GROUP_BYTES):
            if not small_first:
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
        by_device: dict[torch.device, list[int]] = {}
        for i, storage in enumerate(storages):
            by_device.setdefault(storage.device, []).append(i)
        groups: list[list[int]] = []
        places: list[tuple[list[int], list[int]]] = []  # in its chunk: begins and sizes
        chunks: list[Any] = []
        for device, numbers in by_device.items():
            for group in _groups(sizes_bytes, numbers, GROUP_BYTES):
                sizes = [sizes_bytes[i] for i in group]
                steps = (-(-size // _SLOT_BYTES) * _SLOT_BYTES for size in sizes)
                *begins, end = itertools.accumulate(steps, initial=0)
                chunk: Any = torch.empty(end, dtype=torch.uint8, device=device)
                # The engine keeps the chunk until it has been read, and the chunk what it is of.
                chunk.parts = [storages[i] for i in group]
                _C.pack_bytes(chunk.parts, chunk, begins)
                chunks.append(chunk)
                places.append((begins, sizes))
                groups.append(group)
        self._are_made = [_event_on(device) for device in by_device]
        self._copy = HostCopy(chunks, [chunk.nbytes for chunk in chunks], small_first=False)
        self.parts = list(storages)
        for on_host, group, (begins, sizes) in zip(self._copy.parts, groups, places, strict=True):
            for i, part in zip(group, _C.parts_of_bytes(on_host, begins, sizes), strict=True):
                self.parts[i] = part

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
        for device, is_made in self._are_made:
            torch.accelerator.current_stream(device).wait_event(is_made)


def _event_on(device: torch.device) -> tuple[torch.device, torch.Event]:
    """Return a device, and an event that its current stream reaches after its present work."""
    event = torch.Event(device)
    event.record(torch.accelerator.current_stream(device))
    return device, event


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
