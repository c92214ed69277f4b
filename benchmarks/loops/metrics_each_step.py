"""A learner that prefetches large batches and copies its metrics to the host in each step."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from operator import attrgetter, itemgetter
from statistics import median
from typing import Any

import torch
from copies.ways import PINNED
from rows.storages import ROW
from tool.measure import Bench, summaries
from tool.tables import OURS, RESIDENT
from tool.way import Way

import tdcopier
from loops.learner import Work
from loops.steps import STEPS, Check, one_block, played, values

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
    feeds = {way.name: way for way in ways(device, pool)}
    prepared = {name: [way.prepare(batch) for batch in pool] for name, way in feeds.items()}

    def play(name: tuple[str, str], index: int) -> Any:
        feed, metered = name
        send = sends(device)[feed] if metered == WITH else None
        return one_metered(feeds[feed], prepared[feed], pool, work, send, device, index)

    names = dict.fromkeys(((feed, metered) for feed in feeds for metered in (WITHOUT, WITH)), 1)
    rounds = bench.rounds(ROUNDS_PER_REPEAT)
    blocks, wrong, _ = played(bench, "a step with metrics", names, play, rounds=rounds)
    step_us = values(blocks, names, attrgetter("step_us"))
    step = summaries(step_us)

    def over(feed: str, metered: str, reference: tuple[str, str]) -> float:
        """Return the median over rounds of the ratio between two blocks of the same round."""
        both = zip(step_us[feed, metered], step_us[reference], strict=True)
        return median(a / b for a, b in both)

    return {
        "leaves": len(pool[0]),
        "bytes": sum(leaf.nbytes for leaf in pool[0].values()),
        "metrics_bytes": 4 * METRICS,
        "step_ms": STEP_MS,
        "steps_per_block": STEPS,
        "step": {feed: {each: step[feed, each] for each in (WITHOUT, WITH)} for feed in feeds},
        "with_over_without": {feed: over(feed, WITH, (feed, WITHOUT)) for feed in feeds},
        "over_resident": {feed: over(feed, WITHOUT, (RESIDENT, WITHOUT)) for feed in feeds},
        "wrong": {feed: wrong[feed, WITHOUT] + wrong[feed, WITH] for feed in feeds},
    }


def one_metered(
    way: Way,
    prepared: list[Batch],
    pool: list[Batch],
    work: Any,
    send: Send | None,
    device: torch.device,
    first: int = 0,
) -> Any:
    """Run one block, with metrics if ``send`` is given; wrong metrics count as wrong steps."""
    metered = MeteredWork(work, send, device) if send else None
    found, wrong = one_block(way, prepared, check(pool), metered or work, device, first=first)
    return found, wrong + (metered.finish() if metered else 0)


def check(pool: list[Batch]) -> Check:
    def is_right(number: int, batch: Batch) -> bool:
        right = pool[number % len(pool)]
        return all(torch.equal(batch[key].cpu(), leaf) for key, leaf in right.items())

    return Check(itemgetter(ROW), lambda number: pool[number % len(pool)][ROW], is_right)


def make_batch(number: int, device: torch.device) -> Batch:
    """Return a batch in pageable memory, with a leaf that holds its number in the pool."""
    size_bytes = LEAF_BYTES if device.type == "cuda" else LEAF_BYTES_OF_SIM
    dice = torch.Generator().manual_seed(number)
    leaves = {
        str(leaf): torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=dice)
        for leaf in range(LEAVES)
    }
    return {**leaves, ROW: torch.tensor([number])}


def sends(device: torch.device) -> dict[str, Send]:
    """Return how the metrics of each way of :func:`ways` are sent to the host."""
    module = torch.get_device_module(device)

    def by_torch(values: torch.Tensor) -> Callable[[], torch.Tensor]:
        on_host = values.to("cpu", non_blocking=True)
        arrived = module.current_stream(device).record_event()

        def read() -> torch.Tensor:
            arrived.synchronize()
            return on_host

        return read

    def ours(values: torch.Tensor) -> Callable[[], torch.Tensor]:
        return tdcopier.start_copy(values, "cpu").get

    return {name: ours if name.startswith(OURS) else by_torch for name in NAMES}


NAMES = (
    RESIDENT,
    f"{OURS}.prefetch(), pageable batches",
    f"{OURS}.prefetch(), pinned batches",
    f"{PINNED}, one ahead on a side stream",
    f"{PINNED}, on the current stream",
)


def ways(device: torch.device, pool: list[Batch]) -> list[Way]:
    """Return the reference of the ratios, then our ways, then torch's own."""
    module = torch.get_device_module(device)
    side = module.Stream(device)
    pinned = [{key: leaf.pin_memory() for key, leaf in batch.items()} for batch in pool]

    def pin(batch: Batch) -> Batch:
        return pinned[int(batch[ROW])]

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

    resident, pageable, from_pinned, on_side, on_current = NAMES
    return [
        Way(resident, prepare=to),
        Way(pageable, feed=prefetched),
        Way(from_pinned, feed=prefetched, prepare=pin),
        Way(on_side, start, finish, prepare=pin),
        Way(on_current, finish=to, prepare=pin),
    ]
