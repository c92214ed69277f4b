"""The storage in RAM: if it is pinned, the device reads and writes its rows while the host goes on.

Samples and batches from the device are enqueued, and `InFlight` keeps what the device still
accesses. Host code reads rows once the device has written them, and writes rows once the device has
read them. The device itself goes in the order of streams.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tensordict import TensorDict, is_tensor_collection
from torchrl.data import LazyTensorStorage

from tdcopier import _C, _copy
from tdcopier._C import AsyncCopyHandle, DeviceAccess
from tdcopier._options import Device, options_for_filling
from tdcopier._rows.gather import Whole, start_gather
from tdcopier._rows.row_numbers import row_index
from tdcopier._rows.scatter import enqueue_scatter
from tdcopier.torchrl._current_sample import IndexOnDevice, current, untraced
from tdcopier.torchrl._in_flight import InFlight
from tdcopier.torchrl._pin import Pin
from tdcopier.torchrl._plain_read import PlainRead
from tdcopier.torchrl._requests import Request
from tdcopier.torchrl._storage import Packed, WriteStats, is_on_the_host, places


class PackedLazyTensorStorage(Packed, LazyTensorStorage):  # type: ignore[misc]
    """torchrl's `LazyTensorStorage`, whose samples native threads gather into packed memory.

    For example::

        storage = tdcopier.torchrl.PackedLazyTensorStorage(100_000, sample_device="cuda")
        buffer = tdcopier.torchrl.PackedTensorDictReplayBuffer(storage=storage, batch_size=32)
        buffer.extend(rollout)
        batch = buffer.sample()

    The rows are the same as torchrl's. They are in pinned host memory, which `ToDevice` sends
    without packing it again. With `sample_device` they go directly to that device.

    If the storage is pinned too, a CUDA device reads the rows itself, and no thread gathers. The
    host waits for no row: `sample()` returns when the read is enqueued. The device writes batches
    that are on it, too. Everything that reads or writes rows through this class or the buffer waits
    for the device as far as it has to. Code that writes to the tensors themselves, for example
    through a view that `storage[:]` has returned, does so within `writing()`.
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
        pinned: pin the storage in place, at the first sample or the first write of a batch that is
            on the device: see `pin_memory_`. The system never swaps it out then. Needs
            `sample_device`; for "cpu" there is nothing to pin, so that the same code runs there.
        **options: those of torchrl's storage.

        Raises:
            ValueError: `pinned` without `sample_device`, or with `shared_init`.
        """
        if pinned and sample_device is None:
            raise ValueError("pinned=True needs sample_device=, for which the storage is pinned")
        if pinned and options.get("shared_init"):
            raise ValueError(
                "pinned=True and shared_init=True exclude each other: the shared memory is mapped "
                "from a file, which cannot be pinned"
            )
        self.pinned = pinned and str(sample_device) != "cpu"
        self._pin = Pin()
        self._plain: PlainRead | None = None
        self._replacements = 0
        """How often all rows were loaded or removed."""
        self._in_flight = InFlight()
        self._late_cursor = _LateCursor()
        self._written_by_device = 0
        super().__init__(max_size, sample_device=sample_device, **options)

    # ---- the tensors -----------------------------------------------------------------------------

    @property
    def _storage(self) -> Any:
        """The tree with all rows, for the host: torchrl's name. Waits for writes by the device."""
        self._in_flight.wait_writes()
        return self._rows

    @_storage.setter
    def _storage(self, rows: Any) -> None:
        self._rows = rows

    def _tables(self) -> Any:
        return self._rows

    def __getstate__(self) -> Any:
        self._in_flight.wait_writes()
        self._pin.look_again()  # sending it to a process moves tensors to shared memory
        return super().__getstate__()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Return a context in which code may write to the tensors of the storage itself.

        It may also replace them. On entry it blocks until the device neither reads nor writes rows.
        Until its end, other threads that use the storage or its buffers wait. Not needed for `set`,
        `extend` and the other methods of storages and buffers.

        Methods of a buffer with `prefetch=` that take prefetched samples, such as `sample` and
        `state_dict`, raise a `RuntimeError` in the context: they would wait for a thread that waits
        for its end.
        """
        locks = [getattr(each, "_replay_lock", None) for each in self._attached_entities]
        with ExitStack() as stack:
            # The buffers' locks first, as in the buffers' methods.
            for lock in sorted((lock for lock in locks if lock is not None), key=id):
                stack.enter_context(lock)
            stack.enter_context(self._host_writes())
            try:
                yield
            finally:
                self._plain = None

    @contextmanager
    def _host_writes(self) -> Iterator[None]:
        """Do what `writing` does for code that has the buffer's lock, or calls no buffer."""
        with self._in_flight.host_writes():
            try:
                yield
            finally:
                self._pin.look_again()

    @property
    def _is_being_written_here(self) -> bool:
        """Whether this thread is in the context of `writing`."""
        return self._in_flight.host_writer == threading.get_ident()

    @property
    def write_stats(self) -> WriteStats:
        """How the writes so far were done; of a storage that is not pinned, zeros."""
        return super().write_stats._replace(
            by_device=self._written_by_device, waits=self._in_flight.waits
        )

    # ---- reads -----------------------------------------------------------------------------------

    def _takes_index_on(self, device: torch.device) -> bool:
        """Return whether a sample's index may stay on a device."""
        return self.pinned and device == self.sample_device and self.ndim == 1

    @untraced
    def get(self, index: Any) -> Any:
        """Return rows, as torchrl's storage does: see `read_stats` for who reads them."""
        if isinstance(index, IndexOnDevice):
            rows = self._get_by_device(index.numbers)
            if rows is not None:
                return rows
            self._reads.add(moved_indices=1)
            index = index.numbers.cpu()
        return super().get(index)

    def _get_by_device(self, numbers: torch.Tensor) -> Any:
        """Return the rows on the device; None if it cannot read them."""
        now = current.sampling
        if now is None or not self.initialized or not is_on_the_host(self):
            return None
        try:
            self._pin.keep(self._rows, self.sample_device)
            rows = self._pin.in_use(self._rows, len(self), bool(self._is_full))
            found, moved = self._gather(Request(rows, row_index(numbers, rows)), now.tensors())
        except (ValueError, TypeError):
            self._pin.look_again()  # the next time
            return None
        now.is_read, now.moved = True, moved
        now.devices.add(numbers.device)
        self._reads.add(gathered=1)
        return found

    def _plain_read(self, size: int) -> PlainRead | None:
        """Return how the device reads samples of a size; None if Python must look at each."""
        rows, read = self._rows, self._plain
        if read is None or not read.fits(rows, size):
            device = self.sample_device
            is_derived = type(self) is not PackedLazyTensorStorage  # it may read in its own way
            if is_derived or device is None or not self._takes_index_on(device):
                return None
            if not self.initialized or not is_on_the_host(self):
                return None
            read = self._plain = PlainRead(rows, size, device)
        if not read.is_possible:
            return None
        self._pin.keep(rows, self.sample_device)
        return read

    def _read_plainly(self, read: PlainRead, index: torch.Tensor) -> TensorDict:
        """Return the rows of an index that the device has drawn."""
        with self._in_flight.start(index.device):
            if self._in_flight.has_writes():
                self._in_flight.order_after_writes()
            handle = read.start(index)
            leaves = handle._hand_over()
            self._note_read(handle._device_access())
        self._reads.add(gathered=1)
        return read.batch(leaves)

    def _note_read(self, access: DeviceAccess) -> None:
        if self._pin.is_shared:  # other processes may write once the buffer's lock is free
            access.wait()
        else:
            self._in_flight.add_read(access)

    def _request(self, index: Any) -> Request | None:
        request = super()._request(index)
        if request is not None and self.pinned:
            self._pin.keep(self._rows, self.sample_device)
        return request

    def _read(self, index: Any) -> Any:
        if not self.pinned:
            return super()._read(index)
        with self._in_flight.lock:
            self._in_flight.wait_writes()
            return super()._read(index)

    def _gather(self, request: Request, info: dict[Any, torch.Tensor]) -> Any:
        if not self.pinned:
            return super()._gather(request, info)
        device: Any = self.sample_device
        moved = {key: tensor for key, tensor in info.items() if tensor.device == device}
        beside: Any = {key: Whole(info[key]) for key in info if key not in moved}
        numbers = request.numbers
        with self._in_flight.start(device):
            self._pin.keep(self._rows, device)
            if self._in_flight.has_writes():
                # The device reads its own index after the work of the current stream.
                if numbers.lead == 1 and numbers.numbers.is_cpu:
                    numbers = row_index(_copy.start_copy(numbers.numbers, device).wait(), None)
                if numbers.numbers.is_cpu:
                    self._in_flight.wait_writes()
                else:
                    self._in_flight.order_after_writes()
            handle = start_gather((request.rows, beside), numbers, device)
            rows, arrived = handle._hand_over()
            self._note_read(handle._device_access())
        return rows, moved | arrived

    # ---- writes ----------------------------------------------------------------------------------

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Store rows, as torchrl does.

        If the storage is pinned and the batch is on its device, the device writes the rows, and the
        host waits for nothing. You may overwrite the batch by work on the current stream. Batches
        on the host are written when the device has read the samples before.
        """
        if self.pinned:
            self._set_pinned(cursor, data, set_cursor)
        else:
            super().set(cursor, data, set_cursor=set_cursor)

    @untraced
    def _set_pinned(self, cursor: Any, data: Any, set_cursor: bool) -> None:
        with self._in_flight.lock:
            if self._set_by_device(cursor, data, set_cursor):
                self._written_by_device += 1
                return
            with self._host_writes():
                if is_on_the_host(self):
                    cursor, data = _on_the_host(cursor), _on_the_host(data)
                super().set(cursor, data, set_cursor=set_cursor)

    def _set_by_device(self, cursor: Any, data: Any, set_cursor: bool) -> bool:
        """Let the device write the rows, if it can."""
        found = places(data)
        device: Any = self.sample_device
        if not is_on_the_host(self) or device not in found or found - {device, _HOST}:
            return False
        is_one = isinstance(cursor, int)
        if not is_one and not (isinstance(cursor, torch.Tensor) and cursor.dim() == 1):
            return False
        if not self.initialized:
            if self.ndim > 1:  # torchrl changes the capacity after it has counted the rows
                return False
            self._init(data if is_one else data[0])
        self._pin.keep(self._rows, device)
        if self._pin.is_shared:
            return False
        if is_tensor_collection(self._rows) and self._rows.is_locked:
            data = data.select(*self._storage_keys, strict=False)
        if _HOST in found:  # of a TensorDict without a device, torchrl's index
            data = _copy.start_copy(data, device).wait()
        try:
            with self._in_flight.start(device):
                self._in_flight.order_after_reads()
                self._in_flight.order_after_writes()
                # Not start_scatter(), which may raise what the index of a sample was: torchrl's
                # writer counts these rows already. The next sample raises it.
                handle = enqueue_scatter(data, self._rows, cursor, options_for_filling(True, True))
                handle.wait_staged()  # work on this stream may overwrite the batch
                self._in_flight.add_write(handle._device_access())
        except (ValueError, TypeError):
            return False  # torchrl casts, broadcasts, or says what is wrong
        self._writes += 1
        self._note_set(cursor, data, set_cursor)
        return True

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with self._host_writes():
            self._replacements += 1
            super().load_state_dict(state_dict)

    def loads(self, path: Any) -> None:
        with self._host_writes():
            self._replacements += 1
            super().loads(path)

    def _empty(self) -> None:
        super()._empty()
        self._replacements += 1

    def _apply_conditional_patch(self, index: Any, patch: Any) -> None:
        with self._host_writes():
            super()._apply_conditional_patch(index, patch)

    def _set_last_cursor(self, cursor: Any) -> None:
        self._late_cursor.last = None
        if isinstance(cursor, torch.Tensor) and not cursor.is_cpu and cursor.numel():
            self._last_cursor = cursor
            self._late_cursor.last = _copy.start_copy(cursor.reshape(-1)[-1:].clone(), "cpu")
        else:
            super()._set_last_cursor(cursor)

    @property
    def _last_cursor_index(self) -> Any:
        late = self._late_cursor.last
        if late is not None:
            last = late.get()
            with self._in_flight.lock:
                if self._late_cursor.last is late:  # otherwise there was a write meanwhile
                    cursor = self._last_cursor
                    super()._set_last_cursor(last)
                    self._last_cursor = cursor
                    self._late_cursor.last = None  # not before: Ctrl-C would lose it
        return super()._last_cursor_index


_HOST = torch.device("cpu")


def _on_the_host(value: Any) -> Any:
    """Return a batch or an index on the host, if it is a tensor or a TensorDict."""
    if not isinstance(value, torch.Tensor) and not is_tensor_collection(value):
        return value
    leaves = [leaf for _, leaf in _C.leaves_with_paths(value, "cpu")]
    if all(leaf.device == _HOST for leaf in leaves if isinstance(leaf, torch.Tensor)):
        return value
    return _copy.copy(value, "cpu")


class _LateCursor:
    """The copy to the host of the last row written, if its number is on a device."""

    def __init__(self) -> None:
        self.last: AsyncCopyHandle[torch.Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _LateCursor, ()
