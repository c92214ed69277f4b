"""Times a learner that samples from a replay storage, against one with batches on the device.

There are two learners: one keeps the device busy for some milliseconds per step with a few large
kernels; the other keeps the host busy with 500 small kernels, and so competes for the GIL.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from directions import h2d, start_workers
from kernels import SMALL_KERNELS, SmallKernels, Work
from measure import Bench, collector_paused, shuffled, summaries
from replay_feeds import Batches, ReplayFeed, feeds
from rows import drawn
from storages import ROW, Replay, Storage, bytes_of_batch, that_fit
from tables import OURS, RESIDENT
from targets import at_most, none

STEP_MS = 4.0  # duration of a step of the learner with large kernels
ROWS = 100_000
ROWS_OF_SIM = 500
STEPS = 20  # consecutive steps of one feed
WARM_UP_STEPS = 4  # before them, so that the feed has run ahead
WARM_UP = 1
ROUNDS_PER_REPEAT = 0.04
INDICES = 32  # batches whose rows are drawn beforehand
WANTED = 1.03


def learners(device: torch.device) -> dict[str, Any]:
    """Return the objects that enqueue a step, by name."""
    return {
        f"{STEP_MS:g} ms of large kernels": Work(device, STEP_MS),
        f"{SMALL_KERNELS} small kernels": SmallKernels(device),
    }


def run(bench: Bench) -> dict[str, Any]:
    """Return the result of this benchmark, without the machine."""
    start_workers(h2d(bench.device))
    rows = ROWS if bench.is_real else ROWS_OF_SIM
    works = learners(bench.device)
    result: dict[str, Any] = {
        "what": "A learner that samples from a replay storage: time of a step",
        "settings": {
            **bench.settings(bound=False),
            "rows": f"{rows:,} in host memory",
            "order": f"blocks of {STEPS} steps, shuffled per round; ratios are within a round",
            "ahead": "a learner begins a step when the device has done the one before the last",
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
                learner: _compare(bench, f"replay, {name}, {learner}", storage, replay, work)
                for learner, work in works.items()
            },
        }
        del storage
        gc.collect()
    return {**result, "targets": targets(result, speed=bench.is_real)}


def targets(result: dict[str, Any], *, speed: bool = True) -> list[dict[str, Any]]:
    """Return each target and whether it is hit; without ``speed``, only those on values."""
    every = {
        f"{name}, {learner}": found
        for name, replay in result["replays"].items()
        for learner, found in replay["learners"].items()
    }
    wrong = sum(sum(found["wrong"].values()) for found in every.values())
    found = [none("steps with other rows than those of the index, all feeds", wrong)]
    if speed:
        found += [
            at_most(f"{learner}: step over that {RESIDENT}", each["ratios"][OURS], WANTED)
            for learner, each in every.items()
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
    bench: Bench, label: str, storage: Storage, replay: Replay, work: Any
) -> dict[str, Any]:
    indices = drawn(replay, len(storage[ROW]), INDICES)
    ways = feeds()
    rounds = bench.rounds(ROUNDS_PER_REPEAT)
    rounds_us: list[dict[str, float]] = [{} for _ in range(rounds)]
    waited_us: dict[str, list[float]] = {way.name: [] for way in ways}
    wrong = {way.name: 0 for way in ways}
    order = shuffled(ways, bench.progress(label), rounds=rounds, warm_up=WARM_UP)
    with collector_paused(not bench.keep_gc):
        for index, way in order:
            if index >= 0 and index % way.every:
                continue
            step_us, waited, bad = _one(way, storage, indices, work, bench.device)
            wrong[way.name] += bad
            if index >= 0:
                rounds_us[index][way.name] = step_us
                waited_us[way.name].append(waited)
    taken = {way.name: [us for us in rounds_us if way.name in us] for way in ways}
    return {
        "steps_per_block": STEPS,
        "step": summaries({way: [us[way] for us in found] for way, found in taken.items()}),
        "ratios": {
            way: median(us[way] / us[RESIDENT] for us in found) for way, found in taken.items()
        },
        "host": summaries(waited_us),
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
