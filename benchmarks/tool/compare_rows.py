"""Times our own rows of the suites for a given number of seconds each; used by compare.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import copies.ways
import torch
from copies.directions import possible, start_workers, synchroniser, with_host
from copies.timed import TREE
from loops import training_loop
from loops.learner import Work
from loops.steps import STEPS, Reader, block
from rows import gathers
from rows.storages import REPLAYS, Samples, drawn

from tdcopier._commands.interleave import collector_paused, interleave
from tdcopier.workloads import WORKLOADS
from tool.alternate import Turns
from tool.measure import BURST, QuietProcessor, shuffled
from tool.tables import OURS
from tool.way import Way

MIN_ROUNDS, MAX_ROUNDS = 3, 200
STORAGE_ROWS, STORAGE_ROWS_OF_SIM = 10_000, 500

Times = dict[str, list[float]]


class Case(NamedTuple):
    """A batch of a suite, and our own ways to copy it."""

    name: str
    run: Callable[[int], Times]
    """Runs a number of rounds, and returns times in microseconds by row."""


Cases = Iterator[Case]
BeginRound = Callable[[], None]
"""Waits for a turn, and finds a quiet processor."""
Wanted = Callable[[str], bool]
"""Returns whether the case of this name is timed; others are not even made."""
MOST_CASES = 1000  # of a suite


def measured(
    device: torch.device,
    suites: Sequence[str],
    wanted: Wanted,
    seconds: float,
    turns: Turns | None = None,
) -> tuple[dict[str, float], dict[str, str]]:
    """Return medians in microseconds by row, and errors by the suite that they ended.

    ``seconds`` are for each case, of both processes if there are two that take turns.
    """
    turns = turns or Turns()
    for direction in with_host(device).values():
        start_workers(direction)
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    quiet = QuietProcessor()
    for number, suite in enumerate(suites):
        try:
            cases = SUITES[suite](device, partial(turns.begin_round, quiet.seek), wanted)
            for place, case in enumerate(cases):
                turns.begin_case(number * MOST_CASES + place)
                with collector_paused(), quiet:
                    times = within(case.run, seconds, turns)
                for row, taken in times.items():
                    found[f"{suite}: {case.name}, {row}"] = median(taken)
        except Exception as error:  # an older build may lack a function that a suite calls
            failed[suite] = f"{type(error).__name__}: {error}"
    return found, failed


def within(run: Callable[[int], Times], seconds: float, turns: Turns) -> Times:
    """Return times of as many rounds as fit into the seconds, after two that are discarded."""
    run(1)
    begin, waited_s = time.perf_counter(), turns.waited_s
    run(1)
    round_s = time.perf_counter() - begin - (turns.waited_s - waited_s)
    together_s = max(turns.agree(round_s), 1e-9)
    return run(max(MIN_ROUNDS, min(MAX_ROUNDS, round(seconds / together_s))))


def is_ours(way: Way) -> bool:
    return way.name.startswith((OURS, "start_copy()"))


def _interleaved(
    name: str,
    ways: list[Way],
    sources: Sequence[Any],
    device: torch.device,
    begin_round: BeginRound,
    burst: int = BURST,
) -> Case:
    how = {"warm_up": 0, "before_round": begin_round, "burst": burst}
    ours, synchronise = list(filter(is_ours, ways)), synchroniser([device])
    return Case(name, lambda rounds: interleave(ours, sources, synchronise, rounds=rounds, **how))


def _copies(name: str, device: torch.device, begin_round: BeginRound, wanted: Wanted) -> Cases:
    direction = possible(device)[name]
    for workload in filter(wanted, WORKLOADS):
        made = WORKLOADS[workload]
        sources = TREE.sources(made.make, made.pool, direction)
        yield _interleaved(workload, copies.ways.ways(direction), sources, device, begin_round)


def _tensordicts(device: torch.device, begin_round: BeginRound, wanted: Wanted) -> Cases:
    from copies import tensordicts  # needs tensordict, whose import takes seconds

    for direction in with_host(device).values():
        for batch, made in tensordicts.BATCHES.items():
            name = f"{batch} {direction.name}"
            if wanted(name):
                sources = tensordicts.TENSORDICT.sources(made.make, made.pool, direction)
                ways = tensordicts.ways(direction)
                yield _interleaved(name, ways, sources, device, begin_round)


def _into(device: torch.device, begin_round: BeginRound, wanted: Wanted) -> Cases:
    from copies import into_existing  # needs tensordict too

    for direction in with_host(device).values():
        if wanted(direction.name):
            with into_existing.fillings(direction) as fillings:
                ways = into_existing.ways(direction, list(fillings[0].destinations))
                for way in ways:  # starts workers, before this thread is bound to a processor
                    way.run(fillings[0])
                yield _interleaved(direction.name, ways, fillings, device, begin_round)


def _gather(device: torch.device, begin_round: BeginRound, wanted: Wanted) -> Cases:
    count = STORAGE_ROWS if device.type == "cuda" else STORAGE_ROWS_OF_SIM
    for name in filter(wanted, REPLAYS):
        indices = drawn(REPLAYS[name], count, gathers.INDICES)
        samples = Samples(REPLAYS[name].make(count), indices, device)
        ways = list(map(gathers.in_turn, gathers.to_host(samples)))
        yield _interleaved(name, ways, [None], device, begin_round, gathers.BURST)


def _loops(device: torch.device, begin_round: BeginRound, wanted: Wanted) -> Cases:
    work = Work(device, training_loop.STEP_MS)
    for name in filter(wanted, training_loop.WANTED):
        sources = training_loop.sources_of(name)
        check = training_loop.check(sources, device)._replace(every=STEPS + 1)  # none as a whole
        ways = list(filter(is_ours, training_loop.ways(device, name)))
        prepared = {way.name: [way.prepare(source) for source in sources] for way in ways}

        def run(
            rounds: int, check: Any = check, ways: Any = ways, prepared: Any = prepared
        ) -> Times:
            times: Times = {}
            for index, way in shuffled(ways, iter, rounds=rounds, before_round=begin_round):
                read = Reader(check, index).read
                with way.feeding(prepared[way.name], index) as batches:
                    found = block(batches, read, work, device)
                times.setdefault(f"{way.name}, step", []).append(found.step_us)
                times.setdefault(f"{way.name}, copy calls", []).extend(found.batch_us)
            return times

        yield Case(name, run)


SUITES: dict[str, Callable[[torch.device, BeginRound, Wanted], Cases]] = {
    **{name: partial(_copies, name) for name in ("h2d", "d2h", "d2d")},
    "into": _into,
    "tensordict": _tensordicts,
    "gather": _gather,
    "loop": _loops,
}
