"""Times copies with a feature of the engine and without it, in turns in one process.

Each feature is for speed alone, and has a switch for tests. Values are the same either way.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from tool.measure import BURST, MIN_ROUNDS, Bench
from tool.tables import OURS
from tool.way import GET, Way
from trainers.paired import interval

import tdcopier
from copies import cold_caches
from copies.cold_caches import AGENTS, CONTROL, DETECTION, FLAT, IMAGES, MANY_AGENTS, NESTED, Batch
from copies.directions import Direction, synchroniser, with_host
from copies.timed import TREE, Kind, cold_settle, wrong_places
from copies.ways import REUSED, ours, prepared
from tdcopier.workloads import (
    WORKLOADS,
    detection_batch_with_images,
    many_large,
    map_tensors,
    one_large,
)

WITH, WITHOUT = f"{OURS}, with it", f"{OURS}, without it"
POOL = 2
WARM_SHARE, LARGE_SHARE = 0.2, 0.05  # of the repeats: bursts with warm caches
COLD_SHARE = 0.2  # of the repeats: calls with cold caches
SIM_SHRINKS = 64  # large tensors have that many times fewer bytes on the simulated device
WALKED = (DETECTION, FLAT, NESTED, CONTROL, AGENTS)
PREPARED_AGAIN, FILLED = f"{DETECTION}, outputs reused", f"{DETECTION}, into existing tensors"
SAMPLES, SAMPLES_OF_SIM = 16, 1  # with images

Switch = Callable[[bool], None]
"""Turns a feature of the engine off or on."""
Figures = dict[str, Any]


class Case(NamedTuple):
    """Batches, and the copy of them that is timed with and without a feature."""

    sources: Callable[[Direction], list[Any]]
    way: Callable[[Direction], Way]
    kind: Kind = TREE
    share: float = WARM_SHARE
    """The share of the repeats that bursts with warm caches get."""
    cold: bool = True
    """Whether it is timed with cold caches too."""


@contextmanager
def off(switch: Switch) -> Iterator[None]:
    switch(False)
    try:
        yield
    finally:
        switch(True)


def both(switch: Switch, make: Callable[[], Way]) -> list[Way]:
    """Return a way with a feature, and another one like it without."""
    return [
        make()._replace(name=WITH),
        make()._replace(name=WITHOUT, around=partial(off, switch)),
    ]


def figures(with_us: Sequence[float], without_us: Sequence[float]) -> Figures:
    """Return both medians, and the median of the ratios of pairs with its 95 % interval.

    Args:
        with_us: Times with the feature.
        without_us: Times without it, each taken right before or after the same one of the others.

    """
    ratios = [slow / fast for fast, slow in zip(with_us, without_us, strict=True)]
    low, high = interval(ratios)
    return {
        "with_us": median(with_us),
        "without_us": median(without_us),
        "ratio": median(ratios),
        "low": low,
        "high": high,
        "repeats": len(ratios),
    }


def feature(bench: Bench, label: str, switch: Switch, cases: dict[str, Case]) -> Figures:
    """Return the figures of all cases, and the number of wrong leaves of each."""
    direction = with_host(bench.device)["h2d"]
    found: Figures = {"cases": {}, "wrong": {}}
    for name, case in cases.items():
        sources = case.sources(direction)
        ways = both(switch, partial(case.way, direction))
        wrong = sum(len(wrong_places(way, sources[0], direction, case.kind)) for way in ways)
        for caches in ("warm", "cold") if case.cold else ("warm",):
            row = f"{name}, {caches}" if case.cold else name
            if caches == "cold":
                how = {"burst": 1, "bound": False, "before_call": cold_settle(bench.is_real)}
                rounds = bench.rounds(COLD_SHARE)
            else:
                how, rounds = {"burst": BURST}, bench.rounds(case.share, MIN_ROUNDS)
            taken = bench.interleaved(
                f"{label}, {row}",
                ways,
                sources,
                synchroniser(direction.devices),
                rounds=rounds,
                **how,
            )
            size = case.kind.size_of(sources[0])
            found["cases"][row] = {**size, **figures(taken[WITH], taken[WITHOUT])}
            found["wrong"][row] = wrong
    return found


# ---- cases by feature ----------------------------------------------------------------------------


def of_prefetching() -> dict[str, Case]:
    """Return copies whose walk reads many Python objects: new ones, reused ones, existing ones."""
    batches = cold_caches.batches_here()
    cases = {name: _case(batches[name]) for name in WALKED if name in batches}
    cases[PREPARED_AGAIN] = cases[DETECTION]._replace(way=_outputs_reused)
    if importlib.util.find_spec("tensordict"):
        cases[FILLED] = _into_existing()
    return cases


def of_kernel() -> dict[str, Case]:
    """Return copies of leaves that are pinned each for itself."""
    batches = cold_caches.batches_here()
    names = [name for name in (DETECTION, CONTROL, MANY_AGENTS) if name in batches]
    leaves = partial(many_large, 64, 1 << 14)
    trees = (lambda seed: leaves(seed=seed)), TREE, lambda direction: [_of_tree(direction)]
    every = {name: batches[name] for name in names} | {"64 leaves of 16 KiB": trees}
    return {f"{name}, pinned": _pinned(_case(batch)) for name, batch in every.items()}


def of_batches(bench: Bench) -> dict[str, Case]:
    """Return copies of several transfers of some size: of windows, and of pinned leaves."""
    each_bytes = (1 << 20) // (1 if bench.is_real else SIM_SHRINKS)
    sources = partial(TREE.sources, partial(_pinned_leaves, each_bytes), POOL)
    pinned_leaves = Case(sources, _of_tree, cold=False)
    return of_shared_cache(bench) | {"64 pinned tensors of 1 MiB": pinned_leaves}


def of_shared_cache(bench: Bench) -> dict[str, Case]:
    """Return copies of large leaves: their participants run ahead of the device."""
    most = 1 << 28 if bench.is_real else (1 << 28) // SIM_SHRINKS
    made: dict[str, Callable[[int], Any]] = {
        IMAGES: lambda seed: images(bench, seed),
        "Atari replay batch": WORKLOADS["atari_replay"].make,
        "one tensor of 256 MiB": lambda seed: one_large(most, seed),
        "64 tensors of 4 MiB": lambda seed: many_large(64, most // 64, seed),
    }
    return {
        name: Case(
            partial(TREE.sources, make, POOL),
            _of_tree,
            share=LARGE_SHARE if "MiB" in name else WARM_SHARE,
            cold=False,
        )
        for name, make in made.items()
    }


def images(bench: Bench, seed: int) -> Any:
    samples = SAMPLES if bench.is_real else SAMPLES_OF_SIM
    return detection_batch_with_images(samples, seed=seed)


def _pinned_leaves(each_bytes: int, seed: int) -> Any:
    return pinned(many_large(64, each_bytes, seed))


def _case(batch: Batch) -> Case:
    make, kind, ways = batch
    return Case(partial(kind.sources, make, POOL), lambda direction: ways(direction)[0], kind)


def _of_tree(direction: Direction) -> Way:
    return ours(direction.target, GET)


def _outputs_reused(direction: Direction) -> Way:
    return prepared(REUSED, direction.target, GET, reuse_outputs=True)


def _into_existing() -> Case:
    from copies import into_existing as into

    def fill(case: into.Filling) -> Any:
        return tdcopier.copy_into(case.source, case.destinations[into.SCATTERED])

    def sources(direction: Direction) -> list[Any]:
        return [into.filling(direction, seed, Path()) for seed in range(POOL)]

    return Case(sources, lambda _: Way(OURS, fill, prepare=into.zeroed), into.FILLING)


def _pinned(case: Case) -> Case:
    def sources(direction: Direction) -> list[Any]:
        return [pinned(source) for source in case.sources(direction)]

    return case._replace(sources=sources)


def pinned(tree: Any) -> Any:
    """Return a tree or a TensorDict whose leaves are pinned each for itself."""
    if hasattr(tree, "apply"):
        return tree.apply(torch.Tensor.pin_memory)
    return map_tensors(tree, torch.Tensor.pin_memory)
