"""Times copies as loops make them: the caches are full of something else, the collector is on.

Before each call the timed thread writes other memory, so that neither the leaves nor their Python
objects are in a cache, nor the code and tables of the way that is timed. Torch's own threads do not
write it: they spin for a while afterwards, and would be a load beside the call. The pinned memory
that the way before has dropped is taken back too: torch asks the device about each block of it in
the next allocation, which would be a part of the call.

Some batches are timed again beside other work of the host. The timed thread runs where the system
puts it, as in a user's program: bound to one processor, it could not leave one that others use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from tool.measure import Bench
from tool.tables import OURS
from tool.target_forms import Target, at_least, at_most, count_wrong, none
from tool.way import PREPARED, Way

from copies import host_loads, limits
from copies.directions import Direction, with_host
from copies.timed import TREE, Kind, best_other, timed
from copies.ways import ways
from tdcopier.workloads import WORKLOADS

SHARE = 0.12  # of the repeats: a call takes ms with what is between two of them
DETECTION, FLAT, NESTED = "detection batch", "flat TensorDict", "nested TensorDict, 10 x 10 x 10"
AGENTS, CONTROL, ATARI = "64 agents, TensorDict", "control TensorDict", "Atari TensorDict"
MANY_AGENTS = "64 agents, 2 MB, TensorDict"
IMAGES = "detection batch with images"
BESIDE = (DETECTION, FLAT, IMAGES)
"""Batches that are timed beside a load, host to device."""
WANTED = {
    "h2d": {
        DETECTION: 6.0,
        FLAT: 9.0,
        NESTED: 9.0,
        AGENTS: 8.0,
        MANY_AGENTS: 8.0,
        CONTROL: 2.5,
        ATARI: 2.3,
    },
    "d2h": {DETECTION: 12.0, FLAT: 10.0, CONTROL: 2.5, ATARI: 1.0},
}
"""By direction and batch: the target for the time of the best other way over ours."""
OVER_DMA, OVER_DMA_BESIDE = 1.4, 1.8
"""Targets for the time of the batch with images over that of one transfer of its bytes."""

Batch = tuple[Callable[[int], Any], Kind, Callable[[Direction], list[Way]]]
"""A function that makes a batch from a seed, the kind of the batch, and the ways to copy it."""


def run(bench: Bench) -> dict[str, Any]:
    bench = bench._replace(keep_gc=True)
    both, batches = with_host(bench.device), batches_here()
    return {
        "what": "Cold caches: time from the call to the tree on the target",
        "copies": {
            name: {batch: _timed(bench, direction, batch, kind) for batch, kind in batches.items()}
            for name, direction in both.items()
        },
        "beside": {
            load: _beside(bench, both["h2d"], load, kind, batches)
            for load, kind in host_loads.KINDS.items()
        },
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    parts = [*result["copies"].values(), *result["beside"].values()]
    found = [copy for copies in parts for copy in copies.values()]
    yield none("cold: leaves that differ from .to(), all batches and ways", count_wrong(found))


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, wanted in WANTED.items():
        for batch, least in wanted.items():
            if batch in result["copies"][name]:
                way, ratio = best_other(result["copies"][name][batch])
                what = (
                    f"{batch}, {name.upper()}, cold: best of the other ways ({way}) over tdcopier"
                )
                yield at_least(what, ratio, least)
    places = {"alone": (result["copies"]["h2d"], OVER_DMA)}
    places |= {
        f"beside {load}": (there, OVER_DMA_BESIDE) for load, there in result["beside"].items()
    }
    for place, (copies, most) in places.items():
        if IMAGES in copies:
            over = limits.over_transfer(copies[IMAGES])
            yield at_most(f"{IMAGES}, H2D, cold, {place}: over one DMA", over, most)


def batches_here() -> dict[str, Batch]:
    """Return the batches by name; those of TensorDicts only where that package is installed."""
    found = {
        DETECTION: (WORKLOADS["detection_batch"].make, TREE, _ways_of_trees),
        IMAGES: (WORKLOADS["detection_batch_with_images"].make, TREE, _ways_of_trees),
    }
    if importlib.util.find_spec("tensordict") is None:
        return found
    from copies import td_batches, tensordicts

    made = {
        FLAT: td_batches.flat,
        NESTED: td_batches.nested,
        AGENTS: td_batches.agents,
        MANY_AGENTS: td_batches.many_agents,
        CONTROL: td_batches.control,
        ATARI: td_batches.atari,
    }
    kind, of_td = tensordicts.TENSORDICT, tensordicts.ways
    return found | {name: (make, kind, of_td) for name, make in made.items()}


def _beside(
    bench: Bench, direction: Direction, load: str, kind: str, batches: dict[str, Batch]
) -> dict[str, Any]:
    with host_loads.running(kind):
        return {
            name: _timed(bench, direction, f"{name}, beside {load}", batches[name])
            for name in BESIDE
            if name in batches
        }


def _ways_of_trees(direction: Direction) -> list[Way]:
    """Return the ways that receive the batch as it is, without variants of ours, and the limit."""
    found = [way for way in ways(direction) if way.kind != PREPARED]
    found = [way for way in found if way.name == OURS or not way.name.startswith(OURS)]
    return [*found, limits.transfer(direction)]


def _timed(bench: Bench, direction: Direction, name: str, batch: Batch) -> dict[str, Any]:
    make, kind, ways = batch
    return timed(
        bench,
        f"cold, {name}",
        direction,
        kind.sources(make, 2, direction),
        ways(direction),
        rounds=bench.rounds(SHARE),
        kind=kind,
        counted=False,
        cold=True,
    )
