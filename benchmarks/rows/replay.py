"""Times a learner that samples from a replay storage, against one with batches on the device.

There are two learners: one keeps the device busy for some milliseconds per step with a few large
kernels; the other keeps the host busy with 500 small kernels, and so competes for the GIL.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import torch
from loops.learner import learners
from loops.steps import Check, compared
from tool.measure import Bench
from tool.tables import OURS, RESIDENT
from tool.target_forms import Target, at_most, count_wrong, none
from tool.way import WAIT, Way

import tdcopier
from rows.storages import ROW, Replay, Storage, drawn, pinned_like, rows_of, with_each

STEP_MS = 4.0  # duration of a step of the learner with large kernels
ROUNDS_PER_REPEAT = 0.02
INDICES = 32  # batches whose rows are drawn beforehand
WANTED = 1.03
TORCHRL = {
    f"{OURS}'s storage and buffer in torchrl, prefetch": {"in_threads": True, "packed": True},
    "torchrl, sample().to(device)": {"in_threads": False},
    "torchrl, transform .to(device), prefetch": {"in_threads": True},
}
DEPTH = 2  # how many batches the ways run ahead

Indices = Sequence[torch.Tensor]
"""The rows of each batch, in turn."""


def run(bench: Bench) -> dict[str, Any]:
    rows, works = rows_of(bench), learners(bench.device, STEP_MS)

    def replay(name: str, replay: Replay, storage: Storage) -> dict[str, Any]:
        indices = drawn(replay, len(storage[ROW]), INDICES)
        return {
            "learners": {
                learner: compared(
                    bench,
                    f"replay, {name}, {learner}",
                    ways(storage, len(indices[0]), bench.device),
                    indices,
                    partial(check, storage, indices),
                    lambda way, work=work: work,
                    rounds=bench.rounds(ROUNDS_PER_REPEAT),
                )[0]
                for learner, work in works.items()
            }
        }

    return {
        "what": "A learner that samples from a replay storage: time of a step",
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


def check(storage: Storage, indices: Indices, way: Way) -> Check:
    """Compare the row numbers at each step, unless the way draws them, and some whole batches."""

    def is_right(_: int, batch: Any) -> bool:
        rows = batch[ROW].cpu().flatten()
        return all(torch.equal(batch[name].cpu(), leaf[rows]) for name, leaf in storage.items())

    def right_rows(number: int) -> torch.Tensor:
        return indices[number % len(indices)]

    draws = way.name in TORCHRL
    return Check(lambda batch: batch[ROW].flatten(), None if draws else right_rows, is_right)


# ---- ways to bring rows to a learner -------------------------------------------------------------


def ways(storage: Storage, rows: int, device: torch.device) -> list[Way]:
    """Return every way that can run here: the reference of the ratios, then ours, then others.

    Their sources are row numbers, as many as a batch has rows.
    """

    def gather(index: torch.Tensor) -> Any:
        return tdcopier.start_gather(storage, index, device)

    def gathers(order: Indices, threaded: bool) -> Any:
        turn = cycle(order)
        return tdcopier.prefetch(lambda: gather(next(turn)), device, depth=DEPTH, threaded=threaded)

    def plain(index: torch.Tensor) -> Storage:
        return {name: leaf[index].to(device) for name, leaf in storage.items()}

    found = [
        Way(RESIDENT, prepare=plain),
        Way(OURS, feed=partial(gathers, threaded=False)),
        Way(f"{OURS}, a reader of its own", feed=partial(gathers, threaded=True)),
        Way(f"{OURS}, start_gather() one batch ahead", gather, WAIT),
        Way(
            "index_select into pinned memory, non_blocking .to(), by hand",
            finish=by_hand(storage, rows, device),
        ),
        Way("leaf[index].to(device)", finish=plain),
    ]
    if importlib.util.find_spec("torchrl"):
        found += [
            Way(name, feed=partial(_torchrl, storage, device, **how))
            for name, how in TORCHRL.items()
        ]
    return found


def by_hand(storage: Storage, rows: int, device: torch.device) -> Callable[[torch.Tensor], Storage]:
    """Return a way with pinned buffers in turn: one is filled while the device reads another."""
    buffers = cycle([[pinned_like(storage, rows), None] for _ in range(DEPTH + 1)])

    def send(index: torch.Tensor) -> Storage:
        buffer = next(buffers)
        rows, read = buffer
        if read is not None:
            read.synchronize()
        for name, leaf in storage.items():
            torch.index_select(leaf, 0, index, out=rows[name])
        moved = {name: leaf.to(device, non_blocking=True) for name, leaf in rows.items()}
        buffer[1] = torch.accelerator.current_stream(device).record_event()
        return moved

    return send


@contextmanager
def _torchrl(
    storage: Storage,
    device: torch.device,
    indices: Indices,
    *,
    in_threads: bool,
    packed: bool = False,
) -> Iterator[Iterator[Any]]:
    """Yield batches of a torchrl buffer, which draws the rows itself at random."""
    from tensordict import TensorDict
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    rows = len(storage[ROW])
    how = {"batch_size": len(indices[0]), "prefetch": DEPTH if in_threads else None}
    if packed:
        from tdcopier.torchrl import PackedLazyTensorStorage, PackedTensorDictReplayBuffer

        table = PackedLazyTensorStorage(rows, sample_device=device)
        buffer = PackedTensorDictReplayBuffer(storage=table, **how)
    else:
        table = LazyTensorStorage(rows)
        buffer = TensorDictReplayBuffer(storage=table, **how)
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
