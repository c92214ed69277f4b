"""Host-synchronised copies of the named workloads in one direction: contenders, steps, counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import witness
from baselines import OURS, PER_LEAF_TO, contenders, differences
from directions import Direction, synchroniser
from measure import Contender, collector_paused, compared, interleave, steps, summarise
from quiet import QuietProcessor

import tdcopier
from tdcopier.workloads import WORKLOADS, Workload, leaves, map_tensors, total_bytes

BURST = 5  # calls of one contender in a row
MIN_ROUNDS = 3

Progress = Callable[[str], Callable[[Iterable[int]], Iterable[int]]]


def run(
    direction: Direction, names: list[str], repeats: int, progress: Progress, *, keep_gc: bool
) -> dict[str, Any]:
    """The result of one direction, without the machine.

    Args:
        direction: From where to where.
        names: Workloads to run.
        repeats: Calls with the smallest workloads; larger ones get a share of them.
        progress: From a label to a wrapper of the rounds.
        keep_gc: Leave Python's cyclic collector on while timing.

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
    """Start the engine's worker threads, so that they do not inherit one processor later."""
    tdcopier.copy(torch.zeros(1 << 20, device=direction.source), direction.target)


def rounds_of(direction: Direction, workload: Workload, repeats: int) -> int:
    """Bursts that each contender gets with a workload."""
    share = workload.repeat_share
    if share < 1:
        share *= direction.large_share
    return max(MIN_ROUNDS, round(repeats * share / BURST))


def targets(direction: Direction, workloads: dict[str, Any]) -> list[dict[str, Any]]:
    """What the figures are wanted to show, and whether they do.

    Speed is left out on the simulated device, whose times mean nothing.
    """
    wrong = sum(found["wrong_leaves"][OURS] for found in workloads.values())
    found: list[dict[str, Any]] = [
        {
            "what": "leaves of tdcopier's result that differ from .to(), all workloads",
            "wanted": "0",
            "found": wrong,
            "hit": wrong == 0,
        }
    ]
    batch = workloads.get("detection_batch")
    if batch is None:
        return found
    if direction.devices[0].type != "sim":
        speedup = batch["ratios"][PER_LEAF_TO]
        found.append(
            {
                "what": f"detection batch, {PER_LEAF_TO} over tdcopier",
                "wanted": f">= {direction.min_speedup:g}",
                "found": round(speedup, 2),
                "hit": speedup >= direction.min_speedup,
            }
        )
    seen = f"{direction.name.upper()} memcpys seen from outside"
    stats = batch["stats"]
    counts = [stats["packed_leaves"], stats["transfers"], batch[f"{direction.name}_memcpys"]]
    found.append(
        {
            "what": f"detection batch: packed leaves, transfers, {seen}",
            "wanted": "[528, 1, 1]",
            "found": counts,
            "hit": counts == [528, 1, 1],
        }
    )
    return found


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
    ways = contenders(direction)
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
    return {
        "leaves": len(leaves(sources[0])),
        "bytes": total_bytes(sources[0]),
        "sources": len(sources),
        **compared(times, OURS, BURST),
        "steps": {step: summarise(taken)._asdict() for step, taken in own.items()},
        "stats": stats,
        f"{direction.name}_memcpys": counted.memcpys,
        f"{direction.name}_memcpys_counted_by": counted.counted_by,
        "wrong_leaves": wrong,
        "processor": quiet.described(),
    }


def _wrong(way: Contender, source: Any, direction: Direction) -> list[str]:
    result = way.run(way.prepare(source))
    synchroniser(direction.devices)()
    return differences(result, source, direction.target)


def count_transfers(source: Any, direction: Direction) -> tuple[dict[str, Any], witness.Count]:
    """The handle's own counters, and the transfers that somebody else counted meanwhile.

    Args:
        source: The tree to copy, where the direction begins.
        direction: From where to where.

    """
    return count_of(lambda: tdcopier.start_copy(source, direction.target), direction)


def count_of(
    start: Callable[[], tdcopier.AsyncCopyHandle], direction: Direction
) -> tuple[dict[str, Any], witness.Count]:
    """The same of a copy that is begun in any way."""
    synchronise = synchroniser(direction.devices)

    def once() -> dict[str, Any]:
        handle = start()
        handle.get()
        synchronise()
        return dict(handle.stats._asdict())

    return witness.count(direction.witness, direction.devices[0].type, once)
