"""Keeps the timed thread on a processor that no neighbour slows down, if there is one.

On a shared host a virtual processor can lose half its speed, for seconds at a time, to another
virtual machine on the same core. Host work then takes twice as long, but waiting for the device
does not, so ratios say more about the neighbour than about the code. All contenders of a round run
on the same processor.
"""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Any

TOLERANCE = 1.2  # a processor is quiet if its probe is within this factor of the best one
PROBE_STEPS = 8000  # a few tenths of a millisecond


def probe_us() -> float:
    """Time a fixed piece of interpreter work on the current processor."""
    begin = time.perf_counter_ns()
    total = 0
    for step in range(PROBE_STEPS):
        total += step
    return (time.perf_counter_ns() - begin) / 1e3


class QuietProcessor:
    """A context in which :meth:`seek` moves the calling thread to a quiet processor.

    Only the calling thread is moved. Threads that it starts meanwhile inherit its processor, so
    start worker pools before. Where threads cannot be moved (not on Linux), it only counts.
    """

    def __init__(self) -> None:
        self._allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._best_us = float("inf")
        self.rounds = 0
        self.moves = 0
        self.disturbed_rounds = 0

    def __enter__(self) -> QuietProcessor:
        for processor in self._allowed:
            self._move_to(processor)
            self._best_us = min(self._best_us, *(probe_us() for _ in range(3)))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._allowed:
            os.sched_setaffinity(0, self._allowed)

    def seek(self) -> None:
        """Move to a quiet processor before a round; count the round if there is none."""
        self.rounds += 1
        if self._is_quiet():
            return
        for processor in self._allowed:
            self._move_to(processor)
            if self._is_quiet():
                self.moves += 1
                return
        self.disturbed_rounds += 1

    def described(self) -> dict[str, Any]:
        """Return the counts for the result file."""
        return {
            "best_probe_us": round(self._best_us, 1),
            "tolerance": TOLERANCE,
            "rounds": self.rounds,
            "moves": self.moves,
            "disturbed_rounds": self.disturbed_rounds,
        }

    def _is_quiet(self) -> bool:
        found_us = min(probe_us(), probe_us())
        self._best_us = min(self._best_us, found_us)
        return found_us <= TOLERANCE * self._best_us

    @staticmethod
    def _move_to(processor: int) -> None:
        os.sched_setaffinity(0, {processor})
