"""Reads a loader's batches as fast as they come, with no training, in each of the ways.

A loop that does nothing shows what the workers can deliver, and what the process that would train
pays for a batch until it is on the device.
"""

from __future__ import annotations

import os
import random
import resource
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from statistics import median
from typing import Any, NamedTuple

import torch
from tool.measure import Bench, summaries
from tool.target_forms import Target, at_least, at_most, count_wrong, none
from torch.utils.data import DataLoader, Dataset

import tdcopier
from trainers import batches
from trainers.batches import Batches, Data, leaves_of
from trainers.benchmark import raise_limit_of_files
from trainers.table import checksums
from trainers.ways import LOADER, OURS, PINNED, WAYS, Source, close, register

WORKERS, UNTIMED, TIMED = 6, 16, 24
SAMPLES, PIXELS, BOXES = 16, 560, 8
MANY, IN_MEMORY, JPEG, LARGE = "528 leaves", "samples in memory", "samples in JPEG", "64 MB"
ASKED = (LOADER, PINNED, OURS)
ONE = "one_tensor"
"""torch's loader with one tensor of the same bytes, made in the worker."""
MOST_PROCESSOR_MS, LEAST_THROUGHPUT, LEAST_DECODING = 0.5, 5.0, 0.98
MOST_LARGE_MS, MOST_FAULTS, MOST_DESCRIPTORS = 3.0, 5.0, 8
WORKERS_OF_DESCRIPTORS = 16
SEED = 3


class Samples(Dataset[Any]):
    """Images of one size with seven tensors each, in memory or in JPEG."""

    def __init__(self, period: int, pixels: int, *, decodes: bool = False) -> None:
        self.period, self.pixels, self.decodes = period, pixels, decodes

    def __len__(self) -> int:
        return batches.LENGTH

    def __getitem__(self, index: int) -> Any:
        image, target = _sample(index % self.period, self.pixels)
        return (_decoded(self.pixels) if self.decodes else image), target


@lru_cache(maxsize=64)
def _sample(index: int, pixels: int) -> Any:
    """Return a sample that a process makes once."""
    generator = torch.Generator().manual_seed(index)
    count = 1 + index % BOXES
    target = {
        "boxes": torch.rand(count, 4, generator=generator),
        "labels": torch.randint(0, 90, (count,), generator=generator),
        "area": torch.rand(count, generator=generator),
        "iscrowd": torch.zeros(count, dtype=torch.int64),
        "image_id": torch.tensor([index]),
        "orig_size": torch.tensor([pixels, pixels]),
        "size": torch.tensor([pixels, pixels]),
    }
    return torch.rand(3, pixels, pixels, generator=generator), target


def _decoded(pixels: int) -> torch.Tensor:
    from torchvision.io import decode_jpeg  # a dataset's own work; not needed for the other cases

    return decode_jpeg(_jpeg(pixels)).float().div_(255.0)


