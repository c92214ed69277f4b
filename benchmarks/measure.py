"""Timing for the benchmarks: the part shared with the package's own benchmark, and steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

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
    "LIMIT",
    "PREPARED",
    "WAY",
    "Contender",
    "Summary",
    "collector_paused",
    "compared",
    "interleave",
    "ratio_of_medians",
    "steps",
    "summarise",
]


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
