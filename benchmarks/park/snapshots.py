"""Times steps that overwrite a state, while snapshots of it are taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from loops.learner import Work
from tool.measure import Bench
from tool.tables import OURS
from tool.target_forms import Target, at_most
from tool.way import Way

import tdcopier
from tdcopier._commands.interleave import summarise

TO, SIDE = ".to() per tensor", "pinned copies on a side stream"
ASIDE = f"{OURS}, device_copy=True"
STEP_MS = 3.4
STATE = [16 << 10, 384 << 10] * 500
"""Bytes of the tensors that a snapshot copies."""
MOST_STEP, MOST_HOST_US = 1.05, 5000.0

Taken = tuple[Callable[[], object], Callable[[], list[torch.Tensor]]]
"""The call before the state is overwritten, and the one that returns the snapshot."""


def run(bench: Bench) -> dict[str, Any]:
    device = torch.get_device_module(bench.device)
    shrink = 1 if bench.is_real else 100
    state = [torch.zeros(each // 4 // shrink, device=bench.device) for each in STATE]
    work = Work(bench.device, STEP_MS)
    parts = ("step_us", "longest_over_median", "host_us", "wrong")
    result: dict[str, Any] = {part: {} for part in parts}
    steps, period = (60, 15) if bench.is_real else (12, 4)
    for way in bench.progress("snapshots")(ways(state, device)):
        loop = Loop(state, way, work, device)
        result["wrong"][way.name] = loop.count_wrong(period)
        step_us, host_us = loop.time(steps, period)
        usual = summarise(step_us)
        result["step_us"][way.name] = usual._asdict()
        result["longest_over_median"][way.name] = max(step_us[2:]) / usual.median_us
        result["host_us"][way.name] = median(host_us[1:] or host_us)
    return {"leaves": len(state), "bytes": sum(t.nbytes for t in state), **result}


def speed_targets(found: dict[str, Any]) -> Iterator[Target]:
    for way in (OURS, ASIDE):
        over = found["longest_over_median"][way]
        yield at_most(f"{way}: longest over median step", over, MOST_STEP)
        yield at_most(f"{way}: host in a snapshot", found["host_us"][way], MOST_HOST_US, "us")


class Loop:
    """Steps that compute, and then overwrite the state, of which some begin with a snapshot."""

    def __init__(self, state: list[torch.Tensor], way: Way, work: Any, device: Any) -> None:
        self._state, self._way, self._work, self._device = state, way, work, device

    def _step(self, before_update: Callable[[], object] | None) -> None:
        self._work.enqueue()
        if before_update is not None:
            before_update()
        torch._foreach_add_(self._state, 1.0)

    def count_wrong(self, period: int) -> int:
        """Return the number of tensors of two snapshots that have other values than the state."""
        for value, tensor in enumerate(self._state):
            tensor.fill_(value)
        wrong = 0
        for number in range(2 * period):
            takes = number % period == period - 1
            before_update, finish = self._way.run(self._state) if takes else (None, None)
            self._step(before_update)
            if finish is not None:
                wrong += sum(bool((t != i + number).any()) for i, t in enumerate(finish()))
        return wrong

    def time(self, steps: int, period: int) -> tuple[list[float], list[float]]:
        """Return the device's times between updates, and the host's times in the calls, us.

        The host runs ahead of the device, as in a loop that does not look at each step's loss.
        """
        host_us: list[float] = []
        before_update = finish = None
        ends = [self._device.Event(enable_timing=True) for _ in range(steps + 1)]
        self._device.synchronize()
        ends[0].record()
        for number, end in enumerate(ends[1:]):
            before_update = None
            if number % period == period - 1:
                del finish  # an earlier snapshot is there until the next
                begin = time.perf_counter_ns()
                before_update, finish = self._way.run(self._state)
                host_us.append((time.perf_counter_ns() - begin) / 1e3)
            self._step(before_update)
            end.record()
        self._device.synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in pairwise(ends)], host_us


def ways(state: list[torch.Tensor], device: Any) -> list[Way]:
    """Return the ways to take a snapshot; each returns what :data:`Taken` says."""
    stream = device.Stream()
    host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in state]

    def aside(state: list[torch.Tensor]) -> Taken:
        stream.wait_stream(device.current_stream())
        with device.stream(stream):
            for tensor, buffer in zip(state, host, strict=True):
                buffer.copy_(tensor, non_blocking=True)

        def get() -> list[torch.Tensor]:
            stream.synchronize()
            return host

        return lambda: device.current_stream().wait_stream(stream), get

    def to(state: list[torch.Tensor]) -> Taken:
        copies = [t.to("cpu") for t in state]
        return lambda: None, lambda: copies

    def calls(taken: tdcopier.Snapshot) -> Taken:
        return taken.before_update, taken.get

    return [
        Way(OURS, lambda state: tdcopier.snapshot(state, defer_wait=True), calls),
        Way(ASIDE, lambda state: tdcopier.snapshot(state, device_copy=True), calls),
        Way(SIDE, aside),
        Way(TO, to),
    ]
