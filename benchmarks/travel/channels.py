"""Times batches, and weights, to another process, beside one tensor of their bytes by gloo.

Both processes are on this host. A block is a number of batches one after the other, until all have
arrived and were taken, or of versions of weights, each of which is written before the next; the
blocks of all ways take turns.
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

ONE, AHEAD = "one tensor, send and recv", "one tensor, isend and irecv of two"
ONE_AND_ANSWER = "one tensor and an answer"
EACH = "each leaf, send and recv"
BATCHES, FEW, VERSIONS = 40, 2, 2
"""Of a block; of one in which each leaf is a message; and of weights."""
MOST_OVER_ONE, MOST_OF_WEIGHTS = 1.25, 1.2


class Case(NamedTuple):
    count: int
    floats: int
    """Of each leaf."""

    are_weights: bool = False


CASES = {
    "200 leaves of 8 KB": Case(200, 2000),
    "528 leaves of 288 bytes": Case(528, 72),
    "500 parameters, 64 MB": Case(500, 32_768, are_weights=True),
}


def run(bench: Bench) -> dict[str, Any]:
    found = {}
    with two_ranks("gloo", _end_of) as other:
        for name, case in CASES.items():
            found[name] = _timed(bench, name, case, other)
    return {
        "what": "Batches and weights to another process of this host, beside gloo's own messages",
        "settings": {"batches of a block": BATCHES, "with a message for each leaf": FEW},
        "cases": found,
    }


def _timed(bench: Bench, name: str, case: Case, other: Other) -> dict[str, Any]:
    with other.end(name, case) as end:
        expected = zlib.crc32(tdcopier.pack(_batch(case, 0)))
        wrong = {OURS: int(zlib.crc32(tdcopier.pack(end.first())) != expected)}
        times = other.times(bench, name, end)
        wrong[OURS] += end.count_wrong()
    return {
        "leaves": case.count,
        "bytes": 4 * case.count * case.floats,
        "wall_us": summaries(times.wall_us),
        "process_us": summaries(times.process_us),
        "wrong": wrong,
    }


def _batch(case: Case, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        f"leaf {number}": torch.rand(case.floats, generator=generator)
        for number in range(case.count)
    }


class Ends:
    """One process: rank 0 sends, rank 1 receives."""

    def __init__(self, rank: int, name: str, case: Case) -> None:
        self.rank = rank
        self.batch = _batch(case, 0)
        self.tensor = torch.zeros(4 * case.count * case.floats, dtype=torch.uint8)
        self.ways = {
            OURS: self.channel,
            ONE: self.one,
            AHEAD: self.ahead,
            EACH: self.each,
        }
        if rank == 0:
            self.tx = distributed.sender(1, name=name, host="127.0.0.1")
            self.tx.start(self.batch)
        else:
            self.rx = distributed.receiver(0, name=name, host="127.0.0.1")
            self.last: Any = None

    def first(self) -> Any:
        self.last = self.rx.next().get()
        return self.last

    def batches_of(self, way: str) -> int:
        return FEW if way == EACH else BATCHES

    def channel(self, count: int) -> None:
        for _ in range(count):
            if self.rank == 0:
                self.tx.start(self.batch)
            else:
                self.last = self.rx.next().wait()
        if self.rank == 0:
            self.tx.flush()

    def count_wrong(self) -> int:
        """Return whether the last batch differs."""
        return int(zlib.crc32(tdcopier.pack(self.last)) != zlib.crc32(tdcopier.pack(self.batch)))

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

    def close(self) -> None:
        (self.tx if self.rank == 0 else self.rx).close()


class Weights:
    """One process: rank 0 publishes, rank 1 follows."""

    def __init__(self, rank: int, name: str, case: Case) -> None:
        self.rank = rank
        self.weights = _batch(case, rank)
        self.numbers = [leaf[:1] for leaf in self.weights.values()]
        self.tensor = torch.zeros(4 * case.count * case.floats, dtype=torch.uint8)
        self.answer = torch.zeros(1)
        self.ways = {OURS: self.versions, ONE_AND_ANSWER: self.one}
        if rank == 0:
            self.end: Any = distributed.publish(self.weights, name=name, host="127.0.0.1")
        else:
            self.end = distributed.follow(self.weights, name=name, host="127.0.0.1")

    def first(self) -> Any:
        self.end.update(timeout_s=None)
        return self.weights

    def batches_of(self, way: str) -> int:
        return VERSIONS

    def versions(self, count: int) -> None:
        for _ in range(count):
            if self.rank == 0:
                torch._foreach_add_(self.numbers, 1.0)
                self.end.publish()
            else:
                self.end.update(timeout_s=None)
            self._answer()

    def one(self, count: int) -> None:
        for _ in range(count):
            if self.rank == 0:
                torch._foreach_add_(self.numbers, 1.0)
                dist.send(self.tensor, 1)
            else:
                dist.recv(self.tensor, 0)
            self._answer()

    def _answer(self) -> None:
        dist.recv(self.answer, 1) if self.rank == 0 else dist.send(self.answer, 0)

    def count_wrong(self) -> int:
        """Return whether the last version differs in the first number of a parameter."""
        case = Case(len(self.numbers), self.weights["leaf 0"].numel())
        begin = [leaf[0] for leaf in _batch(case, 0).values()]
        pairs = zip(self.numbers, begin, strict=True)
        steps = {round(float(now) - float(then)) for now, then in pairs}
        return int(steps == {0} or len(steps) != 1)

    def close(self) -> None:
        self.end.close()


def _end_of(rank: int, name: str, case: Case) -> Ends | Weights:
    return (Weights if case.are_weights else Ends)(rank, name, case)


# ---- targets -------------------------------------------------------------------------------------


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    yield none("first and last batches with other values", count_wrong(result["cases"].values()))


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, found in result["cases"].items():
        for key, what in (("wall_us", "time"), ("process_us", "processor time of both")):
            medians = {way: each["median_us"] for way, each in found[key].items()}
            ones = [medians[way] for way in (ONE, AHEAD, ONE_AND_ANSWER) if way in medians]
            most = MOST_OF_WEIGHTS if ONE_AND_ANSWER in medians else MOST_OVER_ONE
            over = medians[OURS] / min(ones)
            yield at_most(f"{name}: {what}, over one tensor of the bytes", over, most)
