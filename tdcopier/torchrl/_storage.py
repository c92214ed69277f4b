"""Storages that gather the rows of a batch directly into the memory that is sent."""

from __future__ import annotations

import operator
import sys
import threading
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import is_tensor_collection
from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, TensorStorage

from tdcopier import _copy
from tdcopier._options import Device
from tdcopier._pin_memory import PinnedMemory, pin_memory_
from tdcopier._rows.gather import Whole, start_gather
from tdcopier._rows.request import RowIndex
from tdcopier.torchrl._sampling import current, untraced
from tdcopier.torchrl._to_device import with_index


class ReadStats(NamedTuple):
    """Counts of the reads of one packed storage, in this process. Each read is counted once."""

    gathered: int
    """Reads by native threads, into packed memory."""
    reused: int
    """Reads that returned the rows that a sampler of slices had just read."""
    views: int
    """Reads of slices, single rows and keys: torchrl returns views, which copy nothing."""
    fallbacks: int
    """Reads that torchrl's own indexing copied, because the engine cannot: masks, indices of three
    dimensions or of several kinds, a storage on a device, trees with classes of their own, and
    leaves whose rows differ in number."""


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
        """
        self.sample_device = None if sample_device is None else with_index(sample_device)
        self._last = _LastRead()
        self._reads = _ReadCounts()
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
        if not torch.compiler.is_compiling():  # each value would be compiled for
            self._writes += 1
        super().set(cursor, data, set_cursor=set_cursor)

    def _changes(self) -> tuple[int, Any]:
        """Return a value that differs after each change, in shared memory by any process."""
        return self._writes, getattr(self, "_mutation_revision", None)

    @property
    def read_stats(self) -> ReadStats:
        """How the reads so far were done; those that raised an error are not counted."""
        return self._reads.stats()

    @untraced
    def __getitem__(self, index: Any) -> Any:
        """Return rows as `get` does, but on the host."""
        changes = self._changes()
        rows = self._read(index)
        self._last.keep(index, rows, changes)  # a sampler of slices reads here, then the buffer
        return rows

    @untraced
    def get(self, index: Any) -> Any:
        """Return rows, as torchrl's storage does.

        Rows given by integers in tensors, arrays, lists and pairs of them are gathered into new
        memory, which is pinned if there is a device. For views (a slice, one row), masks and keys,
        torchrl reads; `read_stats` counts which of them were copied.
        """
        now = current.sampling
        rows = self._last.take(index, self._changes())
        if rows is not None:
            self._reads.add(reused=1)
        if self.sample_device is None or now is None or now.storage is not self or now.is_read:
            return self._read(index) if rows is None else rows
        now.is_read = True
        now.devices.add(self.sample_device)
        request = self._request(index) if rows is None else None
        if request is not None:
            beside: dict[Any, Any] = {key: Whole(tensor) for key, tensor in now.tensors().items()}
            handle = start_gather((request.rows, beside), request.numbers, self.sample_device)
            rows, now.moved = handle.wait()  # the rows have been read; the transfer is in flight
            self._reads.add(gathered=1)
            return rows
        is_view = rows is None
        if is_view:
            rows = self._read_by_torchrl(index)
        handle = _copy.start_copy((rows, now.tensors()), self.sample_device)
        if is_view:
            handle.wait_staged()  # a device may read a pinned storage in place
        rows, now.moved = handle.wait()
        return rows

    def _read(self, index: Any) -> Any:
        request = self._request(index)
        if request is None:
            return self._read_by_torchrl(index)
        rows = start_gather(request.rows, request.numbers, "cpu").get()
        if is_tensor_collection(rows) and request.rows.device is None:
            rows.clear_device_()
        self._reads.add(gathered=1)
        return rows

    def _read_by_torchrl(self, index: Any) -> Any:
        rows = super().get(index)
        if _is_view(index):
            self._reads.add(views=1)
        else:
            self._reads.add(fallbacks=1)
        return rows

    def _request(self, index: Any) -> _Request | None:
        """Return what the engine needs to read an index; None if torchrl reads it."""
        initialized: bool = self.initialized
        if not initialized or not _is_on_the_host(self):
            return None
        in_use: torch.Size = self.shape
        numbers = _rows_in_use(index, in_use)
        if numbers is None:
            return None
        rows = self._storage
        if not isinstance(rows, torch.Tensor) and not is_tensor_collection(rows):
            rows = _alike(rows, in_use, bool(self._is_full))
        return None if rows is None else _Request(rows, numbers)


class PackedLazyTensorStorage(_Packed, LazyTensorStorage):  # type: ignore[misc]
    """torchrl's `LazyTensorStorage`, whose samples native threads gather into packed memory.

    The rows are the same as torchrl's. They are in pinned host memory, which `ToDevice` sends
    without packing it again. With `sample_device` they go directly to that device. If the storage
    is pinned too, a CUDA device reads them itself, and no thread gathers.
    """

    def __init__(
        self,
        max_size: int,
        *,
        sample_device: Device | None = None,
        pinned: bool = False,
        **options: Any,
    ) -> None:
        """Args:
        max_size: number of rows.
        sample_device: gather samples directly to this device; needs a
            `PackedTensorDictReplayBuffer`.
        pinned: pin the storage in place, at the first sample: see `pin_memory_`. The system never
            swaps it out then. Needs `sample_device`.
        **options: those of torchrl's storage.

        Raises:
            ValueError: `pinned` without `sample_device`.
        """
        if pinned and sample_device is None:
            raise ValueError("pinned=True needs sample_device=, for which the storage is pinned")
        self.pinned = pinned
        self._pin = _Pin()
        super().__init__(max_size, sample_device=sample_device, **options)

    def _request(self, index: Any) -> _Request | None:
        request = super()._request(index)
        if request is not None and self.pinned:
            self._pin.keep(self._storage, self.sample_device)
        return request


class PackedLazyMemmapStorage(_Packed, LazyMemmapStorage):  # type: ignore[misc]
    """torchrl's `LazyMemmapStorage`, read in place; otherwise like `PackedLazyTensorStorage`."""


