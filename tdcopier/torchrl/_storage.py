"""Storages that gather the rows of a batch directly into the memory that is sent."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorStorage

from tdcopier import _copy
from tdcopier._copy import Device
from tdcopier._rows.gather import Whole, start_gather
from tdcopier._rows.request import RowIndex
from tdcopier.torchrl._sampling import current
from tdcopier.torchrl._to_device import with_index


class _Packed(TensorStorage):  # type: ignore[misc]
    """Reads rows for both storages. torchrl's code decides what is stored, and how."""

    def __init__(
        self, max_size: int, *, sample_device: Device | None = None, **options: Any
    ) -> None:
        """Args:
            max_size: number of rows.
            sample_device: gather samples directly to this device; needs a
                `PackedTensorDictReplayBuffer`. Rows that are read in any other way stay on the
                host.
            **options: those of torchrl's storage.

        Raises:
            ValueError: `compilable=True`, because a compiler cannot trace the gather.
        """
        if options.get("compilable"):
            raise ValueError(
                f"{type(self).__name__} cannot be compilable: use torchrl's storage and ToDevice"
            )
        self.sample_device = None if sample_device is None else with_index(sample_device)
        self._last = _LastRead()
        self._writes = 0
        super().__init__(max_size, **options)

    def attach(self, buffer: Any) -> None:
        """Called by the buffer that uses the storage.

        Raises:
            TypeError: `sample_device` is set, and the buffer cannot take samples on a device.
        """
        wanted = self.sample_device is not None and isinstance(buffer, ReplayBuffer)
        if wanted and not takes_samples_on_a_device(buffer):
            raise TypeError(
                f"sample_device={str(self.sample_device)!r} needs a PackedTensorDictReplayBuffer; "
                f"in a {type(buffer).__name__}, leave it out and append ToDevice"
            )
        super().attach(buffer)

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Store rows, as torchrl does."""
        self._writes += 1
        super().set(cursor, data, set_cursor=set_cursor)

    def _changes(self) -> tuple[int, Any]:
        """Return a value that differs after each change, in shared memory by any process."""
        return self._writes, getattr(self, "_mutation_revision", None)

    def __getitem__(self, index: Any) -> Any:
        """Return rows as `get` does, but on the host."""
        changes = self._changes()
        rows = self._read(index)
        self._last.keep(index, rows, changes)  # a sampler of slices reads here, then the buffer
        return rows

    def get(self, index: Any) -> Any:
        """Return rows, as torchrl's storage does.

        Rows given by integers in tensors, arrays, lists and pairs of them are gathered into new
        memory, which is pinned if there is a device. For views (a slice, one row), masks and keys,
        torchrl reads.
        """
        now = current.sampling
        rows = self._last.take(index, self._changes())
        if self.sample_device is None or now is None or now.storage is not self or now.is_read:
            return self._read(index) if rows is None else rows
        now.is_read = True
        now.devices.add(self.sample_device)
        numbers = self._row_index(index) if rows is None else None
        if numbers is not None:
            beside = {key: Whole(tensor) for key, tensor in now.tensors().items()}
            handle = start_gather((self._rows(), beside), numbers, self.sample_device)
            rows, now.moved = handle.wait()  # the rows have been read; the transfer is in flight
            return rows
        is_view = rows is None
        if is_view:
            rows = super().get(index)
        handle = _copy.start_copy((rows, now.tensors()), self.sample_device)
        if is_view:
            handle.wait_staged()  # a device may read a pinned storage in place
        rows, now.moved = handle.wait()
        return rows

    def _read(self, index: Any) -> Any:
        numbers = self._row_index(index)
        if numbers is None:
            return super().get(index)
        rows = start_gather(self._rows(), numbers, "cpu").get()
        if is_tensor_collection(rows) and self._rows().device is None:
            rows.clear_device_()
        return rows

    def _rows(self) -> Any:
        """Return all rows of the storage, in use or not."""
        return self._storage

    def _row_index(self, index: Any) -> RowIndex | None:
        """Return the rows that an index selects among those in use; None if torchrl reads them."""
        initialized: bool = self.initialized
        if not initialized or not _is_on_the_host(self) or not _is_plain(self._rows()):
            return None
        in_use: torch.Size = self.shape
        parts = index if isinstance(index, tuple) else (index,)
        if not 1 <= len(parts) <= min(2, len(in_use)):
            return None
        found: list[torch.Tensor] = []
        for part, size in zip(parts, in_use, strict=False):
            numbers = _wrapped(part, size)
            if numbers is None:
                return None
            found.append(numbers)
        if len(found) == 1:
            return RowIndex(found[0], 1, True, (), found[0], False)
        try:
            numbers = (found[0] * in_use[1] + found[1]).contiguous()
        except RuntimeError:
            return None  # torchrl says which shapes cannot be broadcast together
        return RowIndex(numbers, 2, True, (), tuple(found), False)


class PackedLazyTensorStorage(_Packed, LazyTensorStorage):  # type: ignore[misc]
    """torchrl's `LazyTensorStorage`, whose samples native threads gather into packed memory.

    The rows are the same as torchrl's. They are in pinned host memory, which `ToDevice` sends
    without packing it again. With `sample_device` they go directly to that device.
    """


class PackedLazyMemmapStorage(_Packed, LazyMemmapStorage):  # type: ignore[misc]
    """torchrl's `LazyMemmapStorage`, read in place; otherwise like `PackedLazyTensorStorage`."""


