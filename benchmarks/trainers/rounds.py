"""Rounds of blocks: each way runs a block of steps in each round, in a random order.

Data repeat after as many batches as a block has steps, so all blocks compute on equal batches. A
loader's epoch never ends: each step takes one batch and causes one to be made, for every way, and
nothing is made ahead of what is timed. After a block there is a pause until the process and the
workers are idle, for the work that the last steps have caused.

In the pause, the loader's queue fills, and a pin thread reads all that is in it. A loop that is
about as fast as its loader would be served from there, so it has as many untimed steps as empty it.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from multiprocessing import active_children
from typing import Any, NamedTuple

import torch

import tdcopier
from trainers.table import Steps, Trainer, checksums
from trainers.ways import Way

LEAST_ROUNDS = 5
MOST_PAUSE_S = 5.0
IDLE_S, IDLE_SHARE = 0.02, 0.1  # idle: this share of one processor, for so long
SEED = 5


class Usage(NamedTuple):
    """Use of processors so far. The process includes all its threads, but not the workers."""

    main_cpu_us: float
    process_cpu_us: float
    minor_faults: int
    voluntary_switches: int
    involuntary_switches: int

    @staticmethod
    def now() -> Usage:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return Usage(
            time.thread_time_ns() / 1e3,
            time.process_time_ns() / 1e3,
            used.ru_minflt,
            used.ru_nvcsw,
            used.ru_nivcsw,
        )


class Block(NamedTuple):
    """The measurements of one block."""

    step_us: list[float]
    """Time of each timed step: from asking for its batch to asking for the next one."""
    per_step: dict[str, float]
    """What the timed steps have used, by step."""
    memory: dict[str, int]
    checked: int
    wrong: int
    """Batches of the untimed steps that differ from the dataset's."""
    was_idle: bool
    """Whether process and workers came to rest after it, so that the next block has no load."""


class Runner(NamedTuple):
    """Runs blocks of one trainer."""

    trainer: Trainer
    step: Callable[[Any], None]
    device: torch.device
    expected: Sequence[list[int]]
    """The checksums of the batches of the untimed steps, made on the host without a loader."""
    steps: Steps

    def block(
        self,
        way: Way,
        batches: Iterator[Any],
        watch: Callable[[], None] = lambda: None,
        timed: int | None = None,
    ) -> Block:
        """Run a block of one way.

        Args:
            way: The way.
            batches: Its iterator, which is at the beginning of a period.
            watch: Called before the first and after the last timed step.
            timed: Number of timed steps, if it is another one. The block still takes a period.

        """
        timed = self.steps.timed if timed is None else timed
        torch.manual_seed(SEED)  # detection models draw proposals
        sums, ticks, before = [], [], Usage.now()
        for number in range(self.steps.untimed + timed):
            if number == self.steps.untimed:
                watch()
                reset_peaks(self.device)
                before = Usage.now()
                ticks.append(time.perf_counter_ns())
            batch = self.trainer.move(next(batches), self.device, way.non_blocking)
            if number < self.steps.untimed:
                sums.append(checksums(batch))
            self.step(batch)
            if number >= self.steps.untimed:
                ticks.append(time.perf_counter_ns())
        after = Usage.now()
        watch()
        batch = None
        memory = memory_of(self.device)
        for _ in range(self.steps.timed - timed):
            next(batches)
        torch.get_device_module(self.device).synchronize()
        wrong = sum(s.tolist() != want for s, want in zip(sums, self.expected, strict=True))
        used = zip(Usage._fields, before, after, strict=True)
        return Block(
            [(end - begin) / 1e3 for begin, end in pairwise(ticks)],
            {name: (end - begin) / timed for name, begin, end in used},
            memory,
            len(sums),
            wrong,
            settle(self.steps.pause_s),
        )


def settle(pause_s: float) -> bool:
    """Wait until this process and its workers are idle, for the pause at least.

    What the last steps have caused would be a load beside the next way's block. Returns whether
    they have become idle.
    """
    clocks = [time.CLOCK_PROCESS_CPUTIME_ID, *clocks_of_workers()]
    end = time.monotonic() + MOST_PAUSE_S
    time.sleep(pause_s)
    while time.monotonic() < end:
        before_ns = sum(map(time.clock_gettime_ns, clocks))
        time.sleep(IDLE_S)
        used_s = (sum(map(time.clock_gettime_ns, clocks)) - before_ns) / 1e9
        if used_s < IDLE_SHARE * IDLE_S:
            return True
    return False


def clocks_of_workers() -> list[int]:
    """Return Linux's clocks of the processor time of the child processes.

    Some sandboxes have no clocks of other processes: then it is empty.
    """
    clocks = [(~child.pid << 3) | 2 for child in active_children() if child.pid is not None]
    return [clock for clock in clocks if _is_clock(clock)]


def _is_clock(clock: int) -> bool:
    try:
        time.clock_gettime_ns(clock)
    except OSError:
        return False
    return True


def reset_peaks(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def memory_of(device: torch.device) -> dict[str, int]:
    """Return bytes: peaks of the device's memory, and pinned memory of torch and of tdcopier."""
    use = tdcopier.pinned.usage()
    found = {
        "tdcopier_staging_bytes": use.staging_bytes,
        "tdcopier_pool_bytes": use.leased_bytes + use.free_bytes,
    }
    if use.torch_bytes is not None:
        found["torch_pinned_bytes"] = use.torch_bytes
    if device.type == "cuda":
        found["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(device)
        found["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(device)
        host = torch.cuda.host_memory_stats()
        for key in ("allocated_bytes.current", "active_bytes.current", "num_host_alloc"):
            if key in host:
                found[f"torch_host_{key.replace('.', '_')}"] = host[key]
    return found


def rounds(
    run_block: Callable[[str], Block],
    names: Iterable[str],
    most: int,
    end_s: float,
    progress: Callable[[Iterable[int]], Iterable[int]],
) -> dict[str, list[Block]]:
    """Run a block of each way in each round, in a random order; return them by way and round.

    The rounds end after ``most`` of them, or at a time of the monotonic clock, but then after five
    rounds at the earliest.
    """
    order, dice = list(names), random.Random(SEED)
    blocks: dict[str, list[Block]] = {name: [] for name in order}
    for number in progress(range(most)):
        if number >= LEAST_ROUNDS and time.monotonic() >= end_s:
            break
        dice.shuffle(order)
        for name in order:
            blocks[name].append(run_block(name))
    return blocks


def wrong_of(blocks: Mapping[str, Sequence[Block]]) -> dict[str, int]:
    """Return the number of wrong batches by way."""
    return {name: sum(block.wrong for block in found) for name, found in blocks.items()}
