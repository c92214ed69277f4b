"""Timing for the benchmarks: rounds of all ways, on a quiet processor.

`tdcopier/_commands/interleave.py` takes turns between the ways and summarises.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from tdcopier._commands.interleave import (
    Contender,
    collector_paused,
    compared,
    interleave,
    summarise,
)
from tool.tables import OURS

BURST = 5  # consecutive calls of one contender
MIN_ROUNDS = 3
TOLERANCE = 1.2  # a processor is quiet if its probe is within this factor of the best one
PROBE_STEPS = 8000  # a few tenths of a millisecond

Progress = Callable[[str], Callable[[Iterable[int]], Iterable[int]]]
Item = TypeVar("Item")
Named = TypeVar("Named", bound=Any)


def probe_us() -> float:
    """Time a fixed piece of interpreter work on the current processor."""
    begin = time.perf_counter_ns()
    total = 0
    for step in range(PROBE_STEPS):
        total += step
    return (time.perf_counter_ns() - begin) / 1e3


class QuietProcessor:
    """A context in which :meth:`seek` moves the calling thread to a quiet processor.

    On a shared host a virtual processor can lose half its speed, for seconds at a time, to another
    virtual machine on the same core. Host work then takes twice as long, but waiting for the device
    does not, so ratios say more about the neighbour than about the code. All contenders of a round
    run on the same processor.

    Only the calling thread is moved. Threads that it starts meanwhile inherit its processor, so
    start worker pools before. Where threads cannot be moved (not on Linux), or without ``bound``,
    the thread stays where the system puts it.
    """

    def __init__(self, bound: bool = True) -> None:
        can_move = bound and hasattr(os, "sched_getaffinity")
        self._allowed = sorted(os.sched_getaffinity(0)) if can_move else []
        self._best_us = float("inf")

    def __enter__(self) -> QuietProcessor:
        for processor in self._allowed:
            self._move_to(processor)
            self._best_us = min(self._best_us, *(probe_us() for _ in range(3)))
        return self

    def __exit__(self, *_: object) -> None:
        if self._allowed:
            os.sched_setaffinity(0, self._allowed)

    def seek(self) -> None:
        """Move to a quiet processor before a round, if there is one."""
        if not self._allowed or self._is_quiet():
            return
        for processor in self._allowed:
            self._move_to(processor)
            if self._is_quiet():
                return

    def _is_quiet(self) -> bool:
        found_us = min(probe_us(), probe_us())
        self._best_us = min(self._best_us, found_us)
        return found_us <= TOLERANCE * self._best_us

    @staticmethod
    def _move_to(processor: int) -> None:
        os.sched_setaffinity(0, {processor})


def _begin(seek: Callable[[], None]) -> None:
    seek()


class Bench(NamedTuple):
    """The device and the options that every benchmark is run with."""

    device: torch.device
    repeats: int
    """Calls with the fastest batches; slower ones get a fraction of that."""
    progress: Progress
    """Returns a wrapper of the rounds for a label."""
    keep_gc: bool = False
    """Leave Python's garbage collector on while timing."""
    begin_round: Callable[[Callable[[], None]], None] = _begin
    """Called before each round with a function that seeks a quiet processor."""
    ours_only: bool = False
    """Time no other ways than ours and those that ratios are relative to."""

    @property
    def is_real(self) -> bool:
        """Whether times mean something: not those of the simulated device."""
        return self.device.type != "sim"

    def rounds(self, share: float, least: int = 2) -> int:
        """Return the number of rounds that are a fraction of the repeats."""
        return max(least, round(self.repeats * share))

    def timed(self, ways: Sequence[Named], reference: str) -> list[Named]:
        """Return the ways that are timed."""
        ours = (OURS, reference) if self.ours_only else ("",)
        return [way for way in ways if way.name.startswith(ours)]

    @contextmanager
    def quiet(self, bound: bool = True) -> Iterator[Callable[[], None]]:
        """Pause the collector, and keep the calling thread on a quiet processor if ``bound``.

        Gives the function to call before each round.
        """
        with collector_paused(not self.keep_gc), QuietProcessor(bound) as processor:
            yield partial(self.begin_round, processor.seek)

    def interleaved(
        self,
        label: str,
        contenders: Sequence[Contender],
        sources: Sequence[Any],
        synchronise: Callable[[], None],
        *,
        bound: bool = True,
        **how: Any,
    ) -> dict[str, list[float]]:
        """Return what :func:`interleave` does, on a quiet processor if ``bound``."""
        how = {"burst": BURST, "progress": self.progress(label), **how}
        with self.quiet(bound) as begin_round:
            return interleave(contenders, sources, synchronise, before_round=begin_round, **how)

    def compared(
        self,
        label: str,
        contenders: Sequence[Contender],
        sources: Sequence[Any],
        synchronise: Callable[[], None],
        *,
        reference: str = OURS,
        **how: Any,
    ) -> dict[str, dict[str, Any]]:
        """Return the summaries of the interleaved ways, and how long others take over one."""
        timed = self.timed(contenders, reference)
        found = compared(
            self.interleaved(label, timed, sources, synchronise, **how), reference, BURST
        )
        return {part: found[part] for part in ("contenders", "ratios")}


def shuffled(
    items: Iterable[Item],
    progress: Callable[[Iterable[int]], Iterable[int]],
    *,
    rounds: int,
    warm_up: int = 0,
    before_round: Callable[[], None] = lambda: None,
) -> Iterator[tuple[int, Item]]:
    """Yield the number of the round and an item: all items in each round, in a new random order.

    The rounds that warm up come first and have negative numbers.
    """
    order, dice = list(items), random.Random(0)
    for index in progress(range(warm_up + rounds)):
        dice.shuffle(order)
        before_round()
        for item in order:
            yield index - warm_up, item


def summaries(times_us: dict[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Return the summary of each list, in the form that result files use."""
    return {name: summarise(taken)._asdict() for name, taken in times_us.items()}
