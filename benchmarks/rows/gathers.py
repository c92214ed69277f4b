"""Times gathers of rows of a storage: to pinned host memory, and of a pinned one to the device.

Those to the host are compared with ``index_select``. Rows of a pinned storage are read by the
device or by host threads; they are timed from the call to the arrival, and in a learner that is fed
with them. The gather of its next batch starts before the kernels of a step are enqueued.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import torch
from copies.directions import synchroniser
from loops.learner import SmallKernels, Work, learners
from loops.steps import Check, compared
from tool.measure import Bench
from tool.tables import OURS, RESIDENT
from tool.target_forms import Target, at_least, at_most, count_wrong, none
from tool.way import GET, WAIT, Way

import tdcopier
from rows.storages import (
    TABLES,
    Replay,
    Samples,
    Storage,
    Tables,
    drawn,
    pinned_like,
    rows_of,
    with_each,
)
from tdcopier import _C

BURST = 3
INDICES = 64  # each call has other rows, because those of the last one are in the caches
OURS_ALONE = f"{OURS}, one thread"
NUMBERS_THERE = f"{OURS}, index on the device"
BY_THREADS, BY_TORCH = f"{OURS}, by host threads", "index_select, pin_memory() and .to() per leaf"
THREADS = (1, 4)
WANTED = {"atari_32": 2.0, "atari_256": 2.0, "rgb": 2.0, "agents": 3.0}
"""Targets for the speedup over ``index_select`` on one thread."""
MIN_OVER_THREADS = 1.5
MAX_STEP_OVER_RESIDENT = 1.03
STEP_MS = 3.4  # duration of a step of the learner with large kernels
PRINT_BYTES = 8  # at the end of each row of the last leaf, compared at every step


def run(bench: Bench) -> dict[str, Any]:
    works = learners(bench.device, STEP_MS)

    def gather(name: str, replay: Replay, storage: Storage) -> dict[str, Any]:
        samples = Samples(storage, drawn(replay, rows_of(bench), INDICES), bench.device)
        threads = torch.get_num_threads()
        found = _timed(bench, f"gather, {name}", samples, to_host(samples), bound=False)
        torch.set_num_threads(threads)
        return found

    return {
        "what": "Rows of a storage: to pinned host memory, and of a pinned storage to the device",
        "gathers": with_each(rows_of(bench), gather),
        "from_pinned": {name: _pinned(bench, name, each, works) for name, each in TABLES.items()},
    }


def _pinned(
    bench: Bench, name: str, tables: Tables, works: dict[str, Work | SmallKernels]
) -> dict[str, Any]:
    samples = tables.samples(bench, INDICES)
    with tdcopier.pin_memory_(samples.storage, bench.device):
        found = {
            "bytes": sum(leaf.nbytes for leaf in samples.batch(0).values()),
            **_timed(bench, f"rows, {name}", samples, to_device(samples)),
        }
        if tables.feeds_a_learner:
            found["learners"] = {
                learner: _steps(bench, f"steps, {name}, {learner}", samples, work)
                for learner, work in works.items()
            }
    return found


def _timed(
    bench: Bench, label: str, samples: Samples, ways: list[Way], *, bound: bool = True
) -> dict[str, Any]:
    wrong: dict[str, int] = {}
    times = bench.compared(
        label,
        [checked(way, samples, wrong) for way in ways],
        [None],
        synchroniser([samples.device]),
        rounds=bench.rounds(0.1),
        burst=BURST,
        bound=bound,
    )
    return {"wrong": wrong, **times}


def _steps(bench: Bench, label: str, samples: Samples, work: Work | SmallKernels) -> dict[str, Any]:
    check = check_of(samples)
    resident = Way(RESIDENT, prepare=lambda number: on_device(samples, number))
    return compared(
        bench,
        label,
        [resident, *to_device(samples, WAIT)[:-1]],
        range(INDICES),
        lambda way: check,
        lambda way: work,
        rounds=bench.rounds(0.02),
        bound=True,
    )[0]


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    pinned = result["from_pinned"].values()
    learners = [found for each in pinned for found in each.get("learners", {}).values()]
    wrong = count_wrong([*result["gathers"].values(), *pinned, *learners])
    yield none("gathers with another value than the storage's, all contenders", wrong)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, wanted in WANTED.items():
        contenders = result["gathers"][name]["contenders"]
        medians = {way: times["median_us"] for way, times in contenders.items()}
        one = medians[_on_threads(1)]
        what = f"{name}, index_select on one thread over tdcopier"
        yield at_least(what, one / medians[OURS], wanted)
        yield at_least(f"{what} on one", one / medians[OURS_ALONE], 1.0)
    for name, found in result["from_pinned"].items():
        us, most_us = found["contenders"][OURS]["median_us"], TABLES[name].most_us
        if most_us is not None:
            yield at_most(f"{name}, read by the device", us, most_us, "us")
        ratio = found["ratios"][BY_THREADS]
        yield at_least(f"{name}, by host threads over the device", ratio, MIN_OVER_THREADS)
        for learner, steps in found.get("learners", {}).items():
            what = f"{name}, {learner}, step over that {RESIDENT}"
            yield at_most(what, steps["ratios"][OURS], MAX_STEP_OVER_RESIDENT)


# ---- ways to gather a batch, by its number -------------------------------------------------------


def to_host(samples: Samples) -> list[Way]:
    """Return ours, and torch's by number of threads."""
    pinned = pinned_like(samples.storage, len(samples.indices[0]))

    def by_torch(threads: int, number: int) -> Storage:
        torch.set_num_threads(threads)
        for name, leaf in samples.storage.items():
            torch.index_select(leaf, 0, samples.index(number), out=pinned[name])
        return pinned

    def ours(number: int, **how: Any) -> Any:
        return tdcopier.start_gather(samples.storage, samples.index(number), "cpu", **how)

    return [
        Way(OURS, ours, GET),
        Way(OURS_ALONE, partial(ours, use_background_thread=False), GET),
        *(Way(_on_threads(threads), partial(by_torch, threads)) for threads in THREADS),
    ]


