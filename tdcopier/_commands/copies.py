"""The short benchmark: times tdcopier and the usual ways, for two batches in both directions.

Each way of copying is compared with ``.to()`` per leaf, before it is timed and again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

import tdcopier
from tdcopier import workloads
from tdcopier._commands.interleave import Contender, collector_paused, compared, interleave
from tdcopier.workloads import leaves_with_paths, map_tensors

OURS = "tdcopier.copy()"
HOST = torch.device("cpu")

Progress = Callable[[str], Callable[[Iterable[int]], Iterable[int]]]


class WrongValuesError(Exception):
    """A way of copying gave a result that differs from that of ``.to()``."""


class Batch(NamedTuple):
    """A batch to copy, and how often to time it."""

    name: str
    trees: list[Any]
    """On the host; the rounds use them in turn."""
    rounds: int
    burst: int
    """Consecutive calls of one way. The first finds colder caches than the others."""


class Case(NamedTuple):
    """One batch in one direction."""

    batch: Batch
    source: torch.device
    target: torch.device

    @property
    def direction(self) -> str:
        """`"H2D"` or `"D2H"`."""
        return "H2D" if self.source == HOST else "D2H"

    @property
    def name(self) -> str:
        """Name of the case, for people."""
        return f"{self.batch.name}, {self.direction}"


def batches(large_bytes: int, *, quick: bool) -> list[Batch]:
    """Return a batch of many small leaves, and one with a single large leaf.

    Args:
        large_bytes: size of the large leaf, rounded down to whole int32 values.
        quick: use few rounds, to check that the benchmark runs.
    """
    small = [workloads.detection_batch(seed=seed) for seed in range(4)]
    large = [workloads.one_large(large_bytes)]
    return [
        Batch("detection batch", small, rounds=3 if quick else 60, burst=5),
        Batch("one large tensor", large, rounds=3 if quick else 25, burst=1),
    ]


def run(case: Case, progress: Progress) -> dict[str, Any]:
    """Time every way of copying; return the figures of one case, with ratios to tdcopier's.

    Raises:
        WrongValuesError: a way gave a result that differs from that of ``.to()``.
    """
    device = case.target if case.direction == "H2D" else case.source
    synchronise = _synchroniser(device)
    sources = [map_tensors(tree, lambda leaf: leaf.to(case.source)) for tree in case.batch.trees]
    ways = contenders(case.target, case.direction)
    for way in ways:
        check(way, sources, case.target, synchronise)
    with collector_paused():
        times = interleave(
            ways,
            sources,
            synchronise,
            rounds=case.batch.rounds,
            burst=case.batch.burst,
            progress=progress(case.name),
        )
    for way in ways:
        check(way, sources, case.target, synchronise)
    handle = tdcopier.start_copy(sources[0], case.target)
    handle.get()
    return {
        "batch": case.batch.name,
        "source": str(case.source),
        "target": str(case.target),
        "leaves": len(workloads.leaves(sources[0])),
        "bytes": workloads.total_bytes(sources[0]),
        "burst": case.batch.burst,
        "stats": handle.stats._asdict(),
        **compared(times, OURS, case.batch.burst),
    }


def contenders(target: torch.device, direction: str) -> list[Contender]:
    """Return tdcopier, the simplest way, and the ways that are used when that is too slow."""
    found = [
        Contender(OURS, lambda tree: tdcopier.copy(tree, target)),
        Contender(".to() per leaf", lambda tree: map_tensors(tree, lambda leaf: leaf.to(target))),
    ]
    if direction == "D2H":
        pinned = "pinned, non_blocking copy_() per leaf"
        return [*found, Contender(pinned, lambda tree: map_tensors(tree, _to_pinned))]

    def to(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(target, non_blocking=True)

    return [
        *found,
        Contender(
            "pin_memory(), non_blocking .to() per leaf",
            lambda tree: map_tensors(tree, lambda leaf: to(leaf.pin_memory())),
        ),
        Contender(
            "pinned beforehand, non_blocking .to() per leaf",
            lambda tree: map_tensors(tree, to),
            lambda tree: map_tensors(tree, torch.Tensor.pin_memory),
        ),
    ]


def _to_pinned(leaf: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(leaf, device="cpu", pin_memory=True).copy_(leaf, non_blocking=True)


def check(
    way: Contender, sources: list[Any], target: torch.device, synchronise: Callable[[], None]
) -> None:
    """Compare the results of a way with those of ``.to()``, leaf by leaf; this is never timed.

    Raises:
        WrongValuesError: they differ; the message names the first leaf.
    """
    for source in sources:
        result = way.run(way.prepare(source))
        synchronise()
        wrong = differences(result, map_tensors(source, lambda leaf: leaf.to(target)))
        if wrong:
            places = "1 place" if len(wrong) == 1 else f"{len(wrong)} places"
            raise WrongValuesError(
                f"{way.name} differs from .to() in {places}, such as {wrong[0]!r}"
            )


def differences(found: Any, expected: Any) -> list[str]:
    """Return the paths of leaves that differ in device, dtype, shape, strides or values."""
    pairs = [leaves_with_paths(tree) for tree in (found, expected)]
    if [path for path, _ in pairs[0]] != [path for path, _ in pairs[1]]:
        return ["the structure"]
    return [
        path
        for (path, got), (_, wanted) in zip(*pairs, strict=True)
        if got.device != wanted.device
        or got.dtype != wanted.dtype
        or got.shape != wanted.shape
        or got.stride() != wanted.stride()
        or not torch.equal(got, wanted)
    ]


def _synchroniser(device: torch.device) -> Callable[[], None]:
    """Return a function that blocks until the device has done all enqueued work."""
    synchronize = torch.get_device_module(device).synchronize
    return lambda: synchronize(device)
