"""Times copies into an existing tree, against copies that allocate and copies leaf by leaf."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from baselines import OURS, differences
from copies import BURST, MIN_ROUNDS, Progress, count_of
from directions import Direction, synchroniser
from measure import Contender, collector_paused, compared, interleave
from quiet import QuietProcessor
from tensordict import MemoryMappedTensor

import tdcopier
from tdcopier.workloads import detection_batch, leaves, map_tensors, total_bytes

POOL = 2
REPEAT_SHARE = 0.3
FRESH = "start_copy().get()"
PER_LEAF = "copy_() per leaf"
CHUNK, SCATTERED, MAPPED = "one earlier chunk", "scattered tensors", "memory-mapped tensors"


class Filling(NamedTuple):
    """A batch, and trees of the same structure that it is copied into."""

    source: Any
    destinations: dict[str, Any]


def into(place: str) -> str:
    return f"{OURS}.copy_into(), {place}"


def per_leaf_into(place: str) -> str:
    return f"{PER_LEAF}, {place}"


def run(direction: Direction, repeats: int, progress: Progress, *, keep_gc: bool) -> dict[str, Any]:
    """Return the result of the detection batch in one direction.

    Args:
        direction: Source and target of the copies.
        repeats: Calls with the fastest batches of a run; this one gets a fraction of that.
        progress: Returns a wrapper of the rounds for a label.
        keep_gc: Leave Python's garbage collector on while timing.

    """
    with tempfile.TemporaryDirectory() as folder:
        fillings = [filling(direction, seed, Path(folder, str(seed))) for seed in range(POOL)]
        return _timed(direction, fillings, repeats, progress, keep_gc=keep_gc)


def filling(direction: Direction, seed: int, folder: Path) -> Filling:
    """Return a batch on the direction's source device, and its destinations.

    Args:
        direction: Source and target of the copies.
        seed: Seed of the batch.
        folder: Created here for the files of memory-mapped tensors, one each.

    """
    on_host = detection_batch(seed=seed)
    source = map_tensors(on_host, lambda leaf: leaf.to(direction.source))
    if direction.target.type != "cpu":
        return Filling(
            source,
            {
                CHUNK: tdcopier.copy(on_host, direction.target),
                SCATTERED: map_tensors(on_host, lambda leaf: leaf.to(direction.target)),
            },
        )
    folder.mkdir()
    files = (folder / f"{index}.memmap" for index in range(len(leaves(on_host))))
    return Filling(
        source,
        {
            MAPPED: map_tensors(
                on_host,
                lambda leaf: MemoryMappedTensor.from_tensor(leaf, filename=next(files)),
            )
        },
    )


def contenders(direction: Direction, places: list[str]) -> list[Contender]:
    """Return a copy that allocates, then ``copy_into()`` and ``copy_()`` per leaf by place."""
    target = direction.target
    found = [Contender(FRESH, lambda case: tdcopier.start_copy(case.source, target).get())]
    for place in places:
        found.append(Contender(into(place), _copy_into(place)))
        if place != CHUNK:  # for copies leaf by leaf, a chunk is like any other memory
            found.append(Contender(per_leaf_into(place), _copy_per_leaf(place)))
    return found


def wrong_leaves(way: Contender, case: Filling, direction: Direction) -> int:
    """Run a way over zeroed destinations, and return how many leaves of its result are wrong."""
    for destination in case.destinations.values():
        for leaf in leaves(destination):
            leaf.zero_()
    result = way.run(case)
    synchroniser(direction.devices)()
    return len(differences(result, case.source, direction.target))


def _copy_into(place: str) -> Callable[[Filling], Any]:
    return lambda case: tdcopier.copy_into(case.source, case.destinations[place]).get()


def _copy_per_leaf(place: str) -> Callable[[Filling], Any]:
    def run(case: Filling) -> Any:
        destination = case.destinations[place]
        for to, leaf in zip(leaves(destination), leaves(case.source), strict=True):
            to.copy_(leaf)
        return destination

    return run


def _timed(
    direction: Direction,
    fillings: list[Filling],
    repeats: int,
    progress: Progress,
    *,
    keep_gc: bool,
) -> dict[str, Any]:
    places = list(fillings[0].destinations)
    found = contenders(direction, places)
    synchronise = synchroniser(direction.devices)
    wrong = {way.name: wrong_leaves(way, fillings[0], direction) for way in found}
    with collector_paused(not keep_gc), QuietProcessor() as quiet:
        times = interleave(
            found,
            fillings,
            synchronise,
            rounds=max(MIN_ROUNDS, round(repeats * REPEAT_SHARE / BURST)),
            progress=progress(f"copy_into, {direction.name}"),
            before_round=quiet.seek,
            burst=BURST,
        )
    counts = {}
    for place in places:
        stats, counted = count_of(_start_into(fillings[0], place), direction)
        counts[into(place)] = {"stats": stats, "memcpys": counted.memcpys}
    return {
        "leaves": len(leaves(fillings[0].source)),
        "bytes": total_bytes(fillings[0].source),
        "sources": len(fillings),
        **compared(times, FRESH, BURST),
        "counts": counts,
        "wrong": wrong,
        "processor": quiet.described(),
    }


def _start_into(case: Filling, place: str) -> Callable[[], tdcopier.AsyncCopyHandle]:
    return lambda: tdcopier.copy_into(case.source, case.destinations[place])
