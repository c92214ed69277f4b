"""A learner that prefetches large batches and copies its metrics to the host in each step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from copies.directions import HOST
from copies.ways import PINNED
from tool.measure import Bench
from tool.tables import OURS, RESIDENT
from tool.way import Way

import tdcopier
from loops.learner import Work, begin_by_torch
from loops.steps import STEPS, compared, over
from loops.training_loop import check

STEP_MS = 3.4  # duration of each step's kernels
LEAVES, LEAF_BYTES = 12, 1 << 22  # a batch of 50 MB
LEAF_BYTES_OF_SIM = 1 << 12
METRICS = 10  # floats: 40 bytes
POOL = 4
ROUNDS_PER_REPEAT = 0.04
WITHOUT, WITH = "without metrics", "with metrics"

Batch = dict[str, torch.Tensor]
Send = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Begins the copy of a tensor to the host, and returns a function that waits for the values."""


class MeteredWork:
    """A step's kernels, and then metrics that the host reads one step later.

    Metrics are new tensors in each step, as in a real model. Their values are the step's number.
    """

    def __init__(self, work: Any, send: Send, device: torch.device) -> None:
        self._work, self._send = work, send
        self._zeros = torch.zeros(METRICS, device=device)
        self._coming: Callable[[], torch.Tensor] | None = None
        self._step = self._wrong = 0

    def enqueue(self) -> None:
        self._work.enqueue()
        coming = self._send(self._zeros + (self._step + 1))
        self._read()
        self._step += 1
        self._coming = coming

    def finish(self) -> int:
        """Wait for the last metrics, and return the number of steps whose metrics were wrong."""
        self._read()
        self._coming = None
        return self._wrong

    def _read(self) -> None:
        """Wait for the metrics of the step before, and check them."""
        if self._coming is not None:
            self._wrong += self._coming().tolist() != [float(self._step)] * METRICS


def run(bench: Bench) -> dict[str, Any]:
    device, work = bench.device, Work(bench.device, STEP_MS)
    pool = [make_batch(number, device) for number in range(POOL)]
    feeds = ways(device)
    works = {f"{way.name}, {WITHOUT}": work for way in feeds}
    metered = {
        f"{way.name}, {WITH}": MeteredWork(work, send(way.name, device), device) for way in feeds
    }
    works |= metered
    checked = check(pool, device)
    found, blocks = compared(
        bench,
        "a step with metrics",
        [way._replace(name=f"{way.name}, {each}") for way in feeds for each in (WITHOUT, WITH)],
        pool,
        lambda way: checked,
        lambda way: works[way.name],
        rounds=bench.rounds(ROUNDS_PER_REPEAT),
    )
    for name, each in metered.items():
        found["wrong"][name] += each.finish()

    def by_feed(value: Callable[[str, str], Any]) -> dict[str, Any]:
        """Return values of the names of the rows without and with metrics."""
        return {way.name: value(f"{way.name}, {WITHOUT}", f"{way.name}, {WITH}") for way in feeds}

    step, resident = found["step"], f"{RESIDENT}, {WITHOUT}"
    return {
        "leaves": len(pool[0]),
        "bytes": sum(leaf.nbytes for leaf in pool[0].values()),
        "metrics_bytes": 4 * METRICS,
        "steps_per_block": STEPS,
        "step": by_feed(lambda plain, full: {WITHOUT: step[plain], WITH: step[full]}),
        "with_over_without": by_feed(lambda plain, full: over(blocks, full, plain)),
        "over_resident": by_feed(lambda plain, _: over(blocks, plain, resident)),
        "wrong": by_feed(lambda plain, full: found["wrong"][plain] + found["wrong"][full]),
    }


def make_batch(number: int, device: torch.device) -> Batch:
    """Return a batch in pageable memory."""
    size_bytes = LEAF_BYTES if device.type == "cuda" else LEAF_BYTES_OF_SIM
    dice = torch.Generator().manual_seed(number)
    return {
        str(leaf): torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=dice)
        for leaf in range(LEAVES)
    }


def send(name: str, device: torch.device) -> Send:
    """Return how the metrics of a way of :func:`ways` are sent to the host."""
    if name.startswith(OURS):
        return lambda values: tdcopier.start_copy(values, "cpu").get
    current_stream = torch.get_device_module(device).current_stream
    return lambda values: begin_by_torch(values, HOST, current_stream(device))


def ways(device: torch.device) -> list[Way]:
    """Return the reference of the ratios, then our ways, then torch's own."""
    module = torch.get_device_module(device)
    side = module.Stream(device)

    def pin(batch: Batch) -> Batch:
        return {key: leaf.pin_memory() for key, leaf in batch.items()}

    def to(batch: Batch) -> Batch:
        return {key: leaf.to(device, non_blocking=True) for key, leaf in batch.items()}

    def prefetched(order: Any) -> Any:
        return tdcopier.prefetch(cycle(order), device)

    def start(batch: Batch) -> tuple[Batch, Any]:
        with module.stream(side):
            return to(batch), side.record_event()

    def finish(coming: tuple[Batch, Any]) -> Batch:
        batch, arrived = coming
        current = module.current_stream(device)
        current.wait_event(arrived)
        for leaf in batch.values():
            leaf.record_stream(current)
        return batch

    return [
        Way(RESIDENT, prepare=to),
        Way(f"{OURS}.prefetch(), pageable batches", feed=prefetched),
        Way(f"{OURS}.prefetch(), pinned batches", feed=prefetched, prepare=pin),
        Way(f"{PINNED}, one ahead on a side stream", start, finish, prepare=pin),
        Way(f"{PINNED}, on the current stream", finish=to, prepare=pin),
    ]
