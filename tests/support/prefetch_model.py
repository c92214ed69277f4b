"""Passes of `prefetch` in random programs: their sources refill the same memory for each batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from call_model import prepare
from copy_model import MADE_TO_FAIL, Copy, CopyPlan, World

import tdcopier


@dataclass(frozen=True)
class PassPlan:
    plan: CopyPlan  # of each batch
    batches: int
    depth: int
    threaded: bool


class Pass:
    """One pass, and the batches that it must deliver."""

    def __init__(self, world: World, plan: PassPlan) -> None:
        """Begins the pass; its reader inherits the current streams."""
        world.counts_are_known = False
        self.plan = plan
        self.is_fallible = False  # a batch may fail: its error comes in its place
        self._world = world
        self._read: deque[Copy] = deque()  # by the source, not yet taken
        self._prefetcher = tdcopier.prefetch(
            self._batches(),
            plan.plan.target,
            depth=plan.depth,
            threaded=plan.threaded,
            **dict(plan.plan.options),
        )
        self._iterator = iter(self._prefetcher)
        self.taken = 0

    def _batches(self) -> Iterator[Any]:
        """Yields batches; overwrites the last batch's memory as soon as it is asked for more."""
        before: Copy | None = None
        for _ in range(self.plan.batches):
            if before is not None:
                self._world.overwrite(before)
            before = prepare(self._world, self.plan.plan)
            tree, before.tree = before.tree, None
            self._read.append(before)
            yield tree
            del tree

    @property
    def is_over(self) -> bool:
        return self.taken == self.plan.batches

    def take(self, late: bool) -> None:
        """Takes the next batch on the current streams, and checks it."""
        try:
            moved = next(self._iterator)
        except torch.AcceleratorError as error:
            if not self.is_fallible or MADE_TO_FAIL not in str(error):
                raise
            self.taken += 1
            self._read.popleft()
            return
        self.taken += 1
        copy = self._read.popleft()
        (self._world.read_late if late else self._world.read_now)(copy, moved)

    def close(self) -> None:
        self._prefetcher.close()
        self._read.clear()
