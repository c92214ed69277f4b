"""Interleaved timing in one process, boiled down to medians, quartiles and ratios of medians."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple


class Summary(NamedTuple):
    """What a list of times came to, in microseconds."""

    median_us: float
    q1_us: float
    q3_us: float
    min_us: float
    max_us: float
    repeats: int


WAY, PREPARED, LIMIT = "way", "prepared", "limit"
"""What a contender is: a way of copying; one that is handed sources that are prepared for it; or no
copy of a tree at all, but what the machine can do at best."""


class Contender(NamedTuple):
    """One way of copying a tree, as it is timed."""

    name: str
    run: Callable[[Any], Any]
    """Timed: from a source tree to the tree on the target."""
    prepare: Callable[[Any], Any] = lambda tree: tree
    """Not timed, once per source tree: for a baseline that is handed pinned sources."""
    kind: str = WAY
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered for each burst, not timed: for what must not be there while others are timed."""


def summarise(times_us: Sequence[float]) -> Summary:
    """Median and quartiles. Quartiles are inclusive: they lie within what was measured."""
    if not times_us:
        raise ValueError("no times to summarise")
    if len(times_us) == 1:
        q1 = median = q3 = times_us[0]
    else:
        q1, median, q3 = statistics.quantiles(times_us, n=4, method="inclusive")
    return Summary(median, q1, q3, min(times_us), max(times_us), len(times_us))


def ratio_of_medians(other: Summary, ours: Summary) -> float:
    """How many times longer the other takes."""
    return other.median_us / ours.median_us


def compared(times_us: dict[str, list[float]], reference: str, burst: int) -> dict[str, Any]:
    """What the times of several contenders come to, as result files hold it.

    Args:
        times_us: From :func:`interleave`.
        reference: The contender that ratios are over.
        burst: As it was interleaved: the first call of each burst is also given apart.

    """
    parts = {
        "contenders": ({way: summarise(taken) for way, taken in times_us.items()}, "ratios"),
        "first_calls": (
            {way: summarise(taken[::burst]) for way, taken in times_us.items()},
            "ratios_of_first_calls",
        ),
    }
    found: dict[str, Any] = {}
    for part, (summaries, ratios) in parts.items():
        found[part] = {way: summary._asdict() for way, summary in summaries.items()}
        found[ratios] = {
            way: ratio_of_medians(summary, summaries[reference])
            for way, summary in summaries.items()
            if way != reference
        }
    return found


@contextmanager
def collector_paused(paused: bool = True) -> Iterator[None]:
    """Keep Python's cyclic collector out of the timed region, as timeit does."""
    was_on = gc.isenabled()
    gc.collect()
    if paused:
        gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def interleave(
    contenders: Sequence[Contender],
    sources: Sequence[Any],
    synchronise: Callable[[], None],
    *,
    rounds: int,
    warm_up: int = 3,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
    before_round: Callable[[], None] = lambda: None,
    burst: int = 1,
) -> dict[str, list[float]]:
    """Time every contender in every round, so that a drift of the machine meets them all alike.

    A round is a burst of calls with one source, contender after contender. The first call of a
    burst finds in the caches what the neighbour left, the others what a loop of copies leaves.

    One time is: the call, its outputs built, and the host synchronised with the device. The device
    is idle when it starts. Dropping the outputs is not in it. The order is shuffled anew for each
    round (the same way in each run), so that no contender always finds the caches that the same
    neighbour left behind. The sources rotate.

    Args:
        contenders: What to time.
        sources: Trees to copy, one per round in turn.
        synchronise: Blocks until the device has done all that was enqueued.
        rounds: Times to keep per contender.
        warm_up: Rounds before them that are thrown away.
        clock_ns: The clock.
        progress: Wraps the rounds, to show how far it is.
        before_round: Called at the beginning of every round, outside what is timed.
        burst: Calls of one contender in a row.

    Returns:
        Times in microseconds by contender's name, in the order of the calls.

    """
    prepared = {c.name: [c.prepare(source) for source in sources] for c in contenders}
    times_us: dict[str, list[float]] = {c.name: [] for c in contenders}
    order = list(contenders)
    dice = random.Random(0)
    for index in progress(range(warm_up + rounds)):
        dice.shuffle(order)
        before_round()
        for contender in order:
            source = prepared[contender.name][index % len(sources)]
            with contender.around():
                for _ in range(burst):
                    synchronise()
                    start = clock_ns()
                    result = contender.run(source)
                    synchronise()
                    end = clock_ns()
                    del result
                    if index >= warm_up:
                        times_us[contender.name].append((end - start) / 1e3)
    return times_us
