"""SAC learns to hold a pendulum up; its steps are one CUDA graph, or run without CUDA on the host.

``python docs/examples/pendulum.py --picture pendulum.png`` needs torchrl, gymnasium and matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gymnasium
import torch
from learners import sac
from tensordict import TensorDict
from tqdm import tqdm

from tdcopier.torchrl import (
    DeviceRandomSampler,
    GraphedLearner,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
)

RANDOM, AT_ONCE, BATCH = 1_000, 8, 256


def train(steps: int, device: str, seed: int = 0) -> list[float]:
    """Return the sum of the rewards of each episode of 200 steps; -1,200 is chance, -150 is good.

    Args:
        steps: of the environment, with one step of the learner for each.
        device: where to learn.
        seed: of the environment, the weights and the samples.
    """
    torch.manual_seed(seed)
    agent = sac(3, 1, device)
    buffer = PackedTensorDictReplayBuffer(
        storage=PackedLazyTensorStorage(steps, sample_device=device, pinned=True),
        sampler=DeviceRandomSampler(device),
        batch_size=BATCH,
    )
    env = gymnasium.make("Pendulum-v1")
    observation, _ = env.reset(seed=seed)
    returns, rows = [0.0], []
    with GraphedLearner(buffer, agent.update) as learner:
        for number in tqdm(range(steps), "pendulum"):
            now = torch.from_numpy(observation)
            if number < RANDOM:
                action = torch.rand(1) * 2 - 1
            else:
                with torch.no_grad():
                    seen = TensorDict({"observation": now[None].to(device)}, [1])
                    action = agent.policy(seen)["action"][0].cpu()
            observation, reward, _, is_over, _ = env.step(2.0 * action.numpy())
            returns[-1] += float(reward)
            rows.append(row(now, action, torch.from_numpy(observation), float(reward)))
            if is_over:
                observation, _ = env.reset()
                returns.append(0.0)
            if len(rows) == AT_ONCE:
                buffer.extend(torch.stack(rows))
                rows.clear()
                if number >= RANDOM:
                    learner.steps(AT_ONCE)
    return returns[:-1]


def row(now: torch.Tensor, action: torch.Tensor, later: torch.Tensor, reward: float) -> TensorDict:
    """Return a row of the buffer. An episode only ends for lack of time, so none is "done"."""
    never = torch.zeros(1, dtype=torch.bool)
    after = {
        "observation": later,
        "reward": torch.tensor([reward / 10.0]),
        "done": never,
        "terminated": never,
    }
    return TensorDict({"observation": now, "action": action, "next": after}, device="cpu")


def draw(returns: dict[str, list[float]], picture: Path) -> None:
    """Draw the returns of runs over the steps of the environment."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for name, found in returns.items():
        axes.plot([200 * (number + 1) for number in range(len(found))], found, label=name)
    axes.set_xlabel("steps of the environment, and of the learner")
    axes.set_ylabel("sum of the rewards of an episode")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--picture", type=Path, help="file for a picture")
    options = parser.parse_args()
    found = {}
    for seed in range(options.seeds):
        found[f"seed {seed}"] = train(options.steps, options.device, seed)
        print(json.dumps({"seed": seed, "last five": found[f"seed {seed}"][-5:]}))
    if options.picture:
        draw(found, options.picture)
        print(f"wrote {options.picture}")


if __name__ == "__main__":
    main()
