"""How long a user waits for the first batch: workers start, and it is read and on the device."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import torch

from trainers.table import Trainer
from trainers.ways import LOADER, Source, Way, close

SEED = 2


def measure(
    trainer: Trainer, source: Source, ways: Mapping[str, Way], times: Iterable[int]
) -> dict[str, Any]:
    """Start each way anew several times, in turns; return seconds, and those over the loader's."""
    names = [name for name, way in ways.items() if way.has_first_batch]
    dice, taken = random.Random(SEED), {name: [] for name in names}
    for _ in times:
        dice.shuffle(names)
        for name in names:
            taken[name].append(_seconds(trainer, source, ways[name]))
    return {name: _figures(taken, name) for name in taken if taken[name]}


def _figures(taken: Mapping[str, list[float]], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"seconds": taken[name], "median_s": median(taken[name])}
    if LOADER in taken:
        pairs = zip(taken[name], taken[LOADER], strict=True)
        found["over_loader_s"] = median(ours - other for ours, other in pairs)
    return found


def _seconds(trainer: Trainer, source: Source, way: Way) -> float:
    synchronize = torch.get_device_module(source.device).synchronize
    synchronize()
    begin = time.perf_counter()
    batches = way.batches(source)
    batch = trainer.move(next(batches), source.device, way.non_blocking)
    synchronize()
    found = time.perf_counter() - begin
    del batch
    close(batches)
    del batches
    gc.collect()  # the workers of a loader end with it
    return found
