"""Times copies to the device by the number of leaves, from 10 to 100,000."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tool.measure import MIN_ROUNDS, Bench, summaries
from tool.tables import OURS
from tool.target_forms import Target, at_most, count_wrong, none

import tdcopier
from copies.directions import synchroniser
from copies.limits import flat_bytes
from copies.ways import PER_LEAF_TO, per_leaf, pinned_beforehand
from tdcopier._commands.interleave import Contender
from tdcopier.workloads import flat_dict, total_bytes

COUNTS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
FLOATS = 64  # per leaf
MOST_SIMULATED = 10_000
MOST_BY_TO = 10_000  # limit for .to() per leaf: more leaves take seconds and show nothing new
BURST = 3
WARM_UP = 1
ROUNDS_OF_LEAVES = 60  # batches with more leaves get fewer rounds
SMALL, LARGE = 1_000, 100_000
MAX_GROWTH = 1.5


def run(bench: Bench) -> dict[str, Any]:
    counts = [n for n in COUNTS if bench.is_real or n <= MOST_SIMULATED]
    return {
        "what": "Host to device: the cost of a copy against the number of its leaves",
        "settings": {
            "leaf": f"{FLOATS} float32, side by side in a dict",
            **bench.settings(burst=BURST),
        },
        "sizes": {str(count): _size(bench, count) for count in counts},
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    wrong = count_wrong(result["sizes"].values())
    yield none("copies that differ from their source, all sizes and ways", wrong)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    small, large = (result["sizes"][str(count)]["us_per_leaf"][OURS] for count in (SMALL, LARGE))
    what = f"tdcopier, cost of a leaf among {LARGE:,} over that among {SMALL:,}"
    yield at_most(what, large / small, MAX_GROWTH)


def contenders(device: torch.device, count: int) -> list[Contender]:
    found = [Contender(OURS, lambda tree: tdcopier.start_copy(tree, device).get())]
    if count <= MOST_BY_TO:
        found.append(per_leaf(PER_LEAF_TO, lambda leaf: leaf.to(device)))
    return [*found, pinned_beforehand(device)]


def rounds_of(count: int, repeats: int) -> int:
    """Return how many bursts each way gets for ``count`` leaves."""
    return max(MIN_ROUNDS, round(repeats / BURST * min(1.0, ROUNDS_OF_LEAVES / count)))


def differs(result: Any, source: dict[str, torch.Tensor], device: torch.device) -> bool:
    """Return whether a copy has wrong keys, devices or bytes."""
    if list(result) != list(source) or {leaf.device for leaf in result.values()} != {device}:
        return True
    return not torch.equal(flat_bytes(result).cpu(), flat_bytes(source))


def _size(bench: Bench, count: int) -> dict[str, Any]:
    source = flat_dict(leaves=count, floats=FLOATS)
    ways = contenders(bench.device, count)
    wrong = {way.name: int(is_wrong(way, source, bench.device)) for way in ways}
    times, processor = bench.interleaved(
        f"{count:,} leaves",
        ways,
        [source],
        synchroniser([bench.device]),
        rounds=rounds_of(count, bench.repeats),
        warm_up=WARM_UP,
        burst=BURST,
    )
    found = summaries(times)
    return {
        "leaves": count,
        "bytes": total_bytes(source),
        "contenders": found,
        "us_per_leaf": {way: summary["median_us"] / count for way, summary in found.items()},
        "wrong": wrong,
        "processor": processor,
    }


def is_wrong(way: Contender, source: dict[str, torch.Tensor], device: torch.device) -> bool:
    result = way.run(way.prepare(source))
    synchroniser([device])()
    return differs(result, source, device)
