"""Cost and correctness of copies that run beside kernels and beside other copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from copies.directions import HOST, synchroniser
from tool.measure import Bench, summaries
from tool.tables import OURS
from tool.target_forms import Target, at_most, none
from tool.way import Way

import tdcopier
from loops import (
    copies_beside_kernels,
    metrics_each_step,
    processor_while_waiting,
    refilled_sources,
)
from tdcopier._commands.interleave import collector_paused, interleave

MAX_WITH_METRICS = 1.02
MAX_BESIDE_KERNELS_US = 1000.0
MAX_BOTH_WAYS_US = 5600.0
MAX_SHARE = 0.05
BYTES, BYTES_OF_SIM = 256 << 20, 1 << 18
BY_TORCH = "non_blocking .to() on two streams"
TO_DEVICE, TO_HOST, BOTH = "to the device", "to the host", "both at once"
PINNED, PAGEABLE = "pinned", "pageable"
ROUNDS_PER_REPEAT = 0.04

Begin = Callable[[torch.Tensor, torch.device], Callable[[], torch.Tensor]]
"""Begins a copy, and returns a function that waits for the result."""


def run(bench: Bench) -> dict[str, Any]:
    """Run all parts. A second device of the same kind is used too if there is one."""
    with collector_paused(not bench.keep_gc):
        return {
            "what": "Copies beside kernels and beside other copies",
            "settings": {**bench.settings(bound=False), "order": "interleaved, shuffled per round"},
            "loop": metrics_each_step.run(bench),
            "kernels": copies_beside_kernels.run(bench),
            "both_ways": both_ways(bench),
            "waiting": processor_while_waiting.run(bench),
            "refill": refilled_sources.run(bench),
        }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    refill, parts = result["refill"], [result["loop"]["wrong"], result["kernels"]["wrong"]]
    parts += result["both_ways"]["wrong"].values()
    others = "steps, copies and trees with another value than the source's, refills apart"
    yield none(others, sum(sum(part.values()) for part in parts))
    # Of the refills, torch's own asynchronous way races.
    refilled = sum(row["wrong"] for row in refill["rows"] if row["way"] == OURS)
    yield none(
        f"batches that a refill after wait() made wrong, of {refill['rounds']} each", refilled
    )


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for feed, ratio in result["loop"]["with_over_without"].items():
        if feed.startswith(OURS):
            yield at_most(f"{feed}: step with metrics over without", ratio, MAX_WITH_METRICS)
    for earlier, times in result["kernels"]["times"].items():
        what = f"small copy to the device beside kernels, after {earlier}"
        yield at_most(what, times[OURS]["median_us"], MAX_BESIDE_KERNELS_US, "us")
    both_us = result["both_ways"]["times"][PINNED][OURS][BOTH]["median_us"]
    yield at_most("pinned, both ways at once", both_us, MAX_BOTH_WAYS_US, "us")
    for case, taken in result["waiting"]["cases"].items():
        if case.startswith(OURS):
            yield at_most(f"share of one processor, {case}", taken["median_share"], MAX_SHARE)


# ---- copies in both directions at once -----------------------------------------------------------


def both_ways(bench: Bench) -> dict[str, Any]:
    """Time large copies to the device and to the host, at the same time and each alone.

    Returns wall times by memory of the host source, way, and copies that run at the same time. The
    copy to the host begins first, because torch's copy from pageable memory blocks the host.
    """
    device, synchronise = bench.device, synchroniser([bench.device])
    size_bytes = BYTES if bench.is_real else BYTES_OF_SIM
    pageable = torch.arange(size_bytes // 4, dtype=torch.int32)
    on_device = pageable.to(device) + 1
    expected = {device.type: pageable, "cpu": on_device.cpu()}
    every = {}
    for memory, source in {PINNED: pageable.pin_memory(), PAGEABLE: pageable}.items():
        both = [(on_device, HOST), (source, device)]
        for name, begin in begins(device).items():
            for what, copies in {TO_DEVICE: both[1:], TO_HOST: both[:1], BOTH: both}.items():
                start = partial(start_all, begin, copies)
                every[memory, name, what] = Way(f"{memory}, {name}, {what}", start, finish_all)
    wrong: dict[str, dict[str, int]] = {PINNED: {}, PAGEABLE: {}}
    for (memory, name, _), way in every.items():
        results = way.run(None)
        synchronise()
        bad = sum(not torch.equal(each.cpu(), expected[each.device.type]) for each in results)
        wrong[memory][name] = wrong[memory].get(name, 0) + bad
    rounds, progress = bench.rounds(ROUNDS_PER_REPEAT), bench.progress("both ways at once")
    taken = interleave(list(every.values()), [None], synchronise, rounds=rounds, progress=progress)
    found = summaries(taken)
    times: dict[str, dict[str, dict[str, Any]]] = {PINNED: {}, PAGEABLE: {}}
    for (memory, name, what), way in every.items():
        times[memory].setdefault(name, {})[what] = found[way.name]
    return {"bytes": size_bytes, "times": times, "wrong": wrong}


def start_all(begin: Begin, copies: list[Any], _: Any) -> list[Callable[[], torch.Tensor]]:
    return [begin(*copy) for copy in copies]


def finish_all(waits: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    return [wait() for wait in waits]


def begins(device: torch.device) -> dict[str, Begin]:
    module = torch.get_device_module(device)
    streams = {"cpu": module.Stream(device), device.type: module.Stream(device)}

    def by_torch(leaf: torch.Tensor, target: torch.device) -> Callable[[], torch.Tensor]:
        with module.stream(streams[target.type]):
            result = leaf.to(target, non_blocking=True)
            arrived = streams[target.type].record_event()

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return result

        return wait

    def ours(leaf: torch.Tensor, target: torch.device) -> Callable[[], torch.Tensor]:
        return tdcopier.start_copy(leaf, target).get

    return {OURS: ours, BY_TORCH: by_torch}
