"""Shared by the tests with torchrl: samplers, data, and pairs of buffers that sample alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    StreamingSliceSampler,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers import Sampler

from tdcopier.torchrl import (
    PackedLazyMemmapStorage,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
    ToDevice,
)

CAPACITY, BATCH, COLUMNS, EPISODE = 60, 12, 3, 10


class WeightedSampler(Sampler):
    """Samples rows by weight and returns importance weights, like a prioritized sampler."""

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        rows = torch.Size(storage.shape)
        weights = torch.arange(1.0, rows.numel() + 1)
        flat = torch.multinomial(weights, batch_size, replacement=True, generator=self._rng)
        info = {
            "priority_weight": (1 / weights[flat]).numpy(),
            "flat": flat,
            "beta": torch.tensor(0.4),  # one value for all rows
        }
        if storage.ndim == 1:
            return flat, info
        return torch.unravel_index(flat, rows), info

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def _empty(self) -> None:
        pass

    def dumps(self, path: Any) -> None:
        pass

    def loads(self, path: Any) -> None:
        pass


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "without replacement": SamplerWithoutReplacement,
    "weighted": WeightedSampler,
    "slices": lambda: SliceSampler(num_slices=4, traj_key="episode"),
    "slices by their ends": lambda: SliceSampler(slice_len=3, end_key=("next", "done")),
    "slices of any length": lambda: SliceSampler(
        slice_len=6, traj_key="episode", strict_length=False
    ),
    "padded slices": lambda: SliceSampler(
        slice_len=6, traj_key="episode", strict_length=False, pad_output=True
    ),
    "slices without replacement": lambda: SliceSamplerWithoutReplacement(
        num_slices=4, traj_key="episode"
    ),
}
ONE_DIMENSION: dict[str, Callable[[], Any]] = {
    "streaming slices": lambda: StreamingSliceSampler(slice_len=3, traj_key="episode"),
}
ROWS = {"partly": 44, "full": CAPACITY, "written over": CAPACITY + 17}
STORAGES = {
    "tensor": (LazyTensorStorage, PackedLazyTensorStorage),
    "memmap": (LazyMemmapStorage, PackedLazyMemmapStorage),
}


def data(rows: int, ndim: int = 1, start: int = 0) -> TensorDict:
    """Makes steps of episodes whose values count up, so that each row can be recognized."""
    size = (rows,) if ndim == 1 else (COLUMNS, rows // COLUMNS)
    numbers = torch.arange(start, start + torch.Size(size).numel()).view(size)
    steps = numbers % EPISODE
    ends = (steps == EPISODE - 1).unsqueeze(-1)
    return TensorDict(
        {
            "pixels": (numbers[..., None, None] + torch.arange(12).view(3, 4)).to(torch.uint8),
            "observation": numbers[..., None] + torch.rand(*size, 5),
            "episode": numbers // EPISODE,
            "is_init": (steps == 0).unsqueeze(-1),
            "next": {
                "reward": numbers.unsqueeze(-1) / 7,
                "done": ends,
                "terminated": ends & (numbers % 20 > 9).unsqueeze(-1),
                "truncated": torch.zeros_like(ends),
            },
        },
        size,
    )


WAYS = {
    "host, torchrl's buffer": (TensorDictReplayBuffer, False, False),
    "host": (PackedTensorDictReplayBuffer, False, False),
    "ToDevice, torchrl's buffer": (TensorDictReplayBuffer, True, False),
    "ToDevice": (PackedTensorDictReplayBuffer, True, False),
    "sample_device": (PackedTensorDictReplayBuffer, False, True),
}
"""Class of the buffer, whether it has the transform, and whether the storage has the device."""


def two_buffers(
    device: str, way: str, storage: str, sampler: Any, *, ndim: int = 1, **options: Any
) -> tuple[ReplayBuffer, ReplayBuffer]:
    """Returns torchrl's buffer and ours, both still empty."""
    buffer_class, transform, straight = WAYS[way]
    theirs_class, ours_class = STORAGES[storage]

    def common() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(5)
        return {"batch_size": BATCH, "sampler": sampler(), "generator": generator, **options}

    theirs = TensorDictReplayBuffer(storage=theirs_class(CAPACITY, ndim=ndim), **common())
    place = {"sample_device": device} if straight else {}
    ours = buffer_class(storage=ours_class(CAPACITY, ndim=ndim, **place), **common())
    if transform:
        ours.append_transform(ToDevice(device))
    if transform or straight:
        theirs.append_transform(lambda batch: batch.to(device))
    return theirs, ours


def fill(buffers: tuple[ReplayBuffer, ...], rows: int, ndim: int = 1) -> None:
    """Adds the same rows to each in two parts, so that a full storage is overwritten."""
    torch.manual_seed(0)
    first = min(rows, CAPACITY) // 6 * 3
    for count, start in ((first, 0), (rows - first, first)):
        given = data(count - count % COLUMNS if ndim == 2 else count, ndim, start)
        for buffer in buffers:
            buffer.extend(given.clone())
