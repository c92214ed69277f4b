"""Learners with a model and a buffer each, and loops that are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from torchrl_support import BATCH, CAPACITY, fill

from tdcopier.torchrl import (
    DeviceRandomSampler,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
)


def buffer_on(device: str, sampler: Any = None, **options: Any) -> PackedTensorDictReplayBuffer:
    storage = PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True)
    sampler = DeviceRandomSampler(device) if sampler is None else sampler
    options = {"batch_size": BATCH, **options}
    return PackedTensorDictReplayBuffer(storage=storage, sampler=sampler, **options)


class Learner:
    """Learns the reward from the observation, with an optimizer that has a state."""

    def __init__(self, device: str, **options: Any) -> None:
        torch.manual_seed(3)
        self.model = nn.Linear(5, 1).to(device)
        options = {"lr": 0.05, "capturable": torch.device(device).type == "cuda", **options}
        self.optimizer = torch.optim.Adam(self.model.parameters(), **options)

    def update(self, batch: Any) -> TensorDict:
        found = self.model(batch["observation"].float())
        error = (found - batch["next", "reward"].float()).square().mean()
        error.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return TensorDict({"loss": error.detach(), "index": batch["index"]})

    def values(self) -> list[list[float]]:
        return [parameter.tolist() for parameter in self.model.parameters()]


def both(device: str, make: Callable[[], Any], **options: Any) -> tuple[Learner, Learner, Any, Any]:
    """Returns two learners with a buffer each: one for a loop written by hand."""
    buffers = [buffer_on(device, make(), **options) for _ in range(2)]
    fill(buffers, 44)
    return Learner(device), Learner(device), *buffers


def steps_by_hand(learner: Learner, buffer: Any, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        found.append(learner.update(buffer.sample()).clone())
    return found


def assert_equal_steps(found: list[Any], wanted: list[Any]) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours["index"].cpu(), theirs["index"].cpu())
        assert ours["loss"].item() == theirs["loss"].item()
