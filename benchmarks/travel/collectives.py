"""Times trees that are broadcast, beside one tensor of their bytes and a broadcast for each leaf.

With two GPUs by NCCL, else by gloo on the host. A block is a number of broadcasts one after the
other, until both devices are done; the blocks of all ways take turns.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from tool.measure import Bench, summaries
from tool.tables import OURS
from tool.target_forms import Target, at_most, count_wrong, none

import tdcopier
from tdcopier import distributed
from tdcopier.workloads import leaves
from travel.two_ranks import Other, two_ranks

ONE, EACH = "one tensor, broadcast", "each leaf, broadcast"
CALLS, FEW = {"nccl": 40, "gloo": 4}, 4
"""Of a block, and of one with a message for each leaf."""
MOST_OVER_ONE, MOST_IN_CALL_US = 1.1, 60.0


class Case(NamedTuple):
    count: int
    floats: int
    """Of each leaf."""
    has_integers: bool = False
    """Every second leaf."""


CASES = {
    "500 leaves, 64 MB": Case(500, 32_768),
    "500 leaves of two dtypes, 64 MB": Case(500, 32_768, has_integers=True),
    "500 leaves of 288 bytes": Case(500, 72),
}


def run(bench: Bench) -> dict[str, Any]:
    backend = "nccl" if bench.device.type == "cuda" and torch.cuda.device_count() > 1 else "gloo"
    found = {}
    with two_ranks(backend, Ends) as other:
        for name, case in CASES.items():
            found[name] = _timed(bench, name, case, other)
    return {
        "what": "Trees broadcast to another process of this host, beside one tensor",
        "settings": {"backend": backend, "calls of a block": CALLS[backend], "for each leaf": FEW},
        "cases": found,
    }


def _timed(bench: Bench, name: str, case: Case, other: Other) -> dict[str, Any]:
    with other.end(name, case) as end:
        times = other.times(bench, name, end)
        expected = zlib.crc32(tdcopier.pack(_tree(case)))
        wrong = {OURS: int(zlib.crc32(tdcopier.pack(tdcopier.copy(end.last, "cpu"))) != expected)}
    return {
        "leaves": case.count,
        "bytes": 4 * case.count * case.floats,
        "wall_us": summaries(times.wall_us),
        "process_us": summaries(times.process_us),
        "calls_us": summaries(times.calls_us),
        "wrong": wrong,
    }


def _tree(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {f"leaf {i}": torch.rand(case.floats, generator=generator) for i in range(case.count)}
    if case.has_integers:
        for name in list(made)[::2]:
            made[name] = made[name].view(torch.int32)
    return made


class Ends:
    """One process: rank 0 is the source."""

    def __init__(self, rank: int, name: str, case: Case) -> None:
        self.rank = rank
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        self.tree = tdcopier.copy(_tree(case), device)
        self.tensor = torch.zeros(4 * case.count * case.floats, dtype=torch.uint8, device=device)
        self.ways = {OURS: self.ours, ONE: self.one, EACH: self.each}
        self.last: Any = None

    def batches_of(self, way: str) -> int:
        return FEW if way == EACH else CALLS[dist.get_backend()]

    def ours(self, count: int) -> None:
        for _ in range(count):
            self.last = distributed.broadcast(self.tree if self.rank == 0 else None, 0)

    def one(self, count: int) -> None:
        for _ in range(count):
            dist.broadcast(self.tensor, 0)

    def each(self, count: int) -> None:
        for _ in range(count):
            for leaf in leaves(self.tree):
                dist.broadcast(leaf, 0)

    def close(self) -> None:
        """Leave nothing open: there is only the group."""


# ---- targets -------------------------------------------------------------------------------------


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    yield none("last trees with other values", count_wrong(result["cases"].values()))


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    if result["settings"]["backend"] != "nccl":
        return
    found = result["cases"]["500 leaves, 64 MB"]
    medians = {way: each["median_us"] for way, each in found["wall_us"].items()}
    yield at_most("500 leaves, 64 MB, over one tensor", medians[OURS] / medians[ONE], MOST_OVER_ONE)
    in_call = found["calls_us"][OURS]["median_us"]
    yield at_most("the same, time in the source's call, us", in_call, MOST_IN_CALL_US)
