"""The harness of copies that are timed alone: a batch, the ways to copy it, and their checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tool.measure import BURST, Bench
from tool.tables import OURS
from tool.way import LIMIT, WAY, Way

import tdcopier
from copies import limits
from copies.directions import Direction, count_transfers, synchroniser
from copies.ways import differences
from tdcopier.workloads import leaves, map_tensors

OTHER_BYTES = 96 << 20


class Kind(NamedTuple):
    """Everything that depends on whether a batch is a tree or a TensorDict."""

    move: Callable[[Any, torch.device], Any]
    leaves: Callable[[Any], list[torch.Tensor]]
    start: Callable[[Any, torch.device], tdcopier.AsyncCopyHandle]
    differences: Callable[[Any, Any, torch.device], list[str]]
    """Takes a result, its source and the target; returns places that differ from ``.to()``'s."""

    def sources(self, make: Callable[[int], Any], pool: int, direction: Direction) -> list[Any]:
        return [self.move(make(seed), direction.source) for seed in range(pool)]

    def size_of(self, batch: Any) -> dict[str, int]:
        found = self.leaves(batch)
        return {"leaves": len(found), "bytes": sum(leaf.nbytes for leaf in found)}


TREE = Kind(
    lambda tree, device: map_tensors(tree, lambda leaf: leaf.to(device)),
    leaves,
    tdcopier.start_copy,
    differences,
)


def wrong_places(way: Way, source: Any, direction: Direction, kind: Kind = TREE) -> list[str] | str:
    """Return the places where a way's result is wrong, or the error that it raises.

    Errors of our own ways are raised; those of other ways are results, since not all support all
    batches.
    """
    try:
        with way.around():
            result = way.run(way.prepare(source))
            synchroniser(direction.devices)()
    except Exception as error:
        if way.name.startswith(OURS):
            raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    if way.kind == LIMIT:
        return ["<bytes>"] if limits.differs(result, source) else []
    return kind.differences(result, source, direction.target)


def timed(
    bench: Bench,
    label: str,
    direction: Direction,
    sources: Sequence[Any],
    ways: Sequence[Way],
    *,
    rounds: int,
    kind: Kind = TREE,
    counted: bool = True,
    cold: bool = False,
    reference: str = OURS,
) -> dict[str, Any]:
    """Return the figures of all ways.

    Args:
        bench: The device and the options.
        label: For the progress.
        direction: Where the copies go.
        sources: The batches, on the source device.
        ways: The ways to copy them.
        rounds: The bursts of each way.
        kind: What the batches are.
        counted: Whether the transfers of our own copies are counted too.
        cold: Whether other memory is written before each call, by a thread that is not bound.
        reference: The way that ratios are relative to.

    """
    ways = bench.timed(ways, reference)
    outcomes = {way.name: wrong_places(way, sources[0], direction, kind) for way in ways}
    failed = {name: found for name, found in outcomes.items() if isinstance(found, str)}
    right = [way for way in ways if way.name not in failed]
    how = (
        {"burst": 1, "bound": False, "before_call": cold_settle(bench.is_real)}
        if cold
        else {"burst": BURST}
    )
    found = bench.compared(
        f"{direction.name}, {label}",
        right,
        sources,
        synchroniser(direction.devices),
        reference=reference,
        rounds=rounds,
        **how,
    )
    if counted and not bench.ours_only:
        found |= count_transfers(direction, lambda: kind.start(sources[0], direction.target))
    return {
        **kind.size_of(sources[0]),
        **found,
        "kinds": {way.name: way.kind for way in right},
        "wrong": {way.name: len(outcomes[way.name]) for way in right},
        "failed": failed,
    }


def cold_settle(pinned: bool) -> Callable[[], None]:
    """Return a function that leaves nothing of a call in the caches.

    Args:
        pinned: Whether torch's pinned memory takes back what the call has dropped, too.

    """
    other = np.zeros(OTHER_BYTES // 8)

    def settle() -> None:
        other.fill(1.0)
        torch.empty(1, pin_memory=pinned)

    return settle


def best_other(found: dict[str, Any]) -> tuple[str, float]:
    """Return the fastest way other than ours, and how many times longer it takes.

    Ways that receive prepared sources, for example pinned ones, do only part of the work and do not
    count.
    """
    ratios = {
        way: ratio
        for way, ratio in found["ratios"].items()
        if found["kinds"][way] == WAY and not way.startswith(OURS)
    }
    best = min(ratios, key=ratios.__getitem__)
    return best, ratios[best]
