"""Times what each feature of the engine gains that exists for speed alone.

A feature has a switch, so copies and loops with it and without it take turns in one process. One
that gains nothing in any of its workloads may as well be removed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from copies import switched
from copies.switched import WITH, WITHOUT, Figures, both, figures
from tool.measure import Bench
from tool.target_forms import Target, at_least, count_wrong, none
from tool.way import Way

import tdcopier
from loops.learner import SmallKernels, Work
from loops.steps import compared
from loops.training_loop import STEP_MS, as_plain, check
from tdcopier import _C
from tdcopier.workloads import WORKLOADS, leaves, map_tensors, total_bytes

DEFERRED, PREFETCHING = "deferred batches", "prefetching to the cache"
KERNEL, SHARED_CACHE = "kernel for small pinned leaves", "stores to the shared cache"
BATCHES = "transfers in batches"
MIN_GAIN = 1.02
"""The target for the time without a feature over that with it, in the workload that it is best
for."""
POOL = 4
ROUNDS_PER_REPEAT = 0.04


class Loop(NamedTuple):
    """A loop over prefetched batches."""

    make: Callable[[Bench, int], Any]
    """Makes a batch from a seed."""
    threaded: bool | None = None
    """As for ``prefetch``: None for a reader thread."""
    is_made_anew: bool = False
    """Whether each batch is new memory, as that of a loader."""
    is_large_work: bool = False
    """Whether a step has a few large kernels, or else many small ones."""


def _labels(_: Bench, seed: int) -> Any:
    return WORKLOADS["detection_batch"].make(seed)


def _control(_: Bench, seed: int) -> Any:
    from copies import td_batches

    return td_batches.control(seed)


LOOPS = {
    "detection batch": Loop(_labels),
    "detection batch, read by the loop": Loop(_labels, threaded=False),
    "control TensorDict": Loop(_control),
    "detection batch with images": Loop(switched.images),
    "detection batch with images, read by the loop": Loop(switched.images, threaded=False),
    "detection batch with images, made anew": Loop(switched.images, is_made_anew=True),
    "detection batch with images, large kernels": Loop(switched.images, is_large_work=True),
}
"""Steps have 500 small kernels if their loop is not said to have large ones."""


def run(bench: Bench) -> Figures:
    testing = _C.testing
    before = testing.shared_cache_copies()
    found = {
        DEFERRED: _loops(bench),
        PREFETCHING: switched.feature(
            bench, PREFETCHING, testing.use_prefetching, switched.of_prefetching()
        ),
        KERNEL: switched.feature(
            bench, KERNEL, testing.use_kernel_for_leaves, switched.of_kernel()
        ),
        SHARED_CACHE: switched.feature(
            bench, SHARED_CACHE, testing.use_shared_cache_store, switched.of_shared_cache(bench)
        ),
        BATCHES: switched.feature(
            bench, BATCHES, testing.use_batch_transfers, switched.of_batches(bench)
        ),
    }
    return {
        "what": "Features that are for speed alone: time with each, and without it",
        "features": found,
        "shared_cache_copies": testing.shared_cache_copies() - before,
    }


def value_targets(result: Figures) -> Iterator[Target]:
    wrong = count_wrong(result["features"].values())
    yield none("steps, batches and leaves that differ from .to(), with and without", wrong)


def speed_targets(result: Figures) -> Iterator[Target]:
    for name, found in result["features"].items():
        case = best_case(found["cases"])
        ratio = found["cases"][case]["ratio"]
        yield at_least(f"{name}: {case}, time without over with", ratio, MIN_GAIN)


def best_case(cases: Figures) -> str:
    """Return the case that gains most, by the lower end of the interval: chance has less part."""
    return max(cases, key=lambda name: float(cases[name]["low"]))


def _loops(bench: Bench) -> Figures:
    works = {True: Work(bench.device, STEP_MS), False: SmallKernels(bench.device)}
    found: Figures = {"cases": {}, "wrong": {}}
    for name, loop in LOOPS.items():
        if loop.make is _control and not importlib.util.find_spec("tensordict"):
            continue
        work = works[loop.is_large_work]
        found["cases"][name], found["wrong"][name] = _loop(bench, name, loop, work)
    return found


def _loop(bench: Bench, name: str, loop: Loop, work: Work | SmallKernels) -> tuple[Figures, int]:
    """Return the times of a step, and the number of wrong steps and batches."""
    sources = [loop.make(bench, seed) for seed in range(POOL)]
    checked = check(sources, bench.device)
    feed = partial(_prefetched, loop, bench.device)
    found, blocks = compared(
        bench,
        f"{DEFERRED}, {name}",
        both(_C.testing.use_deferred_batches, lambda: Way("", feed=feed)),
        sources,
        lambda way: checked,
        lambda way: work,
        rounds=bench.rounds(ROUNDS_PER_REPEAT),
    )
    plain = as_plain(sources[0])
    with_us, without_us = ([each[way].step_us for each in blocks] for way in (WITH, WITHOUT))
    size = {"leaves": len(leaves(plain)), "bytes": total_bytes(plain)}
    return {**size, **figures(with_us, without_us)}, sum(found["wrong"].values())


def _prefetched(
    loop: Loop, device: torch.device, order: Sequence[Any]
) -> AbstractContextManager[Iterator[Any]]:
    batches: Iterator[Any] = cycle(order)
    if loop.is_made_anew:
        batches = (map_tensors(batch, torch.clone) for batch in cycle(order))
    return tdcopier.prefetch(batches, device, threaded=loop.threaded)
