"""Processor time of the whole process while a copy waits for kernels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import methodcaller
from statistics import median
from typing import Any, NamedTuple

import torch
from copies.directions import second_device, synchroniser
from tool.measure import Bench, shuffled
from tool.tables import OURS

import tdcopier
from loops.learner import Sleeper

QUEUED_MS, QUEUED_MS_OF_SIM = 200.0, 10.0
BYTES = 1 << 20
RUN_AHEAD = 4
STAGING_LIMIT_BYTES, DEFAULT_STAGING_LIMIT_BYTES = 4 << 20, 64 << 20
WARM_UP = 1
ROUNDS_PER_REPEAT = 0.01
WAIT, WAIT_STAGED, GET = (methodcaller(name) for name in ("wait", "wait_staged", "get"))
BLOCKING_EVENT = "an event that blocks the host's thread"


class Case(NamedTuple):
    """One way to wait for kernels that are queued."""

    name: str
    begin: Callable[[], Any]
    """Enqueues work after the kernels; not timed."""
    wait: Callable[[Any], Any]
    """The timed call that blocks the host; it receives the result of ``begin``."""


def run(bench: Bench) -> dict[str, Any]:
    """Return the share of one processor that the process takes until the kernels end, by case."""
    queued_ms = QUEUED_MS if bench.is_real else QUEUED_MS_OF_SIM
    sleeper = Sleeper(bench.device)
    every = cases(bench.device)
    taken: dict[str, list[tuple[float, float]]] = {case.name: [] for case in every}
    how = {"rounds": bench.rounds(ROUNDS_PER_REPEAT), "warm_up": WARM_UP}
    with limits_of_company():
        for index, case in shuffled(every, bench.progress("company, waiting"), **how):
            found = measured(case, bench.device, lambda: sleeper.enqueue(queued_ms))
            if index >= 0:
                taken[case.name].append(found)
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
def limits_of_company() -> Iterator[None]:
    """Set limits that are low enough for copies to reach while kernels are queued."""
    tdcopier.set_run_ahead_limit(RUN_AHEAD)
    tdcopier.set_staging_limit_bytes(STAGING_LIMIT_BYTES)
    try:
        yield
    finally:
        tdcopier.set_staging_limit_bytes(DEFAULT_STAGING_LIMIT_BYTES)


def measured(
    case: Case, device: torch.device, enqueue_kernels: Callable[[], None]
) -> tuple[float, float]:
    """Return processor time over wall time of one wait, and how long it blocked its thread, in ms.

    Processor and wall time run until the end of the kernels. If the wait returns earlier, its
    thread then waits for the kernels without using a processor, so that the rest is the time of
    other threads.
    """
    module = torch.get_device_module(device)
    synchroniser([device])()
    enqueue_kernels()
    ended = _blocking_event(device)
    ended.record(module.current_stream(device))
    begun = case.begin()
    begin_ns, processor_ns = time.perf_counter_ns(), time.process_time_ns()
    result = case.wait(begun)
    held_ns = time.perf_counter_ns() - begin_ns
    ended.synchronize()
    processor_ns = time.process_time_ns() - processor_ns
    wall_ns = time.perf_counter_ns() - begin_ns
    if isinstance(begun, tdcopier.AsyncCopyHandle):
        begun.get()
    del result, begun
    return processor_ns / wall_ns, held_ns / 1e6


def cases(device: torch.device) -> list[Case]:
    module = torch.get_device_module(device)
    on_host = torch.ones(BYTES // 4)
    on_device, in_device = (on_host.to(device, copy=True) for _ in range(2))
    to_host = torch.zeros_like(on_host)
    long_on_host = torch.ones(2 * STAGING_LIMIT_BYTES // 4)
    long_in_device = long_on_host.to(device)

    def ahead() -> None:
        for _ in range(RUN_AHEAD):
            tdcopier.start_copy(on_host, device).wait()

    def to(target: torch.device, source: torch.Tensor) -> Callable[[], Any]:
        return lambda: tdcopier.start_copy(source, target)

    def into(source: torch.Tensor, destination: torch.Tensor) -> Callable[[], Any]:
        return lambda: tdcopier.start_copy_into(source, destination)

    to_device, at_limit = to(device, on_host), into(long_on_host, long_in_device)
    staged = "wait_staged() of copy_into() device memory, at the staging limit"
    ours = {
        "wait() for a result on the device": (to_device, WAIT),
        "start_copy() at the run-ahead limit": (ahead, lambda _: to_device()),
        "get() of a result on the host": (to(torch.device("cpu"), on_device), GET),
        "get() of copy_into() host memory": (into(on_device, to_host), GET),
        "get() of copy_into() device memory": (into(on_host, in_device), GET),
        staged: (at_limit, WAIT_STAGED),
    }
    other = second_device(device)
    if other is not None:
        ours["get() of a result on another device"] = (to(other, on_device), GET)
    return [
        *(Case(f"{OURS}: {name}", *calls) for name, calls in ours.items()),
        Case(
            "event.synchronize()",
            lambda: module.current_stream(device).record_event(),
            lambda event: event.synchronize(),
        ),
        Case('.to("cpu")', lambda: None, lambda _: on_device.to("cpu")),
        Case(BLOCKING_EVENT, lambda: None, lambda _: None),
    ]


def _blocking_event(device: torch.device) -> Any:
    """Return an event whose wait uses no processor; on the simulated device every event is one."""
    if device.type == "cuda":
        return torch.cuda.Event(blocking=True)
    return torch.get_device_module(device).Event()
