"""Times parking: models' memory to pinned host memory and back, and snapshots beside a loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tool.measure import Bench
from tool.tables import OURS
from tool.target_forms import Target, at_least, at_most, count_wrong, none
from tool.way import Way

import tdcopier
from park import snapshots
from tdcopier._commands.interleave import summarise

MODEL, WIDE = "510 tensors", "1,500 tensors, 1 KB to 500 MB"
TO, PINNED = ".to() per tensor", "pinned copies per tensor"
WIDE_BYTES = 20e9
LEAST_GB_PER_S = 50.0
MOST_EXTRA_BYTES = 64 << 20
SHRINK_OF_SIM = 2000
"""The simulated device parks so much less."""


def run(bench: Bench) -> dict[str, Any]:
    shrink = 1 if bench.is_real else SHRINK_OF_SIM
    states = {MODEL: model_sizes(shrink), WIDE: wide_sizes(shrink)}
    return {
        "what": "Parking: from the call until the bytes have arrived, on the host and back",
        "parked": {name: _parked(bench, name, sizes) for name, sizes in states.items()},
        "snapshot": snapshots.run(bench),
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    wrong = count_wrong([*result["parked"].values(), result["snapshot"]])
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
    yield from snapshots.speed_targets(result["snapshot"])


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


def wrong_tensors(state: list[torch.Tensor]) -> int:
    """Count the tensors that do not have their value at both ends."""
    ends = [[t[0], t[-1]] for t in state]
    found = torch.stack([end for pair in ends for end in pair]).cpu().tolist()
    return sum(found[2 * i : 2 * i + 2] != [float(i)] * 2 for i in range(len(state)))


def _parked(bench: Bench, name: str, sizes: list[int]) -> dict[str, Any]:
    device = torch.get_device_module(bench.device)
    others = device.memory_allocated(bench.device)
    state = state_of(sizes, bench.device)
    total, times, wrong = sum(sizes), {"park": {}, "resume": {}}, {}
    for make in (_ours, _to, *([_pinned] if name == MODEL else [])):
        way = make(state, device)
        rounds = 3 if way.name == TO else bench.rounds(0.02, 3)
        taken: dict[str, list[float]] = {"park": [], "resume": []}
        for _ in bench.progress(f"{name}, {way.name}")(range(rounds + 1)):
            device.synchronize()
            taken["park"].append(_timed_us(lambda way=way: way.start(state)))
            taken["resume"].append(_timed_us(lambda way=way: way.finish(state)))
        wrong[way.name] = wrong_tensors(state)
        for which, found in taken.items():
            times[which][way.name] = summarise(found[1:])._asdict()
        del way
    rates = {
        which: {way: total / found["median_us"] / 1e3 for way, found in each.items()}
        for which, each in times.items()
    }
    size = {"leaves": len(sizes), "bytes": total}
    memory = _memory(state, device, others)
    return {**size, **times, "gb_per_s": rates, "wrong": wrong, **memory}


# ---- ways to empty tensors and to fill them again ------------------------------------------------


def _ours(state: list[torch.Tensor], device: Any) -> Way:
    handles: list[tdcopier.Parked] = []

    def empty(state: list[torch.Tensor]) -> None:
        handles.append(tdcopier.park(state))
        handles[-1].wait_parked()

    def fill(_: Any) -> None:
        handles.pop().resume()
        device.synchronize()

    return Way(OURS, empty, fill)


def _to(state: list[torch.Tensor], device: Any) -> Way:
    host: list[torch.Tensor] = []

    def empty(state: list[torch.Tensor]) -> None:
        for tensor in state:
            host.append(tensor.to("cpu"))
            tensor.untyped_storage().resize_(0)

    def fill(state: list[torch.Tensor]) -> None:
        _fill(state, host, device)
        host.clear()

    return Way(TO, empty, fill)


def _pinned(state: list[torch.Tensor], device: Any) -> Way:
    host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in state]

    def empty(state: list[torch.Tensor]) -> None:
        for tensor, buffer in zip(state, host, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        device.synchronize()
        for tensor in state:
            tensor.untyped_storage().resize_(0)

    return Way(PINNED, empty, lambda state: _fill(state, host, device))


def _fill(state: list[torch.Tensor], host: list[torch.Tensor], device: Any) -> None:
    for tensor, values in zip(state, host, strict=True):
        tensor.untyped_storage().resize_(values.nbytes)
        tensor.copy_(values, non_blocking=values.is_pinned())
    device.synchronize()


def _timed_us(call: Callable[[], object]) -> float:
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
    parked.wait_parked()
    peaks["park"] = device.max_memory_allocated(where) - before
    while_parked = device.memory_allocated(where) - others
    device.reset_peak_memory_stats(where)
    parked.resume()
    device.synchronize()
    peaks["resume"] = device.max_memory_allocated(where) - before
    return {"bytes_while_parked": while_parked, "extra_peak_bytes": peaks}
