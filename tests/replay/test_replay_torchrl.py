"""A client of a server with torchrl's buffers gives what the same calls of the buffer give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("torchrl")

from tensordict import TensorDict, assert_close
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    ReplayBuffer,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictReplayBuffer,
)

from tdcopier.torchrl import PackedLazyTensorStorage, PackedTensorDictReplayBuffer, ToDevice

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes:UserWarning"),
]
CAPACITY, BATCH = 60, 12


def rollout(begin: int, count: int = 30) -> TensorDict:
    numbers = torch.arange(begin, begin + count)
    done = numbers % 10 == 9
    return TensorDict(
        {
            "observation": numbers.unsqueeze(1).expand(count, 3).float().contiguous(),
            "pixels": (numbers.view(-1, 1, 1) % 256).expand(count, 4, 4).byte().contiguous(),
            "episode": numbers // 10,
            "next": {
                "observation": numbers.unsqueeze(1).expand(count, 3).float() + 1,
                "reward": numbers.unsqueeze(1).double(),
                "done": done.unsqueeze(1),
                "terminated": done.unsqueeze(1),
            },
        },
        [count],
    )


def n_step() -> Any:
    from torchrl.envs.transforms import MultiStepTransform

    return MultiStepTransform(n_steps=3, gamma=0.9)


def doubled(data: Any) -> Any:
    return data.set("twice", 2 * data["observation"])


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def made(cls: Any, storage: Any, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        kinds = {key: value() if callable(value) else value for key, value in options.items()}
        return cls(storage=storage(CAPACITY), batch_size=BATCH, generator=seeded(), **kinds)

    return make


def slices() -> SliceSampler:
    return SliceSampler(slice_len=4, traj_key="episode", strict_length=False)


def with_transform(make: Callable[[], Any], transform: Callable[[], Any]) -> Callable[[], Any]:
    def both() -> Any:
        buffer = make()
        buffer.append_transform(transform())
        return buffer

    return both


PACKED = made(PackedTensorDictReplayBuffer, PackedLazyTensorStorage)
BUFFERS = {
    "torchrl's": made(TensorDictReplayBuffer, LazyTensorStorage),
    "ours": PACKED,
    "on disk": made(TensorDictReplayBuffer, LazyMemmapStorage),
    "without replacement": made(
        TensorDictReplayBuffer, LazyTensorStorage, sampler=SamplerWithoutReplacement
    ),
    "slices": made(TensorDictReplayBuffer, LazyTensorStorage, sampler=slices),
    "slices of ours": made(PackedTensorDictReplayBuffer, PackedLazyTensorStorage, sampler=slices),
    "with a transform": with_transform(PACKED, lambda: doubled),
    "n steps": with_transform(made(TensorDictReplayBuffer, LazyTensorStorage), n_step),
    "no TensorDicts of its own": made(ReplayBuffer, LazyTensorStorage),
}


def play(buffer: Any) -> list[Any]:
    found = []
    for begin in (0, 30, 60):
        found.append(buffer.extend(rollout(begin)))
        found.append(buffer.sample())
    found.append(buffer.sample(8))
    batch, info = buffer.sample(return_info=True)
    index = info["index"]
    found += [batch, torch.stack(index) if isinstance(index, tuple) else index]
    state = buffer.state_dict()
    found.append(buffer.sample())
    buffer.load_state_dict(state)
    found += [buffer.sample(), torch.tensor([len(buffer), buffer.write_count])]
    return found


def same(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert type(one) is type(other)
        if isinstance(other, TensorDict):
            assert one.batch_size == other.batch_size
            keys = set(other.keys(include_nested=True, leaves_only=True))
            assert set(one.keys(include_nested=True, leaves_only=True)) == keys
            assert all(one[key].dtype == other[key].dtype for key in keys)
            assert_close(one, other, rtol=0, atol=0)
        else:
            assert torch.equal(one, other)


@pytest.mark.parametrize("kind", BUFFERS)
def test_calls_are_those_of_the_buffer(serve, connect, kind):
    server = serve(BUFFERS[kind]())
    same(play(connect(prefetch=0)), play(BUFFERS[kind]()))
    assert server.problems == []


def test_samples_arrive_on_the_device(serve, connect, device):
    serve(PACKED())
    client, local = connect(device=device, prefetch=3, batch_size=16), PACKED()
    local.append_transform(ToDevice(device))
    for buffer in (client, local):
        buffer.extend(rollout(0))
    for _ in range(10):
        batch, wanted = client.sample(), local.sample(16)
        assert batch.device == wanted.device
        same([batch.cpu()], [wanted.cpu()])


def test_priorities_come_back_to_the_sampler(serve, connect, monkeypatch):
    from priority_trees import use_trees_in_python

    use_trees_in_python(monkeypatch)

    def make() -> Any:
        sampler = PrioritizedSampler(CAPACITY, alpha=1.0, beta=0.5)
        return TensorDictReplayBuffer(
            storage=LazyTensorStorage(CAPACITY),
            sampler=sampler,
            batch_size=BATCH,
            priority_key=("next", "error"),
            generator=seeded(),
        )

    def work(buffer: Any) -> list[Any]:
        torch.manual_seed(0)
        found = [buffer.extend(rollout(0))]
        buffer.update_priority(torch.arange(30), torch.arange(30.0))
        for _ in range(5):
            batch = buffer.sample()
            batch["next", "error"] = batch["next", "reward"] * 2
            buffer.update_tensordict_priority(batch)
            found.append(batch)
        return found

    serve(make())
    same(work(connect(prefetch=0)), work(make()))


def test_lists_and_other_trees_are_rows_as_in_torchrl(serve, connect):
    serve(ReplayBuffer(storage=ListStorage(20), batch_size=3, collate_fn=lambda rows: rows))
    client = connect(prefetch=0)
    assert client.extend([torch.tensor(number) for number in range(5)]).tolist() == [0, 1, 2, 3, 4]
    assert client.add(torch.tensor(7)) == 5
    assert {int(row) for row in client.sample(50)} == {0, 1, 2, 3, 4, 7}


def test_a_bad_batch_is_refused_and_the_next_one_written(serve, connect):
    serve(PACKED())
    client = connect(prefetch=0)
    client.extend(rollout(0))
    with pytest.raises(ValueError, match="the replay server: PackedTensorDictReplayBuffer only"):
        client.extend({"a": torch.zeros(3)})
    assert client.extend(rollout(30)).tolist() == list(range(30, 60))


@pytest.mark.filterwarnings("ignore")
def test_a_collector_takes_a_client(serve, connect):
    from torchrl.collectors import Collector
    from torchrl.envs.libs.gym import GymEnv

    pytest.importorskip("gymnasium")
    server = serve(PACKED())
    client = connect(batch_size=8)
    collector = Collector(
        GymEnv("CartPole-v1"),
        None,
        frames_per_batch=10,
        total_frames=50,
        replay_buffer=client,
        init_random_frames=20,
    )
    for nothing in collector:
        assert nothing is None
    collector.shutdown()
    assert len(server) == client.write_count == 50
    assert client.sample()["observation"].shape == (8, 4)
