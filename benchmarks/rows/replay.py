"""Times a learner that samples from a replay storage, against one with batches on the device.

There are two learners: one keeps the device busy for some milliseconds per step with a few large
kernels; the other keeps the host busy with 500 small kernels, and so competes for the GIL.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from operator import attrgetter
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from loops.learner import SMALL_KERNELS, STEPS, Block, RowReader, SmallKernels, Work, block
from tool.measure import Bench, shuffled, summaries
from tool.tables import OURS, RESIDENT
from tool.target_forms import Target, at_most, count_wrong, none

import tdcopier
from rows.storages import ROW, Replay, Storage, drawn, rows_of, with_each
from tdcopier._commands.interleave import collector_paused
from tdcopier.workloads import map_tensors

STEP_MS = 4.0  # duration of a step of the learner with large kernels
WARM_UP_STEPS = 4  # before a block, so that the feed has run ahead
WARM_UP = 1
ROUNDS_PER_REPEAT = 0.04
INDICES = 32  # batches whose rows are drawn beforehand
WANTED = 1.03
TORCHRL = {
    f"{OURS}'s storage and buffer in torchrl, prefetch": {"in_threads": True, "packed": True},
    "torchrl, sample().to(device)": {"in_threads": False},
    "torchrl, transform .to(device), prefetch": {"in_threads": True},
}
SELDOM = 3
DEPTH = 2  # how many batches the feeds run ahead

Batches = Iterator[Any]
Indices = list[torch.Tensor]
"""The rows of each batch, in turn."""


def learners(device: torch.device) -> dict[str, Any]:
    return {
        f"{STEP_MS:g} ms of large kernels": Work(device, STEP_MS),
        f"{SMALL_KERNELS} small kernels": SmallKernels(device),
    }


def run(bench: Bench) -> dict[str, Any]:
    rows, works = rows_of(bench), learners(bench.device)

    def replay(name: str, replay: Replay, storage: Storage) -> dict[str, Any]:
        return {
            "learners": {
                learner: _compare(bench, f"replay, {name}, {learner}", storage, replay, work)
                for learner, work in works.items()
            }
        }

    return {
        "what": "A learner that samples from a replay storage: time of a step",
        "settings": {
            **bench.settings(bound=False),
            "rows": f"{rows:,} in host memory",
            "order": f"blocks of {STEPS} steps, shuffled per round; ratios are within a round",
            "ahead": "a learner begins a step when the device has done the one before the last",
        },
        "replays": with_each(rows, replay),
    }


def by_learner(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the part of a result for each storage and learner."""
    return {
        f"{name}, {learner}": found
        for name, replay in result["replays"].items()
        for learner, found in replay["learners"].items()
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    wrong = count_wrong(by_learner(result).values())
    yield none("steps with other rows than those of the index, all feeds", wrong)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for learner, found in by_learner(result).items():
        yield at_most(f"{learner}: step over that {RESIDENT}", found["ratios"][OURS], WANTED)


def _compare(
    bench: Bench, label: str, storage: Storage, replay: Replay, work: Any
) -> dict[str, Any]:
    indices = drawn(replay, len(storage[ROW]), INDICES)
    rounds = bench.rounds(ROUNDS_PER_REPEAT)

    ways = {feed.name: feed for feed in feeds()}

    def play(way: str) -> tuple[Block, int]:
        return one_block(ways[way], storage, indices, work, bench.device)

    every = {name: feed.every for name, feed in ways.items()}
    return compare(bench, label, every, play, rounds=rounds)


def compare(
    bench: Bench,
    label: str,
    every: Mapping[str, int],
    play: Callable[[str], tuple[Block, int]],
    *,
    rounds: int,
    bound: bool = False,
) -> dict[str, Any]:
    """Run one block of each way in each round. Ratios to the resident batches are within a round.

    Args:
        bench: The device and the options.
        label: For the progress.
        every: The ways; with 3, one takes part in every third round.
        play: Runs a block of a way, and returns it and the number of wrong steps.
        rounds: How many.
        bound: Whether to keep the learner's thread on a quiet processor: only if it starts none.

    """
    blocks: list[dict[str, Block]] = [{} for _ in range(rounds)]
    wrong = dict.fromkeys(every, 0)
    with bench.quiet() if bound else collector_paused(not bench.keep_gc) as quiet:
        seek = quiet.seek if quiet else lambda: None
        how = {"rounds": rounds, "warm_up": WARM_UP, "before_round": seek}
        for index, way in shuffled(every, bench.progress(label), **how):
            if index >= 0 and index % every[way]:
                continue
            found, bad = play(way)
            wrong[way] += bad
            if index >= 0:
                blocks[index][way] = found

    def taken(get: Callable[[Block], Any], over: Callable[[Any], Any]) -> dict[str, list[Any]]:
        return {way: [get(f[way]) / over(f) for f in blocks if way in f] for way in every}

    def both(get: Callable[[Block], Any]) -> tuple[dict[str, Any], dict[str, float]]:
        """Return the summaries, and the medians of the ratios to the resident batches."""
        ratios = taken(get, lambda found: get(found[RESIDENT]))
        return summaries(taken(get, lambda _: 1)), {w: median(r) for w, r in ratios.items()}

    step, ratios = both(attrgetter("step_us"))
    result = {
        "steps_per_block": STEPS,
        "step": step,
        "ratios": ratios,
        "host": summaries(taken(lambda found: fmean(found.batch_us), lambda _: 1)),
        "wrong": wrong,
    }
    if blocks[0][RESIDENT].kernels_us is not None:
        result["kernels"], result["kernels_over_resident"] = both(attrgetter("kernels_us"))
    return result


def one_block(
    way: ReplayFeed, storage: Storage, indices: list[torch.Tensor], work: Any, device: torch.device
) -> tuple[Block, int]:
    """Run one block. Return its times, and the number of steps with wrong rows.

    A last batch with wrong values counts as one more. Of a feed that draws rows itself, only the
    last batch can be compared.
    """
    reader = RowReader()
    with way.open(storage, indices, device) as batches:
        found = block(batches, reader.read, work, device, warm_up=WARM_UP_STEPS)
        wrong = 0
        if not way.draws:
            wrong = sum(
                not torch.equal(rows.cpu().flatten(), indices[step % len(indices)])
                for step, rows in enumerate(reader.rows)
            )
        rows = reader.last[ROW].cpu().flatten()
        return found, wrong + any(
            not torch.equal(reader.last[name].cpu(), leaf[rows]) for name, leaf in storage.items()
        )


# ---- ways to bring rows to a learner -------------------------------------------------------------


class ReplayFeed(NamedTuple):
    """One way to bring rows to a learner."""

    name: str
    open: Callable[[Storage, Indices, torch.device], Any]
    """Returns a context that cycles through the batches of these rows."""
    every: int = 1
    """It takes part in every ``every``-th round, since some feeds are ten times slower."""
    draws: bool = False
    """Whether it draws rows itself, at random."""


@contextmanager
def _resident(storage: Storage, indices: Indices, device: torch.device) -> Iterator[Batches]:
    batches = [{k: v[index].to(device) for k, v in storage.items()} for index in indices]
    yield cycle(batches)


@contextmanager
def _ours(
    storage: Storage, indices: Indices, device: torch.device, *, threaded: bool = False
) -> Iterator[Batches]:
    rows = cycle(indices)
    with tdcopier.prefetch(
        lambda: tdcopier.start_gather(storage, next(rows), device),
        device,
        depth=DEPTH,
        threaded=threaded,
    ) as batches:
        yield iter(batches)


@contextmanager
def _ours_in_loop(storage: Storage, indices: Indices, device: torch.device) -> Iterator[Batches]:
    """Yield batches that the learner's own thread starts one ahead."""

    def batches() -> Batches:
        rows = cycle(indices)
        coming = tdcopier.start_gather(storage, next(rows), device)
        while True:
            batch = coming.wait()
            coming = tdcopier.start_gather(storage, next(rows), device)
            yield batch

    yield batches()


def _sample(storage: Storage, index: torch.Tensor) -> Storage:
    return {name: leaf[index] for name, leaf in storage.items()}


@contextmanager
def _plain(storage: Storage, indices: Indices, device: torch.device) -> Iterator[Batches]:
    yield ({k: v.to(device) for k, v in _sample(storage, i).items()} for i in cycle(indices))


@contextmanager
def _pinned(storage: Storage, indices: Indices, device: torch.device) -> Iterator[Batches]:
    def move(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.pin_memory().to(device, non_blocking=True)

    yield (map_tensors(_sample(storage, index), move) for index in cycle(indices))


@contextmanager
def _in_threads(storage: Storage, indices: Indices, device: torch.device) -> Iterator[Batches]:
    """Do as a buffer with ``prefetch=`` whose last transform is ``.to(device)``."""

    def sample(index: torch.Tensor) -> Storage:
        return {k: v.to(device) for k, v in _sample(storage, index).items()}

    with ThreadPoolExecutor(DEPTH) as threads:

        def batches() -> Batches:
            rows = cycle(indices)
            ahead = deque(threads.submit(sample, next(rows)) for _ in range(DEPTH))
            while True:
                batch = ahead.popleft().result()
                ahead.append(threads.submit(sample, next(rows)))
                yield batch

        yield batches()


class _PinnedBuffers:
    """Pinned buffers in turn: one is filled while the device reads another."""

    def __init__(self, storage: Storage, rows: int, count: int) -> None:
        self._buffers = [
            {
                k: torch.empty(rows, *v.shape[1:], dtype=v.dtype, pin_memory=True)
                for k, v in storage.items()
            }
            for _ in range(count)
        ]
        self._read: list[torch.Event | None] = [None] * count
        self._turn = 0

    def send(self, storage: Storage, index: torch.Tensor, device: torch.device) -> Storage:
        turn, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        read = self._read[turn]
        if read is not None:
            read.synchronize()
        buffers = self._buffers[turn]
        for name, leaf in storage.items():
            torch.index_select(leaf, 0, index, out=buffers[name])
        moved = {name: buffer.to(device, non_blocking=True) for name, buffer in buffers.items()}
        self._read[turn] = torch.accelerator.current_stream(device).record_event()
        return moved


@contextmanager
def _by_hand(storage: Storage, indices: Indices, device: torch.device) -> Iterator[Batches]:
    buffers = _PinnedBuffers(storage, len(indices[0]), DEPTH + 1)
    yield (buffers.send(storage, index, device) for index in cycle(indices))


@contextmanager
def _torchrl(
    storage: Storage,
    indices: Indices,
    device: torch.device,
    *,
    in_threads: bool,
    packed: bool = False,
) -> Iterator[Batches]:
    """Yield batches of a torchrl buffer, which draws the rows itself at random."""
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    rows = len(next(iter(storage.values())))
    batch, prefetch = len(indices[0]), DEPTH if in_threads else None
    if packed:
        from tdcopier.torchrl import PackedLazyTensorStorage, PackedTensorDictReplayBuffer

        table = PackedLazyTensorStorage(rows, sample_device=device)
        buffer = PackedTensorDictReplayBuffer(storage=table, batch_size=batch, prefetch=prefetch)
    else:
        table = LazyTensorStorage(rows)
        buffer = TensorDictReplayBuffer(storage=table, batch_size=batch, prefetch=prefetch)
    buffer.extend(TensorDict({k: v[:1] for k, v in storage.items()}, [1]))
    # Replaces the storage instead of filling it, to save the time of writing gigabytes.
    table._storage = TensorDict(dict(storage), [rows])
    table._len = rows
    if packed:
        yield iter(buffer.sample, None)
    elif in_threads:
        buffer.append_transform(lambda batch: batch.to(device))
        yield iter(buffer.sample, None)
    else:
        yield (buffer.sample().to(device) for _ in cycle([0]))


def feeds() -> list[ReplayFeed]:
    """Return every feed that can run here: the reference of the ratios, then ours, then others."""
    found = [
        ReplayFeed(RESIDENT, _resident),
        ReplayFeed(OURS, _ours),
        ReplayFeed(f"{OURS}, a reader of its own", partial(_ours, threaded=True)),
        ReplayFeed(f"{OURS}, start_gather() one batch ahead", _ours_in_loop),
        ReplayFeed("index_select into pinned memory, non_blocking .to(), by hand", _by_hand),
        ReplayFeed("leaf[index].to(device)", _plain, SELDOM),
        ReplayFeed("leaf[index].to(device) in threads", _in_threads, SELDOM),
        ReplayFeed("leaf[index].pin_memory(), non_blocking .to()", _pinned, SELDOM),
    ]
    try:
        import torchrl.data  # noqa: F401
    except ImportError:
        return found
    return [
        *found,
        *(
            ReplayFeed(name, partial(_torchrl, **how), SELDOM, draws=True)
            for name, how in TORCHRL.items()
        ),
    ]