def _on_threads(threads: int) -> str:
    return f"index_select, {threads} thread{'s' if threads > 1 else ''}"


def to_device(samples: Samples, finish: Callable[[Any], Any] = GET) -> list[Way]:
    """Return ours, which ``finish`` ends, and torch's. The storage is pinned."""
    storage, device = samples.storage, samples.device
    there = [index.to(device) for index in samples.indices]

    def ours(number: int) -> tdcopier.AsyncCopyHandle[Storage]:
        return tdcopier.start_gather(storage, samples.index(number), device)

    def numbers_there(number: int) -> tdcopier.AsyncCopyHandle[Storage]:
        return tdcopier.start_gather(storage, there[number % len(there)], device)

    def by_torch(number: int) -> Storage:
        index, pin = samples.index(number), device.type == "cuda"
        rows = {name: leaf.index_select(0, index) for name, leaf in storage.items()}
        return {
            name: (leaf.pin_memory() if pin else leaf).to(device, non_blocking=True)
            for name, leaf in rows.items()
        }

    return [
        Way(OURS, ours, finish),
        Way(NUMBERS_THERE, numbers_there, finish),
        Way(BY_THREADS, ours, finish, around=by_host_threads),
        Way(BY_TORCH, by_torch),
    ]


@contextmanager
def by_host_threads() -> Iterator[None]:
    """Let host threads read the rows of pinned storages, in place of the device."""
    _C.testing.use_row_kernels(False)
    try:
        yield
    finally:
        _C.testing.use_row_kernels(True)


def in_turn(way: Way) -> Way:
    """Return a way that takes the batches in turn."""
    turn = cycle(range(INDICES))
    return way._replace(start=lambda _: way.start(next(turn)))


def checked(way: Way, samples: Samples, wrong: dict[str, int]) -> Way:
    """Return a way that takes the batches in turn, and after each burst compares one more."""
    turn = cycle(range(INDICES))
    wrong[way.name] = 0

    @contextmanager
    def around() -> Iterator[None]:
        with way.around():
            yield
            number = next(turn)
            wrong[way.name] += samples.is_wrong(way.run(number), number)

    return in_turn(way)._replace(around=around)


# ---- a learner -----------------------------------------------------------------------------------


def on_device(samples: Samples, number: int) -> Storage:
    return {name: leaf.to(samples.device) for name, leaf in samples.batch(number).items()}


def check_of(samples: Samples) -> Check:
    """Compare the ends of the rows of the last leaf at each step, and some whole batches."""
    last = list(samples.storage)[-1]
    ends = samples.storage[last][:, -PRINT_BYTES:]
    return Check(
        lambda batch: batch[last][:, -PRINT_BYTES:],
        lambda number: ends[samples.index(number)],
        lambda number, batch: not samples.is_wrong(batch, number),
    )
