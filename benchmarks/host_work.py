"""Times a copy whose caller does other work before it calls get()."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from copies import Progress
from directions import synchroniser
from limits import flat_bytes
from measure import collector_paused, summarise
from quiet import QuietProcessor

import tdcopier
from tdcopier.workloads import WORKLOADS

HOST_WORK_US = 1000.0
MAX_TOGETHER_US = 80.0
WARM_UP = 10
CHECK_EVERY = 10


def run(device: torch.device, calls: int, progress: Progress, *, keep_gc: bool) -> dict[str, Any]:
    """Return times of ``start_copy()`` and of ``get()``, with host work between them.

    Args:
        device: The target.
        calls: Number of copies that are timed; the values of every tenth are compared.
        progress: Returns a wrapper of the calls for a label.
        keep_gc: Leave Python's garbage collector on while timing.

    """
    sources = [WORKLOADS["detection_batch"].make(seed) for seed in range(4)]
    expected = [flat_bytes(source).to(device) for source in sources]
    times_us: dict[str, list[float]] = {"start_copy": [], "get": [], "together": []}
    wrong = 0
    synchronise = synchroniser([device])
    with collector_paused(not keep_gc), QuietProcessor() as quiet:
        for index in progress("copies beside work of the host")(range(WARM_UP + calls)):
            source = sources[index % len(sources)]
            if index % CHECK_EVERY == 0:
                quiet.seek()
            synchronise()
            ticks = [time.perf_counter_ns()]
            handle = tdcopier.start_copy(source, device)
            ticks.append(time.perf_counter_ns())
            work_on_host(HOST_WORK_US)
            ticks.append(time.perf_counter_ns())
            result = handle.get()
            ticks.append(time.perf_counter_ns())
            if index % CHECK_EVERY == 0:
                wrong += not torch.equal(flat_bytes(result), expected[index % len(sources)])
            del handle, result
            if index >= WARM_UP:
                start_us, get_us = ((ticks[i + 1] - ticks[i]) / 1e3 for i in (0, 2))
                for name, us in zip(times_us, (start_us, get_us, start_us + get_us), strict=True):
                    times_us[name].append(us)
    return {
        "host_work_us": HOST_WORK_US,
        **{name: summarise(taken)._asdict() for name, taken in times_us.items()},
        "wrong": wrong,
        "processor": quiet.described(),
    }


def work_on_host(us: float, clock_ns: Callable[[], int] = time.perf_counter_ns) -> int:
    """Do arithmetic in Python until the time is over."""
    end = clock_ns() + us * 1e3
    total = 0
    while clock_ns() < end:
        for number in range(50):
            total += number * number
    return total
