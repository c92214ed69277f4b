"""A learner that prefetches large batches and copies its metrics to the host in each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle
from statistics import median
from typing import Any, NamedTuple

import torch
from copies.ways import PINNED
from rows.replay import WARM_UP_STEPS
from rows.storages import ROW
from tool.measure import Bench, shuffled, summaries
from tool.tables import OURS, RESIDENT

import tdcopier
from loops.learner import STEPS, RowReader, Work, block

STEP_MS = 3.4  # duration of each step's kernels
LEAVES, LEAF_BYTES = 12, 1 << 22  # a batch of 50 MB
LEAF_BYTES_OF_SIM = 1 << 12
METRICS = 10  # floats: 40 bytes
POOL = 4
WARM_UP = 1
ROUNDS_PER_REPEAT = 0.04
WITHOUT, WITH = "without metrics", "with metrics"

Batch = dict[str, torch.Tensor]
Read = Callable[[], torch.Tensor]
Send = Callable[[torch.Tensor], Read]
"""Begins the copy of a tensor to the host, and returns a function that waits for the values."""


class CompanyFeed(NamedTuple):
    """One way to copy batches to the device and metrics to the host."""

    name: str
    open: Callable[[list[Batch]], AbstractContextManager[Iterator[Batch]]]
    """Returns a context that cycles through the batches of a pool on the device."""
    send: Send
    pinned: bool
    """Whether the batches of its pool are pinned."""


class MeteredWork:
    """A step's kernels, and then metrics that the host reads one step later.

    Metrics are new tensors in each step, as in a real model. Their values are the step's number.
    """

    def __init__(self, work: Any, send: Send, device: torch.device) -> None:
        self._work = work
        self._send = send
        self._zeros = torch.zeros(METRICS, device=device)
        self._coming: Read | None = None
        self._step = 0
        self._wrong = 0

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
    pageable = [make_batch(number, device) for number in range(POOL)]
    pinned = [{key: leaf.pin_memory() for key, leaf in batch.items()} for batch in pageable]
    ways = feeds(device)
    step_us: dict[str, dict[str, list[float]]] = {w.name: {WITHOUT: [], WITH: []} for w in ways}
    wrong = {way.name: 0 for way in ways}
    pairs = [(way, metered) for way in ways for metered in (WITHOUT, WITH)]
    how = {"rounds": bench.rounds(ROUNDS_PER_REPEAT), "warm_up": WARM_UP}
    for index, (way, metered) in shuffled(pairs, bench.progress("company, loop"), **how):
        pool = pinned if way.pinned else pageable
        taken_us, bad = one_block(way, pool, work, device, metered=metered == WITH)
        wrong[way.name] += bad
        if index >= 0:
            step_us[way.name][metered].append(taken_us)
    resident = step_us[RESIDENT][WITHOUT]
    return {
        "leaves": len(pageable[0]),
        "bytes": sum(leaf.nbytes for leaf in pageable[0].values()),
        "metrics_bytes": 4 * METRICS,
        "step_ms": STEP_MS,
        "steps_per_block": STEPS,
        "step": {way: summaries(both) for way, both in step_us.items()},
        "with_over_without": {
            way: median_ratio(both[WITH], both[WITHOUT]) for way, both in step_us.items()
        },
        "over_resident": {
            way: median_ratio(both[WITHOUT], resident) for way, both in step_us.items()
        },
        "wrong": wrong,
    }


def make_batch(number: int, device: torch.device) -> Batch:
    """Return a batch in pageable memory, with a leaf that holds its number in the pool."""
    size_bytes = LEAF_BYTES if device.type == "cuda" else LEAF_BYTES_OF_SIM
    dice = torch.Generator().manual_seed(number)
    leaves = {
        str(leaf): torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=dice)
        for leaf in range(LEAVES)
    }
    return {**leaves, ROW: torch.tensor([number])}


def feeds(device: torch.device) -> list[CompanyFeed]:
    """Return the reference of the ratios, then our feeds, then torch's own."""
    module = torch.get_device_module(device)

    def to(batch: Batch) -> Batch:
        return {key: leaf.to(device, non_blocking=True) for key, leaf in batch.items()}

    @contextmanager
    def resident(pool: list[Batch]) -> Iterator[Iterator[Batch]]:
        yield cycle([to(batch) for batch in pool])

    @contextmanager
    def prefetched(pool: list[Batch]) -> Iterator[Iterator[Batch]]:
        with tdcopier.prefetch(cycle(pool), device) as batches:
            yield iter(batches)

    @contextmanager
    def on_current_stream(pool: list[Batch]) -> Iterator[Iterator[Batch]]:
        yield (to(batch) for batch in cycle(pool))

    @contextmanager
    def on_side_stream(pool: list[Batch]) -> Iterator[Iterator[Batch]]:
        side = module.Stream(device)

        def start(batch: Batch) -> tuple[Batch, Any]:
            with module.stream(side):
                return to(batch), side.record_event()

        def batches() -> Iterator[Batch]:
            sources = cycle(pool)
            coming = start(next(sources))
            while True:
                batch, arrived = coming
                current = module.current_stream(device)
                current.wait_event(arrived)
                for leaf in batch.values():
                    leaf.record_stream(current)
                coming = start(next(sources))
                yield batch

        yield batches()

    def ours(values: torch.Tensor) -> Read:
        return tdcopier.start_copy(values, "cpu").get

    def by_torch(values: torch.Tensor) -> Read:
        on_host = values.to("cpu", non_blocking=True)
        arrived = module.current_stream(device).record_event()

        def read() -> torch.Tensor:
            arrived.synchronize()
            return on_host

        return read

    return [
        CompanyFeed(RESIDENT, resident, by_torch, pinned=True),
        CompanyFeed(f"{OURS}.prefetch(), pageable batches", prefetched, ours, pinned=False),
        CompanyFeed(f"{OURS}.prefetch(), pinned batches", prefetched, ours, pinned=True),
        CompanyFeed(f"{PINNED}, one ahead on a side stream", on_side_stream, by_torch, pinned=True),
        CompanyFeed(f"{PINNED}, on the current stream", on_current_stream, by_torch, pinned=True),
    ]


def one_block(
    way: CompanyFeed, pool: list[Batch], work: Any, device: torch.device, *, metered: bool
) -> tuple[float, int]:
    """Run one block. Return microseconds per step, and the number of wrong batches and metrics."""
    company = MeteredWork(work, way.send, device) if metered else None
    reader = RowReader()
    with way.open(pool) as batches:
        found = block(batches, reader.read, company or work, device, warm_up=WARM_UP_STEPS)
    wrong = sum(int(row) != step % len(pool) for step, row in enumerate(reader.rows))
    source = pool[(len(reader.rows) - 1) % len(pool)]
    wrong += any(not torch.equal(reader.last[key].cpu(), leaf) for key, leaf in source.items())
    return found.step_us, wrong + (company.finish() if company else 0)


def median_ratio(times: list[float], reference: list[float]) -> float:
    """Return the median over rounds of the ratio between two blocks of the same round."""
    return median(a / b for a, b in zip(times, reference, strict=True))
