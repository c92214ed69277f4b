"""Cost and correctness of copies that run beside kernels and beside other copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from copies.directions import synchroniser
from tool.measure import Bench, summaries
from tool.tables import OURS
from tool.target_forms import Target, at_most, none

import tdcopier
from loops import copies_beside_kernels as company_kernels
from loops import metrics_each_step as company_loop
from loops import processor_while_waiting as company_waiting
from loops import refilled_sources as company_refill
from tdcopier._commands.interleave import Contender, collector_paused, interleave

MAX_WITH_METRICS = 1.02
MAX_BESIDE_KERNELS_US = 1000.0
MAX_BOTH_WAYS_US = 5600.0
MAX_SHARE = 0.05
BYTES, BYTES_OF_SIM = 256 << 20, 1 << 18
BY_TORCH = "non_blocking .to() on two streams"
TO_DEVICE, TO_HOST, BOTH = "to the device", "to the host", "both at once"
PINNED, PAGEABLE = "pinned", "pageable"
ROUNDS_PER_REPEAT = 0.04

Begin = Callable[[], Callable[[], torch.Tensor]]
"""Begins a copy, and returns a function that waits for the result."""


def run(bench: Bench) -> dict[str, Any]:
    """Run all parts. A second device of the same kind is used too if there is one."""
    with collector_paused(not bench.keep_gc):
        return {
            "what": "Copies beside kernels and beside other copies",
            "settings": {**bench.settings(bound=False), "order": "interleaved, shuffled per round"},
            "loop": company_loop.run(bench),
            "kernels": company_kernels.run(bench),
            "both_ways": both_ways(bench),
            "waiting": company_waiting.run(bench),
            "refill": company_refill.run(bench),
        }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    refill = result["refill"]
    refilled = sum(row["wrong"] for row in refill["rows"] if row["way"] == OURS)
    others = "steps, copies and trees with another value than the source's, refills apart"
    yield none(others, wrong_values(result))
    refills = f"batches that a refill after wait() made wrong, of {refill['rounds']} each"
    yield none(refills, refilled)


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


def wrong_values(result: dict[str, Any]) -> int:
    """Count wrong values in all parts except refills, where torch's own asynchronous way races."""
    both_ways = sum(sum(ways.values()) for ways in result["both_ways"]["wrong"].values())
    parts = (result["loop"]["wrong"], result["kernels"]["wrong"])
    return both_ways + sum(sum(part.values()) for part in parts)


# ---- copies in both directions at once -----------------------------------------------------------


def both_ways(bench: Bench) -> dict[str, Any]:
    """Time large copies to the device and to the host, at the same time and each alone.

    Returns wall times by memory of the host source, way, and copies that run at the same time.
    """
    device = bench.device
    size_bytes = BYTES if bench.is_real else BYTES_OF_SIM
    pageable = torch.arange(size_bytes // 4, dtype=torch.int32)
    sources = {PINNED: pageable.pin_memory(), PAGEABLE: pageable}
    on_device = pageable.to(device) + 1
    expected = {device.type: pageable, "cpu": on_device.cpu()}
    synchronise = synchroniser([device])
    contenders = {
        (memory, way, what): Contender(f"{memory}, {way}, {what}", partial(run_all, begins))
        for memory, source in sources.items()
        for way, both in ways(source, on_device).items()
        for what, begins in {TO_DEVICE: both[1:], TO_HOST: both[:1], BOTH: both}.items()
    }
    wrong: dict[str, dict[str, int]] = {memory: {} for memory in sources}
    for (memory, way, _), contender in contenders.items():
        results = contender.run(None)
        synchronise()
        bad = sum(not torch.equal(each.cpu(), expected[each.device.type]) for each in results)
        wrong[memory][way] = wrong[memory].get(way, 0) + bad
    found = summaries(
        interleave(
            list(contenders.values()),
            [None],
            synchronise,
            rounds=bench.rounds(ROUNDS_PER_REPEAT),
            progress=bench.progress("company, both ways"),
        )
    )
    times: dict[str, dict[str, dict[str, Any]]] = {memory: {} for memory in sources}
    for (memory, way, what), contender in contenders.items():
        times[memory].setdefault(way, {})[what] = found[contender.name]
    return {"bytes": size_bytes, "times": times, "wrong": wrong}


def run_all(begins: Sequence[Begin], _: Any) -> list[torch.Tensor]:
    """Begin all copies, and then wait for all results."""
    coming = [begin() for begin in begins]
    return [wait() for wait in coming]


def ways(source: torch.Tensor, on_device: torch.Tensor) -> dict[str, list[Begin]]:
    """Return, by way, functions that begin the copy to the host and the copy to the device.

    The copy to the host begins first, because torch's copy from pageable memory blocks the host.
    """
    device = on_device.device
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

    host = torch.device("cpu")
    return {
        OURS: [
            lambda: tdcopier.start_copy(on_device, host).get,
            lambda: tdcopier.start_copy(source, device).get,
        ],
        BY_TORCH: [partial(by_torch, on_device, host), partial(by_torch, source, device)],
    }
