"""Copies whole storages between device memory and pinned host memory, all enqueued in the call."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tdcopier import _C
from tdcopier import _pinned_pool as pinned
from tdcopier._into import fill
from tdcopier._options import checked_options, options_for_filling
from tdcopier._progress import Progress

PACKED_BYTES = 256 * 1024
"""Storages up to this size are packed by the engine; larger ones are transferred from where they
are. `kMaxPackedLeafBytes` of the engine."""
GROUP_BYTES = 256 * 1024 * 1024
"""Transfers are enqueued in groups of about this size, as soon as a group has pinned memory: while
memory is pinned for the first time, the groups before are on their way."""
SCRATCH_BYTES = 32 * 1024 * 1024
"""Storages are gathered into device memory of at most this size, and small ones scattered from it.
It takes the link 0.6 ms, and the device's memory 20 us."""


class HostCopy:
    """The bytes of storages, on their way to pinned memory.

    Attributes:
        parts: a uint8 tensor for each storage, in pinned memory.
        handles: of the copies. Each fails at the call that makes it, or with the device.
    """

    def __init__(
        self,
        storages: list[torch.Tensor],
        sizes_bytes: list[int],
        progress: Progress,
        leased: Iterator[torch.Tensor] | None = None,
    ) -> None:
        """Enqueue copies of all storages, in their order, after the work on the current streams.

        Args:
            storages: a uint8 tensor over each.
            sizes_bytes: the length of each.
            progress: of the call, in bytes whose copies are enqueued.
            leased: pinned memory for those of more than `PACKED_BYTES`; None leases it.

        Raises:
            Exception: what kept a copy from being enqueued. Nothing needs to be undone: the engine
                keeps all memory that a device still reads or writes.
        """
        self.parts: list[torch.Tensor] = list(storages)
        self.handles: list[_C.AsyncCopyHandle[Any]] = []
        self._bytes_of_handles: list[int] = []
        sizes = sizes_bytes
        _C.reclaim()  # of the copy before, whose pinned memory can be leased again
        if leased is None:
            leased = leased_for(sizes)
        for group in groups_of(sizes, range(len(sizes)), GROUP_BYTES):
            self._start_small(storages, [i for i in group if sizes[i] <= PACKED_BYTES])
            self._start_large(storages, [i for i in group if sizes[i] > PACKED_BYTES], leased)
            progress.add(sum(sizes[i] for i in group))

    def _start_small(self, storages: list[torch.Tensor], which: list[int]) -> None:
        if not which:
            return
        options = checked_options(True, True, 16, SCRATCH_BYTES, True)
        handle = _C.start_copy([storages[i] for i in which], "cpu", options)
        self.handles.append(handle)
        self._bytes_of_handles.append(sum(storages[i].nbytes for i in which))
        for i, part in zip(which, handle._enqueued(), strict=True):
            self.parts[i] = part

    def _start_large(
        self, storages: list[torch.Tensor], which: list[int], leased: Iterator[torch.Tensor]
    ) -> None:
        if not which:
            return
        parts = list(itertools.islice(leased, len(which)))
        options = options_for_filling(True, False)  # large ones are only enqueued in the call
        handle = _C.start_copy_into([storages[i] for i in which], parts, fill, options, False)
        self.handles.append(handle)
        self._bytes_of_handles.append(sum(part.nbytes for part in parts))
        handle._enqueued()
        for i, part in zip(which, parts, strict=True):
            self.parts[i] = part

    def ready(self) -> bool:
        """Return whether all bytes have arrived, or a copy has failed. Never blocks."""
        return all(handle.ready() for handle in self.handles)

    def wait(self, progress: Progress) -> None:
        """Block until all bytes have arrived.

        Raises:
            Exception: the device's error; every time.
        """
        handles = self.handles  # another thread or a signal handler may wait, too
        for handle, n_bytes in zip(handles, self._bytes_of_handles, strict=False):
            handle.get()
            progress.add(n_bytes)
        self.handles = []  # they refer to the pinned memory

    def before_overwriting(self) -> None:
        """Make the current streams wait until the device has read all storages."""
        for handle in list(self.handles):
            handle.wait_staged()


def leased_for(sizes_bytes: list[int]) -> Iterator[torch.Tensor]:
    """Return pinned memory for all of more than `PACKED_BYTES`: the engine finds it for others."""
    large = [size for size in sizes_bytes if size > PACKED_BYTES]
    return iter(pinned.lease(large)) if large else iter(())


def copy_to_device(
    parts: Sequence[torch.Tensor | None],
    sizes_bytes: Sequence[int],
    devices: Sequence[torch.device],
    progress: Progress,
    *,
    block: bool,
) -> list[torch.Tensor | None]:
    """Copy bytes from pinned memory to new memory of the current streams.

    Those streams wait for the copies. The engine keeps the pinned memory until it has been read.

    Args:
        parts: uint8 tensors; None is passed through.
        sizes_bytes: the length of each.
        devices: the device of each.
        progress: of the call, in bytes whose copies are enqueued, or have arrived with `block`.
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
    copies += [(group, staged) for group in groups_of(sizes, small, SCRATCH_BYTES)]
    for which, options in copies:
        handle = _C.start_copy_into(
            [parts[i] for i in which], [made[i] for i in which], fill, options, False
        )
        handle.wait()  # for the staging of small ones, which then use the same scratch memory
        if block:
            handle.get()
        progress.add(sum(sizes[i] for i in which))
    return made


def groups_of(sizes: Sequence[int], which: Sequence[int], most_bytes: int) -> Iterator[list[int]]:
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
