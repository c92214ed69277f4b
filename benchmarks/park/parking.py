"""Times parking: models' memory to pinned host memory and back, and snapshots beside a loop.

``python -m park.parking --first`` parks once and prints the time, in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from tool.machine import BENCHMARKS
from tool.measure import Bench
from tool.tables import OURS
from tool.target_forms import Target, at_least, at_most, none

import tdcopier
from tdcopier._commands.interleave import summarise

MODEL, WIDE = "510 tensors", "1,500 tensors, 1 KB to 500 MB"
TO, PINNED = ".to() per tensor", "pinned copies per tensor"
SIDE = "pinned copies on a side stream"
ASIDE = f"{OURS}, device_copy=True"
WIDE_BYTES = 20e9
STEP_MS = 3.4
STATE = [16 << 10, 384 << 10] * 500
"""Bytes of the tensors that a snapshot copies."""
LEAST_GB_PER_S = 50.0
MOST_EXTRA_BYTES = 64 << 20
MOST_SNAPSHOT_STEP, MOST_SNAPSHOT_HOST_US = 1.05, 5000.0
SHRINK_OF_SIM = 2000
"""The simulated device parks so much less."""


class Way(NamedTuple):
    """A way to empty tensors and to fill them again; both return when the device is done."""

    empty: Callable[[], None]
    fill: Callable[[], None]


def run(bench: Bench) -> dict[str, Any]:
    shrink = 1 if bench.is_real else SHRINK_OF_SIM
    states = {MODEL: model_sizes(shrink), WIDE: wide_sizes(shrink)}
    return {
        "what": "Parking: from the call until the bytes have arrived, on the host and back",
        "settings": {
            **bench.settings(burst=1),
            "times": "from the second time on, when pinned memory is there",
        },
        "parked": {name: _parked(bench, name, sizes) for name, sizes in states.items()},
        "first": _first(bench),
        "snapshot": _snapshots(bench),
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    wrong = sum(sum(each["wrong"].values()) for each in result["parked"].values())
    wrong += sum(result["snapshot"]["wrong"].values())
    yield none("park: tensors with other values afterwards, all ways", wrong)
    for name, found in result["parked"].items():
        yield at_most(f"{name}: bytes in use while parked", found["bytes_while_parked"], 0)
        extra = max(found["extra_peak_bytes"].values())
        yield at_most(f"{name}: extra device memory at the peak", extra, MOST_EXTRA_BYTES, "B")


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, found in result["parked"].items():
        for which in ("park", "resume"):
            rate = found["gb_per_s"][which][OURS]
            yield at_least(f"{name}: {which}, GB/s", rate, LEAST_GB_PER_S)
    found = result["snapshot"]
    for way in (OURS, ASIDE):
        over = found["longest_over_median"][way]
        yield at_most(f"{way}: longest over median step", over, MOST_SNAPSHOT_STEP)
        host = found["host_us"][way]
        yield at_most(f"{way}: host in a snapshot", host, MOST_SNAPSHOT_HOST_US, "us")


def model_sizes(shrink: int = 1) -> list[int]:
    """Return sizes of 170 parameters with two states each: 5.36 GB, one in three small."""
    return [max(4, each // shrink) & ~3 for each in (16_384, 7_864_320, 23_648_708)] * 170


def wide_sizes(shrink: int = 1) -> list[int]:
    """Return 1,500 sizes from 1 KB to 500 MB, with `WIDE_BYTES` together."""
    low, high = 0.1, 10.0
    while high - low > 1e-6:
        power = (low + high) / 2
        sizes = [1e3 * 5e5 ** ((i / 1499) ** power) for i in range(1500)]
        low, high = (power, high) if sum(sizes) > WIDE_BYTES else (low, power)
    return [max(4, int(size / shrink)) & ~3 for size in sizes]


def state_of(sizes: list[int], device: torch.device) -> list[torch.Tensor]:
    """Return float tensors, each with a value of its own."""
    return [torch.full((each // 4,), float(i), device=device) for i, each in enumerate(sizes)]


def count_wrong(state: list[torch.Tensor]) -> int:
    """Count the tensors that do not have their value at both ends."""
    ends = [[t[0], t[-1]] for t in state]
    found = torch.stack([end for pair in ends for end in pair]).cpu().tolist()
    return sum(found[2 * i : 2 * i + 2] != [float(i)] * 2 for i in range(len(state)))


# ---- park and resume -----------------------------------------------------------------------------


def _parked(bench: Bench, name: str, sizes: list[int]) -> dict[str, Any]:
    device = torch.get_device_module(bench.device)
    others = device.memory_allocated(bench.device)
    state = state_of(sizes, bench.device)
    names = [OURS, TO, PINNED] if name == MODEL else [OURS, TO]
    times: dict[str, dict[str, list[float]]] = {}
    wrong = {}
    for way_name in names:
        rounds = 3 if way_name == TO else bench.rounds(0.02, 3)
        way = _way(way_name, state, device)
        taken: dict[str, list[float]] = {"park": [], "resume": []}
        for _ in bench.progress(f"{name}, {way_name}")(range(rounds + 1)):
            device.synchronize()
            taken["park"].append(_timed_us(way.empty))
            taken["resume"].append(_timed_us(way.fill))
        wrong[way_name] = count_wrong(state)
        times[way_name] = {which: each[1:] for which, each in taken.items()}
        del way
    total = sum(sizes)
    summaries = {
        which: {way: summarise(taken[which]) for way, taken in times.items()}
        for which in ("park", "resume")
    }
    return {
        "leaves": len(sizes),
        "bytes": total,
        **{
            which: {way: found._asdict() for way, found in each.items()}
            for which, each in summaries.items()
        },
        "gb_per_s": {
            which: {way: total / found.median_us / 1e3 for way, found in each.items()}
            for which, each in summaries.items()
        },
        "wrong": wrong,
        **_memory(state, device, others),
    }


def _way(name: str, state: list[torch.Tensor], device: Any) -> Way:
    if name == OURS:
        return _ours(state, device)
    return _to(state, device) if name == TO else _pinned(state, device)


def _ours(state: list[torch.Tensor], device: Any) -> Way:
    handles: list[tdcopier.Parked] = []

    def empty() -> None:
        handles.append(tdcopier.park(state))
        handles[-1].wait()

    def fill() -> None:
        handles.pop().resume()
        device.synchronize()

    return Way(empty, fill)


def _to(state: list[torch.Tensor], device: Any) -> Way:
    host: list[torch.Tensor] = []

    def empty() -> None:
        for tensor in state:
            host.append(tensor.to("cpu"))
            tensor.untyped_storage().resize_(0)

    def fill() -> None:
        for tensor, values in zip(state, host, strict=True):
            tensor.untyped_storage().resize_(values.nbytes)
            tensor.copy_(values)
        host.clear()
        device.synchronize()

    return Way(empty, fill)


def _pinned(state: list[torch.Tensor], device: Any) -> Way:
    host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in state]

    def empty() -> None:
        for tensor, buffer in zip(state, host, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        device.synchronize()
        for tensor in state:
            tensor.untyped_storage().resize_(0)

    def fill() -> None:
        for tensor, buffer in zip(state, host, strict=True):
            tensor.untyped_storage().resize_(buffer.nbytes)
            tensor.copy_(buffer, non_blocking=True)
        device.synchronize()

    return Way(empty, fill)


def _timed_us(call: Callable[[], None]) -> float:
    begin = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - begin) / 1e3


def _memory(state: list[torch.Tensor], device: Any, others: int) -> dict[str, Any]:
    """Return the device memory in use while parked, without `others`, and what the peaks add."""
    where = state[0].device
    device.synchronize()
    before = device.memory_allocated(where)
    peaks = {}
    device.reset_peak_memory_stats(where)
    parked = tdcopier.park(state)
    parked.wait()
    peaks["park"] = device.max_memory_allocated(where) - before
    while_parked = device.memory_allocated(where) - others
    device.reset_peak_memory_stats(where)
    parked.resume()
    device.synchronize()
    peaks["resume"] = device.max_memory_allocated(where) - before
    return {"bytes_while_parked": while_parked, "extra_peak_bytes": peaks}


# ---- the first time ------------------------------------------------------------------------------


def _first(bench: Bench) -> dict[str, Any]:
    """Return ms of the first park in a process, with and without memory that is pinned before."""
    ways = {"without reserve": []}
    if hasattr(tdcopier, "reserve_pinned_memory"):
        ways["with reserve"] = ["--reserve"]
    found = {}
    torch.get_device_module(bench.device).empty_cache()  # the processes share the device
    for name, options in ways.items():
        command = [
            sys.executable,
            "-m",
            "park.parking",
            "--first",
            "--device",
            str(bench.device),
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=BENCHMARKS)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def park_first(device: torch.device, reserve: bool) -> dict[str, float]:
    """Return ms of the first and the second park in this process, and of the reservation."""
    state = state_of(model_sizes(1 if device.type == "cuda" else SHRINK_OF_SIM), device)
    module = torch.get_device_module(device)
    module.synchronize()
    found = {}
    if reserve:
        total = sum(t.nbytes for t in state)
        found["reserve_ms"] = _timed_us(lambda: tdcopier.reserve_pinned_memory(total)) / 1e3
    way = _ours(state, module)
    found["first_park_ms"] = _timed_us(way.empty) / 1e3
    found["first_resume_ms"] = _timed_us(way.fill) / 1e3
    found["second_park_ms"] = _timed_us(way.empty) / 1e3
    way.fill()
    return found


# ---- snapshots -----------------------------------------------------------------------------------


def _snapshots(bench: Bench) -> dict[str, Any]:
    """Return the times of steps that overwrite a state, while snapshots of it are taken."""
    device = torch.get_device_module(bench.device)
    shrink = 1 if bench.is_real else 100
    state = [torch.zeros(each // 4 // shrink, device=bench.device) for each in STATE]
    compute = _compute(bench)
    result: dict[str, Any] = {
        "leaves": len(state),
        "bytes": sum(t.nbytes for t in state),
        "step_us": {},
        "longest_over_median": {},
        "host_us": {},
        "wrong": {},
    }
    takers = {OURS: _take_ours, ASIDE: _take_ours_aside, SIDE: _take_aside, TO: _take_to}
    steps, period = (60, 15) if bench.is_real else (12, 4)
    for way, make in bench.progress("snapshots")(takers.items()):
        loop = _Loop(state, make(state, device), compute, device)
        result["wrong"][way] = loop.count_wrong(period)
        step_us, host_us = loop.time(steps, period)
        usual = summarise(step_us)
        result["step_us"][way] = usual._asdict()
        result["longest_over_median"][way] = max(step_us[2:]) / usual.median_us
        result["host_us"][way] = statistics.median(host_us[1:] or host_us)
    return result


class _Loop:
    """Steps that compute, and then overwrite the state, of which some begin with a snapshot."""

    def __init__(
        self,
        state: list[torch.Tensor],
        take: Callable[[], Taken],
        compute: Callable[[], None],
        device: Any,
    ) -> None:
        self._state, self._take, self._compute, self._device = state, take, compute, device

    def _step(self, before_update: Callable[[], None] | None) -> None:
        self._compute()
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
            before_update, finish = self._take() if takes else (None, None)
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
                before_update, finish = self._take()
                host_us.append((time.perf_counter_ns() - begin) / 1e3)
            self._step(before_update)
            end.record()
        self._device.synchronize()
        return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(ends)], host_us


Taken = tuple[Callable[[], None], Callable[[], list[torch.Tensor]]]
"""What to call before the state is overwritten, and what returns the snapshot."""


def _take_ours(state: list[torch.Tensor], device: Any) -> Callable[[], Taken]:
    def take() -> Taken:
        taken = tdcopier.snapshot(state, defer_wait=True)
        return taken.before_update, taken.get

    return take


def _take_ours_aside(state: list[torch.Tensor], device: Any) -> Callable[[], Taken]:
    def take() -> Taken:
        taken = tdcopier.snapshot(state, device_copy=True)
        return taken.before_update, taken.get

    return take


def _take_to(state: list[torch.Tensor], device: Any) -> Callable[[], Taken]:
    def take() -> Taken:
        copies = [t.to("cpu") for t in state]
        return lambda: None, lambda: copies

    return take


def _take_aside(state: list[torch.Tensor], device: Any) -> Callable[[], Taken]:
    stream = device.Stream()
    host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in state]

    def take() -> Taken:
        stream.wait_stream(device.current_stream())
        with device.stream(stream):
            for tensor, buffer in zip(state, host, strict=True):
                buffer.copy_(tensor, non_blocking=True)

        def get() -> list[torch.Tensor]:
            stream.synchronize()
            return host

        return lambda: device.current_stream().wait_stream(stream), get

    return take


def _compute(bench: Bench) -> Callable[[], None]:
    """Return a call that enqueues products of matrices for about `STEP_MS` on a real device."""
    device = torch.get_device_module(bench.device)
    side = 2048 if bench.is_real else 8
    matrix = torch.rand(side, side, device=bench.device) / side
    products = 1

    def compute() -> None:
        made = matrix
        for _ in range(products):
            made = made @ matrix

    if bench.is_real:
        compute()
        device.synchronize()
        products = 100
        took_ms = min(_timed_us(lambda: (compute(), device.synchronize())) for _ in range(5)) / 1e3
        products = max(1, round(STEP_MS / took_ms * products))
    return compute


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", action="store_true", required=True)
    parser.add_argument("--reserve", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device.startswith("sim"):
        from tdcopier import sim

        sim.enable()  # torch knows the name of the device from here on
    print(json.dumps(park_first(torch.device(options.device), options.reserve)))


if __name__ == "__main__":
    main()
