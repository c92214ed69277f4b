"""The benchmark: each trainer with each way, its figures, and the targets on them."""

from __future__ import annotations

import gc
import os
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from tool.measure import Bench
from tool.target_forms import Target, at_most, count_wrong, none

import tdcopier
from tdcopier import _C
from trainers import paired, starts, threads, ways
from trainers.batches import leaves_of
from trainers.rounds import Block, Runner, clocks_of_workers, rounds, wrong_of
from trainers.table import TRAINERS, checksums, in_bytes
from trainers.ways import (
    FLOOR,
    FLOOR_PACKED,
    LOADER,
    OURS,
    PINNED,
    PINNED_AGAIN,
    RESIDENT,
    Source,
    Way,
)

LOOPS = ("loop_many", "loop_images", "loop_few")
ON_SIM = LOOPS
REFERENCES = (RESIDENT, FLOOR, FLOOR_PACKED, PINNED)
MAX_STEP, MAX_OVER_FLOOR, MAX_PROCESSOR, MAX_SWITCHES = 1.02, 1.03, 1.02, 1.05
NOISE = 0.02
MAX_LATER_S, MAX_LONGEST, MAX_MORE_BATCHES = 0.2, 2.0, 2.0
QUICK_REPEATS = 10
NO_CLOCKS = (
    "This system does not tell the processor time of other processes: after a block there is only "
    "the pause, which may be too short for workers. See --pause."
)
PROCESSOR, SWITCHES = "process_cpu_us", "voluntary_switches"
Progress = Callable[[str], Callable[[Iterable[int]], Iterable[int]]]


class Options(NamedTuple):
    """What is run, and for how long."""

    trainers: tuple[str, ...]
    ways: dict[str, Way]
    rounds: int
    minutes: float
    """For all trainers together; each gets an equal share."""
    workers: int | None = None
    """Of each loader; None: as many as the trainer has."""
    steps: Mapping[str, Any] = {}
    """Fields of `Steps` in place of those that a trainer has."""
    first_batches: int = 3
    """How often each way is started anew."""
    references: tuple[str, ...] = REFERENCES
    """The ways that the others are compared with."""
    small: bool = False
    pictures: str | None = None
    """The folder for pictures of threads; None: threads are not watched."""


def run(bench: Bench) -> dict[str, Any]:
    """Run all trainers that can run here, as `benchmarks/run.py` does."""
    chosen = {name: ways.WAYS[name] for name in ways.COMPARED}
    if not bench.is_real:
        steps = {"untimed": 1, "timed": 2, "pause_s": 0.01}
        options = Options(ON_SIM, chosen, 2, 1.0, 1, steps, first_batches=1, small=True)
    elif bench.repeats <= QUICK_REPEATS:
        options = Options(tuple(TRAINERS), chosen, 2, 1.0, first_batches=1)
    else:
        options = Options(tuple(TRAINERS), chosen, 40, 5.0)
    return run_with(bench.device, options, bench.progress)


def run_with(device: torch.device, options: Options, progress: Progress) -> dict[str, Any]:
    """Return the figures of the trainers."""
    ways.register()
    raise_limit_of_files()
    found, left_out = {}, {}
    share_s = 60.0 * options.minutes / len(options.trainers)
    with _slabs_for(len(options.ways)):
        for name in options.trainers:
            if missing := TRAINERS[name].missing():
                left_out[name] = f"not installed: {', '.join(missing)}"
                print(f"{name} is left out; {left_out[name]}", file=sys.stderr)
                continue
            found[name] = _measured(name, device, options, progress, time.monotonic() + share_s)
    return {
        "what": "Training loops: time of a step, by how a loader's batches get to the device",
        "settings": {
            "workers": "as the trainer has" if options.workers is None else options.workers,
            "prefetch_factor": 2,
            "order": "a block of each way in each round, shuffled",
            "data": "repeat after the batches of a block",
            "ratio": "of the mean steps of two blocks of a round; the median over the rounds",
            "collector": "on",
            "learning rate": "0, so that the work of a step stays equal",
            "interval": f"95 % (94 with 5 rounds), {paired.RESAMPLES} resamples of the rounds",
            "rounds at most": options.rounds,
            "minutes": options.minutes,
            "small": options.small,
        },
        "trainers": found,
        "left_out": left_out,
    }


