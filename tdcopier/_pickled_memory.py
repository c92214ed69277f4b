"""The memory of pickled values: the bytes that their tensors, storages and arrays show."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

Array = np.ndarray[Any, Any]

_RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""For each size of an element, a dtype that copies its bytes unchanged."""
_MOST_COMPARED = 64
"""The number of views that are compared with each other."""
_MOST_WORK: Any = 1000
"""For numpy, which says that views share bytes if it has not found out by then."""


class Place(NamedTuple):
    """Where the elements of a tensor, storage or array are in the memory beside a pickle."""

    run: int
    """Which run of bytes; -1 without elements."""
    offset_bytes: int
    strides: tuple[int, ...]
    """In elements for a tensor, in bytes for an array."""
    dtype: torch.dtype | None
    """None for an array."""


class Places(NamedTuple):
    """The places of all views, by their numbers."""

    places: list[Place]
    run_bytes: list[int]
    """The size of each run."""
    whole: set[int]
    """The runs that need a storage of their own, because a storage is among the values."""


class _View(NamedTuple):
    owner: Any
    """The storage or array that keeps the memory alive."""
    dtype: torch.dtype | None
    begin: int
    """Address of the lowest byte that it shows; `end` is that after the highest one. Both are 0
    without elements."""
    end: int
    origin: int
    """Address of the element whose indices are all 0."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In bytes."""
    itemsize: int
    keeps_strides: bool = False
    is_storage: bool = False


