"""Times host-synchronised copies of the named workloads in one direction, and counts transfers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from tool.measure import BURST, MIN_ROUNDS, Bench
from tool.tables import OURS
from tool.target_forms import Target, at_least, at_most, counts, none

from copies import limits
from copies.directions import Direction, possible
from copies.timed import TREE, best_other, timed
from copies.ways import PER_LEAF_TO, ways
from tdcopier.workloads import WORKLOADS, Workload

LARGE_SHARE = {"d2h": 0.2}
"""By direction, the fraction of their usual rounds that large workloads get. Copies of a large tree
into pageable memory are slow: it is new and faulted in each time."""


class Wanted(NamedTuple):
    """The targets of one direction."""

    speedup: float
    """Detection batch: the time of ``.to()`` per leaf over ours."""
    over_dma: dict[str, float]
    """By workload, the largest ratio of our time to that of one transfer of its bytes."""
    over_best: dict[str, float]
    """By workload, the time of the best other way over ours."""


WANTED = {
    "h2d": Wanted(48.0, {"detection_batch_with_images": 1.5}, {"atari_replay": 2.5}),
    # The first call allocates pinned memory from the system. It is discarded as a warm-up.
    "d2h": Wanted(40.0, {"one_large": 1.03}, {}),
    "d2d": Wanted(20.0, {}, {}),
}


def run(bench: Bench, name: str, workloads: Sequence[str]) -> dict[str, Any]:
    """Return the figures of the direction of this name and of some workloads."""
    direction = possible(bench.device)[name]
    return {
        "what": "Time from the call to the tree on the target, outputs built and host synchronised",
        "workloads": {each: _workload(bench, direction, each) for each in workloads},
    }


def rounds_of(direction: Direction, workload: Workload, repeats: int) -> int:
    """Return how many bursts each way gets with a workload."""
    share = workload.repeat_share
    if share < 1:
        share *= LARGE_SHARE.get(direction.name, 1.0)
    return max(MIN_ROUNDS, round(repeats * share / BURST))


def _workload(bench: Bench, direction: Direction, name: str) -> dict[str, Any]:
    workload = WORKLOADS[name]
    sources = TREE.sources(workload.make, workload.pool, direction)
    every = [*ways(direction), limits.transfer(direction)]
    rounds = rounds_of(direction, workload, bench.repeats)
    return timed(bench, name, direction, sources, every, rounds=rounds)


# ---- targets -------------------------------------------------------------------------------------


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    workloads = result["workloads"]
    wrong = [(way, n) for each in workloads.values() for way, n in each["wrong"].items()]
    ours, others = (sum(n for way, n in wrong if (way == OURS) is own) for own in (True, False))
    yield none("leaves of tdcopier's result that differ from .to(), all workloads", ours)
    if others:
        yield none("leaves and limits of others that differ from .to(), all workloads", others)
    if "detection_batch" in workloads:
        seen = f"{result['name'].upper()} memcpys seen from outside"
        what = f"detection batch: packed leaves, transfers, {seen}"
        yield counts(what, workloads["detection_batch"], 528, 3)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    workloads, wanted = result["workloads"], WANTED[result["name"]]
    if "detection_batch" in workloads:
        speedup = workloads["detection_batch"]["ratios"][PER_LEAF_TO]
        yield at_least(f"detection batch, {PER_LEAF_TO} over tdcopier", speedup, wanted.speedup)
    for name, most in wanted.over_dma.items():
        if name in workloads:
            over = limits.over_transfer(workloads[name])
            yield at_most(f"{name}, tdcopier over one DMA of the same bytes", over, most)
    for name, least in wanted.over_best.items():
        if name in workloads:
            way, ratio = best_other(workloads[name])
            yield at_least(f"{name}, best of the other ways ({way}) over tdcopier", ratio, least)
