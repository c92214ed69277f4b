"""Times a training loop that is fed by copies, against one with batches that are on the device.

For a loop, the duration of a copy matters less than the delay of the step and the time for which
the host is busy with the copy.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import host_work
import torch
from baselines import OURS, PER_LEAF_TO, PINNED, multi_tensor_copier
from copies import Progress, start_workers
from copy_targets import at_most
from directions import h2d, synchroniser
from limits import flat_bytes
from loop_work import Reader, Work
from measure import collector_paused, summarise
from quiet import QuietProcessor

import tdcopier
from tdcopier.workloads import WORKLOADS, leaves, map_tensors, total_bytes

STEP_MS = 3.4  # duration of each step's kernels
STEPS = 20  # consecutive steps of one feed
CHECK_EVERY = 10  # the whole batch is compared at every tenth step, three leaves at each
WARM_UP = 2
RESIDENT = "on the device already"


class Wanted(NamedTuple):
    """Upper limits for a loop that tdcopier feeds."""

    over_resident: float
    """Time of a step over that with a batch that is on the device already."""
    copy_calls_us: float
    """Time of the host in the copy calls of a step."""


WANTED = {
    "detection_batch": Wanted(1.02, 150.0),
    "detection_batch_with_images": Wanted(1.05, 500.0),
    "atari_replay": Wanted(1.02, 300.0),
}
"""Targets by the batch that feeds the loop."""
POOL = {"detection_batch": 8, "detection_batch_with_images": 4, "atari_replay": 6}


class Feed(NamedTuple):
    """One way to copy the batches of a loop to the device."""

    name: str
    start: Callable[[Any], Any]
    """Called before a step with the source of the next one; returns the argument of ``finish``."""
    finish: Callable[[Any], Any]
    """Called at the beginning of a step; returns the batch that the current stream may read."""
    prepare: Callable[[Any], Any] = lambda tree: tree
    """Called once per source, not timed."""


def feeds(device: torch.device) -> list[Feed]:
    """Return every feed that can run here: the reference of the ratios, then ours, then others."""

    def same(value: Any) -> Any:
        return value

    def to(tree: Any, non_blocking: bool = False) -> Any:
        return map_tensors(tree, lambda leaf: leaf.to(device, non_blocking=non_blocking))

    found = [
        Feed(RESIDENT, same, same, to),
        Feed(OURS, lambda tree: tdcopier.start_copy(tree, device), lambda handle: handle.wait()),
        Feed(
            f"{OURS}, prepared, outputs reused",
            lambda planned: planned[0].start_copy(planned[1]),
            lambda handle: handle.wait(),
            lambda tree: (tdcopier.prepare(tree, device, reuse_outputs=True), tree),
        ),
        Feed(PER_LEAF_TO, same, to),
        Feed(
            PINNED,
            same,
            lambda tree: to(tree, non_blocking=True),
            lambda tree: map_tensors(tree, torch.Tensor.pin_memory),
        ),
    ]
    peer = multi_tensor_copier()
    if peer is not None and device.type == "cuda":
        found.append(
            Feed(
                "multi_tensor_copier",
                lambda tree: peer.start_copy(tree, device),
                lambda handle: handle.get(),
            )
        )
    return found


class Block(NamedTuple):
    """The result of one feed's consecutive steps."""

    step_us: float
    """Time of the whole block, including the device, per step."""
    copy_calls_us: list[float]
    """Time of the host in the copy calls, by step."""
    checked: list[tuple[int, Any]]
    """Numbers of steps, with the batches that they had."""


