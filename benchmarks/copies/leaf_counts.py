"""Times copies to the device by the number of leaves, from 10 to 100,000."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tool.measure import MIN_ROUNDS, Bench
from tool.tables import OURS
from tool.target_forms import Target, at_most, count_wrong, none
from tool.way import GET, Way

from copies.directions import h2d
from copies.timed import timed
from copies.ways import PER_LEAF_TO, ours, per_leaf, pinned_beforehand
from tdcopier.workloads import flat_dict

COUNTS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
FLOATS = 64  # per leaf
MOST_SIMULATED = 10_000
MOST_BY_TO = 10_000  # limit for .to() per leaf: more leaves take seconds and show nothing new
BURST = 3
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


def ways(device: torch.device, count: int) -> list[Way]:
    to = [per_leaf(PER_LEAF_TO, lambda leaf: leaf.to(device))] if count <= MOST_BY_TO else []
    return [ours(device, GET), *to, pinned_beforehand(device)]


def _size(bench: Bench, count: int) -> dict[str, Any]:
    found = timed(
        bench,
        f"{count:,} leaves",
        h2d(bench.device),
        [flat_dict(leaves=count, floats=FLOATS)],
        ways(bench.device, count),
        rounds=bench.rounds(min(1.0, ROUNDS_OF_LEAVES / count) / BURST, MIN_ROUNDS),
        own=False,
        warm_up=1,
        burst=BURST,
    )
    us = {way: times["median_us"] / count for way, times in found["contenders"].items()}
    return {**found, "us_per_leaf": us}