def takes_samples_on_a_device(buffer: Any) -> bool:
    """Return whether the buffer's `sample` orders the current stream of its caller."""
    from tdcopier.torchrl._buffer import PackedTensorDictReplayBuffer

    return isinstance(buffer, PackedTensorDictReplayBuffer)


def _is_on_the_host(storage: Any) -> bool:
    device = storage.device
    return isinstance(device, torch.device) and device.type == "cpu"


class _Request(NamedTuple):
    rows: Any
    """All rows that the engine may read; each leaf has the same number."""
    numbers: RowIndex


def _alike(tree: Any, in_use: torch.Size, is_full: bool) -> Any:
    """Return a tree whose leaves all have the same rows; None if the engine cannot read it.

    torchrl gives each leaf of a tree a capacity of its own if the storage has several dimensions,
    and indexes the rows in use.
    """
    leaves = _leaves(tree)
    if not leaves:
        return None
    lead = len(in_use)
    sizes = {tuple(leaf.shape[:lead]) for leaf in leaves}
    if len(sizes) == 1:
        return tree
    if is_full or any(size[1:] != in_use[1:] or size[0] < in_use[0] for size in sizes):
        return None  # torchrl counts negative numbers from the end of each leaf
    return _narrowed(tree, in_use[0])


def _leaves(tree: Any) -> list[Any] | None:
    """Return the leaves, if the engine takes the tree apart as torchrl does, otherwise None."""
    if isinstance(tree, torch.Tensor) or is_tensor_collection(tree):
        return [tree]
    if type(tree) in (dict, OrderedDict):
        tree = list(tree.values())
    if type(tree) not in (list, tuple):
        return None
    parts = [_leaves(part) for part in tree]
    return None if None in parts else [leaf for part in parts for leaf in part or ()]


def _narrowed(tree: Any, rows: int) -> Any:
    """Return the same containers with views of the first rows of each leaf."""
    if isinstance(tree, dict):
        return type(tree)((key, _narrowed(part, rows)) for key, part in tree.items())
    if isinstance(tree, (list, tuple)):
        return type(tree)(_narrowed(part, rows) for part in tree)
    return tree[:rows]


def _is_view(index: Any) -> bool:
    """Return whether torch answers an index with a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(
        part is None
        or isinstance(part, (int, np.integer, slice, str, type(...)))
        or (isinstance(part, torch.Tensor) and part.dim() == 0 and part.dtype != torch.bool)
        for part in parts
    )


def _rows_in_use(index: Any, in_use: torch.Size) -> RowIndex | None:
    """Return the rows that an index selects among those in use; None for any other index.

    `_rows/row_numbers.py` converts the indices of `start_gather`; this one leaves to torchrl what
    torchrl's own samplers do not make, and counts from the end of what is in use.
    """
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


def _wrapped(part: Any, size: int) -> torch.Tensor | None:
    """Return row numbers, of `size` in use, as the engine takes them; None for any other index."""
    if isinstance(part, (list, range)):
        if not all(type(number) is int for number in part):
            return None
        part = torch.tensor(list(part), dtype=torch.int64, device="cpu")
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


class _ReadCounts:
    """Counts of reads, kept by all threads. A copy of the storage starts anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = ReadStats(0, 0, 0, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ReadCounts, ()

    def add(
        self, *, gathered: int = 0, reused: int = 0, views: int = 0, fallbacks: int = 0
    ) -> None:
        more = (gathered, reused, views, fallbacks)
        with self._lock:
            self._stats = ReadStats(*map(operator.add, self._stats, more))

    def stats(self) -> ReadStats:
        return self._stats


class _Pin:
    """Keeps the present memory of a storage pinned. A copy of the storage pins its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: Any = None
        self._memory: PinnedMemory | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Pin, ()

    def keep(self, rows: Any, device: Device | None) -> None:
        """Pin the rows, unless that was done; torchrl replaces them when it loads a storage."""
        if self._of is rows:
            return
        with self._lock:
            if self._of is rows:
                return
            if self._memory is not None:
                self._memory.close()
            self._of, self._memory = None, None
            self._memory = pin_memory_(rows, device)
            self._of = rows


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
        if isinstance(index, tuple) and _have_versions(index) and is_tensor_collection(rows):
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


def _have_versions(index: tuple[Any, ...]) -> bool:
    return all(isinstance(part, torch.Tensor) and not part.is_inference() for part in index)


def _versions(index: tuple[torch.Tensor, ...]) -> tuple[int, ...]:
    return tuple(part._version for part in index)
