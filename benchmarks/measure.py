"""Timing for the benchmarks: the part shared with the package's own benchmark, rounds and steps."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from quiet import QuietProcessor

from tdcopier._commands.measure import (
    LIMIT,
    PREPARED,
    WAY,
    Contender,
    Summary,
    collector_paused,
    compared,
    interleave,
    ratio_of_medians,
    summarise,
)

__all__ = [
    "BURST",
    "LIMIT",
    "MIN_ROUNDS",
    "PREPARED",
    "WAY",
    "Bench",
    "Contender",
    "Summary",
    "collector_paused",
    "compared",
    "interleave",
    "ratio_of_medians",
    "shuffled",
    "steps",
    "summaries",
    "summarise",
]

BURST = 5  # consecutive calls of one contender
MIN_ROUNDS = 3

Progress = Callable[[str], Callable[[Iterable[int]], Iterable[int]]]
Item = TypeVar("Item")


class Bench(NamedTuple):
    """The device and the options that every benchmark is run with."""

    device: torch.device
    repeats: int
    """Calls with the fastest batches; slower ones get a fraction of that."""
    progress: Progress
    """Returns a wrapper of the rounds for a label."""
    keep_gc: bool = False
    """Leave Python's garbage collector on while timing."""

    @property
    def is_real(self) -> bool:
        """Whether times mean something: not those of the simulated device."""
        return self.device.type != "sim"

    def rounds(self, share: float, least: int = 2) -> int:
        """Return the number of rounds that are a fraction of the repeats."""
        return max(least, round(self.repeats * share))

    def settings(self, *, bound: bool = True, burst: int = BURST) -> dict[str, str]:
        """Return the settings in a result that several benchmarks have.

        Args:
            bound: Whether the timed thread is moved to a quiet processor.
            burst: Consecutive calls of one contender.

        """
        alone = "each round on one that no neighbour slows down, where there is one"
        free = "wherever threads are put: one that is tied ties those that it starts"
        return {
            "collector": "on" if self.keep_gc else "paused",
            "order": f"interleaved, bursts of {burst} calls, shuffled per round",
            "processor": alone if bound else free,
        }

    @contextmanager
    def quiet(self) -> Iterator[QuietProcessor]:
        """Pause the collector, and keep the calling thread on a quiet processor."""
        with collector_paused(not self.keep_gc), QuietProcessor() as processor:
            yield processor

    def interleaved(
        self,
        label: str,
        contenders: Sequence[Contender],
        sources: Sequence[Any],
        synchronise: Callable[[], None],
        **how: Any,
    ) -> tuple[dict[str, list[float]], dict[str, Any]]:
        """Call :func:`interleave` on a quiet processor; return its times, and the processor's."""
        how = {"burst": BURST, "progress": self.progress(label), **how}
        with self.quiet() as quiet:
            times = interleave(contenders, sources, synchronise, before_round=quiet.seek, **how)
        return times, quiet.described()


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


def steps(
    start_copy: Callable[[Any], Any],
    sources: Sequence[Any],
    synchronise: Callable[[], None],
    *,
    rounds: int,
    warm_up: int = 3,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    before_round: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """Time the steps of one copy as its caller sees them.

    Args:
        start_copy: Starts the copy of a source tree, and returns a handle.
        sources: Trees to copy, one per round in turn.
        synchronise: Blocks until the device has finished all enqueued work.
        rounds: Number of times to keep per step.
        warm_up: Number of earlier rounds that are discarded.
        clock_ns: The clock.
        before_round: Called at the beginning of every round, not timed.

    Returns:
        Times in microseconds: ``start_copy`` (the call), ``get`` (the wait and the outputs),
        ``synchronise`` (the device's remaining work), ``drop`` (freeing handle and tree).

    """
    names = ("start_copy", "get", "synchronise", "drop")
    times_us: dict[str, list[float]] = {name: [] for name in names}
    for index in range(warm_up + rounds):
        before_round()
        synchronise()
        ticks = [clock_ns()]
        handle = start_copy(sources[index % len(sources)])
        ticks.append(clock_ns())
        tree = handle.get()
        ticks.append(clock_ns())
        synchronise()
        ticks.append(clock_ns())
        del tree, handle
        ticks.append(clock_ns())
        if index >= warm_up:
            for name, before, after in zip(names, ticks[:-1], ticks[1:], strict=True):
                times_us[name].append((after - before) / 1e3)
    return times_us
