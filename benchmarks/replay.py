"""Times a learner that samples from a replay storage, against one with batches on the device.

There are two learners: one keeps the device busy for some milliseconds per step with a few large
kernels; the other keeps the host busy with 500 small kernels, and so competes for the GIL.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from copies import Progress, start_workers
from copy_targets import at_most
from directions import h2d
from loop_work import Work
from measure import collector_paused, summarise
from replay_feeds import OURS, RESIDENT, Batches, ReplayFeed, feeds
from storages import ROW, Storage, bytes_of_batch, that_fit

STEP_MS = 4.0  # duration of a step of the learner with large kernels
SMALL_KERNELS = 500
ROWS = 100_000
ROWS_OF_SIM = 500
STEPS = 20  # consecutive steps of one feed
WARM_UP_STEPS = 4  # before them, so that the feed has run ahead
WARM_UP = 1
ROUNDS_PER_REPEAT = 0.04
INDICES = 32  # batches whose rows are drawn beforehand
WANTED = 1.03


class SmallKernels:
    """A step of small kernels that takes the host as long as the device."""

    def __init__(self, device: torch.device) -> None:
        self._values = torch.zeros(256, device=device)
        self._count = SMALL_KERNELS if device.type == "cuda" else 1

    def enqueue(self) -> None:
        for _ in range(self._count):
            self._values.add_(1.0)


def learners(device: torch.device) -> dict[str, Any]:
    """Return the objects that enqueue a step, by name."""
    return {
        f"{STEP_MS:g} ms of large kernels": Work(device, STEP_MS),
        f"{SMALL_KERNELS} small kernels": SmallKernels(device),
    }


def run(device: torch.device, repeats: int, progress: Progress, *, keep_gc: bool) -> dict[str, Any]:
    """Return the result of this benchmark, without the machine.

    Args:
        device: The target.
        repeats: As for the other benchmarks; blocks are longer, so there are fewer.
        progress: Returns a wrapper of the rounds for a label.
        keep_gc: Leave Python's garbage collector on while timing.

    """
    start_workers(h2d(device))
    rounds = max(2, round(repeats * ROUNDS_PER_REPEAT))
    rows = ROWS if device.type == "cuda" else ROWS_OF_SIM
    works = learners(device)
    result = {
        "what": "A learner that samples from a replay storage: time of a step",
        "settings": {
            "rows": f"{rows:,} in host memory",
            "order": f"blocks of {STEPS} steps, shuffled per round; ratios are within a round",
            "processor": "wherever threads are put: one that is tied ties those that it starts",
            "ahead": "a learner begins a step when the device has done the one before the last",
            "collector": "on" if keep_gc else "paused",
        },
        "replays": {},
    }
    for name, replay in that_fit(rows).items():
        storage = replay.make(rows)
        result["replays"][name] = {
            "title": replay.title,
            "leaves": len(storage),
            "bytes": bytes_of_batch(storage, replay.batch),
            "learners": {
                learner: _compare(
                    storage,
                    replay.batch,
                    work,
                    device,
                    rounds,
                    progress(f"replay, {name}, {learner}"),
                    keep_gc=keep_gc,
                )
                for learner, work in works.items()
            },
        }
        del storage
        gc.collect()
    return {**result, "targets": targets(result, speed=device.type != "sim")}


def targets(result: dict[str, Any], *, speed: bool = True) -> list[dict[str, Any]]:
    """Return each target and whether it is hit; without ``speed``, only those on values."""
    every = [
        (name, learner, found)
        for name, replay in result["replays"].items()
        for learner, found in replay["learners"].items()
    ]
    wrong = sum(sum(found["wrong"].values()) for _, _, found in every)
    found = [
        {
            "what": "steps with other rows than those of the index, all feeds",
            "wanted": "0",
            "found": wrong,
            "hit": wrong == 0,
        }
    ]
    if speed:
        found += [
            at_most(f"{name}, {learner}: step over that {RESIDENT}", each["ratios"][OURS], WANTED)
            for name, learner, each in every
        ]
    return found


def block(
    batches: Batches,
    work: Any,
    device: torch.device,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> tuple[float, float, list[Any], Any]:
    """Run warm-up steps and then timed ones.

    Returns:
        Time of a step, and of the host in getting its batch, in microseconds; the row numbers of
        each batch, including warm-up steps; the last batch.

    """
    module = torch.get_device_module(device)
    ended = [module.Event(), module.Event()]
    seen: list[Any] = []
    waited_ns = begin = 0
    batch = None
    for step in range(WARM_UP_STEPS + STEPS):
        if step == WARM_UP_STEPS:
            module.synchronize(device)
            waited_ns, begin = 0, clock_ns()
        called = clock_ns()
        batch = next(batches)
        waited_ns += clock_ns() - called
        seen.append(batch[ROW].clone())  # read by the learner, in stream order
        work.enqueue()
        ended[step % 2].record()
        if step > WARM_UP_STEPS:
            ended[(step - 1) % 2].synchronize()
    module.synchronize(device)
    return (clock_ns() - begin) / 1e3 / STEPS, waited_ns / 1e3 / STEPS, seen, batch


def count_wrong(
    storage: Storage, indices: list[torch.Tensor], seen: list[Any], last: Any, *, drawn: bool
) -> int:
    """Count the steps with wrong rows, plus one if the last batch has wrong values.

    Args:
        storage: The storage that was sampled.
        indices: The rows of each step, in turn.
        seen: The row numbers of the batch, by step.
        last: The batch of the last step.
        drawn: Whether the feed draws rows itself, so that only the last batch can be compared.

    """
    wrong = 0
    if not drawn:
        wrong = sum(
            not torch.equal(rows.cpu().flatten(), indices[step % len(indices)])
            for step, rows in enumerate(seen)
        )
    rows = last[ROW].cpu().flatten()
    return wrong + any(
        not torch.equal(last[name].cpu(), leaf[rows]) for name, leaf in storage.items()
    )


def _compare(
    storage: Storage,
    batch: int,
    work: Any,
    device: torch.device,
    rounds: int,
    progress: Callable[[Any], Any],
    *,
    keep_gc: bool,
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = len(storage[ROW])
    indices = [torch.randint(0, rows, (batch,), generator=generator) for _ in range(INDICES)]
    ways = feeds()
    step_us: dict[str, list[float]] = {way.name: [] for way in ways}
    waited_us: dict[str, list[float]] = {way.name: [] for way in ways}
    wrong = {way.name: 0 for way in ways}
    ratios: dict[str, list[float]] = {way.name: [] for way in ways}
    dice = random.Random(0)
    with collector_paused(not keep_gc):
        for index in progress(range(WARM_UP + rounds)):
            order = [way for way in ways if (index - WARM_UP) % way.every == 0 or index < WARM_UP]
            dice.shuffle(order)
            taken: dict[str, float] = {}
            for way in order:
                step, waited, bad = _one(way, storage, indices, work, device)
                wrong[way.name] += bad
                if index >= WARM_UP:
                    taken[way.name] = step
                    waited_us[way.name].append(waited)
            for name, step in taken.items():
                step_us[name].append(step)
                ratios[name].append(step / taken[RESIDENT])
    return {
        "steps_per_block": STEPS,
        "step": {way: summarise(taken)._asdict() for way, taken in step_us.items()},
        "ratios": {way: median(each) for way, each in ratios.items()},
        "host": {way: summarise(taken)._asdict() for way, taken in waited_us.items()},
        "wrong": wrong,
    }


def _one(
    way: ReplayFeed,
    storage: Storage,
    indices: list[torch.Tensor],
    work: Any,
    device: torch.device,
) -> tuple[float, float, int]:
    with way.open(storage, indices, device) as batches:
        step, waited, seen, last = block(batches, work, device)
        drawn = "torchrl" in way.name
        return step, waited, count_wrong(storage, indices, seen, last, drawn=drawn)
