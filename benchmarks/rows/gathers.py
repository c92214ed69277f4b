"""Times gathers of rows of a storage to pinned host memory, against ``index_select``.

The result also has the rows of pinned storages that go to the device (`pinned_rows.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import torch
from copies.directions import synchroniser
from loops.learner import SMALL_KERNELS, learners
from loops.steps import STEPS
from tool.measure import Bench
from tool.tables import OURS, RESIDENT
from tool.target_forms import Target, at_least, at_most, count_wrong, none
from tool.way import GET, Way

import tdcopier
from rows import pinned_rows
from rows.pinned_rows import BURST, BY_THREADS, INDICES
from rows.storages import Replay, Storage, drawn, pinned_like, rows_of, with_each

OURS_ALONE = f"{OURS}, one thread"
THREADS = (1, 4)
WANTED = {"atari_32": 2.0, "atari_256": 2.0, "rgb": 2.0, "agents": 3.0}
"""Targets for the speedup over ``index_select`` on one thread."""
MIN_OVER_THREADS = 1.5
MAX_STEP_OVER_RESIDENT = 1.03


def run(bench: Bench) -> dict[str, Any]:
    rows = rows_of(bench)

    def gather(name: str, replay: Replay, storage: Storage) -> dict[str, Any]:
        return _gather(bench, name, storage, drawn(replay, rows, INDICES))

    return {
        "what": "Rows of a storage: to pinned host memory, and of a pinned storage to the device",
        "settings": {
            "rows": f"{rows:,} in host memory",
            "order": f"bursts of {BURST} calls, shuffled per round; other rows in each call",
            "collector": bench.settings()["collector"],
            "small kernels": f"{SMALL_KERNELS} a step",
            "large kernels": f"about {pinned_rows.STEP_MS:g} ms a step",
            "steps": f"blocks of {STEPS}, shuffled per round; ratios are within a round; the next "
            "gather starts before the kernels of a step are enqueued",
        },
        "gathers": with_each(rows, gather),
        "from_pinned": _from_pinned(bench),
    }


def _gather(
    bench: Bench, name: str, storage: Storage, indices: list[torch.Tensor]
) -> dict[str, Any]:
    each_way = ways(storage, indices)
    threads = torch.get_num_threads()
    wrong = {each.name: _is_wrong(each, storage, indices) for each in each_way}
    times = bench.compared(
        f"gather, {name}",
        each_way,
        [None],
        synchroniser([bench.device]),
        rounds=bench.rounds(0.1),
        burst=BURST,
        bound=False,
    )
    torch.set_num_threads(threads)
    return {"wrong": wrong, **times}


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    pinned = result["from_pinned"].values()
    learners = [found for each in pinned for found in each.get("learners", {}).values()]
    wrong = count_wrong([*result["gathers"].values(), *pinned, *learners])
    yield none("gathers with another value than the storage's, all contenders", wrong)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, wanted in WANTED.items():
        if name in result["gathers"]:
            contenders = result["gathers"][name]["contenders"]
            medians = {way: times["median_us"] for way, times in contenders.items()}
            one = medians[_by_torch(1)]
            what = f"{name}, index_select on one thread over tdcopier"
            yield at_least(what, one / medians[OURS], wanted)
            yield at_least(f"{what} on one", one / medians[OURS_ALONE], 1.0)
    for name, found in result["from_pinned"].items():
        us, most_us = found["contenders"][OURS]["median_us"], pinned_rows.TABLES[name].most_us
        if most_us is not None:
            yield at_most(f"{name}, read by the device", us, most_us, "us")
        ratio = found["ratios"][BY_THREADS]
        yield at_least(f"{name}, by host threads over the device", ratio, MIN_OVER_THREADS)
        for learner, steps in found.get("learners", {}).items():
            what = f"{name}, {learner}, step over that {RESIDENT}"
            yield at_most(what, steps["ratios"][OURS], MAX_STEP_OVER_RESIDENT)


def _by_torch(threads: int) -> str:
    return f"index_select, {threads} thread{'s' if threads > 1 else ''}"


def ways(storage: Storage, indices: list[torch.Tensor]) -> list[Way]:
    """Return ours, and torch's by number of threads; each takes the indices in turn."""
    pinned = pinned_like(storage, len(indices[0]))

    def by_torch(threads: int, index: torch.Tensor) -> Storage:
        torch.set_num_threads(threads)
        for name, leaf in storage.items():
            torch.index_select(leaf, 0, index, out=pinned[name])
        return pinned

    def ours(index: torch.Tensor, **how: Any) -> Any:
        return tdcopier.start_gather(storage, index, "cpu", **how)

    found = [
        Way(OURS, ours, GET),
        Way(OURS_ALONE, partial(ours, use_background_thread=False), GET),
        *(Way(_by_torch(threads), partial(by_torch, threads)) for threads in THREADS),
    ]

    def in_turn(way: Way) -> Way:
        turn = cycle(indices)
        return way._replace(start=lambda _: way.start(next(turn)))

    return [in_turn(way) for way in found]


def _from_pinned(bench: Bench) -> dict[str, Any]:
    works, found = learners(bench.device, pinned_rows.STEP_MS), {}
    for name, tables in pinned_rows.TABLES.items():
        samples = pinned_rows.Samples(bench, tables)
        with tdcopier.pin_memory_(samples.storage, bench.device):
            found[name] = pinned_rows.run(bench, name, samples)
            if tables.feeds_a_learner:
                found[name]["learners"] = {
                    learner: pinned_rows.run_learner(bench, f"{name}, {learner}", samples, work)
                    for learner, work in works.items()
                }
    return found


def _is_wrong(way: Way, storage: Storage, indices: list[torch.Tensor]) -> bool:
    """Check one full cycle, so that the next one begins with the first rows again."""
    wrong = False
    for index in indices:
        got = way.run(None)
        wrong |= any(
            not torch.equal(got[name].cpu(), leaf[index]) for name, leaf in storage.items()
        )
    return wrong