@lru_cache(maxsize=1)
def _jpeg(pixels: int) -> torch.Tensor:
    from torchvision.io import encode_jpeg

    image, _ = _sample(0, pixels // 8)
    image = torch.nn.functional.interpolate(image[None], (pixels, pixels), mode="bilinear")
    return encode_jpeg((image[0] * 255).to(torch.uint8))


def collate_samples(items: Any) -> Any:
    images, targets = zip(*items, strict=True)
    return torch.stack(images), list(targets)


class InOneTensor(Dataset[torch.Tensor]):
    """The bytes of the batches of a dataset whose items are batches."""

    def __init__(self, items: Dataset[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return batches.LENGTH

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.frombuffer(bytearray(tdcopier.pack(self.items[number])), dtype=torch.uint8)


class Case(NamedTuple):
    data: Callable[[bool], Data]
    """Takes whether the batches are tiny."""
    needs: tuple[str, ...] = ()


def _samples(small: bool, *, decodes: bool = False) -> Data:
    pixels, size = (16, 2) if small else (PIXELS, SAMPLES)
    return Data(Samples(2 * size, pixels, decodes=decodes), size, collate_samples)


def _many(small: bool) -> Data:
    return Data(Batches(batches.ManyLeaves(1 if small else 16), 4), None)


def _large(small: bool) -> Data:
    return Data(Samples(8, 16 if small else 1154), 4, collate_samples)


CASES = {
    MANY: Case(_many),
    IN_MEMORY: Case(_samples),
    JPEG: Case(partial(_samples, decodes=True), ("torchvision",)),
    LARGE: Case(_large),
}


def run(bench: Bench) -> dict[str, Any]:
    register()
    raise_limit_of_files()
    small = not bench.is_real
    found = {}
    for name, case in CASES.items():
        if small and case.needs:
            continue
        rounds = bench.rounds(0.01, least=2 if small else 5)
        found[name] = _measured(bench, name, case.data(small), rounds, small)
    return {
        "what": "A loader's batches on the device, in a loop that does nothing else",
        "settings": {"workers": WORKERS, "timed batches of a round": TIMED},
        "cases": found,
        "descriptors": _descriptors(bench, small),
    }


def _measured(bench: Bench, name: str, data: Data, rounds: int, small: bool) -> dict[str, Any]:
    source = Source(data, bench.device, 1 if small else WORKERS)
    untimed, timed = (2, 2) if small else (UNTIMED, TIMED)
    ways, opened = dict(WAYS), {way: WAYS[way].batches(source) for way in ASKED}
    if data.batch_size is None:
        one = Data(InOneTensor(data.dataset), None)
        ways[ONE] = WAYS[LOADER]
        opened[ONE] = ways[ONE].batches(source._replace(data=one))
    blocks: dict[str, list[dict[str, float]]] = {way: [] for way in opened}
    wrong = dict.fromkeys(opened, 0)
    expected = {way: checksums(data.batch(0)).tolist() for way in opened}
    if ONE in opened:
        expected[ONE] = checksums(one.batch(0)).tolist()
    dice, period = random.Random(SEED), untimed + timed
    try:
        for _ in bench.progress(f"reading, {name}")(range(rounds)):
            for way in dice.sample(list(opened), len(opened)):
                read = partial(_read, source, ways[way].non_blocking, opened[way])
                first = read(untimed)
                is_first = not blocks[way]
                wrong[way] += is_first and checksums(first).tolist() != expected[way]
                before = _used()
                read(timed)
                blocks[way].append(
                    {key: (now - before[key]) / timed for key, now in _used().items()}
                )
    finally:
        reader = opened[OURS].stats
        for iterator in opened.values():
            close(iterator)
        opened.clear()
    keys = blocks[OURS][0]
    by_way = {key: {way: [b[key] for b in blocks[way]] for way in blocks} for key in keys}
    return {
        "leaves": len(leaves_of(data.batch(0))),
        "bytes": sum(leaf.nbytes for leaf in leaves_of(data.batch(0))),
        "period": period,
        "wall_us": summaries(by_way["wall_us"]),
        "process_cpu_us": summaries(by_way["process_cpu_us"]),
        "faults": {way: median(found) for way, found in by_way["minor_faults"].items()},
        "slab_batches": [reader.slab_batches, reader.packed_batches],
        "wrong": wrong,
    }


def _read(source: Source, non_blocking: bool, iterator: Iterator[Any], count: int) -> Any:
    """Take batches, and return the first of them, when all are on the device."""
    first = None
    for number in range(count):
        batch = next(iterator)
        if iterator.__class__ is not tdcopier.Prefetcher:
            batch = _moved(batch, source.device, non_blocking)
        first = batch if number == 0 else first
    torch.get_device_module(source.device).synchronize()
    return first


def _moved(tree: Any, device: torch.device, non_blocking: bool) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.to(device, non_blocking=non_blocking)
    if isinstance(tree, dict):
        return {key: _moved(value, device, non_blocking) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)([_moved(value, device, non_blocking) for value in tree])
    return tree


def _used() -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "wall_us": time.perf_counter_ns() / 1e3,
        "process_cpu_us": time.process_time_ns() / 1e3,
        "minor_faults": float(used.ru_minflt),
    }


# ---- descriptors ---------------------------------------------------------------------------------


def _descriptors(bench: Bench, small: bool) -> dict[str, Any]:
    """Return the most descriptors that the process had open, by what a loader's batches are."""
    workers = 1 if small else WORKERS_OF_DESCRIPTORS
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"}
    count = 4 * workers
    integers = DataLoader(range(1 << 20), 2, collate_fn=len, **options)
    data = _samples(small)
    tensors = DataLoader(data.dataset, data.batch_size, collate_fn=data.collate, **options)
    return {
        "workers": workers,
        "integers": _most_open(iter(integers), count),
        LOADER: _most_open(iter(tensors), count),
        OURS: _most_open(tdcopier.prefetch(tensors, bench.device), count),
    }


def _most_open(batches_: Iterator[Any], count: int) -> int:
    most, kept = 0, []
    for _ in range(count):
        kept = [next(batches_), *kept[:1]]
        most = max(most, len(os.listdir("/proc/self/fd")))
    close(batches_)
    return most


# ---- targets -------------------------------------------------------------------------------------


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    yield none("wrong first batches, all cases and ways", count_wrong(result["cases"].values()))
    for name, found in result["cases"].items():
        slab, all_batches = found["slab_batches"]
        is_large = found["bytes"] >= 1 << 15
        if is_large:
            yield at_least(
                f"{name}: share of batches that came in a slab", slab / all_batches, 0.95
            )
    found = result["descriptors"]
    more = found[OURS] - found["integers"]
    yield at_most("open descriptors, more than with integers", more, MOST_DESCRIPTORS)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    cases = result["cases"]

    def median_of(name: str, what: str, way: str = OURS) -> float:
        found: float = cases[name][what][way]["median_us"]
        return found

    if ONE in cases[MANY]["process_cpu_us"]:
        more = median_of(MANY, "process_cpu_us") - median_of(MANY, "process_cpu_us", ONE)
        what = f"{MANY}: processor time of a batch, more than with {ONE}"
        yield at_most(what, more / 1e3, MOST_PROCESSOR_MS, "ms")
    processor = median_of(LARGE, "process_cpu_us") / 1e3
    yield at_most(f"{LARGE}: processor time of a batch", processor, MOST_LARGE_MS, "ms")
    yield at_most(f"{LARGE}: page faults", cases[LARGE]["faults"][OURS], MOST_FAULTS)
    for name, least in ((IN_MEMORY, LEAST_THROUGHPUT), (JPEG, LEAST_DECODING)):
        if name in cases:
            ratio = median_of(name, "wall_us", LOADER) / median_of(name, "wall_us")
            yield at_least(f"{name}: batches in the same time, over {LOADER}", ratio, least)
