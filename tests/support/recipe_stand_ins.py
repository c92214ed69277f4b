"""Stand-ins for packages that the recipes of the docs use, for machines without them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch


class ReplayBufferSamples(NamedTuple):
    observations: torch.Tensor
    actions: torch.Tensor
    next_observations: torch.Tensor
    dones: torch.Tensor
    rewards: torch.Tensor


class ReplayBuffer:
    """A buffer with the attributes of stable-baselines3's, which makes batches field by field."""

    def __init__(
        self,
        buffer_size: int,
        observation_space: Any,
        action_space: Any,
        device: str,
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
    ) -> None:
        self.buffer_size = buffer_size // n_envs
        self.n_envs = n_envs
        self.device = torch.device(device)
        self.optimize_memory_usage = optimize_memory_usage
        self.handle_timeout_termination = handle_timeout_termination
        rows = (self.buffer_size, n_envs)
        self.observations = np.zeros((*rows, *observation_space.shape), observation_space.dtype)
        if not optimize_memory_usage:
            self.next_observations = np.zeros_like(self.observations)
        self.actions = np.zeros((*rows, 1), action_space.dtype)
        self.rewards = np.zeros(rows, np.float32)
        self.dones = np.zeros(rows, np.float32)
        self.timeouts = np.zeros(rows, np.float32)
        self.pos = 0
        self.full = False

    def add(self, obs, next_obs, action, reward, done, infos) -> None:
        at, following = self.pos, (self.pos + 1) % self.buffer_size
        self.observations[at] = obs
        if self.optimize_memory_usage:
            self.observations[following] = next_obs
        else:
            self.next_observations[at] = next_obs
        self.actions[at] = action.reshape(self.n_envs, 1)
        self.rewards[at], self.dones[at] = reward, done
        if self.handle_timeout_termination:
            self.timeouts[at] = [info.get("TimeLimit.truncated", False) for info in infos]
        self.pos = following
        self.full |= following == 0

    def sample(self, batch_size: int, env: Any = None) -> ReplayBufferSamples:
        if self.optimize_memory_usage and self.full:  # the newest row has no next observation
            index = (np.random.randint(1, self.buffer_size, size=batch_size) + self.pos) % (
                self.buffer_size
            )
        else:
            filled = self.buffer_size if self.full else self.pos
            index = np.random.randint(0, filled, size=batch_size)
        return self._get_samples(index, env)

    def _normalize_obs(self, observations: np.ndarray, env: Any) -> np.ndarray:
        return observations if env is None else env.normalize_obs(observations)

    def _normalize_reward(self, rewards: np.ndarray, env: Any) -> np.ndarray:
        return rewards if env is None else env.normalize_reward(rewards).astype(np.float32)

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> ReplayBufferSamples:
        which = np.random.randint(0, high=self.n_envs, size=len(batch_inds))
        if self.optimize_memory_usage:
            following = self.observations[(batch_inds + 1) % self.buffer_size, which]
        else:
            following = self.next_observations[batch_inds, which]
        ends = self.dones[batch_inds, which] * (1 - self.timeouts[batch_inds, which])
        fields = [
            self._normalize_obs(self.observations[batch_inds, which], env),
            self.actions[batch_inds, which],
            self._normalize_obs(following, env),
            ends[:, None],
            self._normalize_reward(self.rewards[batch_inds, which][:, None], env),
        ]
        return ReplayBufferSamples(*(torch.tensor(one, device=self.device) for one in fields))


def stand_in_for_stable_baselines3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes imports of stable_baselines3 find the buffer above."""
    buffers = ModuleType("stable_baselines3.common.buffers")
    buffers.ReplayBuffer = ReplayBuffer
    aliases = ModuleType("stable_baselines3.common.type_aliases")
    aliases.ReplayBufferSamples = ReplayBufferSamples
    for module in (buffers, aliases):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("stable_baselines3", "stable_baselines3.common"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


class Accelerator:
    """The part of Accelerate's interface that a loop in one process calls."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.places_batches: list[bool] = []

    def prepare(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        return model.to(self.device), optimizer

    def prepare_data_loader(self, loader: Any, device_placement: bool | None = None) -> Any:
        self.places_batches.append(device_placement is not False)
        return loader

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def stand_in_for_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes imports of accelerate find the class above."""
    module = ModuleType("accelerate")
    module.Accelerator = Accelerator
    monkeypatch.setitem(sys.modules, "accelerate", module)


class Signs:
    """An environment: it shows 1 or -1, and rewards naming the sign with 1; five steps each."""

    observation_space = SimpleNamespace(shape=(1,))
    action_space = SimpleNamespace(n=2)

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)

    def reset(self) -> tuple[np.ndarray, dict[str, Any]]:
        self.turns = 5
        return self._show(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(action == (self.shown > 0))
        self.turns -= 1
        return self._show(), reward, self.turns == 0, False, {}

    def _show(self) -> np.ndarray:
        self.shown = self.generator.choice([-1.0, 1.0])
        return np.array([self.shown], np.float32)
