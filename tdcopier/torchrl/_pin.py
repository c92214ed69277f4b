"""Keeps the memory of a storage pinned, as long as it is the same."""

from __future__ import annotations

import threading
from typing import Any

import torch

from tdcopier import _C
from tdcopier._options import Device
from tdcopier._pin_memory import PinnedMemory, pin_memory_
from tdcopier.torchrl._requests import narrowed


class Pin:
    """Keeps the present memory of a storage pinned. A copy of the storage pins its own."""

    def __init__(self) -> None:
        self.is_shared = False
        """Whether other processes may write to the memory."""
        self._lock = threading.Lock()
        self._of: Any = None  # None: the memory may have changed
        self._looks = 0
        self._memory: PinnedMemory | None = None
        self._places: list[int] | None = None
        self._views: tuple[Any, int, Any] = (None, 0, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return Pin, ()

    def keep(self, rows: Any, device: Device | None) -> None:
        """Pin the rows, unless that was done.

        torchrl replaces them when it loads a storage, and `writing` is for code that may.
        """
        if self._of is rows:
            return
        with self._lock:
            if self._of is rows:
                return
            looks = self._looks
            self._pin_rows(rows, device)
            if looks == self._looks:
                self._of = rows

    def look_again(self) -> None:
        """Find out at the next use whether the tensors and their memory are still the same."""
        self._looks += 1
        self._of = None
        self._views = (None, 0, None)

    def _pin_rows(self, rows: Any, device: Device | None) -> None:
        if self._memory is not None:
            if _places_of(_leaves(rows, device)) == self._places:
                return  # the old memory has not become that of others: it is pinned, thus alive
            memory, self._memory = self._memory, None
            memory.close()
        self._memory = pin_memory_(rows, device)
        leaves = _leaves(rows, device)
        self._places = _places_of(leaves)
        self.is_shared = any(leaf.is_shared() for leaf in leaves)  # type: ignore[no-untyped-call]

    def in_use(self, rows: Any, count: int, is_full: bool) -> Any:
        """Return a tree with the first rows, of which a device finds out what is out of range."""
        if is_full:
            return rows
        of, views, tree = self._views
        if of is not rows or views != count:
            tree = narrowed(rows, count)
            self._views = rows, count, tree
        return tree


def _leaves(rows: Any, device: Device | None) -> list[torch.Tensor]:
    found = _C.leaves_with_paths(rows, "cpu" if device is None else device)
    return [leaf for _, leaf in found if isinstance(leaf, torch.Tensor)]


def _places_of(leaves: list[torch.Tensor]) -> list[int] | None:
    """Return the addresses of tensors; None if one has none, as pin_memory_() will say."""
    try:
        return [leaf.data_ptr() for leaf in leaves]
    except (NotImplementedError, RuntimeError):
        return None
