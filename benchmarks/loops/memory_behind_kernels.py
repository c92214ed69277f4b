"""Measures memory of a CUDA device and pinned staging while it is slower than the host.

In each iteration, a consumer and 12 ms of kernels follow a copy.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from tool.measure import Bench
from tool.target_forms import Target, at_most

import tdcopier
from loops.learner import Sleeper
from tdcopier.workloads import WORKLOADS, leaves

MAX_BATCHES = 8.0
STAGING_LIMIT_BYTES = 64 << 20
SLEEP_MS = 12.0
MEMORY_OF = ("detection_batch", "detection_batch_with_images")


def run(bench: Bench) -> dict[str, Any]:
    iterations = bench.rounds(0.4, 40)
    tdcopier.set_staging_limit_bytes(STAGING_LIMIT_BYTES)
    sleeper = Sleeper(bench.device)
    return {
        "what": "Peak memory over GPU-bound iterations of start_copy() and wait()",
        "settings": {"iterations": iterations, "staging_limit_bytes": STAGING_LIMIT_BYTES},
        "workloads": {name: _memory(bench, name, iterations, sleeper) for name in MEMORY_OF},
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, found in result["workloads"].items():
        peak = f"{name}: peak device memory above the start, in batches"
        held, held_bytes = f"{name}: most pinned staging held, bytes", found["max_staging_bytes"]
        yield at_most(peak, found["peak_batches"], MAX_BATCHES)
        yield at_most(held, held_bytes, STAGING_LIMIT_BYTES)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    return iter(())


def _memory(bench: Bench, name: str, iterations: int, sleeper: Sleeper) -> dict[str, Any]:
    device = bench.device
    source = WORKLOADS[name].make(0)
    total = torch.zeros((), dtype=torch.float64, device=device)

    def consume(result: Any) -> None:
        # Adds up reductions to one value each, which need almost no memory.
        for sample in result:
            total.add_(sample["boxes_3d"].sum())
            if "images" in sample:
                total.add_(sample["images"].sum())

    for _ in range(3):
        consume(tdcopier.start_copy(source, device).wait())
    torch.cuda.empty_cache()  # synchronises, and frees blocks that streams were still reading
    at_start = torch.cuda.memory_stats(device)["active_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats(device)
    staging: list[int] = []
    device_behind = 0
    last = torch.cuda.Event()
    begin = time.perf_counter()
    for _ in bench.progress(f"memory, {name}")(range(iterations)):
        device_behind += not last.query()
        handle = tdcopier.start_copy(source, device)
        consume(handle.wait())
        sleeper.enqueue(SLEEP_MS)
        last = torch.cuda.Event()
        last.record()
        staging.append(tdcopier.staging_bytes(device))
    torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    # "active" counts blocks that are freed but may still be read by a stream; "allocated" does not.
    peak = torch.cuda.memory_stats(device)["active_bytes.all.peak"] - at_start
    batch_bytes = handle.stats.transfer_bytes
    return {
        "leaves": len(leaves(source)),
        "batch_bytes": batch_bytes,
        "peak_bytes": peak,
        "peak_batches": peak / batch_bytes,
        "max_staging_bytes": max(staging),
        "iterations_with_the_device_behind": device_behind,
        "seconds": round(seconds, 3),
        "queued_seconds": round(iterations * SLEEP_MS / 1e3, 3),
    }
