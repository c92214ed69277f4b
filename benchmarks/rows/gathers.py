"""Times gathers of rows of a storage to pinned host memory, against ``index_select``.

The result also has the rows of pinned storages that go to the device (`pinned_rows.py`), and the
learners that get them (`pinned_learner.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
from copies.directions import synchroniser
from loops.learner import SMALL_KERNELS, STEPS
from tool.measure import Bench
from tool.tables import OURS, RESIDENT
from tool.target_forms import Target, at_least, at_most, count_wrong, none

import tdcopier
from rows import pinned_learner, pinned_rows
from rows.pinned_rows import BURST, BY_THREADS, INDICES
from rows.storages import Replay, Storage, drawn, rows_of, with_each
from tdcopier._commands.interleave import Contender, collector_paused, compared, interleave

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
            "large kernels": f"about {pinned_learner.STEP_MS:g} ms a step",
            "steps": f"blocks of {STEPS}, shuffled per round; ratios are within a round; the next "
            "gather starts before the kernels of a step are enqueued",
        },
        "gathers": with_each(rows, gather),
        "from_pinned": _from_pinned(bench),
    }


def _gather(
    bench: Bench, name: str, storage: Storage, indices: list[torch.Tensor]
) -> dict[str, Any]:
    ways = contenders(storage, indices)
    threads = torch.get_num_threads()
    wrong = {each.name: _is_wrong(each, storage, indices) for each in ways}
    with collector_paused(not bench.keep_gc):
        times_us = interleave(
            ways,
            [None],
            synchroniser([bench.device]),
            rounds=bench.rounds(0.1),
            burst=BURST,
            progress=bench.progress(f"gather, {name}"),
        )
    torch.set_num_threads(threads)
    return {"wrong": wrong, **compared(times_us, OURS, BURST)}


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


def contenders(storage: Storage, indices: list[torch.Tensor]) -> list[Contender]:
    """Return ours, and torch's by number of threads; each takes the indices in turn."""
    rows = len(indices[0])
    pinned = {
        name: torch.empty(rows, *leaf.shape[1:], dtype=leaf.dtype, pin_memory=True)
        for name, leaf in storage.items()
    }

    def by_torch(threads: int) -> Callable[[Any], Any]:
        turn = cycle(indices)

        def run(_: Any) -> Storage:
            index = next(turn)
            torch.set_num_threads(threads)
            for name, leaf in storage.items():
                torch.index_select(leaf, 0, index, out=pinned[name])
            return pinned

        return run

    def ours(use_background_thread: bool) -> Callable[[Any], Any]:
        turn = cycle(indices)
        return lambda _: tdcopier.start_gather(
            storage, next(turn), "cpu", use_background_thread=use_background_thread
        ).get()

    return [
        Contender(OURS, ours(True)),
        Contender(OURS_ALONE, ours(False)),
        *(Contender(_by_torch(threads), by_torch(threads)) for threads in THREADS),
    ]


def _from_pinned(bench: Bench) -> dict[str, Any]:
    works, found = pinned_learner.learners(bench.device), {}
    for name, tables in pinned_rows.TABLES.items():
        samples = pinned_rows.Samples(bench, tables)
        with tdcopier.pin_memory_(samples.storage, bench.device):
            found[name] = pinned_rows.run(bench, name, samples)
            if tables.feeds_a_learner:
                found[name]["learners"] = pinned_learner.run(bench, name, samples, works)
    return found


def _is_wrong(contender: Contender, storage: Storage, indices: list[torch.Tensor]) -> bool:
    """Check one full cycle, so that the next one begins with the first rows again."""
    wrong = False
    for index in indices:
        got = contender.run(None)
        wrong |= any(
            not torch.equal(got[name].cpu(), leaf[index]) for name, leaf in storage.items()
        )
    return wrong
