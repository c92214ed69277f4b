"""Trains from a loader until it is killed: prints its workers' numbers after the first batches.

``python train_until_killed.py fork 100000``: how workers start, and the elements of a batch.
"""

from __future__ import annotations

import multiprocessing
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

import tdcopier


class Endless(Dataset[torch.Tensor]):
    """Gives an item for each index."""

    def __init__(self, elements: int) -> None:
        self.elements = elements

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.elements,), float(index))


def main(context: str, elements: int) -> None:
    from tdcopier import sim

    sim.enable()
    loader = DataLoader(Endless(elements), 2, num_workers=2, multiprocessing_context=context)
    with tdcopier.prefetch(loader, "sim") as batches:
        for number, batch in enumerate(batches):
            assert batch[0, -1].item() == 2 * number
            if number == 3:
                print(*(each.pid for each in multiprocessing.active_children()), flush=True)
                time.sleep(1000)  # queues fill, and workers wait


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
