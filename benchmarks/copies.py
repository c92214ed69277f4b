"""Times host-synchronised copies of the named workloads in one direction, and counts transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import limits
import torch
import witness
from baselines import OURS, contenders, differences
from copy_targets import targets
from directions import Direction, synchroniser
from measure import LIMIT, Contender, collector_paused, compared, interleave, steps, summarise
from quiet import QuietProcessor

import tdcopier
from tdcopier.workloads import WORKLOADS, Workload, leaves, map_tensors, total_bytes

BURST = 5  # consecutive calls of one contender
MIN_ROUNDS = 3

Progress = Callable[[str], Callable[[Iterable[int]], Iterable[int]]]


def run(
    direction: Direction, names: list[str], repeats: int, progress: Progress, *, keep_gc: bool
) -> dict[str, Any]:
    """Return the result of one direction, without the machine.

    Args:
        direction: Source and target of the copies.
        names: Workloads to run.
        repeats: Calls with the smallest workloads; larger ones get a fraction of that.
        progress: Returns a wrapper of the rounds for a label.
        keep_gc: Leave Python's garbage collector on while timing.

    """
    start_workers(direction)
    workloads: dict[str, Any] = {}
    for name in names:
        workloads[name] = _workload(direction, name, repeats, progress, keep_gc=keep_gc)
    return {
        "what": "Time from the call to the tree on the target, outputs built and host synchronised",
        "settings": {
            "source": str(direction.source),
            "target": str(direction.target),
            "collector": "on" if keep_gc else "paused",
            "order": f"interleaved, bursts of {BURST} calls, shuffled per round",
            "processor": "each round on one that no neighbour slows down, where there is one",
        },
        "workloads": workloads,
        "targets": targets(direction, workloads),
    }


def start_workers(direction: Direction) -> None:
    """Start the engine's and torch's threads now, so that they are not bound to one processor."""
    tdcopier.copy(torch.zeros(1 << 20, device=direction.source), direction.target)
    torch.ones(1 << 22).add_(1)


def rounds_of(direction: Direction, workload: Workload, repeats: int) -> int:
    """Return how many bursts each contender gets with a workload."""
    share = workload.repeat_share
    if share < 1:
        share *= direction.large_share
    return max(MIN_ROUNDS, round(repeats * share / BURST))


def _workload(
    direction: Direction, name: str, repeats: int, progress: Progress, *, keep_gc: bool
) -> dict[str, Any]:
    workload = WORKLOADS[name]
    rounds = rounds_of(direction, workload, repeats)
    sources = [
        map_tensors(workload.make(seed), lambda leaf: leaf.to(direction.source))
        for seed in range(workload.pool)
    ]
    synchronise = synchroniser(direction.devices)
    size_bytes = total_bytes(sources[0])
    crews = limits.crews()
    ways = contenders(direction) + limits.contenders(direction, size_bytes, crews)
    wrong = {way.name: len(_wrong(way, sources[0], direction)) for way in ways}
    with collector_paused(not keep_gc), QuietProcessor() as quiet:
        times = interleave(
            ways,
            sources,
            synchronise,
            rounds=rounds,
            progress=progress(f"{direction.name}, {name}"),
            before_round=quiet.seek,
            burst=BURST,
        )
        own = steps(
            lambda tree: tdcopier.start_copy(tree, direction.target),
            sources,
            synchronise,
            rounds=rounds,
            before_round=quiet.seek,
        )
    stats, counted = count_transfers(sources[0], direction)
    found = compared(times, OURS, BURST)
    medians_us = {way: taken["median_us"] for way, taken in found["contenders"].items()}
    return {
        "leaves": len(leaves(sources[0])),
        "bytes": size_bytes,
        "sources": len(sources),
        **found,
        "kinds": {way.name: way.kind for way in ways},
        "limits": limits.found_limits(
            direction, size_bytes, [crew.threads for crew in crews], medians_us, OURS
        ),
        "steps": {step: summarise(taken)._asdict() for step, taken in own.items()},
        "stats": stats,
        f"{direction.name}_memcpys": counted.memcpys,
        f"{direction.name}_memcpys_counted_by": counted.counted_by,
        "wrong_leaves": wrong,
        "processor": quiet.described(),
    }


def _wrong(way: Contender, source: Any, direction: Direction) -> list[str]:
    with way.around():
        result = way.run(way.prepare(source))
        synchroniser(direction.devices)()
    if way.kind == LIMIT:
        return ["<bytes>"] if limits.differs(result, source) else []
    return differences(result, source, direction.target)


def count_transfers(source: Any, direction: Direction) -> tuple[dict[str, Any], witness.Count]:
    """Return the handle's own counters, and the transfers that an outside counter saw.

    Args:
        source: The tree to copy, on the direction's source device.
        direction: Source and target of the copies.

    """
    return count_of(lambda: tdcopier.start_copy(source, direction.target), direction)


def count_of(
    start: Callable[[], tdcopier.AsyncCopyHandle], direction: Direction
) -> tuple[dict[str, Any], witness.Count]:
    """Do as :func:`count_transfers` for any call that starts a copy."""
    synchronise = synchroniser(direction.devices)

    def once() -> dict[str, Any]:
        handle = start()
        handle.get()
        synchronise()
        return dict(handle.stats._asdict())

    return witness.count(direction.witness, direction.devices[0].type, once)
