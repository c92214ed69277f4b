"""The setting of a scenario: streams, distinct batches, and stand-ins for kernels."""

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
from tdcopier._options import SENDING

Tree = list[torch.Tensor]

READ_IN_PLACE = (1 << 16) + 16
"""Elements of int32: above 256 KiB, so that a device reads them in place if they are pinned."""


@dataclass
class ScenarioWorld:
    """The streams, batches and checks of a scenario; no two batches are alike."""

    sim: ModuleType  # `tdcopier.sim`
    devices: tuple[str, str]
    values: dict[str, torch.Tensor]  # values to write, by device: see `device_values`
    schedule: Any = None  # the active schedule, or None
    made: int = 0
    checks: list[tuple[Tree, Tree]] = field(default_factory=list)

    def batch(self, sizes: tuple[int, ...] = (5, 40, 17)) -> Tree:
        """Makes leaves of int32 on the host, with values that no other batch has."""
        self.made += 1
        first = 1000 * self.made
        return [torch.arange(first, first + size, dtype=torch.int32) for size in sizes]

    def stream(self, device: str) -> torch.Stream:
        """Takes one of a pool, in turns, so that those of a scenario have different engine streams.

        The last one of the pool has that of the first, which is the next.
        """
        stream = torch.sim.Stream(device=device)
        return stream if stream.stream_id % 32 else torch.sim.Stream(device=device)

    def on(self, stream: torch.Stream) -> contextlib.AbstractContextManager[None]:
        return torch.sim.stream(stream)

    def expect(self, tree: Tree, expected: Tree) -> None:
        """Checks the values now, on the current streams."""
        for leaf, wanted in zip(tree, expected, strict=True):
            got = leaf.cpu()
            assert torch.equal(got, wanted), f"{_begin(got)}... is not {_begin(wanted)}..."

    def read_late(self, tree: Tree, expected: Tree) -> None:
        """Enqueues a read on the current stream, as a kernel would; `finish` checks it."""
        copies = [torch.empty_like(leaf) for leaf in tree]
        for target, leaf in zip(copies, tree, strict=True):
            target.copy_(leaf, non_blocking=True)
        self.checks.append((copies, expected))

    # Writes to a device copy from memory of the same device, as kernels do, so that all transfers
    # are the engine's.

    def write(self, device: str, batch: Tree) -> Tree:
        """Returns the batch on a device, written by the current stream."""
        written = [torch.empty(leaf.shape, dtype=leaf.dtype, device=device) for leaf in batch]
        self.fill(written, batch)
        return written

    def fill(self, tree: Tree, batch: Tree) -> None:
        """Enqueues on the current stream a write of the batch into memory of a device."""
        for target, leaf in zip(tree, batch, strict=True):
            first, values = int(leaf[0]), self.values[str(target.device)]
            target.copy_(values[first : first + leaf.numel()], non_blocking=True)

    def overwrite(self, tree: Tree) -> None:
        """Enqueues writes of junk on the current stream, without waiting."""
        for leaf in tree:
            junk = self.values[str(leaf.device)][:1].expand(leaf.numel())
            leaf.copy_(junk, non_blocking=True)

    def churn(self, device: str, like: Tree) -> None:
        """Uses device memory of the current stream, as much as a batch, for other data."""
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
    """Returns the integers from 0 on, enough of them for any batch, on each device."""
    return {device: torch.arange(20_000, dtype=torch.int32).to(device) for device in devices}


@contextlib.contextmanager
def small_limits(
    inline_bytes: int = 0, window_bytes: int = 64, staging_buffers: int = 2
) -> Iterator[None]:
    """Sets limits that make batches of a few hundred bytes use workers, windows and a full ring."""
    _C.testing.set_max_inline_bytes(inline_bytes)
    _C.testing.set_max_window_bytes(window_bytes)
    tdcopier.limits.set_staging_bytes(staging_buffers * _C.STAGING_BUFFER_BYTES)
    try:
        yield
    finally:
        _C.testing.set_max_inline_bytes(_C.MAX_INLINE_BYTES)
        _C.testing.set_max_window_bytes(2**63)
        tdcopier.limits.set_staging_bytes(_C.DEFAULT_STAGING_LIMIT_BYTES)


@contextlib.contextmanager
def one_processor() -> Iterator[None]:
    """Keeps this process's threads on one processor, and torch's operators to one thread.

    The schedule lets one thread run at a time. On one processor a change of threads wakes no other
    processor, which cuts the time of a schedule to a half or a quarter.
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
    _C.testing.wake_workers()  # made now: the number of workers follows the processors
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(thread), processors)


@contextlib.contextmanager
def held(sending: Any = _C.Sending.DEFERRED, *, in_callers_order: bool = False) -> Iterator[None]:
    """Copies that this thread starts in the block are deferred: staged, and sent by their user."""
    SENDING.now, SENDING.in_callers_order = sending, in_callers_order
    try:
        yield
    finally:
        SENDING.now, SENDING.in_callers_order = None, False
