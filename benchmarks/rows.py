"""Times gathers alone, against ``index_select``.

Rows of a storage go to pinned host memory; rows of a pinned storage go to the device, read by it or
by host threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any, NamedTuple

import torch
from directions import synchroniser
from measure import Bench
from storages import Replay, Storage, drawn, rows_of, with_each
from tables import OURS
from target_forms import Target, at_least, at_most, count_wrong, none

import tdcopier
from tdcopier import _C
from tdcopier._commands.interleave import Contender, collector_paused, compared, interleave

OURS_ALONE = f"{OURS}, one thread"
THREADS = (1, 4)
BURST = 3
INDICES = 64  # each call has other rows, because those of the last one are in the caches
WANTED = {"atari_32": 2.0, "atari_256": 2.0, "rgb": 2.0, "agents": 3.0}
"""Targets for the speedup over ``index_select`` on one thread."""
BY_THREADS, BY_TORCH = f"{OURS}, by host threads", "index_select, pin_memory() and .to() per leaf"
MIN_OVER_THREADS = 1.5


class Tables(NamedTuple):
    """Leaves of a pinned storage, and the rows that go to the device."""

    row_bytes: list[int]
    rows: int
    most_us: float
    """Target for the time from the call to the rows on the device."""
    tall: int = 100_000
    """Rows in the storage."""


TABLES = {
    "2 leaves, 256 rows of 28 KB": Tables([4 * 84 * 84] * 2, 256, 330.0, 20_000),
    "4 leaves, 4096 rows of 256 B": Tables([256] * 4, 4096, 140.0),
    "13 leaves, 4096 rows of 64 B": Tables([64] * 13, 4096, 150.0),
    "13 leaves, 256 rows of 64 B": Tables([64] * 13, 256, 55.0),
    "200 leaves, 256 rows of 32 B": Tables([32] * 200, 256, 190.0),
    "8 leaves, 4096 rows of 4 B": Tables([4] * 8, 4096, 85.0),
}


def run(bench: Bench) -> dict[str, Any]:
    rows = rows_of(bench)

    def gather(name: str, replay: Replay, storage: Storage) -> dict[str, Any]:
        return _gather(bench, name, storage, drawn(replay, rows, INDICES))

    return {
        "what": "Rows of a storage to pinned host memory",
        "settings": {
            "rows": f"{rows:,} in host memory",
            "order": f"bursts of {BURST} calls, shuffled per round; other rows in each call",
            "collector": bench.settings()["collector"],
        },
        "gathers": with_each(rows, gather),
        "from_pinned": {name: _from_pinned(bench, name, tables) for name, tables in TABLES.items()},
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
    wrong = count_wrong([*result["gathers"].values(), *result["from_pinned"].values()])
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
        us = found["contenders"][OURS]["median_us"]
        yield at_most(f"{name}, read by the device", us, TABLES[name].most_us, "us")
        ratio = found["ratios"][BY_THREADS]
        yield at_least(f"{name}, by host threads over the device", ratio, MIN_OVER_THREADS)


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


def _from_pinned(bench: Bench, name: str, tables: Tables) -> dict[str, Any]:
    tall = tables.tall if bench.is_real else 100
    storage = {
        f"{i}": torch.randint(0, 256, (tall, row), dtype=torch.uint8)
        for i, row in enumerate(tables.row_bytes)
    }
    generator = torch.Generator().manual_seed(0)
    rows = tables.rows if bench.is_real else 5
    indices = [torch.randint(0, tall, (rows,), generator=generator) for _ in range(INDICES)]
    with tdcopier.pin_memory_(storage, bench.device):
        ways = to_device(storage, indices, bench.device)
        wrong = {}
        for each in ways:
            with each.around():
                wrong[each.name] = _is_wrong(each, storage, indices)
        times_us, processor = bench.interleaved(
            f"rows, {name}",
            ways,
            [None],
            synchroniser([bench.device]),
            rounds=bench.rounds(0.04),
            burst=BURST,
        )
    size_bytes = rows * sum(tables.row_bytes)
    return {
        "bytes": size_bytes,
        "wrong": wrong,
        "processor": processor,
        **compared(times_us, OURS, BURST),
    }


def to_device(
    storage: Storage, indices: list[torch.Tensor], device: torch.device
) -> list[Contender]:
    """Return the ways of gathering rows of a pinned storage; each takes the indices in turn."""

    @contextmanager
    def kernel(use: bool) -> Iterator[None]:
        _C.use_row_kernels(use)
        try:
            yield
        finally:
            _C.use_row_kernels(True)

    def in_turn(run: Callable[[torch.Tensor], Any]) -> Callable[[Any], Any]:
        turn = cycle(indices)
        return lambda _: run(next(turn))

    def by_torch(index: torch.Tensor) -> Storage:
        pinned = device.type == "cuda"
        found = {}
        for name, leaf in storage.items():
            read = leaf.index_select(0, index)
            found[name] = (read.pin_memory() if pinned else read).to(device, non_blocking=True)
        return found

    gather = in_turn(lambda index: tdcopier.gather(storage, index, device))
    threads = in_turn(lambda index: tdcopier.gather(storage, index, device))
    return [
        Contender(OURS, gather, around=lambda: kernel(True)),
        Contender(BY_THREADS, threads, around=lambda: kernel(False)),
        Contender(BY_TORCH, in_turn(by_torch)),
    ]


def _is_wrong(contender: Contender, storage: Storage, indices: list[torch.Tensor]) -> bool:
    """Check one full cycle, so that the next one begins with the first rows again."""
    wrong = False
    for index in indices:
        got = contender.run(None)
        wrong |= any(
            not torch.equal(got[name].cpu(), leaf[index]) for name, leaf in storage.items()
        )
    return wrong
