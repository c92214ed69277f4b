"""Times batches through a channel of two processes, beside one tensor of their bytes by gloo.

Both processes are on this host. A block is a number of batches one after the other, until all have
arrived and were taken; the blocks of all ways take turns.
"""

from __future__ import annotations

import multiprocessing
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tool.measure import Bench, shuffled, summaries
from tool.tables import OURS
from tool.target_forms import Target, at_most, count_wrong, none

import tdcopier
from tdcopier import distributed
from tdcopier.workloads import leaves

ONE, AHEAD = "one tensor, send and recv", "one tensor, isend and irecv of two"
EACH = "each leaf, send and recv"
BATCHES, FEW = 40, 2
"""Of a block; and of one in which each leaf is a message."""
MOST_OVER_ONE = 1.25
WARM_UP = 1


class Case(NamedTuple):
    count: int
    floats: int
    """Of each leaf."""


CASES = {"200 leaves of 8 KB": Case(200, 2000), "528 leaves of 288 bytes": Case(528, 72)}


def run(bench: Bench) -> dict[str, Any]:
    found = {}
    with _two_ranks() as other:
        for name, case in CASES.items():
            found[name] = _timed(bench, name, case, other)
    return {
        "what": "Batches to another process of this host: a channel, beside gloo's own messages",
        "settings": {"batches of a block": BATCHES, "with a message for each leaf": FEW},
        "cases": found,
    }


def _timed(bench: Bench, name: str, case: Case, other: Any) -> dict[str, Any]:
    end = Ends(1, name, case)
    wall: dict[str, list[float]] = {way: [] for way in WAYS}
    process: dict[str, list[float]] = {way: [] for way in WAYS}
    other.send((name, case))
    expected = zlib.crc32(tdcopier.pack(_batch(case, 0)))
    wrong = {OURS: int(zlib.crc32(tdcopier.pack(end.rx.next().get())) != expected)}
    for index, way in shuffled(
        list(WAYS), bench.progress(name), rounds=bench.rounds(0.05), warm_up=WARM_UP
    ):
        other.send(way)
        assert other.recv() == "ready"
        count, begin, used = _batches_of(way), time.perf_counter_ns(), time.process_time_ns()
        WAYS[way](end, count)
        used, took = time.process_time_ns() - used, time.perf_counter_ns() - begin
        used += other.recv()
        if index >= 0:
            wall[way].append(took / 1e3 / count)
            process[way].append(used / 1e3 / count)
    other.send(None)
    end.rx.close()
    return {
        "leaves": case.count,
        "bytes": 4 * case.count * case.floats,
        "wall_us": summaries(wall),
        "process_us": summaries(process),
        "wrong": wrong,
    }


def _batch(case: Case, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"leaf {number}": torch.rand(case.floats, generator=generator)
        for number in range(case.count)
    }


def _batches_of(way: str) -> int:
    return FEW if way == EACH else BATCHES


class Ends:
    """One process: rank 0 sends, rank 1 receives."""

    def __init__(self, rank: int, name: str, case: Case) -> None:
        self.rank = rank
        self.batch = _batch(case, 0)
        self.tensor = torch.zeros(4 * case.count * case.floats, dtype=torch.uint8)
        if rank == 0:
            self.tx = distributed.sender(1, name=name, host="127.0.0.1")
        else:
            self.rx = distributed.receiver(0, name=name, host="127.0.0.1")

    def channel(self, count: int) -> None:
        for _ in range(count):
            if self.rank == 0:
                self.tx.start(self.batch)
            else:
                self.rx.next().wait()
        if self.rank == 0:
            self.tx.flush()

    def one(self, count: int) -> None:
        for _ in range(count):
            self._message(self.tensor)

    def _message(self, tensor: torch.Tensor) -> None:
        dist.send(tensor, 1) if self.rank == 0 else dist.recv(tensor, 0)

    def ahead(self, count: int) -> None:
        under_way: list[Any] = []
        for _ in range(count):
            rank, tensor = self.rank, self.tensor
            under_way.append(dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0))
            if len(under_way) == 2:
                under_way.pop(0).wait()
        for work in under_way:
            work.wait()

    def each(self, count: int) -> None:
        for _ in range(count):
            for leaf in leaves(self.batch):
                self._message(leaf)


WAYS: dict[str, Callable[[Ends, int], None]] = {
    OURS: Ends.channel,
    ONE: Ends.one,
    AHEAD: Ends.ahead,
    EACH: Ends.each,
}


# ---- the other process ---------------------------------------------------------------------------


@contextmanager
def _two_ranks() -> Iterator[Any]:
    """Make this process rank 1 of two; give a connection to the other one."""
    store = _store(0, is_master=True)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_send, args=(there, store.port), daemon=True)
    process.start()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=1, world_size=2)
    try:
        yield here
    finally:
        here.close()
        dist.destroy_process_group()
        process.join()
        torch.set_num_threads(threads)


def _store(port: int, *, is_master: bool) -> Any:
    made: Any = dist
    return made.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)


def _send(pipe: Any, port: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=_store(port, is_master=False), rank=0, world_size=2)
    try:
        while True:
            _send_case(pipe, *pipe.recv())
    except EOFError:
        dist.destroy_process_group()


def _send_case(pipe: Any, name: str, case: Case) -> None:
    end = Ends(0, name, case)
    end.tx.start(end.batch)
    while (way := pipe.recv()) is not None:
        pipe.send("ready")
        used = time.process_time_ns()
        WAYS[way](end, _batches_of(way))
        pipe.send(time.process_time_ns() - used)
    end.tx.close()


# ---- targets -------------------------------------------------------------------------------------


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    yield none("first batches with other values", count_wrong(result["cases"].values()))


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, found in result["cases"].items():
        for key, what in (("wall_us", "time"), ("process_us", "processor time of both")):
            medians = {way: each["median_us"] for way, each in found[key].items()}
            over = medians[OURS] / min(medians[ONE], medians[AHEAD])
            yield at_most(f"{name}: {what}, over one tensor of the bytes", over, MOST_OVER_ONE)
