"""Times how long pinned memory takes: torch's allocator beside the pool's leases, cold and warm.

A cold request finds nothing that was pinned before; a warm one follows an equal one whose tensors
were dropped. The first tensor of a lease can be used while the others are made.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from tool.measure import Bench
from tool.target_forms import Target, at_least, count_wrong, none

import tdcopier
from tdcopier._pinned_pool import lease

TORCHS, LEASES = "torch.empty(pin_memory=True)", "lease of the pool"
ROUNDS = 3  # a cold request of 4 GiB takes more than a second
REQUESTS = {
    "1 tensor of 1 GiB": [1 << 30],
    "1 tensor of 4 GiB": [4 << 30],
    "510 tensors of 5.36 GB together": [5_360_000_000 // 510] * 510,
}
ON_SIM = 256  # requests are that much smaller there
WANTED = 1.5
"""The target for the time of torch's allocator over ours, cold, for every request."""


def _empty_cache_of_torch() -> None:
    if hasattr(torch.accelerator, "empty_host_cache"):  # from torch 2.12 on
        torch.accelerator.empty_host_cache()
    else:
        torch._C._host_emptyCache()


class Way(NamedTuple):
    ask: Callable[[list[int]], Iterable[torch.Tensor]]
    give_back: Callable[[], object]


WAYS = {
    TORCHS: Way(
        lambda sizes: (torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes),
        _empty_cache_of_torch,
    ),
    LEASES: Way(lease, tdcopier.trim_pinned_memory),
}


def run(bench: Bench) -> dict[str, Any]:
    scale = 1 if bench.is_real else ON_SIM
    found = {}
    for name, sizes in REQUESTS.items():
        for _ in bench.progress(name)([0]):
            found[name] = _timed([size // scale for size in sizes], bench.device)
    return {
        "what": "Pinned memory: time until it can be used",
        "settings": {"rounds": ROUNDS},
        "requests": found,
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    wrong = count_wrong(result["requests"].values())
    yield none("pinning: tensors that are not pinned, or arrive with other bytes", wrong)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, found in result["requests"].items():
        times = found["times"]
        ratio = times[TORCHS]["cold"]["all_ms"] / times[LEASES]["cold"]["all_ms"]
        yield at_least(f"{name}, cold: {TORCHS} over a {LEASES}", ratio, WANTED)


def _timed(sizes: list[int], device: torch.device) -> dict[str, Any]:
    times: dict[str, dict[str, list[tuple[float, float]]]] = {
        way: {"cold": [], "warm": []} for way in WAYS
    }
    held: dict[str, int] = {}
    wrong = dict.fromkeys(WAYS, 0)
    for _ in range(ROUNDS):
        for name, way in WAYS.items():
            way.give_back()
            before = _held_bytes()
            tensors: list[torch.Tensor] = []
            for state in ("cold", "warm"):
                tensors.clear()
                tensors, taken = _ask(way, sizes)
                times[name][state].append(taken)
            held[name] = _held_bytes() - before
            wrong[name] += _wrong([tensors[0], tensors[-1]], device)
            del tensors
            torch.accelerator.synchronize()
            way.give_back()
    return {
        "n_tensors": len(sizes),
        "bytes": sum(sizes),
        "held_bytes": held,
        "wrong": wrong,
        "times": {
            way: {
                state: {
                    "first_ms": statistics.median(first for first, _ in taken),
                    "all_ms": statistics.median(last for _, last in taken),
                    "slowest_ms": max(last for _, last in taken),
                }
                for state, taken in states.items()
            }
            for way, states in times.items()
        },
    }


def _ask(way: Way, sizes: list[int]) -> tuple[list[torch.Tensor], tuple[float, float]]:
    """Return the tensors, and the time until the first and until the last one, in ms."""
    begin = time.perf_counter()
    tensors, first = [], 0.0
    for tensor in way.ask(sizes):
        first = first or time.perf_counter() - begin
        tensors.append(tensor)
    return tensors, (1e3 * first, 1e3 * (time.perf_counter() - begin))


def _held_bytes() -> int:
    use = tdcopier.pinned_memory()
    return use.leased_bytes + use.free_bytes + (use.torch_bytes or 0)


def _wrong(tensors: list[torch.Tensor], device: torch.device) -> int:
    """Count tensors that are not pinned, or of which a transfer of the first bytes fails."""
    wrong = 0
    for value, tensor in enumerate(tensors, 1):
        part = tensor[: 1 << 20].fill_(value)
        arrived = part.to(device, non_blocking=True)
        wrong += not (tensor.is_pinned() and bool(arrived.cpu().eq(value).all()))
    return wrong
