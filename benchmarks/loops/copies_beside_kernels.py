"""Times a small copy to the device while kernels are queued, after one of several other calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from copies.directions import second_device, synchroniser
from tool.measure import Bench, shuffled, summaries
from tool.tables import OURS

import tdcopier
from loops.learner import Sleeper, begin_by_torch

FLOATS = 1000
QUEUED_MS, QUEUED_MS_OF_SIM = 100.0, 5.0
ROWS = 100
WARM_UP = 2
ROUNDS_PER_REPEAT = 0.02
BY_TORCH = "pinned, non_blocking .to() on a side stream"
WAYS = (OURS, BY_TORCH)
NOTHING = "nothing"

Call = Callable[[], Any]


def run(bench: Bench) -> dict[str, Any]:
    """Return times from the call to the arrival, by earlier call and way."""
    trial, calls = Trial(bench.device), earlier_calls(bench.device)
    pairs = [(earlier, way) for earlier in calls for way in WAYS]
    times_us: dict[str, dict[str, list[float]]] = {name: {w: [] for w in WAYS} for name in calls}
    wrong = dict.fromkeys(WAYS, 0)
    how = {"rounds": bench.rounds(ROUNDS_PER_REPEAT), "warm_up": WARM_UP}
    for index, (earlier, way) in shuffled(pairs, bench.progress("copies beside kernels"), **how):
        taken_us, was_right = trial(way, calls[earlier][WAYS.index(way)])
        wrong[way] += not was_right
        if index >= 0:
            times_us[earlier][way].append(taken_us)
    return {
        "floats": FLOATS,
        "queued_ms": trial.queued_ms,
        "times": {earlier: summaries(both) for earlier, both in times_us.items()},
        "wrong": wrong,
    }


class Trial:
    """Queues kernels, makes an earlier call, and then times a copy of 1000 floats to the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._side = self._module.Stream(device)
        self._sleeper = Sleeper(device)
        self._synchronise = synchroniser([device])
        self._source = torch.arange(float(FLOATS))
        self._pinned = torch.empty(FLOATS).pin_memory()
        self._expected = self._source.to(device)
        self.queued_ms = QUEUED_MS if device.type == "cuda" else QUEUED_MS_OF_SIM

    def __call__(self, way: str, earlier: Call) -> tuple[float, bool]:
        """Run one round of a way, with an earlier call between the kernels and the copy.

        Returns the time in microseconds, and whether the values are right.
        """
        for values in (self._source, self._expected):
            values.add_(1)
        self._pinned.copy_(self._source)
        copy = self._ours if way == OURS else self._by_torch
        self._synchronise()
        self._sleeper.enqueue(self.queued_ms)
        begun = earlier()
        begin = time.perf_counter_ns()
        result = copy()
        taken_us = (time.perf_counter_ns() - begin) / 1e3
        with self._module.stream(self._side):  # an idle stream, so this reads the current values
            was_right = torch.equal(result, self._expected)
        self._synchronise()
        if isinstance(begun, tdcopier.AsyncCopyHandle):
            begun.get()
        return taken_us, was_right

    def _ours(self) -> torch.Tensor:
        handle = tdcopier.start_copy(self._source, self._device)  # the busy stream is current
        with self._module.stream(self._side):
            result = handle.get()
            self._side.record_event().synchronize()
        assert isinstance(result, torch.Tensor)
        return result

    def _by_torch(self) -> torch.Tensor:
        return begin_by_torch(self._pinned, self._device, self._side)()


def earlier_calls(device: torch.device) -> dict[str, tuple[Call, Call]]:
    """Return calls between the kernels and the copy: ours, and torch's. None of them waits."""
    on_device, other_on_device = (torch.ones(FLOATS, device=device) for _ in range(2))
    on_host, to_host = torch.zeros(FLOATS), torch.zeros(FLOATS)
    pinned, to_pinned = (torch.zeros(FLOATS).pin_memory() for _ in range(2))
    batch = torch.ones(ROWS, FLOATS, device=device)
    storage, index = torch.zeros(10 * ROWS, FLOATS), torch.arange(0, 10 * ROWS, 10)

    def into(source: torch.Tensor, destination: torch.Tensor) -> Call:
        return lambda: tdcopier.start_copy_into(source, destination)

    def to(source: torch.Tensor, target: Any) -> tuple[Call, Call]:
        ours = lambda: tdcopier.start_copy(source, target)  # noqa: E731
        return ours, lambda: source.to(target, non_blocking=True)

    def over(destination: torch.Tensor, source: torch.Tensor) -> Call:
        return lambda: destination.copy_(source, non_blocking=True)

    other = second_device(device)
    return {
        NOTHING: (lambda: None, lambda: None),
        "a copy to the host": to(on_device, "cpu"),
        "copy_into() host memory": (into(on_device, to_host), over(to_pinned, on_device)),
        "copy_into() device memory": (into(on_host, on_device), over(on_device, pinned)),
        "a copy within the device": (
            into(on_device, other_on_device),
            over(other_on_device, on_device),
        ),
        "a scatter of rows": (
            lambda: tdcopier.start_scatter(batch, storage, index),
            to(batch, "cpu")[1],
        ),
        **({"a copy to another device": to(on_device, other)} if other is not None else {}),
    }
