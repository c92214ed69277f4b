"""Processor time of the whole process while a copy waits for kernels."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any, NamedTuple

import torch
from baselines import OURS
from busy import Sleeper
from copies import Progress
from directions import second_device, synchroniser

import tdcopier

QUEUED_MS, QUEUED_MS_OF_SIM = 200.0, 10.0
BYTES = 1 << 20
RUN_AHEAD = 4
STAGING_LIMIT_BYTES, DEFAULT_STAGING_LIMIT_BYTES = 4 << 20, 64 << 20
WARM_UP = 1
ROUNDS_PER_REPEAT = 0.01
BLOCKING_EVENT = "an event that blocks the host's thread"


class Case(NamedTuple):
    """One way to wait for kernels that are queued."""

    name: str
    begin: Callable[[], Any]
    """Enqueues work after the kernels; not timed."""
    wait: Callable[[Any], Any]
    """The timed call that blocks the host; it receives the result of ``begin``."""


def run(device: torch.device, repeats: int, progress: Progress) -> dict[str, Any]:
    """Return the share of one processor that the process takes until the kernels end, by case.

    Args:
        device: The device whose current stream has kernels queued.
        repeats: As for the other benchmarks; each round takes as long as the kernels.
        progress: Returns a wrapper of the rounds for a label.

    """
    rounds = max(2, round(repeats * ROUNDS_PER_REPEAT))
    queued_ms = QUEUED_MS if device.type == "cuda" else QUEUED_MS_OF_SIM
    sleeper = Sleeper(device)
    every = cases(device)
    shares: dict[str, list[float]] = {case.name: [] for case in every}
    held_ms: dict[str, list[float]] = {case.name: [] for case in every}
    order, dice = list(every), random.Random(0)
    with limits_of_company():
        for index in progress("company, waiting")(range(WARM_UP + rounds)):
            dice.shuffle(order)
            for case in order:
                share, held = measured(case, device, lambda: sleeper.enqueue(queued_ms))
                if index >= WARM_UP:
                    shares[case.name].append(share)
                    held_ms[case.name].append(held)
    return {
        "queued_ms": queued_ms,
        "bytes": BYTES,
        "staging_limit_bytes": STAGING_LIMIT_BYTES,
        "cases": {
            name: {
                "median_share": median(taken),
                "max_share": max(taken),
                "median_held_ms": median(held_ms[name]),
                "repeats": len(taken),
            }
            for name, taken in shares.items()
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
    """Return our own waits in every direction, then torch's."""
    module = torch.get_device_module(device)
    on_host = torch.ones(BYTES // 4)
    on_device, in_device = (on_host.to(device, copy=True) for _ in range(2))
    to_host = torch.zeros_like(on_host)
    long_on_host = torch.ones(2 * STAGING_LIMIT_BYTES // 4)
    long_in_device = long_on_host.to(device)

    def ahead() -> None:
        for _ in range(RUN_AHEAD):
            tdcopier.start_copy(on_host, device).wait()

    found = [
        Case(
            f"{OURS}: wait() for a result on the device",
            lambda: tdcopier.start_copy(on_host, device),
            lambda handle: handle.wait(),
        ),
        Case(
            f"{OURS}: start_copy() at the run-ahead limit",
            ahead,
            lambda _: tdcopier.start_copy(on_host, device),
        ),
        Case(
            f"{OURS}: get() of a result on the host",
            lambda: tdcopier.start_copy(on_device, "cpu"),
            lambda handle: handle.get(),
        ),
        Case(
            f"{OURS}: get() of copy_into() host memory",
            lambda: tdcopier.copy_into(on_device, to_host),
            lambda handle: handle.get(),
        ),
        Case(
            f"{OURS}: get() of copy_into() device memory",
            lambda: tdcopier.copy_into(on_host, in_device),
            lambda handle: handle.get(),
        ),
        Case(
            f"{OURS}: wait_staged() of copy_into() device memory, at the staging limit",
            lambda: tdcopier.copy_into(long_on_host, long_in_device),
            lambda handle: handle.wait_staged(),
        ),
    ]
    other = second_device(device)
    if other is not None:
        found.append(
            Case(
                f"{OURS}: get() of a result on another device",
                lambda: tdcopier.start_copy(on_device, other),
                lambda handle: handle.get(),
            )
        )
    return [
        *found,
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
