"""The frame of a program that plays seeds: its arguments, its processes, and what they played."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import faulthandler
import gc
import itertools
import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

DEVICE_TYPE = os.environ.get("TDCOPIER_TEST_DEVICE", "sim")
TIMEOUT_S = 300  # of a batch


@dataclass
class Tally:
    """The outcome of a number of seeds: numbers, counters, lists and sets."""

    def add(self, other: Tally) -> None:
        for each in dataclasses.fields(self):
            mine = getattr(self, each.name)
            if isinstance(mine, set):
                mine |= getattr(other, each.name)
            else:
                mine += getattr(other, each.name)
            setattr(self, each.name, mine)


T = TypeVar("T", bound=Tally)


def parser_of(doc: str) -> argparse.ArgumentParser:
    """Returns a parser of the arguments that all programs have. `doc`: of the program."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play this one alone")
    return parser


def played_by_arguments(
    doc: str, play: Callable[[range], T], total: T, unit: str, of_a_seed: int, a_batch: int
) -> T:
    """Plays the seeds that a program's arguments ask for, and returns the tally.

    `unit` is the field of the tally that is counted, which grows by `of_a_seed` with each seed.
    """
    parser = parser_of(doc)
    parser.add_argument(f"--{unit}", type=int, default=10_000)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        prepare()
        total.add(play(range(arguments.seed, arguments.seed + 1)))
        return total
    seeds = -(-getattr(arguments, unit) // of_a_seed)
    batches = batches_of(arguments.first_seed, seeds, a_batch)
    for played in play_batches(play, batches, arguments.jobs, unit, seeds * of_a_seed):
        total.add(played)
    return total


def print_played(counts: Counter[str], wrong: list[str]) -> None:
    for name, count in sorted(counts.items()):
        print(f"{count:9,}  {name}")
    for each in wrong:
        print(f"WRONG: {each}")


def prepare() -> None:
    """Prepares a process for `play_batches`. Tracebacks are printed if it crashes."""
    faulthandler.enable()
    torch.set_num_threads(1)
    if DEVICE_TYPE == "sim":
        from tdcopier import sim

        sim.enable(devices=2)
    gc.collect()
    gc.freeze()


def batches_of(first_seed: int, seeds: int, a_batch: int) -> list[range]:
    last = first_seed + seeds
    return [range(at, min(at + a_batch, last)) for at in range(first_seed, last, a_batch)]


def play_batches(
    play: Callable[[range], T],
    batches: Iterable[range],
    jobs: int,
    unit: str,
    total: int | None = None,
    start: Callable[..., None] = prepare,
    start_with: tuple[Any, ...] = (),
) -> Iterator[T]:
    """Plays batches of seeds in processes, which `start` prepares, and yields what each played.

    Batches are read as processes become free. A process that is stuck ends with its traceback.
    `unit` is the field of the tally that is counted, up to `total` if that is known.

    Raises:
        RuntimeError: a batch cannot be played; the text names its seeds.
    """
    from tqdm import tqdm

    spawn, batches = multiprocessing.get_context("spawn"), iter(batches)
    with (
        concurrent.futures.ProcessPoolExecutor(jobs, spawn, start, start_with) as pool,
        tqdm(total=total, unit=f" {unit}", mininterval=5) as bar,
    ):
        waiting = {pool.submit(_play, play, seeds): seeds for seeds in _next(batches, jobs + 1)}
        while waiting:
            done, _ = concurrent.futures.wait(
                waiting, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for each in done:
                seeds = waiting.pop(each)
                try:
                    played = each.result()
                except BaseException as error:
                    pool.shutdown(wait=False, cancel_futures=True)
                    text = f"in seeds {seeds.start} to {seeds.stop - 1}: {error}"
                    raise RuntimeError(text) from error
                bar.update(getattr(played, unit))
                waiting.update((pool.submit(_play, play, more), more) for more in _next(batches, 1))
                yield played


def _next(batches: Iterator[range], count: int) -> Iterator[range]:
    return itertools.islice(batches, count)


def _play(play: Callable[[range], T], seeds: range) -> T:
    faulthandler.dump_traceback_later(TIMEOUT_S, exit=True)
    try:
        return play(seeds)
    finally:
        faulthandler.cancel_dump_traceback_later()


def write_json(path: str | None, told: dict[str, Any]) -> None:
    """Writes a file, if there is to be one, so that a run that is ended early has its figures."""
    if path:
        Path(path).write_text(json.dumps(told, indent=2) + "\n")