class Views:
    """Collects what pickled values show of memory, and says what memory to send.

    Views that share bytes become one run, from the first to the last byte, and share memory again
    where they arrive. A view that shares bytes with no other becomes a run without gaps.
    """

    def __init__(self, device: torch.device) -> None:
        """Start without views; all will be on this device."""
        self._device = device
        self._views: list[_View] = []

    def add_tensor(
        self,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        offset: int,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        keeps_strides: bool = False,
    ) -> int:
        """Add a strided tensor, whose offset and strides are in elements; return its number.

        Raises:
            ValueError: the storage is too small for it.
        """
        size = dtype.itemsize
        in_bytes = tuple(stride * size for stride in strides)
        _, length = _extent(shape, in_bytes, size)
        if length and offset * size + length > storage.nbytes():
            raise ValueError(
                f"its storage has {storage.nbytes()} bytes; it needs {offset * size + length}"
            )
        begin = storage.data_ptr() + offset * size if length else 0
        view = _View(
            storage, dtype, begin, begin + length, begin, tuple(shape), in_bytes, size,
            keeps_strides,
        )  # fmt: skip
        return self._add(view)

    def add_storage(self, storage: torch.UntypedStorage, dtype: torch.dtype) -> int:
        """Add all bytes of a storage, and return its number."""
        length = storage.nbytes()
        begin = storage.data_ptr() if length else 0
        strides = (dtype.itemsize,)
        view = _View(
            storage, dtype, begin, begin + length, begin, (length,), strides, dtype.itemsize,
            keeps_strides=True, is_storage=True,
        )  # fmt: skip
        return self._add(view)

    def add_array(self, array: Array) -> int:
        """Add an array, and return its number."""
        array = array.view(np.ndarray)
        before, length = _extent(array.shape, array.strides, array.itemsize)
        origin = array.ctypes.data if length else 0
        view = _View(
            array, None, origin - before, origin - before + length, origin, array.shape,
            array.strides, array.itemsize,
        )  # fmt: skip
        return self._add(view)

    def placed(self) -> tuple[Places, list[torch.Tensor]]:
        """Return the place of each view, and the runs as 1-d uint8 tensors.

        What is one run already is not copied.
        """
        places: dict[int, Place] = {}
        runs: list[torch.Tensor] = []
        whole = set()
        for numbers in (part for group in self._groups() for part in self._apart(group)):
            views = [self._views[number] for number in numbers]
            if not views[0].end:
                empty = torch.empty_strided(views[0].shape, _strides_of(views[0]))
                strides = torch.empty_like(empty).stride()
                places[numbers[0]] = Place(-1, 0, strides, views[0].dtype)
                continue
            if _is_one(views):
                run, strides = self._without_gaps(views[0])
                places |= {
                    number: Place(len(runs), 0, strides, view.dtype)
                    for number, view in zip(numbers, views, strict=True)
                }
            else:
                begin = _aligned_begin(views)
                run = self._run(views, begin, max(view.end for view in views))
                for number, view in zip(numbers, views, strict=True):
                    offset = view.origin - begin
                    places[number] = Place(len(runs), offset, _strides_of(view), view.dtype)
            if any(view.is_storage for view in views):
                whole.add(len(runs))
            runs.append(run)
        in_order = [places[number] for number in range(len(self._views))]
        return Places(in_order, [run.numel() for run in runs], whole), runs

    def _add(self, view: _View) -> int:
        self._views.append(view)
        return len(self._views) - 1

    def _groups(self) -> Iterator[list[int]]:
        """Yield the numbers of views whose first to last bytes overlap, directly or by others."""
        # On the host, several storages and arrays may have one memory; only its address matters.
        on_host = self._device.type == "cpu"
        by_address = sorted(
            (0 if on_host or not view.begin else view.owner.data_ptr(), view.begin, number)
            for number, view in enumerate(self._views)
        )
        group: list[int] = []
        owner, end = 0, 0
        for its_owner, begin, number in by_address:
            if group and (begin >= end or its_owner != owner):  # an empty view overlaps none
                yield group
                group, end = [], 0
            group.append(number)
            owner, end = its_owner, max(end, self._views[number].end)
        if group:
            yield group

    def _apart(self, group: list[int]) -> list[list[int]]:
        """Split a group that is mostly gaps into the views that share bytes.

        For example, two columns of a wide table share none.
        """
        views = [self._views[number] for number in group]
        shown = sum(math.prod(view.shape) * view.itemsize for view in views)
        span = max(view.end for view in views) - views[0].begin
        if span <= 2 * shown or not 1 < len(views) <= _MOST_COMPARED:
            return [group]
        parts: list[list[int]] = []
        for number in group:
            joined = [
                part
                for part in parts
                if any(_share_bytes(self._views[number], self._views[other]) for other in part)
            ]
            parts = [part for part in parts if part not in joined]
            parts.append([*(other for part in joined for other in part), number])
        return parts

    def _without_gaps(self, view: _View) -> tuple[torch.Tensor, tuple[int, ...]]:
        """Return what a view shows as one run, and its strides there."""
        if isinstance(view.owner, np.ndarray):
            dense = view.owner if view.owner.flags.forc else view.owner.copy(order="K")
            return _host_bytes([dense], dense.ctypes.data, dense.nbytes), dense.strides
        raw = torch.empty(0, dtype=_RAW[view.itemsize], device=self._device)
        raw.set_(
            view.owner,
            (view.origin - view.owner.data_ptr()) // view.itemsize,
            view.shape,
            _strides_of(view),
        )
        dense_strides = torch.empty_like(raw, device="meta").stride()
        if dense_strides == raw.stride():
            return self._run([view], view.begin, view.end), dense_strides
        dense = torch.empty_like(raw).copy_(raw)
        return _bytes_of(dense.untyped_storage(), 0, dense.nbytes), dense_strides

    def _run(self, views: list[_View], begin: int, end: int) -> torch.Tensor:
        """Return the bytes between two addresses. On a device, one storage contains them."""
        for owner in (view.owner for view in views if view.dtype):
            first = begin - owner.data_ptr()
            if first >= 0 and first + end - begin <= owner.nbytes():
                return _bytes_of(owner, first, end - begin)
        return _host_bytes([view.owner for view in views], begin, end - begin)


