"""Times how long pinned memory takes: torch's allocator beside the pool's leases, cold and warm.

A cold request finds nothing that was pinned before; a warm one follows an equal one whose tensors
were dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from tool.measure import Bench
from tool.target_forms import Target, at_least, count_wrong, none
from tool.way import Way

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


@contextmanager
def emptied(give_back: Callable[[], object]) -> Iterator[None]:
    give_back()
    yield
    torch.accelerator.synchronize()
    give_back()


WAYS = [
    Way(
        TORCHS,
        lambda sizes: [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes],
        around=partial(emptied, _empty_cache_of_torch),
    ),
    Way(LEASES, lease, list, around=partial(emptied, tdcopier.pinned.trim)),
]
"""Each returns the tensors of a request of some sizes."""


def run(bench: Bench) -> dict[str, Any]:
    scale = 1 if bench.is_real else ON_SIM
    found = {}
    for name, sizes in REQUESTS.items():
        for _ in bench.progress(name)([0]):
            found[name] = _timed([size // scale for size in sizes], bench.device)
    return {
        "what": "Pinned memory: time until it can be used",
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
    taken_ms = {way.name: {"cold": [], "warm": []} for way in WAYS}
    wrong = {way.name: 0 for way in WAYS}
    for _ in range(ROUNDS):
        for way in WAYS:
            with way.around():
                for times_ms in taken_ms[way.name].values():
                    begin = time.perf_counter()
                    tensors = way.run(sizes)
                    times_ms.append(1e3 * (time.perf_counter() - begin))
                    wrong[way.name] += _wrong([tensors[0], tensors[-1]], device)
                    del tensors
    return {
        "bytes": sum(sizes),
        "wrong": wrong,
        "times": {
            way: {state: {"all_ms": median(times_ms)} for state, times_ms in states.items()}
            for way, states in taken_ms.items()
        },
    }


def _wrong(tensors: list[torch.Tensor], device: torch.device) -> int:
    """Count tensors that are not pinned, or of which a transfer of the first bytes fails."""
    wrong = 0
    for value, tensor in enumerate(tensors, 1):
        part = tensor[: 1 << 20].fill_(value)
        arrived = part.to(device, non_blocking=True)
        wrong += not (tensor.is_pinned() and bool(arrived.cpu().eq(value).all()))
    return wrong
