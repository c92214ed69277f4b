"""Times our own rows of the suites for a given number of seconds each; used by compare.py."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import baselines
import loop
import rows
import torch
from baselines import OURS
from copies import BURST, start_workers
from directions import d2h, h2d, possible, synchroniser
from loop_work import Reader, Work
from measure import Contender, collector_paused, interleave
from quiet import QuietProcessor
from storages import REPLAYS

from tdcopier.workloads import WORKLOADS, map_tensors

MIN_ROUNDS, MAX_ROUNDS = 3, 200
STORAGE_ROWS, STORAGE_ROWS_OF_SIM = 10_000, 500

Times = dict[str, list[float]]


class Case(NamedTuple):
    """A batch of a suite, and our own ways to copy it."""

    name: str
    run: Callable[[int], Times]
    """Runs a number of rounds, and returns times in microseconds by row."""


Cases = Iterator[Case]
Wanted = Callable[[str], bool]
"""Returns whether the case of this name is timed; others are not even made."""


def measured(
    device: torch.device, suites: Sequence[str], wanted: Wanted, seconds: float
) -> tuple[dict[str, float], dict[str, str]]:
    """Return medians in microseconds by row, and errors by the suite that they ended.

    Args:
        device: The accelerator.
        suites: Names of :data:`SUITES`.
        wanted: Selects the cases that are timed.
        seconds: Duration of each case.

    """
    for direction in (h2d(device), d2h(device)):
        start_workers(direction)
    found: dict[str, float] = {}
    failed: dict[str, str] = {}
    quiet = QuietProcessor()
    for suite in suites:
        try:
            for case in SUITES[suite](device, quiet.seek, wanted):
                with collector_paused(), quiet:
                    times = within(case.run, seconds)
                for row, taken in times.items():
                    found[f"{suite}: {case.name}, {row}"] = median(taken)
        except Exception as error:  # an older build may lack a function that a suite calls
            failed[suite] = f"{type(error).__name__}: {error}"
    return found, failed


def within(
    run: Callable[[int], Times],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Return times of as many rounds as take about ``seconds``, after two that are discarded."""
    run(1)
    begin = clock()
    run(1)
    round_s = max(clock() - begin, 1e-9)
    return run(max(MIN_ROUNDS, min(MAX_ROUNDS, round(seconds / round_s))))


def is_ours(way: str) -> bool:
    return way.startswith((OURS, "start_copy()"))


def _interleaved(
    name: str,
    contenders: list[Contender],
    sources: Sequence[Any],
    device: torch.device,
    seek: Callable[[], None],
    burst: int = BURST,
) -> Case:
    ours = [way for way in contenders if is_ours(way.name)]
    synchronise = synchroniser([device])
    return Case(
        name,
        lambda rounds: interleave(
            ours,
            sources,
            synchronise,
            rounds=rounds,
            warm_up=0,
            before_round=seek,
            burst=burst,
        ),
    )


def _copies(name: str) -> Callable[[torch.device, Callable[[], None], Wanted], Cases]:
    def cases(device: torch.device, seek: Callable[[], None], wanted: Wanted) -> Cases:
        direction = possible(device)[name]
        for workload in filter(wanted, WORKLOADS):
            made = WORKLOADS[workload]
            sources = [
                map_tensors(made.make(seed), lambda leaf: leaf.to(direction.source))
                for seed in range(made.pool)
            ]
            yield _interleaved(workload, baselines.contenders(direction), sources, device, seek)

    return cases


def _tensordicts(device: torch.device, seek: Callable[[], None], wanted: Wanted) -> Cases:
    import td_copies  # needs tensordict, whose import takes seconds

    for direction in (h2d(device), d2h(device)):
        for batch, made in td_copies.BATCHES.items():
            name = f"{batch} {direction.name}"
            if wanted(name):
                sources = [made.make(seed) for seed in range(made.pool)]
                if direction.source.type != "cpu":
                    sources = [td.to(direction.source) for td in sources]
                yield _interleaved(name, td_copies.contenders(direction), sources, device, seek)


def _into(device: torch.device, seek: Callable[[], None], wanted: Wanted) -> Cases:
    import into  # needs tensordict too

    for direction in (h2d(device), d2h(device)):
        if wanted(direction.name):
            with tempfile.TemporaryDirectory() as folder:
                fillings = [
                    into.filling(direction, seed, Path(folder, str(seed)))
                    for seed in range(into.POOL)
                ]
                ways = into.contenders(direction, list(fillings[0].destinations))
                yield _interleaved(direction.name, ways, fillings, device, seek)


def _gather(device: torch.device, _: Callable[[], None], wanted: Wanted) -> Cases:
    count = STORAGE_ROWS if device.type == "cuda" else STORAGE_ROWS_OF_SIM
    for name in filter(wanted, REPLAYS):
        storage = REPLAYS[name].make(count)
        indices = [torch.randint(0, count, (REPLAYS[name].batch,)) for _ in range(rows.INDICES)]
        ways = rows.contenders(storage, indices)
        yield _interleaved(name, ways, [None], device, lambda: None, rows.BURST)


def _loops(device: torch.device, seek: Callable[[], None], wanted: Wanted) -> Cases:
    work = Work(device, loop.STEP_MS)
    feeds = [feed for feed in loop.feeds(device) if is_ours(feed.name)]
    dice = random.Random(0)
    for name in filter(wanted, loop.WANTED):
        sources = [WORKLOADS[name].make(seed) for seed in range(loop.POOL[name])]
        reader = Reader(sources, loop.STEPS, device)
        prepared = {feed.name: [feed.prepare(source) for source in sources] for feed in feeds}

        def run(rounds: int, reader: Reader = reader, prepared: Any = prepared) -> Times:
            times: Times = {}
            for index in range(rounds):
                dice.shuffle(feeds)
                seek()
                for feed in feeds:
                    found = loop.block(feed, prepared[feed.name], index, work, reader, device)
                    times.setdefault(f"{feed.name}, step", []).append(found.step_us)
                    times.setdefault(f"{feed.name}, copy calls", []).extend(found.copy_calls_us)
            return times

        yield Case(name, run)


SUITES: dict[str, Callable[[torch.device, Callable[[], None], Wanted], Cases]] = {
    **{name: _copies(name) for name in ("h2d", "d2h", "d2d")},
    "into": _into,
    "tensordict": _tensordicts,
    "gather": _gather,
    "loop": _loops,
}
