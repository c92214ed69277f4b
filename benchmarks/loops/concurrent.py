"""Cost and correctness of copies that run beside kernels and beside other copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from copies.directions import HOST, synchroniser
from tool.measure import Bench, summaries
from tool.tables import OURS
from tool.target_forms import Target, at_most, count_wrong, none
from tool.way import Way

import tdcopier
from loops import copies_beside_kernels, metrics_each_step
from loops.learner import begin_by_torch
from tdcopier._commands.interleave import collector_paused

MAX_WITH_METRICS = 1.02
MAX_BESIDE_KERNELS_US = 1000.0
MAX_BOTH_WAYS_US = 5600.0
BYTES, BYTES_OF_SIM = 256 << 20, 1 << 18
BY_TORCH = "non_blocking .to() on two streams"
TO_DEVICE, TO_HOST, BOTH = "to the device", "to the host", "both at once"
ROUNDS_PER_REPEAT = 0.04

Begin = Callable[[torch.Tensor, torch.device], Callable[[], torch.Tensor]]
"""Begins a copy, and returns a function that waits for the result."""


def run(bench: Bench) -> dict[str, Any]:
    """Run all parts. A second device of the same kind is used too if there is one."""
    with collector_paused():
        return {
            "what": "Copies beside kernels and beside other copies",
            "loop": metrics_each_step.run(bench),
            "kernels": copies_beside_kernels.run(bench),
            "both_ways": both_ways(bench),
        }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    wrong = count_wrong(result[part] for part in ("loop", "kernels", "both_ways"))
    yield none("steps, copies and trees with another value than the source's", wrong)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for feed, ratio in result["loop"]["with_over_without"].items():
        if feed.startswith(OURS):
            yield at_most(f"{feed}: step with metrics over without", ratio, MAX_WITH_METRICS)
    for earlier, times in result["kernels"]["times"].items():
        what = f"small copy to the device beside kernels, after {earlier}"
        yield at_most(what, times[OURS]["median_us"], MAX_BESIDE_KERNELS_US, "us")
    both_us = result["both_ways"]["times"][OURS][BOTH]["median_us"]
    yield at_most("pinned, both ways at once", both_us, MAX_BOTH_WAYS_US, "us")


# ---- copies in both directions at once -----------------------------------------------------------


def both_ways(bench: Bench) -> dict[str, Any]:
    """Time large pinned copies to the device and to the host, at the same time and each alone.

    Returns wall times by way, and by copies that run at the same time.
    """
    device, synchronise = bench.device, synchroniser([bench.device])
    size_bytes = BYTES if bench.is_real else BYTES_OF_SIM
    source = torch.arange(size_bytes // 4, dtype=torch.int32).pin_memory()
    on_device = source.to(device) + 1
    expected = {device.type: source, "cpu": on_device.cpu()}
    both = [(on_device, HOST), (source, device)]
    every = {
        (name, what): Way(f"{name}, {what}", partial(start_all, begin, copies), finish_all)
        for name, begin in begins(device).items()
        for what, copies in {TO_DEVICE: both[1:], TO_HOST: both[:1], BOTH: both}.items()
    }
    wrong: dict[str, int] = {}
    for (name, _), way in every.items():
        results = way.run(None)
        synchronise()
        bad = sum(not torch.equal(each.cpu(), expected[each.device.type]) for each in results)
        wrong[name] = wrong.get(name, 0) + bad
    rounds = bench.rounds(ROUNDS_PER_REPEAT)
    how = {"rounds": rounds, "burst": 1, "bound": False}
    taken = bench.interleaved("both ways at once", list(every.values()), [None], synchronise, **how)
    found = summaries(taken)
    times: dict[str, dict[str, Any]] = {name: {} for name in wrong}
    for (name, what), way in every.items():
        times[name][what] = found[way.name]
    return {"bytes": size_bytes, "times": times, "wrong": wrong}


def start_all(begin: Begin, copies: list[Any], _: Any) -> list[Callable[[], torch.Tensor]]:
    return [begin(*copy) for copy in copies]


def finish_all(waits: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
    return [wait() for wait in waits]


def begins(device: torch.device) -> dict[str, Begin]:
    module = torch.get_device_module(device)
    streams = {"cpu": module.Stream(device), device.type: module.Stream(device)}
    return {
        OURS: lambda leaf, target: tdcopier.start_copy(leaf, target).get,
        BY_TORCH: lambda leaf, target: begin_by_torch(leaf, target, streams[target.type]),
    }
