"""Decides when rows may be inserted and sampled, so that both keep a ratio."""

from __future__ import annotations

import time
from typing import Any

_SHARE = 0.1
"""Of the rows that `min_size` stands for: the least tolerance, unless one is given."""


class Waits:
    """How often one side had to wait, and how long."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0

    def note(self, begin: float) -> None:
        """Count a wait that has just ended."""
        self.count += 1
        self.seconds += time.monotonic() - begin


class Limiter:
    """Counts rows. Its callers hold the lock of the buffer.

    A call is looked at before it is made, by what is due: the rows that are still to be sampled for
    those that were inserted. One of the two sides may always go on, whatever the sizes of batches.
    """

    def __init__(
        self, samples_per_insert: float | None, min_size: int, tolerance: float | None, size: int
    ) -> None:
        """Begin with a buffer that has `size` rows."""
        self.samples_per_insert, self.min_size = samples_per_insert, min_size
        self.tolerance = tolerance
        self.inserted = self.sampled = 0
        self.insert_waits, self.sample_waits = Waits(), Waits()
        self._free = max(min_size - size, 0)
        """Rows that are inserted before any is due."""
        self._largest = 0.0
        """Rows of the largest call, in rows that are sampled."""

    def may_insert(self, size: int) -> bool:
        """Return whether the next batch may be written to a buffer of that size."""
        if self.samples_per_insert is None or size < self.min_size:
            return True
        return self._due() <= self._allowed()

    def may_sample(self, size: int) -> bool:
        """Return whether the next batch may be drawn from a buffer of that size."""
        if size < self.min_size:
            return False
        return self.samples_per_insert is None or self._due() > -self._allowed()

    def note_inserted(self, rows: int) -> None:
        """Count rows."""
        self.inserted += rows
        self._largest = max(self._largest, rows * (self.samples_per_insert or 0.0))

    def note_sampled(self, rows: int) -> None:
        """Count rows."""
        self.sampled += rows
        self._largest = max(self._largest, float(rows))

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "inserted": self.inserted,
            "sampled": self.sampled,
            "free": self._free,
            "largest": self._largest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the counts of another one."""
        self.inserted, self.sampled = state["inserted"], state["sampled"]
        self._free, self._largest = state["free"], state["largest"]

    def _due(self) -> float:
        return (self.inserted - self._free) * (self.samples_per_insert or 0.0) - self.sampled

    def _allowed(self) -> float:
        if self.tolerance is not None:
            return self.tolerance
        least = _SHARE * self.min_size * (self.samples_per_insert or 0.0)
        return max(least, self._largest)
