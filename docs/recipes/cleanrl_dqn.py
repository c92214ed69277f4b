"""A DQN in cleanrl's style that prefetches batches from its buffer."""

import random
import threading
from typing import Any

import torch
from torch import nn

import tdcopier


class Buffer:
    """A ring of transitions on the host, locked: another thread samples."""

    def __init__(self, capacity: int, observed: int, batch_size: int) -> None:
        self.rows = {
            "observation": torch.zeros(capacity, observed),
            "action": torch.zeros(capacity, 1, dtype=torch.int64),
            "reward": torch.zeros(capacity),
            "terminated": torch.zeros(capacity),
            "next_observation": torch.zeros(capacity, observed),
        }
        self.capacity, self.batch_size, self.written = capacity, batch_size, 0
        self.lock = threading.Lock()

    def add(self, **transition: Any) -> None:
        with self.lock:
            row = self.written % self.capacity
            for name, value in transition.items():
                self.rows[name][row] = torch.as_tensor(value)
            self.written += 1

    def sample(self) -> dict[str, torch.Tensor]:
        with self.lock:
            filled = min(self.written, self.capacity)
            index = torch.randint(filled, (self.batch_size,))
            return {name: leaf[index] for name, leaf in self.rows.items()}


def network(observed: int, actions: int) -> nn.Module:
    hidden = nn.Linear(observed, 120)
    return nn.Sequential(hidden, nn.ReLU(), nn.Linear(120, actions))


def train(
    env: Any,
    device: str,
    steps: int = 50_000,
    learning_starts: int = 1_000,
    train_every: int = 4,
    batch_size: int = 128,
) -> nn.Module:
    """Learn a gymnasium environment; return the Q-network."""
    observed, actions = env.observation_space.shape[0], int(env.action_space.n)
    values = network(observed, actions).to(device)
    target = network(observed, actions).to(device)
    target.load_state_dict(values.state_dict())
    optimizer = torch.optim.Adam(values.parameters(), lr=2.5e-3)
    buffer = Buffer(10_000, observed, batch_size)

    observation, _ = env.reset()
    # Nothing is sampled before the first next().
    with tdcopier.prefetch(buffer.sample, device) as batches:
        for step in range(steps):
            if random.random() < max(0.05, 1 - 2 * step / steps):
                action = random.randrange(actions)
            else:
                with torch.no_grad():
                    seen = torch.as_tensor(observation, device=device)
                    action = values(seen).argmax().item()
            following, reward, terminated, truncated, _ = env.step(action)
            buffer.add(
                observation=observation,
                action=action,
                reward=reward,
                terminated=terminated,
                next_observation=following,
            )
            ended = terminated or truncated
            observation = env.reset()[0] if ended else following

            if step < learning_starts or step % train_every:
                continue
            batch = next(batches)  # instead of sample() and .to() per field
            with torch.no_grad():
                worth = target(batch["next_observation"]).amax(1)
                goes_on = 1 - batch["terminated"]
                wanted = batch["reward"] + 0.99 * worth * goes_on
            scores = values(batch["observation"])
            found = scores.gather(1, batch["action"])[:, 0]
            loss = (found - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % (50 * train_every) == 0:
                target.load_state_dict(values.state_dict())
    return values


def main() -> None:
    import gymnasium

    device = "cuda"
    if not torch.cuda.is_available():
        from tdcopier import sim

        sim.enable()
        device = "sim"
    env = gymnasium.make("CartPole-v1")
    values = train(env, device, steps=600, learning_starts=100)
    start = torch.as_tensor(env.reset()[0], device=device)
    print(f"{device}: value of the start {values(start).max().item():.2f}")


if __name__ == "__main__":
    main()
