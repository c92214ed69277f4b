"""A stable-baselines3 replay buffer that tdcopier gathers and sends."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.type_aliases import ReplayBufferSamples

import tdcopier


class GatheredReplayBuffer(ReplayBuffer):
    """Pass it as `replay_buffer_class=` to DQN, SAC, TD3 and the like.

    Not with `n_steps` above 1: an algorithm tells only a buffer of its own of that, and this one
    would give it one-step batches.
    """

    def __init__(self, buffer_size: int, observation_space: Any, *others: Any, **more: Any) -> None:
        if isinstance(observation_space, spaces.Dict):
            raise ValueError(
                "GatheredReplayBuffer takes observations that are one array: for dicts of them, "
                "use stable_baselines3's DictReplayBuffer"
            )
        super().__init__(buffer_size, observation_space, *others, **more)

    def _get_samples(self, batch_inds: np.ndarray, env: Any = None) -> ReplayBufferSamples:
        if env is not None:  # VecNormalize works on host arrays
            return super()._get_samples(batch_inds, env)
        count = len(batch_inds)
        environments = np.random.randint(0, high=self.n_envs, size=count)
        fields = ["observations", "actions", "rewards", "dones", "timeouts"]
        if not self.optimize_memory_usage:
            fields.append("next_observations")
        rows = {field: getattr(self, field) for field in fields}
        index = (batch_inds, environments)
        handles = [tdcopier.start_gather(rows, index, self.device)]
        if self.optimize_memory_usage:  # next observations are in the next row
            rows = {"next_observations": self.observations}
            index = ((batch_inds + 1) % self.buffer_size, environments)
            handles.append(tdcopier.start_gather(rows, index, self.device))

        batch: dict[str, torch.Tensor] = {}
        for handle in handles:
            handle.wait_gathered()  # from here on, add() may overwrite the rows
            batch |= handle.wait()
        return ReplayBufferSamples(
            observations=batch["observations"],
            actions=batch["actions"],
            next_observations=batch["next_observations"],
            dones=(batch["dones"] * (1 - batch["timeouts"])).reshape(-1, 1),
            rewards=batch["rewards"].reshape(-1, 1),
        )


def main() -> None:
    device = "cuda"
    if not torch.cuda.is_available():
        from tdcopier import sim

        sim.enable()
        device = "sim"
    images = spaces.Box(0, 255, (3, 64, 64), np.uint8)
    buffer = GatheredReplayBuffer(200, images, spaces.Discrete(6), device)
    for number in range(200):
        image, action = images.sample(), np.array([number % 6])
        buffer.add(image, image, action, np.ones(1), np.zeros(1), [{}])
    batch = buffer.sample(64)
    print(f"{batch.observations.device}: {len(batch.observations)} rows")


if __name__ == "__main__":
    main()
