"""Plays random passes over loaders whose workers pack: values, order, and memory that is left.

``python tests/support/play_slabs.py --batches 100000``: workers are killed at random.
``python tests/support/play_slabs.py --kills 200``: processes that train are killed, under each way
to start workers, and their workers must end.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import tdcopier
from tdcopier import _C, _slabs
from tdcopier._progress import show_rounds

SIZES = (1, 3_000, 5_000, 40_000)  # elements: sent as bytes, and in slabs of several sizes
DEVICE = "sim"


class Items(Dataset[Any]):
    """Gives items of sizes that follow from a seed and the batch's number."""

    def __init__(self, count: int, batch_size: int, seed: int) -> None:
        self.count, self.batch_size, self.seed = count, batch_size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        dice = random.Random(self.seed * 1_000_003 + index // self.batch_size)
        size = dice.choice(SIZES) + dice.randrange(100)
        values = torch.full((size,), index, dtype=torch.int32)
        return {"values": values, "boxes": [values[:1], values.double()[:3]], "name": str(index)}


def check(batch: Any, number: int, items: Items) -> None:
    """Compare a batch on the device with what its number says."""
    first = number * items.batch_size
    wanted = default_collate([items[first + i] for i in range(items.batch_size)])
    for found, right in (
        (batch["values"], wanted["values"]),
        (batch["boxes"][0], wanted["boxes"][0]),
        (batch["boxes"][1], wanted["boxes"][1]),
    ):
        assert torch.equal(found.cpu(), right), f"batch {number} is wrong"
    assert batch["name"] == wanted["name"]


def play_pass(dice: random.Random, most: int) -> tuple[int, bool]:
    """Run one pass. Return the number of batches, and whether a worker was killed."""
    size = dice.choice((1, 2, 5))
    items = Items(size * min(dice.randrange(20, 400), most), size, dice.randrange(1 << 30))
    loader: Any = DataLoader(
        items,
        size,
        num_workers=dice.randrange(1, 4),
        multiprocessing_context="fork",
        collate_fn=dice.choice((None, tdcopier.collate, tdcopier.packed())),
        persistent_workers=dice.random() < 0.3,
        prefetch_factor=dice.choice((1, 2, 4)),
    )
    options = {"depth": dice.choice((1, 2, 5)), "threaded": dice.choice((None, False))}
    ends_at = dice.randrange(len(loader)) if dice.random() < 0.3 else None
    kills_at = dice.randrange(len(loader)) if dice.random() < 0.2 else None
    holds, held, number, was_killed = dice.choice((0, 0, 3, 40)), [], -1, False
    try:
        with tdcopier.prefetch(loader, DEVICE, **options) as batches:
            for number, batch in enumerate(batches):
                if holds:
                    held.append((batch, number))
                    if len(held) > holds:
                        check(*held.pop(dice.randrange(len(held))), items)
                else:
                    check(batch, number, items)
                if number == kills_at and (workers := active_children()):
                    was_killed = True
                    # torch's handler raises wherever the main thread is; the pass tells it too.
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    os.kill(dice.choice(workers).pid, signal.SIGKILL)
                if number == ends_at:
                    break
            else:
                assert was_killed or number == len(loader) - 1
    except RuntimeError as error:
        if not was_killed or "worker" not in str(error):
            raise
        error.__traceback__ = None
    for batch, its_number in held:
        check(batch, its_number, items)
    return number + 1, was_killed


def assert_nothing_is_left() -> None:
    """Wait until copies that were dropped have ended, and check that no slab is left."""
    end = time.monotonic() + 10.0
    while True:
        gc.collect()
        _C.reclaim()
        _slabs.drop_ended()
        left = len(_slabs._mapped), tdcopier.pinned.usage().slab_bytes
        if left == (0, 0) or time.monotonic() > end:
            assert left == (0, 0)
            return
        time.sleep(0.005)


def play(batches: int, seed: int) -> None:
    dice, played, passes, kills = random.Random(seed), 0, 0, 0
    descriptors = 0
    while played < batches:
        count, was_killed = play_pass(dice, batches - played + 20)
        played, passes, kills = played + count, passes + 1, kills + was_killed
        assert_nothing_is_left()
        if passes == 10:
            descriptors = len(os.listdir("/proc/self/fd"))
        if passes % 50 == 0:
            print(f"{played} batches, {passes} passes, {kills} workers killed", flush=True)
            assert len(os.listdir("/proc/self/fd")) <= descriptors + 8
    print(f"{played} batches in {passes} passes were right; {kills} workers were killed")


def kill_trainers(count: int, seed: int) -> None:
    dice, script = random.Random(seed), Path(__file__).parent / "train_until_killed.py"
    slowest = 0.0
    for number in show_rounds("processes killed")(range(count)):
        context = ("fork", "spawn", "forkserver")[number % 3]
        command = [
            sys.executable,
            "-W",
            "ignore",
            str(script),
            context,
            dice.choice(("9", "99999")),
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trains:
            assert trains.stdout is not None
            try:
                workers = [int(each) for each in trains.stdout.readline().split()]
                assert len(workers) == 2, workers
                time.sleep(dice.choice((0.0, 0.05)))
            finally:
                trains.kill()
        began = time.monotonic()
        while any(_slabs._began(worker) is not None for worker in workers):
            assert time.monotonic() - began < 10, f"workers of {context} did not end"
            time.sleep(0.005)
        slowest = max(slowest, time.monotonic() - began)
    print(f"{count} processes were killed; their workers ended within {slowest:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not options.batches and not options.kills:
        parser.error("give --batches or --kills")
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    if options.kills:
        kill_trainers(options.kills, options.seed)
    if options.batches:
        from tdcopier import sim

        sim.enable()
        play(options.batches, options.seed)


if __name__ == "__main__":
    main()
