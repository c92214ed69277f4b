"""Times a training loop that is fed by copies, against one with batches that are on the device.

For a loop, the duration of a copy matters less than the delay of the step and the time for which
the host is busy with the copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from directions import h2d, start_workers, synchroniser
from kernels import Work
from limits import flat_bytes
from loop_steps import CHECK_EVERY, STEPS, Reader, block, count_wrong, feeds
from measure import Bench, shuffled, summaries
from tables import OURS, RESIDENT
from targets import Target, at_most, none

import tdcopier
from tdcopier.workloads import WORKLOADS, leaves, total_bytes

STEP_MS = 3.4  # duration of each step's kernels
WARM_UP = 2
HOST_WORK_US = 1000.0
MAX_TOGETHER_US = 80.0
COPIES_TO_WARM_UP = 10
COMPARE_EVERY = 10  # copies beside other work of the host


class Wanted(NamedTuple):
    """Upper limits for a loop that tdcopier feeds."""

    over_resident: float
    """Time of a step over that with a batch that is on the device already."""
    copy_calls_us: float
    """Time of the host in the copy calls of a step."""


WANTED = {
    "detection_batch": Wanted(1.02, 150.0),
    "detection_batch_with_images": Wanted(1.05, 500.0),
    "atari_replay": Wanted(1.02, 300.0),
}
"""Targets by the batch that feeds the loop."""
POOL = {"detection_batch": 8, "detection_batch_with_images": 4, "atari_replay": 6}


def run(bench: Bench) -> dict[str, Any]:
    """Return the result of this benchmark, without the machine."""
    start_workers(h2d(bench.device))
    work = Work(bench.device, STEP_MS)
    result = {
        "what": "A training loop: time of a step, and of the host in the calls that copy",
        "settings": {
            **bench.settings(),
            "work": f"{work.count} multiplications of matrices, {tuple(work.factor.shape)}, "
            f"{work.factor.dtype}, for about {STEP_MS:g} ms a step",
            "order": f"blocks of {STEPS} steps, shuffled per round",
            "ahead": "start_copy() of the next batch before the step, wait() at its beginning; the "
            "host begins a step when the one before the last is done",
        },
        "loops": {name: _loop(bench, name, work) for name in WANTED},
        "beside_host_work": beside_host_work(bench),
    }
    return {**result, "targets": targets(result, speed=bench.is_real)}


def targets(result: dict[str, Any], *, speed: bool = True) -> list[Target]:
    """Return each target and whether it is hit; without ``speed``, only those on values."""
    beside = result["beside_host_work"]
    wrong = sum(sum(found["wrong"].values()) for found in result["loops"].values())
    what = "steps and batches with another value than the source's, all feeds"
    found = [none(what, wrong + beside["wrong"])]
    if not speed:
        return found
    for name, wanted in WANTED.items():
        loop = result["loops"][name]
        ratio, host_us = loop["ratios"][OURS], loop["copy_calls"][OURS]["median_us"]
        calls = f"{name}, host in the copy calls of a step"
        found.append(at_most(f"{name}, step over that {RESIDENT}", ratio, wanted.over_resident))
        found.append(at_most(calls, host_us, wanted.copy_calls_us, "us"))
    between = f"{HOST_WORK_US:g} us of other work between"
    what = f"detection batch, start_copy() and get() with {between}"
    return [*found, at_most(what, beside["together"]["median_us"], MAX_TOGETHER_US, "us")]


def _loop(bench: Bench, name: str, work: Work) -> dict[str, Any]:
    device, rounds = bench.device, bench.rounds(0.03)
    sources = [WORKLOADS[name].make(seed) for seed in range(POOL[name])]
    expected = [flat_bytes(source).to(device) for source in sources]
    reader = Reader(sources, STEPS, device)
    ways = feeds(device)
    prepared = {feed.name: [feed.prepare(source) for source in sources] for feed in ways}
    step_us: dict[str, list[float]] = {feed.name: [] for feed in ways}
    copy_calls_us: dict[str, list[float]] = {feed.name: [] for feed in ways}
    wrong = {feed.name: 0 for feed in ways}
    synchroniser([device])()
    how = {"rounds": rounds, "warm_up": WARM_UP}
    with bench.quiet() as quiet:
        progress = bench.progress(f"loop, {name}")
        for index, feed in shuffled(ways, progress, before_round=quiet.seek, **how):
            found = block(feed, prepared[feed.name], index, work, reader, device)
            wrong[feed.name] += sum(count_wrong(found, index, reader, expected))
            if index >= 0:
                step_us[feed.name].append(found.step_us)
                copy_calls_us[feed.name] += found.copy_calls_us
            del found
    steps = summaries(step_us)
    resident_us = steps[RESIDENT]["median_us"]
    return {
        "leaves": len(leaves(sources[0])),
        "bytes": total_bytes(sources[0]),
        "sources": len(sources),
        "steps_per_block": STEPS,
        "step": steps,
        "ratios": {way: found["median_us"] / resident_us for way, found in steps.items()},
        "copy_calls": summaries(copy_calls_us),
        "checked_steps": (WARM_UP + rounds) * STEPS,
        "checked_batches": (WARM_UP + rounds) * (STEPS // CHECK_EVERY),
        "wrong": wrong,
        "processor": quiet.described(),
    }


# ---- a caller that does other work before get() --------------------------------------------------


def beside_host_work(bench: Bench) -> dict[str, Any]:
    """Return times of ``start_copy()`` and of ``get()``, with host work between them.

    The values of every tenth copy are compared.
    """
    device, calls = bench.device, bench.rounds(0.5, least=10)
    sources = [WORKLOADS["detection_batch"].make(seed) for seed in range(4)]
    expected = [flat_bytes(source).to(device) for source in sources]
    times_us: dict[str, list[float]] = {"start_copy": [], "get": [], "together": []}
    wrong = 0
    synchronise = synchroniser([device])
    with bench.quiet() as quiet:
        progress = bench.progress("copies beside work of the host")
        for index in progress(range(COPIES_TO_WARM_UP + calls)):
            if index % COMPARE_EVERY == 0:
                quiet.seek()
            synchronise()
            result, start_us, get_us = _start_work_get(sources[index % len(sources)], device)
            if index % COMPARE_EVERY == 0:
                wrong += not torch.equal(flat_bytes(result), expected[index % len(sources)])
            del result
            if index >= COPIES_TO_WARM_UP:
                for name, us in zip(times_us, (start_us, get_us, start_us + get_us), strict=True):
                    times_us[name].append(us)
    found = {"host_work_us": HOST_WORK_US, **summaries(times_us)}
    return {**found, "wrong": wrong, "processor": quiet.described()}


def _start_work_get(source: Any, device: torch.device) -> tuple[Any, float, float]:
    ticks = [time.perf_counter_ns()]
    handle = tdcopier.start_copy(source, device)
    ticks.append(time.perf_counter_ns())
    work_on_host(HOST_WORK_US)
    ticks.append(time.perf_counter_ns())
    result = handle.get()
    ticks.append(time.perf_counter_ns())
    return result, (ticks[1] - ticks[0]) / 1e3, (ticks[3] - ticks[2]) / 1e3


def work_on_host(us: float, clock_ns: Callable[[], int] = time.perf_counter_ns) -> int:
    """Do arithmetic in Python until the time is over."""
    end = clock_ns() + us * 1e3
    total = 0
    while clock_ns() < end:
        for number in range(50):
            total += number * number
    return total