class Memory:
    """Runs of bytes that have arrived, and the views in them."""

    def __init__(self, places: Places, runs: Sequence[torch.Tensor]) -> None:
        """Take the runs as tensors of any dtype, each in one piece.

        Raises:
            ValueError: there are other runs than the pickle was made with.
        """
        run_bytes = [run.nbytes for run in runs]
        if run_bytes != places.run_bytes:
            raise ValueError(
                f"the memory has runs of {run_bytes} bytes, but those of the pickle have "
                f"{places.run_bytes}"
            )
        self._places = places
        self._runs = [run.detach().view(torch.uint8) for run in runs]
        for run, offset, _, dtype in places.places:
            if run < 0 or dtype is None:
                continue
            if (self._runs[run].data_ptr() + offset) % dtype.itemsize:
                self._runs[run] = self._runs[run].clone()  # to memory that is aligned
        self._storages: dict[int, tuple[torch.UntypedStorage, int]] = {}

    @property
    def device(self) -> torch.device:
        """The device of the memory: the host, if there is none."""
        return self._runs[0].device if self._runs else torch.device("cpu")

    def storage(self, number: int) -> torch.storage.TypedStorage:
        """Return a storage that contains a view."""
        dtype = self._places.places[number].dtype
        typed: Any = torch.storage.TypedStorage
        made: torch.storage.TypedStorage = typed(
            wrap_storage=self._found(number)[0], dtype=dtype, _internal=True
        )
        return made

    def offset(self, number: int) -> int:
        """Return the offset of a view in that storage, in its elements."""
        dtype = self._places.places[number].dtype
        assert dtype is not None
        return self._found(number)[1] // dtype.itemsize

    def strides(self, number: int) -> tuple[int, ...]:
        """Return the strides of a view: of a tensor in elements, of an array in bytes."""
        return self._places.places[number].strides

    def array(
        self, number: int, cls: type[Array], dtype: Any, shape: tuple[int, ...], is_writeable: bool
    ) -> Array:
        """Return an array. Copies the memory if it is on a device."""
        place = self._places.places[number]
        buffer: Any = self._runs[place.run].cpu().numpy()
        made: Array = np.ndarray.__new__(
            cls, shape, dtype, buffer, place.offset_bytes, place.strides
        )
        made.flags.writeable = is_writeable
        return made

    def _found(self, number: int) -> tuple[torch.UntypedStorage, int]:
        """Return the storage that contains a view, and its offset there in bytes."""
        place = self._places.places[number]
        if place.run < 0:
            return torch.empty(0, device=self.device).untyped_storage(), 0
        if place.run not in self._storages:
            self._storages[place.run] = self._storage_of_run(place.run)
        storage, first = self._storages[place.run]
        offset = first + place.offset_bytes
        if place.dtype is not None and offset % place.dtype.itemsize:
            # Another view's elements begin within those of this one: they cannot share memory.
            rest = _bytes_of(storage, offset, storage.nbytes() - offset)
            return rest.clone().untyped_storage(), 0
        return storage, offset

    def _storage_of_run(self, index: int) -> tuple[torch.UntypedStorage, int]:
        run = self._runs[index]
        storage, first = run.untyped_storage(), int(run.storage_offset())
        if (first, run.numel()) == (0, storage.nbytes()):
            return storage, 0
        is_whole = index in self._places.whole
        if storage.device.type == "cpu" and (is_whole or not storage.is_shared()):
            return storage[first : first + run.numel()], 0  # over the same memory
        return (run.clone().untyped_storage(), 0) if is_whole else (storage, first)


def _extent(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return the bytes before the element with indices 0, and the bytes from first to last."""
    if 0 in shape:
        return 0, 0
    steps = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    before = -sum(step for step in steps if step < 0)
    return before, before + sum(step for step in steps if step > 0) + itemsize


def _strides_of(view: _View) -> tuple[int, ...]:
    """Return its strides as a place has them."""
    unit = view.itemsize if view.dtype else 1
    return tuple(stride // unit for stride in view.strides)


def _is_one(views: list[_View]) -> bool:
    """Return whether these views have the same elements, and may lose their gaps."""
    alike = {
        (view.origin, view.shape, view.strides, view.itemsize, view.dtype is None) for view in views
    }
    return len(alike) == 1 and not any(view.keeps_strides for view in views)


def _aligned_begin(views: list[_View]) -> int:
    """Return where a run for these views begins, so that each is at a multiple of its elements."""
    begin = min(view.begin for view in views)
    return next(
        (
            address
            for address in range(begin, begin - max(_RAW), -1)
            if all((view.origin - address) % view.itemsize == 0 for view in views if view.dtype)
        ),
        begin,
    )


def _bytes_of(storage: torch.UntypedStorage, first: int, length: int) -> torch.Tensor:
    as_bytes = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return as_bytes.set_(storage, first, (length,), (1,))


def _share_bytes(view: _View, other: _View) -> bool:
    """Return whether two views share bytes. Reads nothing, so they may be on a device."""
    one, two = (
        np.asarray(_Elements(each.origin, each.shape, each.strides, f"|V{each.itemsize}", []))
        for each in (view, other)
    )
    return np.may_share_memory(one, two, max_work=_MOST_WORK)


class _Elements:
    """Elements at an address, for numpy."""

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        kind: str,
        owners: list[Any],
    ) -> None:
        self.owners = owners
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": kind,
            "version": 3,
        }


def _host_bytes(owners: list[Any], begin: int, length: int) -> torch.Tensor:
    return torch.from_numpy(np.asarray(_Elements(begin, (length,), (1,), "|u1", owners)))
