"""The steps of a training loop: how it is fed, what a step reads, and how a block is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import torch
from baselines import PER_LEAF_TO, PINNED, multi_tensor_copier
from kernels import Work
from limits import flat_bytes
from tables import OURS, RESIDENT

import tdcopier
from tdcopier.workloads import map_tensors

STEPS = 20  # consecutive steps of one feed
CHECK_EVERY = 10  # the whole batch is compared at every tenth step, three leaves at each
READ_BYTES = 1 << 14  # at the end of a leaf, because its last bytes arrive last


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

    def wait(handle: tdcopier.AsyncCopyHandle) -> Any:
        return handle.wait()

    def to(tree: Any, non_blocking: bool = False) -> Any:
        return map_tensors(tree, lambda leaf: leaf.to(device, non_blocking=non_blocking))

    def planned(tree: Any) -> Any:
        return tdcopier.prepare(tree, device, reuse_outputs=True), tree

    def pinned(tree: Any) -> Any:
        return map_tensors(tree, torch.Tensor.pin_memory)

    found = [
        Feed(RESIDENT, same, same, to),
        Feed(OURS, lambda tree: tdcopier.start_copy(tree, device), wait),
        Feed(
            f"{OURS}, prepared, outputs reused",
            lambda plan_and_tree: plan_and_tree[0].start_copy(plan_and_tree[1]),
            wait,
            planned,
        ),
        Feed(PER_LEAF_TO, same, to),
        Feed(PINNED, same, lambda tree: to(tree, non_blocking=True), pinned),
    ]
    peer = multi_tensor_copier()
    if peer is not None and device.type == "cuda":
        start = peer.start_copy
        found.append(
            Feed("multi_tensor_copier", lambda tree: start(tree, device), lambda h: h.get())
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
    """Return how many steps read wrong values, and how many whole batches have wrong values."""
    batches = sum(
        not torch.equal(flat_bytes(batch), expected[(first + step) % len(expected)])
        for step, batch in found.checked
    )
    return reader.count_wrong(first), batches


class Reader:
    """Reads three leaves of the batch in each step, in stream order, as a model would.

    It sums their last bytes. If a step begins before its batch has arrived, the sum differs from
    that of the source.
    """

    def __init__(self, sources: list[Any], steps: int, device: torch.device) -> None:
        everywhere = routes(sources[0])
        self.routes = [everywhere[0], everywhere[len(everywhere) // 2], everywhere[-1]]
        self.expected = [self._sums(source) for source in sources]
        self.sums = torch.zeros(steps, len(self.routes), dtype=torch.int64, device=device)

    def read(self, batch: Any, step: int) -> None:
        for found, leaf in zip(self.sums[step], self._leaves(batch), strict=True):
            found.copy_(sum_of_last_bytes(leaf))

    def count_wrong(self, first: int) -> int:
        """Count the steps of a block whose sums differ from those of the sources, and reset."""
        found = self.sums.tolist()
        self.sums.fill_(-1)
        count = len(self.expected)
        return sum(sums != self.expected[(first + step) % count] for step, sums in enumerate(found))

    def _leaves(self, batch: Any) -> list[torch.Tensor]:
        return [reduce(getitem, route, batch) for route in self.routes]

    def _sums(self, batch: Any) -> list[int]:
        return [int(sum_of_last_bytes(leaf)) for leaf in self._leaves(batch)]


def routes(tree: Any) -> list[tuple[Any, ...]]:
    """Return the keys and indices that lead to each leaf, in the order of the containers."""
    if isinstance(tree, torch.Tensor):
        return [()]
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [(key, *route) for key, child in children for route in routes(child)]


def sum_of_last_bytes(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.reshape(-1).view(torch.uint8)[-READ_BYTES:].sum()