@contextmanager
def _slabs_for(loaders: int) -> Iterator[None]:
    """Let each of several loaders pin what the only one of a process may."""
    limit_bytes = _C.slab_limit_bytes()
    tdcopier.limits.set_slab_bytes(loaders * limit_bytes)
    try:
        yield
    finally:
        tdcopier.limits.set_slab_bytes(limit_bytes)


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    wrong = count_wrong(result["trainers"].values())
    yield none("batches that differ from the dataset's, all trainers and ways", wrong)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, found in result["trainers"].items():
        yield from _targets_of_starts(name, found)
        # Kernels of a fixed time, or a model, whose step the workers' load makes longer.
        references = (RESIDENT,) if name in LOOPS else (FLOOR, FLOOR_PACKED)
        for reference in references:
            if OURS in found["over"].get(reference, {}):
                over = found["over"][reference][OURS]["high"]
                what = f"{name}, {OURS} over {reference}: step, upper end of the interval"
                yield at_most(what, over, MAX_STEP if name in LOOPS else MAX_OVER_FLOOR)
        if OURS not in found["over"].get(PINNED, {}):
            continue
        begin = f"{name}, {OURS} over {PINNED}"
        over = found["over"][PINNED][OURS]["high"]
        yield at_most(f"{begin}: step, upper end of the interval", over, MAX_STEP)
        more = found["more_over"]
        yield at_most(f"{begin}: processor time", more[PROCESSOR][OURS]["ratio"], MAX_PROCESSOR)
        switches = more[SWITCHES][OURS]["ratio"]
        if switches is not None:  # there were none to compare with
            yield at_most(f"{begin}: voluntary switches", switches, MAX_SWITCHES)
        if PINNED_AGAIN in found["over"][PINNED]:
            off = abs(found["over"][PINNED][PINNED_AGAIN]["ratio"] - 1.0)
            yield at_most(f"{name}, {PINNED_AGAIN} over {PINNED}: distance from 1", off, NOISE)


def _targets_of_starts(name: str, found: Mapping[str, Any]) -> Iterator[Target]:
    ours, others = found["first_batch"].get(OURS), found["first_batch"]
    if ours is None:
        return
    if LOADER in others:
        later_s = ours["over_loader_s"]
        yield at_most(f"{name}, first batch of {OURS}, later", later_s, MAX_LATER_S, "s")
    if (longest := ours.get("longest_over_median")) is not None:
        what = f"{name}, longest of the first steps with {OURS}, over the median"
        yield at_most(what, longest, MAX_LONGEST)
    if PINNED in others and starts.PEAKS[0] in ours:
        largest = found.get("largest_bytes", found["bytes"])  # sizes vary, and peaks are of these
        allocated, reserved = ((ours[key] - others[PINNED][key]) / largest for key in starts.PEAKS)
        what = f"{name}, peak device memory of {OURS}, over {PINNED}, in batches"
        yield at_most(what, allocated, MAX_MORE_BATCHES)
        yield at_most(f"{what}: reserved above allocated", reserved - allocated, 0.0)


# ---- one trainer ---------------------------------------------------------------------------------


def _measured(
    name: str, device: torch.device, options: Options, progress: Progress, end_s: float
) -> dict[str, Any]:
    trainer = TRAINERS[name]
    steps = trainer.steps._replace(**options.steps)
    data = trainer.data(steps.period, options.small)
    on_host = [data.batch(number) for number in range(steps.period)]
    workers = trainer.workers if options.workers is None else options.workers
    source = Source(data, device, workers, [trainer.move(b, device, False) for b in on_host])
    _check_shared_memory(in_bytes(on_host[0]), workers, options.ways)
    expected = [checksums(batch).tolist() for batch in on_host[: steps.untimed]]
    step = trainer.make_step(device, small=options.small)
    for batch in source.on_device:  # kernels are chosen, and memory is allocated
        step(batch)
    runner = Runner(trainer, step, device, expected, steps)
    times = progress(f"{name}, starts")(range(options.first_batches))
    first = starts.measure(trainer, source, options.ways, step, times)
    with _opened(options.ways, source) as batches:

        def run_block(way: str) -> Block:
            return runner.block(options.ways[way], batches[way])

        if workers and not clocks_of_workers():
            print(NO_CLOCKS, file=sys.stderr)
        begin_s = time.monotonic()
        warm_up = {way: [run_block(way)] for way in batches}
        _print_estimate(name, time.monotonic() - begin_s, options, end_s)
        blocks = rounds(run_block, batches, options.rounds, end_s, progress(name))
        watched = {}
        if options.pictures is not None:
            watched = {
                way: threads.watched(name, way, runner, options.ways[way], batches[way], options)
                for way in batches
            }
        reader = {way: _reader_of(iterator) for way, iterator in batches.items()}
    result = {
        "what": trainer.what,
        "leaves": len(leaves_of(on_host[0])),
        "bytes": in_bytes(on_host[0]),
        "largest_bytes": max(map(in_bytes, on_host)),
        "workers": workers,
        "block": f"{steps.untimed} untimed and {steps.timed} timed steps, then a pause of "
        f"{steps.pause_s:g} s, and until the process and the workers are idle",
        "first_batch": first,
        **figures(blocks, options.references),
        "reader": {way: stats for way, stats in reader.items() if stats},
        "threads": watched,
    }
    for way, count in wrong_of(warm_up).items():
        result["wrong"][way] += count + watched.get(way, {}).pop("wrong_batches", 0)
    return result