def run(device: torch.device, repeats: int, progress: Progress, *, keep_gc: bool) -> dict[str, Any]:
    """Return the result of this benchmark, without the machine.

    Args:
        device: The target.
        repeats: As for the other benchmarks; blocks are longer, so there are fewer.
        progress: Returns a wrapper of the rounds for a label.
        keep_gc: Leave Python's garbage collector on while timing.

    """
    start_workers(h2d(device))
    work = Work(device, STEP_MS)
    rounds = max(2, round(repeats * 0.03))
    result = {
        "what": "A training loop: time of a step, and of the host in the calls that copy",
        "settings": {
            "work": f"{work.count} multiplications of matrices, {tuple(work.factor.shape)}, "
            f"{work.factor.dtype}, for about {STEP_MS:g} ms a step",
            "order": f"blocks of {STEPS} steps, shuffled per round",
            "ahead": "start_copy() of the next batch before the step, wait() at its beginning; the "
            "host begins a step when the one before the last is done",
            "collector": "on" if keep_gc else "paused",
            "processor": "each round on one that no neighbour slows down, where there is one",
        },
        "loops": {
            name: _loop(device, name, work, rounds, progress, keep_gc=keep_gc) for name in WANTED
        },
        "beside_host_work": host_work.run(device, max(10, repeats // 2), progress, keep_gc=keep_gc),
    }
    return {**result, "targets": targets(result, speed=device.type != "sim")}


def targets(result: dict[str, Any], *, speed: bool = True) -> list[dict[str, Any]]:
    """Return each target and whether it is hit; without ``speed``, only those on values."""
    beside = result["beside_host_work"]
    wrong = sum(sum(found["wrong"].values()) for found in result["loops"].values())
    wrong += beside["wrong"]
    found = [
        {
            "what": "steps and batches with another value than the source's, all feeds",
            "wanted": "0",
            "found": wrong,
            "hit": wrong == 0,
        }
    ]
    if not speed:
        return found
    for name, wanted in WANTED.items():
        loop = result["loops"][name]
        ratio, host_us = loop["ratios"][OURS], loop["copy_calls"][OURS]["median_us"]
        found += [
            at_most(f"{name}, step over that {RESIDENT}", ratio, wanted.over_resident),
            at_most(
                f"{name}, host in the copy calls of a step", host_us, wanted.copy_calls_us, "us"
            ),
        ]
    between = f"{host_work.HOST_WORK_US:g} us of other work between"
    what = f"detection batch, start_copy() and get() with {between}"
    return [*found, at_most(what, beside["together"]["median_us"], host_work.MAX_TOGETHER_US, "us")]


def block(
    feed: Feed,
    sources: list[Any],
    first: int,
    work: Work,
    reader: Reader,
    device: torch.device,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> Block:
    """Run a block of steps. Each starts the copy for the next; the first one's starts beforehand.

    Args:
        feed: The feed.
        sources: Sources that the feed has prepared, one per step in turn.
        first: Index of the first step's source.
        work: Enqueues the kernels of a step.
        reader: Reads the batch.
        device: The device that the loop runs on.
        clock_ns: The clock.

    """
    module = torch.get_device_module(device)
    ended = [module.Event(), module.Event()]
    copy_calls_us: list[float] = []
    checked: list[tuple[int, Any]] = []
    coming = feed.start(sources[first % len(sources)])
    module.synchronize(device)
    begin = clock_ns()
    for step in range(STEPS):
        following = sources[(first + step + 1) % len(sources)]
        called = clock_ns()
        batch = feed.finish(coming)
        coming = feed.start(following)
        copy_calls_us.append((clock_ns() - called) / 1e3)
        reader.read(batch, step)
        work.enqueue()
        ended[step % 2].record()
        if (step + 1) % CHECK_EVERY == 0:
            checked.append((step, batch))
        del batch
        if step > 0:  # like a loop that prints the loss of the previous step
            ended[(step - 1) % 2].synchronize()
    module.synchronize(device)
    return Block((clock_ns() - begin) / 1e3 / STEPS, copy_calls_us, checked)


def count_wrong(
    found: Block, first: int, reader: Reader, expected: list[torch.Tensor]
) -> tuple[int, int]:
    """Return how many steps read wrong values, and how many whole batches have wrong values.

    Args:
        found: The result of :func:`block`.
        first: As for :func:`block`.
        reader: As for :func:`block`.
        expected: The bytes of each source, on the device.

    """
    batches = sum(
        not torch.equal(flat_bytes(batch), expected[(first + step) % len(expected)])
        for step, batch in found.checked
    )
    return reader.count_wrong(first), batches


def _loop(
    device: torch.device,
    name: str,
    work: Work,
    rounds: int,
    progress: Progress,
    *,
    keep_gc: bool,
) -> dict[str, Any]:
    sources = [WORKLOADS[name].make(seed) for seed in range(POOL[name])]
    expected = [flat_bytes(source).to(device) for source in sources]
    reader = Reader(sources, STEPS, device)
    ways = feeds(device)
    prepared = {feed.name: [feed.prepare(source) for source in sources] for feed in ways}
    step_us: dict[str, list[float]] = {feed.name: [] for feed in ways}
    copy_calls_us: dict[str, list[float]] = {feed.name: [] for feed in ways}
    wrong = {feed.name: 0 for feed in ways}
    synchroniser([device])()
    order, dice = list(ways), random.Random(0)
    with collector_paused(not keep_gc), QuietProcessor() as quiet:
        for index in progress(f"loop, {name}")(range(WARM_UP + rounds)):
            dice.shuffle(order)
            quiet.seek()
            for feed in order:
                found = block(feed, prepared[feed.name], index, work, reader, device)
                wrong[feed.name] += sum(count_wrong(found, index, reader, expected))
                if index >= WARM_UP:
                    step_us[feed.name].append(found.step_us)
                    copy_calls_us[feed.name] += found.copy_calls_us
                del found
    steps = {way: summarise(taken) for way, taken in step_us.items()}
    return {
        "leaves": len(leaves(sources[0])),
        "bytes": total_bytes(sources[0]),
        "sources": len(sources),
        "steps_per_block": STEPS,
        "step": {way: summary._asdict() for way, summary in steps.items()},
        "ratios": {way: s.median_us / steps[RESIDENT].median_us for way, s in steps.items()},
        "copy_calls": {way: summarise(taken)._asdict() for way, taken in copy_calls_us.items()},
        "checked_steps": (WARM_UP + rounds) * STEPS,
        "checked_batches": (WARM_UP + rounds) * (STEPS // CHECK_EVERY),
        "wrong": wrong,
        "processor": quiet.described(),
    }
