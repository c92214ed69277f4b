"""A replay buffer in an actor of Ray: rows and batches cross as parcels, one buffer each."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ray
import torch

import tdcopier

Rows = dict[str, torch.Tensor]


class Ring:
    """The newest rows. Any buffer with these methods may take its place, such as torchrl's."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.written = capacity, 0
        self.rows: Rows = {}

    def extend(self, rows: Rows) -> None:
        count = len(next(iter(rows.values())))
        index = torch.arange(self.written, self.written + count) % self.capacity
        for name, leaf in rows.items():
            if name not in self.rows:
                self.rows[name] = leaf.new_empty(self.capacity, *leaf.shape[1:])
            self.rows[name][index] = leaf
        self.written += count

    def sample(self, batch_size: int) -> Rows:
        index = torch.randint(len(self), (batch_size,))
        return {name: leaf[index] for name, leaf in self.rows.items()}

    def __len__(self) -> int:
        return min(self.written, self.capacity)


class Replay:
    """Has the buffer: takes parcels of rows, and gives parcels of batches."""

    def __init__(self, make_buffer: Callable[[], Any]) -> None:
        self.buffer = make_buffer()

    def extend(self, rows: tdcopier.Parcel) -> int:
        self.buffer.extend(rows.tree())
        return len(self.buffer)

    def sample(self, batch_size: int) -> tdcopier.Parcel:
        return tdcopier.pack(self.buffer.sample(batch_size))


class Actor:
    """Writes rows; here, points and their distances from the origin."""

    def __init__(self, replay: Any, seed: int) -> None:
        self.replay = replay
        self.generator = torch.Generator().manual_seed(seed)

    def act(self, times: int, rows: int = 256) -> int:
        size = 0
        for _ in range(times):
            points = torch.randn(rows, 2, generator=self.generator)
            seen = {"observation": points, "reward": -points.norm(dim=1, keepdim=True)}
            size = ray.get(self.replay.extend.remote(tdcopier.pack(seen)))
        return size


def batches(replay: Any, device: str, size: int = 128, ahead: int = 2) -> Iterator[Any]:
    """Yield batches on the device, asked for ahead; the current stream waits for each copy."""
    asked = deque(replay.sample.remote(size) for _ in range(ahead))
    while True:
        asked.append(replay.sample.remote(size))
        parcel = ray.get(asked.popleft())  # in the memory of Ray's store
        yield tdcopier.start_copy(parcel, device).wait()


def main() -> None:
    device = "cuda"
    if not torch.cuda.is_available():
        from tdcopier import sim

        sim.enable()
        device = "sim"
    replay = ray.remote(Replay).remote(partial(Ring, 10_000))
    actors: list[Any] = [ray.remote(Actor).remote(replay, seed) for seed in range(2)]
    ray.get([actor.act.remote(1) for actor in actors])  # the first rows
    acting = [actor.act.remote(20) for actor in actors]
    value = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    value.to(device)
    optimizer = torch.optim.Adam(value.parameters(), 0.01)
    for _, batch in zip(range(200), batches(replay, device), strict=False):
        loss = (value(batch["observation"]) - batch["reward"]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    size = max(ray.get(acting))
    ray.shutdown()
    print(f"{device}: {size} rows, the loss is {loss.item():.3f}")


if __name__ == "__main__":
    main()