def figures(
    blocks: Mapping[str, list[Block]], references: Iterable[str] = REFERENCES
) -> dict[str, Any]:
    """Return the figures of blocks by way and round."""
    return {
        "rounds": len(next(iter(blocks.values()))),
        "step": {way: paired.summary(found) for way, found in blocks.items()},
        "over": {name: paired.ratios(blocks, name) for name in references},
        "more_over": {
            what: paired.ratios(blocks, PINNED, paired.used(what)) for what in (PROCESSOR, SWITCHES)
        },
        "per_step": {way: paired.medians(found) for way, found in blocks.items()},
        "memory": {way: _most(found) for way, found in blocks.items()},
        "checked": {way: sum(block.checked for block in found) for way, found in blocks.items()},
        "wrong": wrong_of(blocks),
        "blocks_without_rest": {
            way: sum(not block.was_idle for block in found) for way, found in blocks.items()
        },
        "blocks": {
            way: [{"step_us": block.step_us, **block.per_step} for block in found]
            for way, found in blocks.items()
        },
    }


def _most(blocks: list[Block]) -> dict[str, int]:
    return {key: max(block.memory[key] for block in blocks) for key in blocks[0].memory}


@contextmanager
def _opened(chosen: Mapping[str, Way], source: Source) -> Iterator[dict[str, Iterator[Any]]]:
    """Start each way's workers; give an iterator by way, and end them all."""
    opened: dict[str, Iterator[Any]] = {}
    try:
        for name, way in chosen.items():
            opened[name] = way.batches(source)
        yield opened
    finally:
        for batches in opened.values():
            ways.close(batches)
        opened.clear()
        gc.collect()  # the workers of a loader end with it


def _reader_of(batches: Iterator[Any]) -> dict[str, float]:
    """Return what a prefetcher has counted over all blocks; nothing for other iterators."""
    stats = getattr(batches, "stats", None)
    if stats is None:
        return {}
    names = ("batches", "late_batches", "waited_us", "read_us", "copy_us", "idle_us")
    names += ("packed_batches", "slab_batches", "why_unpacked")
    return {name: getattr(stats, name) for name in names}


def _print_estimate(name: str, round_s: float, options: Options, end_s: float) -> None:
    fit = int(max(0.0, end_s - time.monotonic()) / round_s)
    count = min(options.rounds, max(fit, 5))
    print(
        f"{name}: a round takes {round_s:.1f} s; about {count} rounds, {count * round_s:.0f} s",
        file=sys.stderr,
        flush=True,
    )


def _check_shared_memory(batch_bytes: int, workers: int, chosen: Mapping[str, Way]) -> None:
    """Refuse what does not fit: a worker that lacks shared memory dies of a bus error."""
    ahead = 2 * workers * sum(way.has_workers for way in chosen.values())
    needed = batch_bytes * (ahead + 2 * workers)  # also what workers are making
    there = os.statvfs("/dev/shm")
    free = there.f_bavail * there.f_frsize
    if needed > free:
        raise SystemExit(
            f"/dev/shm has {free / 1e9:.1f} GB free, and the workers may need {needed / 1e9:.1f} "
            "GB for batches that are ahead: give fewer --workers or --ways"
        )


def raise_limit_of_files() -> None:
    """Raise the limit of open files: each leaf of a batch from a worker is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
