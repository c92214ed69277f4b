"""Storages that gather the rows of a batch directly into the memory that is sent."""

from __future__ import annotations

import operator
import sys
import threading
from typing import Any, NamedTuple

import torch
from tensordict import TensorDict, is_tensor_collection
from torchrl.data import LazyMemmapStorage, ReplayBuffer, TensorStorage

from tdcopier import _copy
from tdcopier._into import finished
from tdcopier._options import Device, options_for_filling
from tdcopier._rows.gather import Whole, start_gather
from tdcopier._rows.request import RowIndex
from tdcopier._rows.row_numbers import is_numbers
from tdcopier._rows.scatter import enqueue_scatter
from tdcopier.torchrl._current_sample import current, untraced
from tdcopier.torchrl._requests import Request, alike, gives_view, rows_in_use
from tdcopier.torchrl._to_device import with_index

_HOST = torch.device("cpu")
_OPTIONS = options_for_filling(use_pinned_staging=True, use_background_thread=True)


class ReadStats(NamedTuple):
    """Counts of the reads of one packed storage, in this process.

    For example::

        storage = tdcopier.torchrl.PackedLazyMemmapStorage(1_000_000)
        print(f"{storage.read_stats.fallbacks} reads by torchrl's own code")

    Each read is counted once in the first four; `moved_indices` is of all of them.

    Attributes:
        gathered: Reads by native threads, into packed memory.
        reused: Reads that returned the rows that a sampler of slices had just read.
        views: Reads of slices, single rows and keys: torchrl returns views, which copy nothing.
        fallbacks: Reads that torchrl's own indexing copied, because the engine cannot: masks,
            indices of three dimensions or of several kinds, a storage on a device, trees with
            classes of their own, and leaves whose rows differ in number.
        moved_indices: Reads for which the host waited for an index on the device, because the
            device cannot read the rows, for example of trees with classes of their own.
    """

    gathered: int
    reused: int
    views: int
    fallbacks: int
    moved_indices: int = 0


class WriteStats(NamedTuple):
    """Counts of the writes to one packed storage, in this process.

    For example::

        storage = tdcopier.torchrl.PackedLazyTensorStorage(4096, sample_device="cuda", pinned=True)
        print(storage.write_stats.by_device, storage.write_stats.waits)

    Attributes:
        by_device: Batches on the device whose rows the device has written, to a pinned storage.
        by_host: Batches that the host has written, those on the host included.
        waits: Writes by the host that waited because the device was still reading rows.
        fallbacks: Of those by the host: by torchrl's own code, one leaf after the other, because
            the engine does not: the first, masks and single rows, other dtypes or shapes, and
            classes of their own.
    """

    by_device: int
    by_host: int
    waits: int
    fallbacks: int = 0


