"""The harness of all loops: blocks of steps that get a batch each, by way, and their checks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from tool.measure import Bench, shuffled, summaries
from tool.way import Way

STEPS = 20  # consecutive steps of one way
WARM_UP, WARM_UP_STEPS = 1, 4  # rounds, and steps before a block, so that a way has run ahead
CHECK_EVERY = 10


class Block(NamedTuple):
    """The times of one way's consecutive steps, in microseconds."""

    step_us: float
    """Time of the whole block, including the device, per step."""
    batch_us: list[float]
    """Time of the host in getting the batch, by step."""


Blocks = list[dict[str, Block]]
"""By round, the block of each way."""


def block(
    batches: Iterator[Any],
    read: Callable[[Any, int], None],
    work: Any,
    device: torch.device,
    *,
    warm_up: int = 0,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> Block:
    """Run a block of steps. Each gets a batch, reads it, and enqueues the kernels of the step.

    Args:
        batches: Yields batches that the current stream may read.
        read: Reads a batch in stream order, as a model would; also gets the number of the step.
        work: Enqueues the kernels of a step.
        device: The device that the learner runs on.
        warm_up: Steps that come first, have negative numbers, and are not timed.
        clock_ns: The clock.

    """
    module = torch.get_device_module(device)
    ended = [module.Event(), module.Event()]
    batch_us: list[float] = []
    begin = 0
    for step in range(-warm_up, STEPS):
        if step == 0:
            module.synchronize(device)
            batch_us.clear()
            begin = clock_ns()
        called = clock_ns()
        batch = next(batches)
        batch_us.append((clock_ns() - called) / 1e3)
        read(batch, step)
        work.enqueue()
        ended[step % 2].record()
        del batch
        if step > 0:  # like a learner that prints the loss of the previous step
            ended[(step - 1) % 2].synchronize()
    module.synchronize(device)
    return Block((clock_ns() - begin) / 1e3 / STEPS, batch_us)


class Check(NamedTuple):
    """How batches are compared with their sources, which have numbers from 0 on."""

    part: Callable[[Any], torch.Tensor]
    """Returns the part of a batch that each step reads."""
    right_part: Callable[[int], torch.Tensor] | None
    """Returns the right part of a number; None if the way draws the rows itself."""
    is_right: Callable[[int, Any], bool]
    """Returns whether the whole batch of a number is right."""
    every: int = CHECK_EVERY
    """After the block, the whole batch of each step that this number divides is compared."""


class Reader:
    """Reads a part of every batch of a block, and keeps some batches whole."""

    def __init__(self, check: Check, first: int = 0) -> None:
        self._check, self._first = check, first
        self.parts: list[torch.Tensor] = []
        self.kept: list[tuple[int, Any]] = []
        """Batches with their numbers."""

    def read(self, batch: Any, step: int) -> None:
        if step > 0 and (step + 1) % self._check.every == 0:
            self.kept.append((self._first + len(self.parts), batch))
        self.parts.append(self._check.part(batch).clone())

    def count_wrong(self) -> int:
        """Return the number of steps that read wrong values, and of wrong batches."""
        right = self._check.right_part
        parts = enumerate(self.parts, self._first) if right else ()
        wrong = sum(not torch.equal(part.cpu(), right(number).cpu()) for number, part in parts)
        return wrong + sum(not self._check.is_right(*each) for each in self.kept)


def one_block(
    way: Way,
    prepared: Sequence[Any],
    check: Check,
    work: Any,
    device: torch.device,
    *,
    first: int = 0,
    warm_up: int = WARM_UP_STEPS,
) -> tuple[Block, int]:
    """Run one block. Return its times, and the number of wrong steps and batches."""
    reader = Reader(check, first)
    with way.feeding(prepared, first) as batches:
        found = block(batches, reader.read, work, device, warm_up=warm_up)
        return found, reader.count_wrong()


def compared(
    bench: Bench,
    label: str,
    ways: Sequence[Way],
    sources: Sequence[Any],
    check: Callable[[Way], Check],
    work: Callable[[Way], Any],
    *,
    rounds: int,
    bound: bool = False,
    warm_up: int = WARM_UP_STEPS,
) -> tuple[dict[str, Any], Blocks]:
    """Return the figures of a loop that each way feeds, and the blocks that they come from.

    Args:
        bench: The device and the options.
        label: For the progress.
        ways: The rows; the first one is the reference of the ratios.
        sources: What the ways prepare and copy in turn.
        check: How the batches of a way are compared.
        work: Returns what enqueues the kernels of a step.
        rounds: How many blocks of each way.
        bound: Whether to keep the learner's thread on a quiet processor: only if it starts none.
        warm_up: Steps before each block.

    """
    ways = bench.timed(ways, ways[0].name)
    prepared = {way.name: [way.prepare(source) for source in sources] for way in ways}
    blocks: Blocks = [{} for _ in range(rounds)]
    wrong = {way.name: 0 for way in ways}
    with bench.quiet(bound) as begin_round:
        how = {"rounds": rounds, "warm_up": WARM_UP, "before_round": begin_round}
        for index, way in shuffled(ways, bench.progress(label), **how):
            found, bad = one_block(
                way,
                prepared[way.name],
                check(way),
                work(way),
                bench.device,
                first=index + WARM_UP,
                warm_up=warm_up,
            )
            wrong[way.name] += bad
            if index >= 0:
                blocks[index][way.name] = found
    names = [way.name for way in ways]
    return {"steps_per_block": STEPS, **figures(blocks, names), "wrong": wrong}, blocks


def figures(blocks: Blocks, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the summaries by way, and the medians of the ratios to the first one."""
    host_us = {name: [fmean(found[name].batch_us) for found in blocks] for name in names}
    return {
        "step": summaries({name: [found[name].step_us for found in blocks] for name in names}),
        "ratios": {name: over(blocks, name, names[0]) for name in names},
        "host": summaries(host_us),
    }


def over(blocks: Blocks, name: str, reference: str) -> float:
    """Return the median over rounds of the ratio between two blocks of the same round."""
    return median(found[name].step_us / found[reference].step_us for found in blocks)
