"""The kernels of a learner's steps, of a chosen duration, and torch's own copies beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

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


def begin_by_torch(
    leaf: torch.Tensor, target: torch.device, stream: Any
) -> Callable[[], torch.Tensor]:
    """Begin a copy on a stream, and return a function that waits for the result."""
    with torch.get_device_module(stream.device).stream(stream):
        result = leaf.to(target, non_blocking=True)
        arrived = stream.record_event()

    def wait() -> torch.Tensor:
        arrived.synchronize()
        return result

    return wait


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


def learners(device: torch.device, step_ms: float) -> dict[str, Work | SmallKernels]:
    """Return a learner that keeps the device busy, and one that keeps the host as busy as it."""
    return {
        f"{step_ms:g} ms of large kernels": Work(device, step_ms),
        f"{SMALL_KERNELS} small kernels": SmallKernels(device),
    }


def _ms(enqueue: Callable[[], None]) -> float:
    """Return the time that the current CUDA stream takes for the work of a call."""
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    enqueue()
    after.record()
    after.synchronize()
    return float(before.elapsed_time(after))
