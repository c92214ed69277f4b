"""Times copies into an existing tree, against copies that allocate and copies leaf by leaf."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tensordict import MemoryMappedTensor
from tool.measure import BURST, MIN_ROUNDS, Bench
from tool.tables import OURS
from tool.way import GET, Way

import tdcopier
from copies.directions import Direction
from copies.timed import Kind, timed
from copies.ways import differences
from tdcopier.workloads import detection_batch, leaves, map_tensors

POOL = 2
REPEAT_SHARE = 0.3
FRESH = "start_copy().get()"
PER_LEAF = "copy_() per leaf"
CHUNK, SCATTERED, MAPPED = "one earlier chunk", "scattered tensors", "memory-mapped tensors"


class Filling(NamedTuple):
    """A batch, and trees of the same structure that it is copied into."""

    source: Any
    destinations: dict[str, Any]


FILLING = Kind(
    move=lambda case, device: case,
    leaves=lambda case: leaves(case.source),
    start=lambda case, _: tdcopier.start_copy_into(
        case.source, next(iter(case.destinations.values()))
    ),
    differences=lambda result, case, device: differences(result, case.source, device),
)


def into(place: str) -> str:
    return f"{OURS}.copy_into(), {place}"


@contextmanager
def fillings(direction: Direction) -> Iterator[list[Filling]]:
    """Return the batches with their destinations; files of these exist in the context only."""
    with tempfile.TemporaryDirectory() as folder:
        yield [filling(direction, seed, Path(folder, str(seed))) for seed in range(POOL)]


def run(bench: Bench, direction: Direction) -> dict[str, Any]:
    with fillings(direction) as cases:
        return timed(
            bench,
            "copy_into",
            direction,
            cases,
            ways(direction, list(cases[0].destinations)),
            rounds=bench.rounds(REPEAT_SHARE / BURST, MIN_ROUNDS),
            kind=FILLING,
            reference=FRESH,
        )


def filling(direction: Direction, seed: int, folder: Path) -> Filling:
    """Return a batch on the direction's source device, and its destinations.

    Memory-mapped tensors have a file each in the folder, which is created for them.
    """
    on_host = detection_batch(seed=seed)
    source = map_tensors(on_host, lambda leaf: leaf.to(direction.source))
    if direction.target.type != "cpu":
        chunk = tdcopier.copy(on_host, direction.target)
        scattered = map_tensors(on_host, lambda leaf: leaf.to(direction.target))
        return Filling(source, {CHUNK: chunk, SCATTERED: scattered})
    folder.mkdir()
    files = (folder / f"{index}.memmap" for index in range(len(leaves(on_host))))

    def mapped(leaf: torch.Tensor) -> torch.Tensor:
        return MemoryMappedTensor.from_tensor(leaf, filename=next(files))

    return Filling(source, {MAPPED: map_tensors(on_host, mapped)})


def ways(direction: Direction, places: list[str]) -> list[Way]:
    """Return a copy that allocates, then ``copy_into()`` and ``copy_()`` per leaf by place."""

    def copy_into(place: str, case: Filling) -> Any:
        return tdcopier.copy_into(case.source, case.destinations[place])

    def per_leaf(place: str, case: Filling) -> Any:
        destination = case.destinations[place]
        for to, leaf in zip(leaves(destination), leaves(case.source), strict=True):
            to.copy_(leaf)
        return destination

    found = [Way(FRESH, lambda case: tdcopier.start_copy(case.source, direction.target), GET)]
    for place in places:
        found.append(Way(into(place), partial(copy_into, place), prepare=zeroed))
        if place != CHUNK:  # for copies leaf by leaf, a chunk is like any other memory
            name = f"{PER_LEAF}, {place}"
            found.append(Way(name, partial(per_leaf, place), prepare=zeroed))
    return found


def zeroed(case: Filling) -> Filling:
    """Zero the destinations, so that leaves which are not filled are wrong."""
    for destination in case.destinations.values():
        for leaf in leaves(destination):
            leaf.zero_()
    return case
