"""Host-synchronised copies of the named workloads: contenders, our own steps, transfer counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from baselines import OURS, PER_LEAF_TO, contenders, differences
from measure import collector_paused, interleave, ratio_of_medians, steps, summarise
from quiet import QuietProcessor

import tdcopier
from tdcopier.workloads import WORKLOADS, leaves, total_bytes

BURST = 5  # calls of one contender in a row
MIN_SPEEDUP = 35.0  # detection batch, ours against .to() per leaf

Progress = Callable[[str], Callable[[Iterable[int]], Iterable[int]]]


def synchroniser(device: torch.device) -> Callable[[], None]:
    """Blocks the host until everything that was enqueued on the device is done."""
    module = getattr(torch, device.type)
    return lambda: module.synchronize(device)


def run(
    device: torch.device, names: list[str], repeats: int, progress: Progress, *, keep_gc: bool
) -> dict[str, Any]:
    """The result of this benchmark, without the machine.

    Args:
        device: The target.
        names: Workloads to run.
        repeats: Rounds of the smallest workloads; larger ones get a share of them.
        progress: From a label to a wrapper of the rounds.
        keep_gc: Leave Python's cyclic collector on while timing.

    """
    start_workers(device)
    workloads: dict[str, Any] = {}
    for name in names:
        workloads[name] = _workload(device, name, repeats, progress, keep_gc=keep_gc)
    return {
        "what": "Time from the call to the tree on the target, outputs built and host synchronised",
        "settings": {
            "collector": "on" if keep_gc else "paused",
            "order": f"interleaved, bursts of {BURST} calls, shuffled per round",
            "processor": "each round on one that no neighbour slows down, where there is one",
        },
        "workloads": workloads,
        "targets": targets(workloads, speed=device.type != "sim"),
    }


def start_workers(device: torch.device) -> None:
    """Start the engine's worker threads, so that they do not inherit one processor later."""
    tdcopier.copy(torch.zeros(1 << 20), device)


def targets(workloads: dict[str, Any], *, speed: bool = True) -> list[dict[str, Any]]:
    """What the figures are wanted to show, and whether they do; without speed, the counts only."""
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
    if speed:
        speedup = batch["ratios"][PER_LEAF_TO]
        found.append(
            {
                "what": f"detection batch, {PER_LEAF_TO} over tdcopier",
                "wanted": f">= {MIN_SPEEDUP:g}",
                "found": round(speedup, 2),
                "hit": speedup >= MIN_SPEEDUP,
            }
        )
    counts = [batch["stats"]["packed_leaves"], batch["stats"]["transfers"], batch["h2d_memcpys"]]
    found.append(
        {
            "what": "detection batch: packed leaves, transfers, H2D memcpys seen from outside",
            "wanted": "[528, 1, 1]",
            "found": counts,
            "hit": counts == [528, 1, 1],
        }
    )
    return found


def _workload(
    device: torch.device, name: str, repeats: int, progress: Progress, *, keep_gc: bool
) -> dict[str, Any]:
    workload = WORKLOADS[name]
    rounds = max(5, round(repeats * workload.repeat_share / BURST))
    sources = [workload.make(seed) for seed in range(workload.pool)]
    synchronise = synchroniser(device)
    ways = contenders(device)
    wrong = {way.name: len(_wrong(way, sources[0], device)) for way in ways}
    with collector_paused(not keep_gc), QuietProcessor() as quiet:
        times = interleave(
            ways,
            sources,
            synchronise,
            rounds=rounds,
            progress=progress(name),
            before_round=quiet.seek,
            burst=BURST,
        )
        own = steps(
            lambda tree: tdcopier.start_copy(tree, device),
            sources,
            synchronise,
            rounds=rounds,
            before_round=quiet.seek,
        )
    summaries = {way: summarise(taken) for way, taken in times.items()}
    cold = {way: summarise(taken[::BURST]) for way, taken in times.items()}
    stats, memcpys, witness = count_transfers(sources[0], device)
    return {
        "leaves": len(leaves(sources[0])),
        "bytes": total_bytes(sources[0]),
        "sources": len(sources),
        "contenders": {way: summary._asdict() for way, summary in summaries.items()},
        "first_calls": {way: summary._asdict() for way, summary in cold.items()},
        "ratios_of_first_calls": {
            way: ratio_of_medians(summary, cold[OURS])
            for way, summary in cold.items()
            if way != OURS
        },
        "ratios": {
            way: ratio_of_medians(summary, summaries[OURS])
            for way, summary in summaries.items()
            if way != OURS
        },
        "steps": {step: summarise(taken)._asdict() for step, taken in own.items()},
        "stats": stats,
        "h2d_memcpys": memcpys,
        "h2d_memcpys_counted_by": witness,
        "wrong_leaves": wrong,
        "processor": quiet.described(),
    }


def _wrong(way: Any, source: Any, device: torch.device) -> list[str]:
    result = way.run(way.prepare(source))
    synchroniser(device)()
    return differences(result, source, device)


def count_transfers(source: Any, device: torch.device) -> tuple[dict[str, Any], int, str]:
    """The handle's own counters, and the H2D memcpys that somebody else counted meanwhile.

    Args:
        source: The tree to copy.
        device: The target.

    Returns:
        The handle's stats, the outside count, and who counted.

    """
    synchronise = synchroniser(device)

    def once() -> dict[str, Any]:
        handle = tdcopier.start_copy(source, device)
        handle.get()
        synchronise()
        return dict(handle.stats._asdict())

    once()  # first use allocates and may load modules: not part of what is counted
    if device.type == "sim":
        from tdcopier import sim

        sim.reset_counts()
        stats = once()
        return stats, sim.counts().h2d.transfers, "tdcopier.sim"
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        stats = once()
    memcpys = sum(
        event.device_type == DeviceType.CUDA and "Memcpy HtoD" in event.name
        for event in profiler.events()
    )
    return stats, memcpys, "torch.profiler"
