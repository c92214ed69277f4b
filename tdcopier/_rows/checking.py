"""Check mode for gathers: finds rows of a storage that were modified before they were read."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from tdcopier import _C, _checking
from tdcopier._checking import SourceCheck
from tdcopier._into import is_mapped_class
from tdcopier._options import Device
from tdcopier._rows.request import RowIndex, RowReaders, leave

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _TableRows:
    """The selected rows of a table, compared with a copy of them."""

    def __init__(
        self, path: str, table: torch.Tensor | np.ndarray[Any, Any], rows: _Selected
    ) -> None:
        self.path = path
        on_host = isinstance(table, np.ndarray) or table.device.type == "cpu"
        self.is_read_at_wait = not (on_host and rows.are_on_device)
        self._table = table
        self._shape = tuple(table.shape)
        self._places = rows.places_in(self._shape)
        self._version = self._version_now()
        self._before = self._bytes_now()

    def is_modified(self) -> bool:
        if self._version is not None and self._version_now() == self._version:
            return False
        return tuple(self._table.shape) != self._shape or self._modified_row() is not None

    def named(self) -> str:
        """Return the first modified row with its table, for a message."""
        if tuple(self._table.shape) != self._shape:
            return self.path
        place = self._modified_row()
        if place is None:  # it was written again meanwhile
            return self.path
        row = tuple(int(numbers[place]) for numbers in self._places)
        return f"row {row[0] if len(row) == 1 else row} of {self.path}"

    def _modified_row(self) -> int | None:
        now = self._bytes_now()
        if now.shape != self._before.shape:  # `.data =` gave it another dtype
            return 0
        differ = (now != self._before).any(1)
        return int(differ.argmax()) if differ.any() else None

    def _version_now(self) -> int | None:
        """Return the version counter on a device; on the host, writes of numpy do not change it."""
        if isinstance(self._table, np.ndarray) or self._table.device.type == "cpu":
            return None
        return _checking.version(self._table)

    def _bytes_now(self) -> np.ndarray[Any, Any]:
        """Return the bytes of the rows, in one line for each row."""
        if isinstance(self._table, np.ndarray):
            rows = np.ascontiguousarray(np.asarray(self._table)[self._places])
            return rows.reshape(len(rows), -1).view(np.uint8)
        with torch._C.DisableTorchFunction():  # a mode of the caller could change what is read
            table = self._table.detach().resolve_neg()
            if not table.is_complex():  # torch cannot index all the others
                table = table.view(_WORDS[table.element_size()])
            places = tuple(torch.from_numpy(numbers).to(table.device) for numbers in self._places)
            read = table[places].resolve_conj().cpu().contiguous()
            return read.reshape(len(read), -1).view(torch.uint8).numpy()


class _Selected:
    """The row numbers of an index, on the host."""

    def __init__(self, rows: RowIndex) -> None:
        self.are_on_device = rows.numbers.device.type != "cpu"
        self._lead = rows.lead
        self._numbers = rows.numbers.detach().cpu().numpy().astype(np.int64).ravel()

    def places_in(self, shape: tuple[int, ...]) -> tuple[np.ndarray[Any, Any], ...]:
        """Return each row once, by its place in each leading dimension.

        Numbers out of range are left out: the call raises an error, or the device reads no row.
        """
        lead = shape[: self._lead]
        size = int(np.prod(lead))
        numbers = np.where(self._numbers < 0, self._numbers + size, self._numbers)
        numbers = np.unique(numbers[(numbers >= 0) & (numbers < size)])
        return np.unravel_index(numbers, lead)

    def bytes_in(self, table: torch.Tensor | np.ndarray[Any, Any]) -> int:
        """Return the size of the rows of a table; 0 if it has too few dimensions."""
        if table.ndim < self._lead or 0 in table.shape:
            return 0
        row_bytes = int(np.prod(table.shape[self._lead :])) * table.dtype.itemsize
        return len(self.places_in(tuple(table.shape))[0]) * row_bytes


class GatherCheck(SourceCheck):
    """The state of the rows of one gather when it was started.

    Waits for the device if the index or the storage is there: the host reads the numbers and rows.
    """

    @classmethod
    def of_gather(cls, storage: Any, rows: RowIndex, device: Device) -> GatherCheck:
        """Record the rows that `start_gather` will read into new memory."""
        check = cls()
        if not (_checking.is_altered() or _checking.is_captured(rows.numbers)):
            selected = _Selected(rows)
            tables = _C.tables_with_paths(storage, rows, _parts(rows), device)
            if not _checking.is_captured(*(leaf for _, leaf in tables)):
                for path, leaf in tables:
                    check._watch_rows(f"storage{path.removeprefix('data')}", leaf, selected)
        return check

    @classmethod
    def of_gather_into(cls, storage: Any, rows: RowIndex, out: Any) -> GatherCheck:
        """Record the rows that `start_gather` will read into `out`."""
        check = cls()
        if _checking.is_altered() or _checking.is_captured(rows.numbers):
            return check
        pairs = _C.pairs_with_paths(storage, out, "storage", "out")
        if not _checking.is_captured(*(filled for _, _, filled in pairs)):
            selected = _Selected(rows)
            for steps, leaf, _ in pairs:
                check._watch_rows(f"storage{steps}", leaf, selected)
        return check

    def _watch_rows(self, path: str, leaf: Any, rows: _Selected) -> None:
        if is_mapped_class(type(leaf)):
            leaf = torch.Tensor.as_subclass(leaf, torch.Tensor)
        leaf = _checking.without_class(leaf)
        if isinstance(leaf, np.ndarray):
            is_plain = leaf.dtype.kind in "biufc"
        else:
            is_plain = _checking.is_plain(leaf)
        if is_plain and 0 < rows.bytes_in(leaf) <= _checking.MOST_BYTES:
            self._leaves.append(_TableRows(path, leaf, rows))

    def _report(self, leaf: Any) -> str:
        return (
            f"{leaf.named()} was modified before it was gathered. The gather was started at "
            f"{self._started_at}. Before writing to its rows, call wait_gathered() or get() on its "
            "handle."
        )


def _parts(rows: RowIndex) -> RowReaders:
    """Return functions with which a walk finds tables."""
    if "tensordict" not in sys.modules:
        return RowReaders(_as_it_is, leave, None)
    from tdcopier.tensordict._rows import flatten
    from tdcopier.tensordict._walk import unflatten

    def flatten_with_keys(value: Any, device: torch.device, named: bool) -> Any:
        return flatten(value, device, rows, named)

    return RowReaders(_as_it_is, flatten_with_keys, unflatten)


def _as_it_is(leaf: Any) -> Any:
    return leaf
