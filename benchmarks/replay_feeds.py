"""Ways to bring rows of a storage to a learner, each as an iterator over device batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from storages import Storage
from tables import OURS, RESIDENT

import tdcopier
from tdcopier.workloads import map_tensors

THREADED = f"{OURS}, a reader of its own"
BY_HAND = "index_select into pinned memory, non_blocking .to(), by hand"
SELDOM = 3
DEPTH = 2  # how many batches the feeds run ahead

Batches = Iterator[Any]
Indices = list[torch.Tensor]
"""The rows of each batch, in turn."""


class ReplayFeed(NamedTuple):
    """One way to bring rows to a learner."""

    name: str
    open: Callable[[Storage, Indices, torch.device], Any]
    """Returns a context that cycles through the batches of these rows."""
    every: int = 1
    """It takes part in every ``every``-th round, since some feeds are ten times slower."""


@contextmanager
def _resident(storage: Storage, indices: Indices, device: torch.device) -> Iterator[Batches]:
    batches = [{k: v[index].to(device) for k, v in storage.items()} for index in indices]
    yield cycle(batches)


@contextmanager
def _ours(
    storage: Storage,
    indices: Indices,
    device: torch.device,
    *,
    threaded: bool = False,
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
        ReplayFeed(THREADED, partial(_ours, threaded=True)),
        ReplayFeed(f"{OURS}, start_gather() one batch ahead", _ours_in_loop),
        ReplayFeed(BY_HAND, _by_hand),
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
        ReplayFeed(
            f"{OURS}'s storage and buffer in torchrl, prefetch",
            partial(_torchrl, in_threads=True, packed=True),
            SELDOM,
        ),
        ReplayFeed("torchrl, sample().to(device)", partial(_torchrl, in_threads=False), SELDOM),
        ReplayFeed(
            "torchrl, transform .to(device), prefetch", partial(_torchrl, in_threads=True), SELDOM
        ),
    ]
