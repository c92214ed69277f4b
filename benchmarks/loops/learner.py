"""The steps of a learner: kernels of a chosen duration, and blocks of steps that are timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import torch
from rows.storages import ROW

STEPS = 20  # consecutive steps of one feed
SMALL_KERNELS = 500


class Sleeper:
    """Keeps the current stream of a device busy for about the requested time."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            cycles = 50_000_000
            torch.cuda._sleep(1_000_000)
            times_ms = sorted(_ms(lambda: torch.cuda._sleep(cycles)) for _ in range(3))
            self._cycles_per_ms = cycles / times_ms[1]

    def enqueue(self, ms: float) -> None:
        if self._on_cuda:
            torch.cuda._sleep(int(ms * self._cycles_per_ms))
            return
        from tdcopier import sim

        sim.busy(ms / 1e3)


class Work:
    """The kernels of a step: matrix multiplications that take about the requested time.

    On the simulated device, whose times mean nothing, it is a single small one.
    """

    def __init__(self, device: torch.device, ms: float) -> None:
        on_cuda = device.type == "cuda"
        size, dtype = (4096, torch.bfloat16) if on_cuda else (16, torch.float32)
        self.factor = torch.full((size, size), 1.0 / size, dtype=dtype, device=device)
        self.product = torch.empty_like(self.factor)
        self.count = 1
        if on_cuda:
            self.count = 100  # the first ones raise the clock of an idle device
            ms_of_one = [_ms(self.enqueue) / self.count for _ in range(2)][1]
            self.count = max(1, round(ms / ms_of_one))

    def enqueue(self) -> None:
        for _ in range(self.count):
            torch.mm(self.factor, self.factor, out=self.product)


class SmallKernels:
    """A step of small kernels that takes the host as long as the device."""

    def __init__(self, device: torch.device) -> None:
        self._values = torch.zeros(256, device=device)
        self._count = SMALL_KERNELS if device.type == "cuda" else 1

    def enqueue(self) -> None:
        for _ in range(self._count):
            self._values.add_(1.0)


class KernelClock:
    """Enqueues the kernels of a step between two events: the device's own time in them.

    What the stream waits for before the kernels, such as a batch, is not part of it.
    """

    def __init__(self, work: Any, device: torch.device) -> None:
        self._work = work
        self._module = torch.get_device_module(device)
        self._events: list[tuple[Any, Any]] = []

    def enqueue(self) -> None:
        before, after = (self._module.Event(enable_timing=True) for _ in range(2))
        before.record()
        self._work.enqueue()
        after.record()
        self._events.append((before, after))

    def mean_us(self) -> float:
        """Return the mean of the last block's steps. The device must have done them."""
        return 1e3 * fmean(before.elapsed_time(after) for before, after in self._events[-STEPS:])


def _ms(enqueue: Callable[[], None]) -> float:
    """Return the time that the current CUDA stream takes for the work of a call."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    enqueue()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))


# ---- blocks of steps -----------------------------------------------------------------------------


class Block(NamedTuple):
    """The times of one feed's consecutive steps, in microseconds."""

    step_us: float
    """Time of the whole block, including the device, per step."""
    batch_us: list[float]
    """Time of the host in getting the batch, by step."""
    kernels_us: float | None = None
    """The device's own time in the kernels of a step; None where it was not measured."""


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


class RowReader:
    """Reads a part of every batch, and keeps the last batch.

    Args:
        part: Returns the part: by default the row numbers.

    """

    def __init__(self, part: Callable[[Any], torch.Tensor] = itemgetter(ROW)) -> None:
        self._part = part
        self.rows: list[torch.Tensor] = []
        """The parts, by step."""
        self.last: Any = None

    def read(self, batch: Any, _: int) -> None:
        self.rows.append(self._part(batch).clone())
        self.last = batch
