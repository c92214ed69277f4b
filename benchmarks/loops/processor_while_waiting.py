"""Processor time of the whole process while a copy waits for kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from statistics import median
from typing import Any

import torch
from copies.directions import second_device, synchroniser
from tool.measure import Bench, shuffled
from tool.tables import OURS
from tool.way import GET, WAIT, Way

import tdcopier
from loops.learner import Sleeper

QUEUED_MS, QUEUED_MS_OF_SIM = 200.0, 10.0
BYTES = 1 << 20
RUN_AHEAD = 4
STAGING_LIMIT_BYTES, DEFAULT_STAGING_LIMIT_BYTES = 4 << 20, 64 << 20
WARM_UP = 1
ROUNDS_PER_REPEAT = 0.01


def run(bench: Bench) -> dict[str, Any]:
    """Return the share of one processor that the process takes until the kernels end, by case."""
    queued_ms = QUEUED_MS if bench.is_real else QUEUED_MS_OF_SIM
    sleeper, every = Sleeper(bench.device), ways(bench.device)
    taken: dict[str, list[tuple[float, float]]] = {way.name: [] for way in every}
    how = {"rounds": bench.rounds(ROUNDS_PER_REPEAT), "warm_up": WARM_UP}
    with low_limits():
        for index, way in shuffled(every, bench.progress("processor while waiting"), **how):
            found = measured(way, bench.device, lambda: sleeper.enqueue(queued_ms))
            if index >= 0:
                taken[way.name].append(found)
    return {
        "queued_ms": queued_ms,
        "bytes": BYTES,
        "staging_limit_bytes": STAGING_LIMIT_BYTES,
        "cases": {
            name: {
                "median_share": median(share for share, _ in found),
                "max_share": max(share for share, _ in found),
                "median_held_ms": median(held_ms for _, held_ms in found),
                "repeats": len(found),
            }
            for name, found in taken.items()
        },
    }


@contextmanager
def low_limits() -> Iterator[None]:
    """Set limits that are low enough for copies to reach while kernels are queued."""
    tdcopier.set_run_ahead_limit(RUN_AHEAD)
    tdcopier.set_staging_limit_bytes(STAGING_LIMIT_BYTES)
    try:
        yield
    finally:
        tdcopier.set_staging_limit_bytes(DEFAULT_STAGING_LIMIT_BYTES)


def measured(
    way: Way, device: torch.device, enqueue_kernels: Callable[[], None]
) -> tuple[float, float]:
    """Return processor time over wall time of one wait, and how long it blocked its thread, in ms.

    Processor and wall time run until the end of the kernels. If the wait returns earlier, its
    thread then waits for the kernels without using a processor, so that the rest is the time of
    other threads.
    """
    module = torch.get_device_module(device)
    synchroniser([device])()
    enqueue_kernels()
    # On the simulated device every event is one whose wait uses no processor.
    ended = torch.cuda.Event(blocking=True) if device.type == "cuda" else module.Event()
    ended.record(module.current_stream(device))
    begun = way.start(None)  # enqueues work after the kernels; not timed
    begin_ns, processor_ns = time.perf_counter_ns(), time.process_time_ns()
    result = way.finish(begun)
    held_ns = time.perf_counter_ns() - begin_ns
    ended.synchronize()
    processor_ns = time.process_time_ns() - processor_ns
    wall_ns = time.perf_counter_ns() - begin_ns
    if isinstance(begun, tdcopier.AsyncCopyHandle):
        begun.get()
    del result, begun
    return processor_ns / wall_ns, held_ns / 1e6


def ways(device: torch.device) -> list[Way]:
    """Return the ways to wait for kernels that are queued."""
    module = torch.get_device_module(device)
    on_host = torch.ones(BYTES // 4)
    on_device, in_device = (on_host.to(device, copy=True) for _ in range(2))
    to_host = torch.zeros_like(on_host)
    long_on_host = torch.ones(2 * STAGING_LIMIT_BYTES // 4)
    long_in_device = long_on_host.to(device)

    def ahead(_: Any) -> None:
        for _ in range(RUN_AHEAD):
            tdcopier.start_copy(on_host, device).wait()

    def to(source: torch.Tensor, target: Any) -> Callable[[Any], Any]:
        return lambda _: tdcopier.start_copy(source, target)

    def into(source: torch.Tensor, destination: torch.Tensor) -> Callable[[Any], Any]:
        return lambda _: tdcopier.start_copy_into(source, destination)

    def nothing(_: Any) -> None:
        pass

    other, staged = second_device(device), methodcaller("wait_staged")
    at_limit = "wait_staged() of copy_into() device memory, at the staging limit"
    ours = [
        Way("wait() for a result on the device", to(on_host, device), WAIT),
        Way("start_copy() at the run-ahead limit", ahead, to(on_host, device)),
        Way("get() of a result on the host", to(on_device, "cpu"), GET),
        Way("get() of copy_into() host memory", into(on_device, to_host), GET),
        Way("get() of copy_into() device memory", into(on_host, in_device), GET),
        Way(at_limit, into(long_on_host, long_in_device), staged),
    ]
    if other is not None:
        ours.append(Way("get() of a result on another device", to(on_device, other), GET))
    return [
        *(way._replace(name=f"{OURS}: {way.name}") for way in ours),
        Way(
            "event.synchronize()",
            lambda _: module.current_stream(device).record_event(),
            methodcaller("synchronize"),
        ),
        Way('.to("cpu")', nothing, lambda _: on_device.to("cpu")),
        Way("an event that blocks the host's thread", nothing, nothing),
    ]
