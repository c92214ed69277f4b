"""Times gathers alone: rows of a storage to pinned host memory, against ``index_select``."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from directions import h2d, start_workers, synchroniser
from measure import Bench, Contender, collector_paused, compared, interleave
from storages import Replay, Storage, bytes_of_batch, that_fit
from targets import at_least, count_wrong, none

import tdcopier

OURS_ALONE = "tdcopier, one thread"
OURS = "tdcopier"
THREADS = (1, 4)
ROWS = 100_000
ROWS_OF_SIM = 500
BURST = 3
INDICES = 64  # each call has other rows, because those of the last one are in the caches
WANTED = {"atari_32": 2.0, "atari_256": 2.0, "rgb": 2.0, "agents": 3.0}
"""Targets for the speedup over ``index_select`` on one thread."""


def run(bench: Bench) -> dict[str, Any]:
    """Return the result of this benchmark, without the machine."""
    rows = ROWS if bench.is_real else ROWS_OF_SIM
    settings = bench.settings()
    result: dict[str, Any] = {
        "what": "Rows of a storage to pinned host memory",
        "settings": {
            "rows": f"{rows:,} in host memory",
            "order": f"bursts of {BURST} calls, shuffled per round; other rows in each call",
            "collector": settings["collector"],
        },
        "gathers": {},
    }
    start_workers(h2d(bench.device))
    threads = torch.get_num_threads()
    for name, replay in that_fit(rows).items():
        result["gathers"][name] = _gather(bench, name, replay, rows)
        torch.set_num_threads(threads)
        gc.collect()
    return {**result, "targets": targets(result, speed=bench.is_real)}


def _gather(bench: Bench, name: str, replay: Replay, rows: int) -> dict[str, Any]:
    storage = replay.make(rows)
    indices = drawn(replay, rows, INDICES)
    ways = contenders(storage, indices)
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
    return {
        "title": replay.title,
        "leaves": len(storage),
        "bytes": bytes_of_batch(storage, replay.batch),
        "wrong": wrong,
        **compared(times_us, OURS, BURST),
    }


def drawn(replay: Replay, rows: int, batches: int) -> list[torch.Tensor]:
    """Return the rows of some batches, drawn at random."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, rows, (replay.batch,), generator=generator) for _ in range(batches)]


def targets(result: dict[str, Any], *, speed: bool = True) -> list[dict[str, Any]]:
    """Return each target and whether it is hit; without ``speed``, only those on values."""
    wrong = count_wrong(result["gathers"].values())
    found = [none("gathers with another value than the storage's, all contenders", wrong)]
    if not speed:
        return found
    for name in WANTED:
        if name in result["gathers"]:
            contenders = result["gathers"][name]["contenders"]
            medians = {way: times["median_us"] for way, times in contenders.items()}
            one = medians[_by_torch(1)]
            what = f"{name}, index_select on one thread over tdcopier"
            found.append(at_least(what, one / medians[OURS], WANTED[name]))
            found.append(at_least(f"{what} on one", one / medians[OURS_ALONE], 1.0))
    return found


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


def _is_wrong(contender: Contender, storage: Storage, indices: list[torch.Tensor]) -> bool:
    """Check one full cycle, so that the next one begins with the first rows again."""
    wrong = False
    for index in indices:
        got = contender.run(None)
        wrong |= any(not torch.equal(got[name], leaf[index]) for name, leaf in storage.items())
    return wrong
