"""Large copies to the device and to the host, at the same time and each alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from directions import synchroniser
from measure import Bench, Contender, interleave, summarise
from tables import OURS

import tdcopier

BYTES, BYTES_OF_SIM = 256 << 20, 1 << 18
BY_TORCH = "non_blocking .to() on two streams"
TO_DEVICE, TO_HOST, BOTH = "to the device", "to the host", "both at once"
PINNED, PAGEABLE = "pinned", "pageable"
ROUNDS_PER_REPEAT = 0.04

Begin = Callable[[], Callable[[], torch.Tensor]]
"""Begins a copy, and returns a function that waits for the result."""


def run(bench: Bench) -> dict[str, Any]:
    """Return wall times by memory of the host source, way, and copies that run at the same time."""
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
    times_us = interleave(
        list(contenders.values()),
        [None],
        synchronise,
        rounds=bench.rounds(ROUNDS_PER_REPEAT),
        progress=bench.progress("company, both ways"),
    )
    times: dict[str, dict[str, dict[str, Any]]] = {memory: {} for memory in sources}
    for (memory, way, what), contender in contenders.items():
        summary = summarise(times_us[contender.name])
        times[memory].setdefault(way, {})[what] = summary._asdict()
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
