"""A single-file DQN in cleanrl's style whose batches are prefetched from the buffer."""

import random
import threading

import torch
from torch import nn

import tdcopier


class Buffer:
    """A ring of transitions on the host. It has a lock because a thread of its own samples."""

    def __init__(self, capacity, observed, batch_size):
        self.rows = {
            "observation": torch.zeros(capacity, observed),
            "action": torch.zeros(capacity, 1, dtype=torch.int64),
            "reward": torch.zeros(capacity),
            "terminated": torch.zeros(capacity),
            "next_observation": torch.zeros(capacity, observed),
        }
        self.capacity, self.batch_size, self.written = capacity, batch_size, 0
        self.lock = threading.Lock()

    def add(self, **transition):
        with self.lock:
            for name, value in transition.items():
                self.rows[name][self.written % self.capacity] = torch.as_tensor(value)
            self.written += 1

    def sample(self):
        with self.lock:
            index = torch.randint(min(self.written, self.capacity), (self.batch_size,))
            return {name: leaf[index] for name, leaf in self.rows.items()}


def network(observed, actions):
    return nn.Sequential(nn.Linear(observed, 120), nn.ReLU(), nn.Linear(120, actions))


def train(env, device, steps=50_000, learning_starts=1_000, train_every=4, batch_size=128):
    """Learns `env`, a gymnasium environment, and returns the Q-network."""
    observed, actions = env.observation_space.shape[0], int(env.action_space.n)
    values, target = network(observed, actions).to(device), network(observed, actions).to(device)
    target.load_state_dict(values.state_dict())
    optimizer = torch.optim.Adam(values.parameters(), lr=2.5e-3)
    buffer = Buffer(10_000, observed, batch_size)

    observation, _ = env.reset()
    with tdcopier.prefetch(buffer.sample, device) as batches:  # samples nothing yet
        for step in range(steps):
            if random.random() < max(0.05, 1 - 2 * step / steps):
                action = random.randrange(actions)
            else:
                with torch.no_grad():
                    action = values(torch.as_tensor(observation, device=device)).argmax().item()
            following, reward, terminated, truncated, _ = env.step(action)
            buffer.add(
                observation=observation,
                action=action,
                reward=reward,
                terminated=terminated,
                next_observation=following,
            )
            observation = env.reset()[0] if terminated or truncated else following

            if step < learning_starts or step % train_every:
                continue
            batch = next(batches)  # replaces buffer.sample() and a .to() per field
            with torch.no_grad():
                worth = target(batch["next_observation"]).amax(1)
                wanted = batch["reward"] + 0.99 * worth * (1 - batch["terminated"])
            found = values(batch["observation"]).gather(1, batch["action"])[:, 0]
            loss = (found - wanted).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % (50 * train_every) == 0:
                target.load_state_dict(values.state_dict())
    return values
