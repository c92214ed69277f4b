"""How a pass begins: its first batch, the steps after it, and the device memory they need.

In these steps workers make their memory, and it is pinned. Each pass begins anew, on a device whose
unused memory was given back, so that its peaks are those of the way alone.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch

from trainers.rounds import memory_of, reset_peaks
from trainers.table import Trainer
from trainers.ways import LOADER, Source, Way, close

SEED = 2
STEPS = 30
PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


class Start(NamedTuple):
    seconds: float
    """Until the first batch is on the device: workers start, and it is read and copied."""
    step_us: list[float]
    peaks: dict[str, int]
    """Bytes of the device's memory, from the start of the workers on."""


def measure(
    trainer: Trainer,
    source: Source,
    ways: Mapping[str, Way],
    step: Callable[[Any], None],
    times: Iterable[int],
) -> dict[str, Any]:
    """Start each way anew several times, in turns; return the figures by way."""
    names = [name for name, way in ways.items() if way.has_first_batch]
    dice, taken = random.Random(SEED), {name: [] for name in names}
    for _ in times:
        dice.shuffle(names)
        for name in names:
            taken[name].append(_started(trainer, source, ways[name], step))
    return {name: _figures(taken, name) for name in taken if taken[name]}


def _figures(taken: Mapping[str, list[Start]], name: str) -> dict[str, Any]:
    starts = taken[name]
    seconds = [start.seconds for start in starts]
    longest = [max(start.step_us) / median(start.step_us) for start in starts]
    found: dict[str, Any] = {
        "seconds": seconds,
        "median_s": median(seconds),
        "step_us": [start.step_us for start in starts],
        "longest_over_median": median(longest),
        **{key: max(start.peaks[key] for start in starts) for key in starts[0].peaks},
    }
    if LOADER in taken:
        pairs = zip(seconds, (start.seconds for start in taken[LOADER]), strict=True)
        found["over_loader_s"] = median(ours - other for ours, other in pairs)
    return found


def _started(trainer: Trainer, source: Source, way: Way, step: Callable[[Any], None]) -> Start:
    module = torch.get_device_module(source.device)
    if source.device.type != "cpu":
        module.empty_cache()
    step(source.on_device[0])  # the model has its memory
    module.synchronize()
    reset_peaks(source.device)
    begin_ns = time.perf_counter_ns()
    batches = way.batches(source)
    batch = trainer.move(next(batches), source.device, way.non_blocking)
    module.synchronize()
    ticks = [time.perf_counter_ns()]
    for _ in range(STEPS):
        step(batch)
        batch = trainer.move(next(batches), source.device, way.non_blocking)
        ticks.append(time.perf_counter_ns())
    memory = memory_of(source.device)
    peaks = {key: memory[key] for key in PEAKS if key in memory}
    del batch
    close(batches)
    del batches
    gc.collect()  # the workers of a loader end with it
    step_us = [(end - start) / 1e3 for start, end in pairwise(ticks)]
    return Start((ticks[0] - begin_ns) / 1e9, step_us, peaks)
