"""The work in a step of a training loop: reads of the batch, and kernels for the device."""

from __future__ import annotations

from functools import reduce
from operator import getitem
from typing import Any

import torch

READ_BYTES = 1 << 14  # at the end of a leaf, because its last bytes arrive last


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
            self.count = max(1, round(ms / self._ms_of_one()))

    def enqueue(self) -> None:
        for _ in range(self.count):
            torch.mm(self.factor, self.factor, out=self.product)

    def _ms_of_one(self) -> float:
        calls = 100  # the first ones raise the clock of an idle device
        for _ in range(2):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            for _ in range(calls):
                torch.mm(self.factor, self.factor, out=self.product)
            after.record()
            after.synchronize()
        return float(before.elapsed_time(after)) / calls


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
        """Count the steps of a block whose sums differ from those of the sources, and reset.

        Args:
            first: The index of the first step's source.

        """
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
