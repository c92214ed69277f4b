"""Kernels of a chosen duration, so that a stream is busy when a copy is started."""

from __future__ import annotations

import torch


class Sleeper:
    """Keeps the current stream of a device busy for about the requested time."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        if self._on_cuda:
            self._cycles_per_ms = _cycles_per_ms()

    def enqueue(self, ms: float) -> None:
        if self._on_cuda:
            torch.cuda._sleep(int(ms * self._cycles_per_ms))
            return
        from tdcopier import sim

        sim.busy(ms / 1e3)


def _cycles_per_ms() -> float:
    torch.cuda._sleep(1_000_000)
    cycles = 50_000_000
    times_ms = []
    for _ in range(3):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        torch.cuda._sleep(cycles)
        after.record()
        after.synchronize()
        times_ms.append(before.elapsed_time(after))
    return cycles / sorted(times_ms)[1]