class Packed(TensorStorage):  # type: ignore[misc]
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
        self._writes = self._written_by_host = self._write_fallbacks = 0
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
            if self._set_by_threads(cursor, data, set_cursor):
                self._written_by_host += 1
                return
        super().set(cursor, data, set_cursor=set_cursor)
        if not torch.compiler.is_compiling():
            self._written_by_host += 1
            self._write_fallbacks += 1

    @untraced
    def _set_by_threads(self, cursor: Any, data: Any, set_cursor: bool) -> bool:
        """Write rows of the host without a call for each leaf, if that does what torchrl does."""
        initialized: bool = self.initialized
        if not initialized or not is_on_the_host(self):
            return False
        if not isinstance(cursor, torch.Tensor) or cursor.dim() != 1 or not cursor.is_cpu:
            return False
        rows = self._tables()
        is_tree = is_tensor_collection(rows)
        if cursor.dtype != torch.int64 or is_tree is isinstance(data, torch.Tensor):
            return False
        try:
            if is_tree and rows.is_locked and type(data) is TensorDict:
                data = data.select(*self._storage_keys, strict=False)
            is_plain = places(data) == {_HOST}
        except RuntimeError:  # of a lazy stack whose members differ
            is_plain = False
        if not is_plain:
            return False
        try:
            finished(enqueue_scatter(data, rows, cursor, _OPTIONS))
        except (ValueError, TypeError, IndexError):
            return False  # torchrl casts, broadcasts, or says what is wrong
        self._note_set(cursor, data, set_cursor)
        return True

    def _note_set(self, cursor: Any, data: Any, set_cursor: bool) -> None:
        """Do what torchrl does beside writing rows."""
        if set_cursor:
            self._set_last_cursor(cursor)
            self._get_new_len(data, cursor)
        self._bump_mutation_revision()

    def _changes(self) -> tuple[int, Any]:
        """Return a value that differs after each change, in shared memory by any process."""
        return self._writes, getattr(self, "_mutation_revision", None)

    @property
    def write_stats(self) -> WriteStats:
        """Counts of the writes."""
        return WriteStats(0, self._written_by_host, 0, self._write_fallbacks)

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
        rows = None
        if isinstance(index, tuple):  # as samplers of slices give it
            rows = self._last.take(index, self._changes())
            if rows is not None:
                self._reads.add(reused=1)
        if self.sample_device is None or now is None or now.storage is not self or now.is_read:
            return self._read(index) if rows is None else rows
        now.is_read = True
        now.devices.add(self.sample_device)
        request = self._request(index) if rows is None else None
        if request is not None:
            rows, now.moved = self._gather(request, now.tensors())
            self._reads.add(gathered=1)
            return rows
        is_read_here = rows is None
        if is_read_here:
            rows = self._read_by_torchrl(index)
        handle = _copy.start_copy((rows, now.tensors()), self.sample_device)
        if is_read_here:
            handle.wait_staged()  # a device may read a pinned storage in place
        rows, now.moved = handle.wait()
        return rows

    def _gather(self, request: Request, info: dict[Any, torch.Tensor]) -> Any:
        """Return rows and info on `sample_device`, once the rows have been read."""
        beside: dict[Any, Any] = {key: Whole(tensor) for key, tensor in info.items()}
        handle = start_gather((request.rows, beside), request.numbers, self.sample_device)
        return handle.wait()  # the transfer is in flight

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
        if gives_view(index):
            self._reads.add(views=1)
        else:
            self._reads.add(fallbacks=1)
        return rows

    def _request(self, index: Any) -> Request | None:
        """Return what the engine needs to read an index; None if torchrl reads it."""
        initialized: bool = self.initialized
        if not initialized or not is_on_the_host(self):
            return None
        is_full: bool = self._is_full
        if is_full and is_numbers(index):  # the engine checks them
            numbers: RowIndex | None = RowIndex(index, 1, False, (), index, False)
        else:
            numbers = rows_in_use(index, self.shape)
        if numbers is None:
            return None
        rows = self._tables()
        if not isinstance(rows, torch.Tensor) and not is_tensor_collection(rows):
            rows = alike(rows, self.shape, is_full)
        return None if rows is None else Request(rows, numbers)

    def _tables(self) -> Any:
        """Return the tree whose leaves have all rows."""
        return self._storage


class PackedLazyMemmapStorage(Packed, LazyMemmapStorage):  # type: ignore[misc]
    """torchrl's `LazyMemmapStorage`, read in place; otherwise like `PackedLazyTensorStorage`.

    For example::

        storage = tdcopier.torchrl.PackedLazyMemmapStorage(1_000_000, scratch_dir="/data/replay")
    """


def takes_samples_on_a_device(buffer: Any) -> bool:
    """Return whether the buffer's `sample` orders the current stream of its caller."""
    from tdcopier.torchrl._buffer import PackedTensorDictReplayBuffer

    return isinstance(buffer, PackedTensorDictReplayBuffer)


def is_on_the_host(storage: Any) -> bool:
    device = storage.device
    return isinstance(device, torch.device) and device.type == "cpu"


def places(data: Any) -> set[torch.device]:
    """Return the devices of a batch whose leaves can be written to rows as they are, or none."""
    found: set[torch.device] = set()
    values = [data]
    for value in values:
        if type(value) is torch.Tensor and not value.requires_grad:
            found.add(value.device)
        elif type(value) is TensorDict:
            values += value._tensordict.values()  # four times as fast as its own `values`
        else:
            return set()
    return found


class _ReadCounts:
    """Counts of reads, kept by all threads. A copy of the storage starts anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = ReadStats(0, 0, 0, 0, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        return _ReadCounts, ()

    def add(
        self,
        *,
        gathered: int = 0,
        reused: int = 0,
        views: int = 0,
        fallbacks: int = 0,
        moved_indices: int = 0,
    ) -> None:
        more = (gathered, reused, views, fallbacks, moved_indices)
        with self._lock:
            self._stats = ReadStats(*map(operator.add, self._stats, more))

    def stats(self) -> ReadStats:
        return self._stats


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
