"""The recipe's replay buffer in Ray, and in its stand-in, gives rows as they were written."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from ray_stand_ins import stand_in_for_ray
from recipe_support import assert_all_packed, recipe

import tdcopier

pytestmark = pytest.mark.filterwarnings("ignore:::ray")


@pytest.fixture(scope="module")
def real_ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False
    )
    yield ray
    ray.shutdown()


@pytest.fixture(params=["its stand-in", "ray"])
def ray(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "ray":
        return request.getfixturevalue("real_ray")
    stand_in_for_ray(monkeypatch)
    return importlib.import_module("ray")


@pytest.fixture(scope="module")
def torchrl_data() -> Any:
    """Is imported before there is a stand-in: torchrl looks whether Ray is installed."""
    return pytest.importorskip("torchrl.data")


def rows_of(begin: int, count: int) -> dict[str, torch.Tensor]:
    numbers = torch.arange(begin, begin + count)
    frames = numbers[:, None].to(torch.uint8).expand(count, 5_000)
    return {"number": numbers, "frame": frames, "reward": numbers / 2}


def test_batches_on_the_device_have_rows_as_they_were_written(ray, device, copies):
    module = recipe("ray_replay")

    def make_ring() -> Any:
        return module.Ring(100)

    replay = ray.remote(module.Replay).remote(make_ring)
    sizes = [
        ray.get(replay.extend.remote(tdcopier.pack(rows_of(begin, 40)))) for begin in (0, 40, 80)
    ]
    assert sizes == [40, 80, 100]
    copies.clear()
    seen: set[int] = set()
    for batch in islice(module.batches(replay, device, size=32), 20):
        assert {leaf.device for leaf in batch.values()} == {torch.device(device)}
        numbers = batch["number"].cpu()
        assert torch.equal(batch["reward"].cpu(), numbers / 2)
        assert torch.equal(batch["frame"].cpu(), rows_of(0, 120)["frame"][numbers])
        seen |= set(numbers.tolist())
    assert seen <= set(range(20, 120))  # the first twenty were written over
    assert len(seen) > 80
    assert_all_packed(copies, [3] * 20)


def test_actors_write_from_their_processes(ray):
    module = recipe("ray_replay")
    replay = ray.remote(module.Replay).remote(lambda: module.Ring(1_000))
    actors = [ray.remote(module.Actor).remote(replay, seed) for seed in range(2)]
    assert max(ray.get([actor.act.remote(2, 50) for actor in actors])) == 200
    batch = ray.get(replay.sample.remote(300)).tree()
    assert torch.equal(batch["reward"], -batch["observation"].norm(dim=1, keepdim=True))
    assert len(batch["reward"].unique()) > 100


def test_a_buffer_of_torchrl_takes_the_place_of_the_ring(torchrl_data, ray, device):
    TensorDict = importlib.import_module("tensordict").TensorDict

    def make_buffer() -> Any:
        storage = torchrl_data.LazyTensorStorage(100)
        return torchrl_data.TensorDictReplayBuffer(storage=storage)

    replay = ray.remote(recipe("ray_replay").Replay).remote(make_buffer)
    rows = TensorDict(rows_of(0, 40), [40])
    assert ray.get(replay.extend.remote(tdcopier.pack(rows))) == 40
    batch = tdcopier.copy(ray.get(replay.sample.remote(32)), device)
    assert type(batch) is TensorDict
    assert batch.device == torch.device(device)
    assert torch.equal(batch["reward"].cpu(), batch["number"].cpu() / 2)
