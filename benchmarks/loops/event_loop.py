"""How late an asyncio event loop runs its tasks while batches are copied, by way of copying."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Any, NamedTuple

import torch
from copies.ways import PER_LEAF_TO, differences
from tool.measure import Bench, shuffled
from tool.tables import OURS
from tool.target_forms import Target, at_least, at_most, none
from tool.way import Way

import tdcopier
from tdcopier._commands.interleave import collector_paused
from tdcopier.workloads import detection_batch, leaves, map_tensors, total_bytes

COPIES_PER_S = 200
MOST_IN_FLIGHT = 8  # a copy that is due while that many are in flight is left out
BEAT_MS = 3.0  # not a divisor of the time between two copies, so beats meet all parts of a copy
SEGMENT_S, SEGMENT_S_OF_SIM = 1.0, 0.05
ROUNDS_PER_REPEAT = 0.02
WARM_UP = 1
MAX_LATE_MS = 1.5
LEAST_RATE = 0.95
IDLE = "no copies"
AWAITED = f"{OURS}, await handle"

Copy = Callable[[], Awaitable[Any]]


class Segment(NamedTuple):
    """Measurements of one way in one round."""

    late_us: list[float]
    """By heartbeat: how long after its time it ran."""
    copy_us: list[float]
    """By copy: from the call until its task has the result."""
    wrong: int
    """1 if the last copy differs from its source."""


def run(bench: Bench) -> dict[str, Any]:
    batch = detection_batch()
    segment_s = SEGMENT_S if bench.is_real else SEGMENT_S_OF_SIM
    with collector_paused():
        found = asyncio.run(_segments(bench, batch, segment_s))
    return {
        "what": "An asyncio event loop while batches are copied to the device",
        "leaves": len(leaves(batch)),
        "bytes": total_bytes(batch),
        "times": {way: _figures(segments, segment_s) for way, segments in found.items()},
        "wrong": {way: sum(each.wrong for each in segments) for way, segments in found.items()},
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    yield none(
        "last copies of a round that differ from their source, all ways",
        sum(result["wrong"].values()),
    )


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    ours = result["times"][AWAITED]
    what = f"{AWAITED}, lateness of a heartbeat, 99th percentile"
    yield at_most(what, ours["late"]["p99_us"], MAX_LATE_MS * 1000, "us")
    what = f"{AWAITED}, copies a second over those wanted"
    yield at_least(what, ours["copies_per_s"] / COPIES_PER_S, LEAST_RATE)


def ways(device: torch.device) -> list[Way]:
    """Return the ways, which start a coroutine of a copy; the first one copies nothing."""

    async def awaited(source: Any) -> Any:
        return await tdcopier.start_copy(source, device)

    async def in_executor(call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, call)

    def to(source: Any) -> Any:
        return map_tensors(source, lambda leaf: leaf.to(device))

    async def to_in_loop(source: Any) -> Any:
        return to(source)

    return [
        Way(IDLE),
        Way(AWAITED, awaited),
        Way(
            f"{OURS}, run_in_executor(handle.get)",
            lambda source: in_executor(tdcopier.start_copy(source, device).get),
        ),
        Way(f"{PER_LEAF_TO}, in the loop", to_in_loop),
        Way(f"{PER_LEAF_TO}, run_in_executor", lambda source: in_executor(partial(to, source))),
    ]


async def _segments(bench: Bench, source: Any, segment_s: float) -> dict[str, list[Segment]]:
    every = ways(bench.device)
    found: dict[str, list[Segment]] = {way.name: [] for way in every}
    how = {"rounds": bench.rounds(ROUNDS_PER_REPEAT), "warm_up": WARM_UP}
    for index, way in shuffled(every, bench.progress("event loop"), **how):
        end = asyncio.get_running_loop().time() + segment_s
        copy = None if way.name == IDLE else partial(way.start, source)
        copies = asyncio.create_task(_paced(copy, end)) if copy else None
        late_us = await _beats(end)
        copy_us, last = await copies if copies else ([], source)
        wrong = bool(copies and differences(last, source, bench.device))
        if index >= 0:
            found[way.name].append(Segment(late_us, copy_us, int(wrong)))
    return found


async def _beats(end: float) -> list[float]:
    """Beat until ``end``. A beat that comes late does not delay the times of those after it."""
    loop, late_us = asyncio.get_running_loop(), []
    due = loop.time() + BEAT_MS / 1000
    while due < end:
        await asyncio.sleep(due - loop.time())
        late_us.append((loop.time() - due) * 1e6)
        due += BEAT_MS / 1000
    return late_us


async def _paced(copy: Copy, end: float) -> tuple[list[float], Any]:
    """Begin a copy whenever one is due, until ``end``; at least one.

    Returns the time of each in microseconds, and the last result.
    """
    loop, in_flight = asyncio.get_running_loop(), set()
    copy_us: list[float] = []
    last: Any = None

    async def timed() -> None:
        nonlocal last
        begin_ns = time.perf_counter_ns()
        result = await copy()
        copy_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
        last = result

    has_begun, due = False, loop.time()
    while due < end or not has_begun:
        if len(in_flight) < MOST_IN_FLIGHT:
            has_begun = True
            task = asyncio.create_task(timed())
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
        due = max(due + 1 / COPIES_PER_S, loop.time())
        await asyncio.sleep(due - loop.time())
    await asyncio.gather(*in_flight)
    return copy_us, last


def _figures(segments: Sequence[Segment], segment_s: float) -> dict[str, Any]:
    copy_us = [us for segment in segments for us in segment.copy_us]
    return {
        "late": _percentiles([us for segment in segments for us in segment.late_us]),
        "copy": _percentiles(copy_us) if copy_us else None,
        "copies_per_s": len(copy_us) / (len(segments) * segment_s),
    }


def _percentiles(times_us: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(times_us, n=100, method="inclusive") if len(times_us) > 1 else [*times_us] * 99
    return {
        "p50_us": median(times_us),
        "p99_us": cuts[98],
        "max_us": max(times_us),
        "repeats": len(times_us),
    }
