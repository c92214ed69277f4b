"""Interleaved timing in one process, summarised as medians, quartiles and ratios of medians."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple


class Summary(NamedTuple):
    """Summary of a list of times, in microseconds."""

    median_us: float
    q1_us: float
    q3_us: float
    min_us: float
    max_us: float
    repeats: int


WAY, PREPARED, LIMIT = "way", "prepared", "limit"
"""Kinds of contenders: a way of copying; a way that gets sources prepared for it; or a limit, which
copies no tree but measures the best that the machine can do."""


class Contender(NamedTuple):
    """One way of copying a tree, to be timed."""

    name: str
    run: Callable[[Any], Any]
    """Timed: takes a source tree and returns the tree on the target."""
    prepare: Callable[[Any], Any] = lambda tree: tree
    """Not timed, called once per source tree: for example to pin the sources of a baseline."""
    kind: str = WAY
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around each burst, not timed: for state that must not affect other contenders."""


def summarise(times_us: Sequence[float]) -> Summary:
    """Return median and quartiles. Quartiles are inclusive: they are within the measured range."""
    if not times_us:
        raise ValueError("no times to summarise")
    if len(times_us) == 1:
        q1 = median = q3 = times_us[0]
    else:
        q1, median, q3 = statistics.quantiles(times_us, n=4, method="inclusive")
    return Summary(median, q1, q3, min(times_us), max(times_us), len(times_us))


def ratio_of_medians(other: Summary, ours: Summary) -> float:
    """Return how many times longer the other takes."""
    return other.median_us / ours.median_us


def compared(times_us: dict[str, list[float]], reference: str, burst: int) -> dict[str, Any]:
    """Compare the times of several contenders, in the form that result files use.

    Args:
        times_us: from :func:`interleave`.
        reference: the contender that ratios are relative to.
        burst: as passed to :func:`interleave`; the first call of each burst is also reported
            separately.
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
    """Keep Python's cyclic garbage collector out of the timed region, as timeit does."""
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
    before_call: Callable[[], object] = lambda: None,
    burst: int = 1,
) -> dict[str, list[float]]:
    """Time every contender in every round, so that drift of the machine affects all of them alike.

    A round is a burst of calls with one source, for one contender after the other. The first call
    of a burst finds the caches as the previous contender left them; the other calls find them as in
    a loop of copies.

    One time includes the call, building its outputs, and synchronising the host with the device.
    The device is idle at the start. Dropping the outputs is not included. The order is shuffled for
    each round (in the same way in each run), so that no contender always follows the same other
    one. The sources rotate.

    Args:
        contenders: the contenders to time.
        sources: trees to copy, one per round in turn.
        synchronise: blocks until the device has done all enqueued work.
        rounds: number of times to keep per contender.
        warm_up: number of rounds before them that are discarded.
        clock_ns: the clock.
        progress: wraps the rounds, to show progress.
        before_round: called at the beginning of every round, outside the timed region.
        before_call: called before every call, outside the timed region.
        burst: consecutive calls of one contender.

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
                    before_call()
                    synchronise()
                    start = clock_ns()
                    result = contender.run(source)
                    synchronise()
                    end = clock_ns()
                    del result
                    if index >= warm_up:
                        times_us[contender.name].append((end - start) / 1e3)
    return times_us
