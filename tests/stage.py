"""What scenarios play on: streams, batches that are all different, and what stands for kernels."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

import tdcopier
from tdcopier import _C

Tree = list[torch.Tensor]

READ_IN_PLACE = (1 << 16) + 16
"""Elements of int32: above 256 KiB, so that a device reads them in place if they are pinned."""


@dataclass
class Play:
    """What a scenario works with: streams, batches of which no two are alike, checks at the end."""

    sim: ModuleType  # `tdcopier.sim`
    devices: tuple[str, str]
    values: dict[str, torch.Tensor]  # by device: what there is to write, see `device_values`
    schedule: Any = None  # the schedule that is on, or None
    made: int = 0
    checks: list[tuple[Tree, Tree]] = field(default_factory=list)

    def batch(self, sizes: tuple[int, ...] = (5, 40, 17)) -> Tree:
        """Leaves of int32 on the host, with values that no other batch has."""
        self.made += 1
        first = 1000 * self.made
        return [torch.arange(first, first + size, dtype=torch.int32) for size in sizes]

    def stream(self, device: str) -> torch.Stream:
        return torch.sim.Stream(device=device)

    def on(self, stream: torch.Stream) -> contextlib.AbstractContextManager[None]:
        return torch.sim.stream(stream)

    def expect(self, tree: Tree, expected: Tree) -> None:
        """Check now, on the current streams."""
        for leaf, wanted in zip(tree, expected, strict=True):
            got = leaf.cpu()
            assert torch.equal(got, wanted), f"{_begin(got)}... is not {_begin(wanted)}..."

    def read_late(self, tree: Tree, expected: Tree) -> None:
        """Enqueue on the current stream what a kernel would read; check when all is over."""
        copies = [torch.empty_like(leaf) for leaf in tree]
        for target, leaf in zip(copies, tree, strict=True):
            target.copy_(leaf, non_blocking=True)
        self.checks.append((copies, expected))

    # What writes on a device here does so within it, as kernels do: the only transfers are the
    # engine's.

    def write(self, device: str, batch: Tree) -> Tree:
        """The batch on a device, written by the current stream when its turn comes."""
        written = [torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in batch]
        self.fill(written, batch)
        return written

    def fill(self, tree: Tree, batch: Tree) -> None:
        """Enqueue on the current stream what writes the batch into memory of a device."""
        for target, leaf in zip(tree, batch, strict=True):
            first, values = int(leaf[0]), self.values[str(target.device)]
            target.copy_(values[first : first + leaf.numel()], non_blocking=True)

    def overwrite(self, tree: Tree) -> None:
        """Enqueue writes on the current stream, without waiting for anything."""
        for leaf in tree:
            junk = self.values[str(leaf.device)][:1].expand(leaf.numel())
            leaf.copy_(junk, non_blocking=True)

    def churn(self, device: str, like: Tree) -> None:
        """Use device memory of the current stream, as much as a batch, for something else."""
        total = sum(leaf.numel() for leaf in like)
        for size in (total, *(leaf.numel() for leaf in like)):
            for _ in range(2):
                self.overwrite([torch.empty(size, dtype=torch.int32, device=device)])

    def finish(self) -> None:
        for device in self.devices:
            torch.sim.synchronize(device)
        for tree, expected in self.checks:
            self.expect(tree, expected)
        self.checks.clear()


def _begin(leaf: torch.Tensor) -> list[int]:
    return leaf.flatten()[:4].tolist()


def device_values(devices: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The integers from 0 on, enough of them for any batch, on each device."""
    return {device: torch.arange(20_000, dtype=torch.int32).to(device) for device in devices}


@contextlib.contextmanager
def small_limits(
    inline_bytes: int = 0, window_bytes: int = 64, staging_buffers: int = 2
) -> Iterator[None]:
    """Workers, several windows and a ring that runs out, for batches of a few hundred bytes."""
    _C.set_max_inline_bytes(inline_bytes)
    _C.set_max_window_bytes(window_bytes)
    tdcopier.set_staging_limit_bytes(staging_buffers * _C.STAGING_BUFFER_BYTES)
    try:
        yield
    finally:
        _C.set_max_inline_bytes(_C.MAX_INLINE_BYTES)
        _C.set_max_window_bytes(2**63)
        tdcopier.set_staging_limit_bytes(_C.DEFAULT_STAGING_LIMIT_BYTES)


@contextlib.contextmanager
def one_processor() -> Iterator[None]:
    """Keep this process's threads on one processor, and torch's operators to one thread.

    The schedule lets one thread go on at a time. A turn that is given to a thread on the same
    processor wakes nobody else, which takes an order of events half the time, or a quarter.
    """
    threads, processors = torch.get_num_threads(), os.sched_getaffinity(0)
    torch.set_num_threads(1)
    if len(processors) > 1:  # a program that plays for long has chosen one
        keep_on({sorted(processors)[os.getpid() % len(processors)]})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if len(processors) > 1:
            keep_on(processors)


def keep_on(processors: set[int]) -> None:
    """Move this process's threads to these processors. Requires that a device is enabled."""
    _C.wake_workers()  # made now: the number of workers follows the processors
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended since
            os.sched_setaffinity(int(thread), processors)


@contextlib.contextmanager
def held(sending: Any = _C.Sending.HELD) -> Iterator[None]:
    """Copies that this thread starts meanwhile are staged, and sent by whoever uses them."""
    _C.set_sending(sending)
    try:
        yield
    finally:
        _C.set_sending(_C.Sending.AT_ONCE)