def takes_samples_on_a_device(buffer: Any) -> bool:
    """Return whether the buffer's `sample` orders the current stream of its caller."""
    from tdcopier.torchrl._buffer import PackedTensorDictReplayBuffer

    return isinstance(buffer, PackedTensorDictReplayBuffer)


def _is_on_the_host(storage: Any) -> bool:
    device = storage.device
    return isinstance(device, torch.device) and device.type == "cpu"


def _is_plain(rows: Any) -> bool:
    """Return whether the engine takes the rows apart as torchrl does."""
    if isinstance(rows, torch.Tensor) or is_tensor_collection(rows):
        return True
    if type(rows) in (dict, OrderedDict):
        return all(map(_is_plain, rows.values()))
    return type(rows) in (list, tuple) and all(map(_is_plain, rows))


def _wrapped(part: Any, size: int) -> torch.Tensor | None:
    """Return row numbers, of `size` in use, as the engine takes them; None for any other index."""
    if isinstance(part, (list, range)):
        if not all(type(number) is int for number in part):
            return None
        part = torch.tensor(list(part), dtype=torch.int64)
    elif isinstance(part, np.ndarray) and part.dtype in (np.int64, np.int32):
        part = torch.from_numpy(part.copy())
    if not isinstance(part, torch.Tensor) or part.dtype not in (torch.int64, torch.int32):
        return None
    if part.dim() == 0 or part.device.type != "cpu":
        return None
    if part.numel() == 0:
        return part.long()
    low, high = (int(bound) for bound in part.aminmax())
    if low < -size or high >= size:
        return None  # torchrl says what is wrong
    numbers = part.detach().long().contiguous()
    return numbers if low >= 0 else torch.where(numbers < 0, numbers + size, numbers)


class _Read(NamedTuple):
    asked: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]
    rows: Any
    changes: tuple[int, Any]


class _LastRead:
    """The rows that this thread read last by a tuple of tensors, for its next read.

    A sampler of slices reads the rows it has chosen, looks at a few leaves and drops the rest; then
    the buffer reads the same rows. The rows are returned once, and only if nothing else refers to
    them, the tensors of the index are the same with the same values, and the storage has not
    changed.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return _LastRead, ()

    def keep(self, index: Any, rows: Any, changes: tuple[int, Any]) -> None:
        self._local.read = None
        is_tuple = isinstance(index, tuple) and all(isinstance(p, torch.Tensor) for p in index)
        if is_tuple and is_tensor_collection(rows):
            self._local.read = _Read(index, _versions(index), rows, changes)

    def take(self, index: Any, changes: tuple[int, Any]) -> Any:
        read: _Read | None = getattr(self._local, "read", None)
        self._local.read = None
        if read is None or not isinstance(index, tuple) or len(index) != len(read.asked):
            return None
        if any(a is not b for a, b in zip(index, read.asked, strict=True)):
            return None
        is_old = read.changes != changes or _versions(index) != read.versions
        if is_old or sys.getrefcount(read.rows) > _NO_OTHER:
            return None
        for key in _shared_keys(read.rows):  # leaves that the sampler keeps as info must not change
            read.rows.set(key, read.rows.get(key).clone())
        return read.rows


_NO_OTHER = 2  # references: from the tuple, and from the argument of getrefcount


def _shared_keys(rows: Any) -> list[Any]:
    """Return the keys of the leaves that have other references."""
    leaves = list(rows.items(include_nested=True, leaves_only=True))
    return [key for key, leaf in leaves if sys.getrefcount(leaf) > _ONLY_THE_ROWS]


_ONLY_THE_ROWS = 4  # references: the entry, the pair in the list, the variable, the argument


def _versions(index: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(part._version for part in index)
