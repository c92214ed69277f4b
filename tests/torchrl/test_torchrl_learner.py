"""A learner whose steps may be one CUDA graph does the steps of a loop that is written by hand."""

from __future__ import annotations

import pickle
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict_same import assert_same_tensordict

pytest.importorskip("torchrl")

from learner_cases import assert_equal_steps, both, buffer_on, steps_by_hand
from torchrl.data.replay_buffers import SampleUnit
from torchrl.envs.transforms import RewardScaling
from torchrl_support import BATCH, CAPACITY, SAMPLERS, fill

from tdcopier.torchrl import (
    DeviceRandomSampler,
    GraphedLearner,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
    _graphed_step,
    _static_batch,
)
from tdcopier.torchrl._graphed_step import GraphedStep

pytestmark = pytest.mark.usefixtures("no_collections")


@pytest.fixture(params=["the device", "the host alone"])
def place(request, device):
    return device if request.param == "the device" else "cpu"


def test_steps_are_those_of_a_loop_that_is_written_by_hand(place):
    ours, theirs, buffer, other = both(place, lambda: DeviceRandomSampler(place))
    with GraphedLearner(buffer, ours.update) as learner:
        torch.manual_seed(5)
        found = [learner.step().clone() for _ in range(8)]
        assert learner.stats.steps == 8
    torch.manual_seed(5)
    assert_equal_steps(found, steps_by_hand(theirs, other, 8))
    assert ours.values() == theirs.values()


@pytest.mark.parametrize("name", ["random", "without replacement", "weighted", "slices"])
def test_samplers_on_the_host_give_index_and_info(place, name):
    ours, theirs, buffer, other = both(place, SAMPLERS[name])
    seen = []

    def update(batch):
        seen.append(set(batch.keys(True, True)))
        return ours.update(batch)

    learner = GraphedLearner(buffer, update)
    torch.manual_seed(5)
    found = [learner.step().clone() for _ in range(6)]
    torch.manual_seed(5)
    assert_equal_steps(found, steps_by_hand(theirs, other, 6))
    assert ours.values() == theirs.values()
    assert seen[0] == set(other.sample().keys(True, True))


def test_a_buffer_may_grow(place):
    ours, theirs, buffer, other = both(place, lambda: DeviceRandomSampler(place))
    learner = GraphedLearner(buffer, ours.update)
    torch.manual_seed(5)
    found = [learner.step().clone() for _ in range(4)]
    fill([buffer], 10)
    found += [learner.steps(3).clone()]
    torch.manual_seed(5)
    wanted = steps_by_hand(theirs, other, 4)
    fill([other], 10)
    wanted.append(steps_by_hand(theirs, other, 3)[-1])
    assert_equal_steps(found, wanted)
    assert learner.stats.steps == 7


def test_a_learner_that_reads_ahead_learns_from_rows_of_the_step_before(place):
    ours, theirs, buffer, other = both(place, lambda: DeviceRandomSampler(place))
    learner = GraphedLearner(buffer, ours.update, read_ahead=True)
    torch.manual_seed(5)
    found = [learner.step().clone() for _ in range(5)]
    fill([buffer], 10)
    found += [learner.step().clone(), learner.steps(3).clone()]
    with pytest.raises(ZeroDivisionError):
        GraphedLearner(buffer, lambda batch: 1 / 0, read_ahead=True).step()
    wanted = []
    torch.manual_seed(5)
    following = other.sample()
    for number in range(9):
        if number == 5:
            fill([other], 10)
        batch, following = following, other.sample()
        wanted.append(theirs.update(batch).clone())
    assert_equal_steps(found, [*wanted[:6], wanted[8]])
    assert ours.values() == theirs.values()


def test_a_batch_that_was_read_ahead_goes_with_its_storage(place):
    buffer = buffer_on(place)
    fill([buffer], 44)
    learner = GraphedLearner(buffer, lambda batch: batch["observation"].clone(), read_ahead=True)
    learner.step()
    with buffer.storage.writing():
        leaf = buffer.storage._storage["observation"]
        leaf.set_(torch.full_like(leaf, 7))
    assert learner.step().eq(7).all()


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_are_those_of_the_index_after_a_read_that_failed(place, ahead, monkeypatch):
    buffer = buffer_on(place)
    fill([buffer], 44)
    learner = GraphedLearner(buffer, lambda batch: batch.clone(), read_ahead=ahead)
    learner.step()
    with monkeypatch.context() as patch:
        patch.setattr(_static_batch, "start_gather", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            learner.step()
    for _ in range(3):
        batch = learner.step().cpu()
        rows = buffer.storage[:][batch["index"]]
        assert torch.equal(batch["observation"], rows["observation"])


@pytest.mark.parametrize("ahead", [False, True])
def test_another_storage_of_the_buffer_is_read(place, ahead):
    buffer = buffer_on(place)
    fill([buffer], 44)
    learner = GraphedLearner(buffer, lambda batch: batch["observation"].clone(), read_ahead=ahead)
    learner.step()
    other = PackedLazyTensorStorage(CAPACITY, sample_device=place, pinned=True)
    buffer.set_storage(other)
    buffer.writer.register_storage(other)
    buffer.empty()
    fill([buffer], 44)
    with other.writing():
        other._storage["observation"].fill_(7)
    assert learner.step().eq(7).all()
    buffer.set_storage(PackedLazyTensorStorage(CAPACITY, sample_device=place))
    if place != "cpu":
        with pytest.raises(ValueError, match="storage is not pinned"):
            learner.step()


def test_reading_ahead_needs_an_index_that_the_device_draws(place):
    with pytest.raises(ValueError, match="needs an index that the device draws"):
        GraphedLearner(buffer_on(place, SAMPLERS["random"]()), len, read_ahead=True)
    buffer = buffer_on(place)
    fill([buffer], 44)
    learner = GraphedLearner(buffer, len, read_ahead=True)
    assert learner.step() == BATCH
    buffer.set_sampler(SAMPLERS["random"]())
    with pytest.raises(ValueError, match="needs an index that the device draws"):
        learner.step()


def test_only_the_keys_that_are_given_are_read(place):
    buffer = buffer_on(place)
    fill([buffer], 44)
    keys = []
    learner = GraphedLearner(
        buffer, lambda batch: keys.append(set(batch.keys(True, True))), keys=["observation"]
    )
    learner.step()
    assert keys == [{"observation", "index"}]


def test_transforms_of_the_buffer_are_applied(place):
    buffer = buffer_on(place)
    fill([buffer], 44)
    buffer.append_transform(RewardScaling(0.0, 2.0, in_keys=[("next", "reward")]))
    learner = GraphedLearner(buffer, lambda batch: batch)
    batch = learner.step()
    rows = buffer.storage[:][batch["index"].cpu()]
    assert torch.equal(batch["next", "reward"].cpu(), rows["next", "reward"] * 2.0)


def test_rows_that_another_thread_writes_are_read_as_a_whole(device):
    """Each write makes all leaves of some rows equal to its number."""
    storage = PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True)
    buffer = PackedTensorDictReplayBuffer(
        storage=storage, sampler=DeviceRandomSampler(device), batch_size=64
    )

    def rows(number: int) -> TensorDict:
        leaves = {name: torch.full((20, size), number) for name, size in (("a", 400), ("b", 3))}
        return TensorDict(leaves, [20], device="cpu")

    buffer.extend(rows(0))
    ended = threading.Event()

    def write() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            batch = rows(number)
            buffer.extend(batch.to(device) if number % 3 == 0 else batch)

    def update(batch: Any) -> torch.Tensor:
        first = batch["a"][:, :1]
        return ((batch["a"] == first).all() & (batch["b"] == first).all()).logical_not().long()

    torn = torch.zeros((), dtype=torch.int64, device=device)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        with GraphedLearner(buffer, update) as learner:
            for _ in range(200):
                torn += learner.step()
    finally:
        ended.set()
        writer.join()
    assert torn.item() == 0


def test_a_buffer_that_is_made_late_is_made_by_the_learner(place):
    buffer = PackedTensorDictReplayBuffer(
        storage=lambda: PackedLazyTensorStorage(CAPACITY, sample_device=place, pinned=True),
        sampler=lambda: DeviceRandomSampler(place),
        batch_size=BATCH,
        delayed_init=True,
    )
    learner = GraphedLearner(buffer, lambda batch: len(batch))
    fill([buffer], 44)
    assert learner.step() == BATCH


def test_several_learners_share_a_buffer(place):
    buffer = buffer_on(place)
    fill([buffer], 44)
    learners = [GraphedLearner(buffer, lambda batch: batch, read_ahead=n == 1) for n in range(2)]
    for _ in range(6):
        for learner in learners:
            found = learner.step().cpu()
            rows = buffer.storage[:][found["index"]]
            assert torch.equal(found["observation"], rows["observation"])
    assert [learner.stats.steps for learner in learners] == [6, 6]


def test_an_error_of_update_is_raised_and_the_next_step_goes_on(place):
    ours, _, buffer, _ = both(place, lambda: DeviceRandomSampler(place))
    fails = [True]

    def update(batch):
        if fails.pop() if fails else False:
            raise KeyError("mine")
        return ours.update(batch)

    learner = GraphedLearner(buffer, update)
    with pytest.raises(KeyError, match="mine"):
        learner.step()
    assert learner.step()["loss"].isfinite()
    assert learner.stats.steps == 1


def test_buffers_that_do_not_suit_are_refused_with_what_to_do(device):
    with pytest.raises(TypeError, match="got list"):
        GraphedLearner([], len)
    storage = PackedLazyTensorStorage(CAPACITY, sample_device=device)
    plain = PackedTensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    with pytest.raises(ValueError, match="storage is not pinned"):
        GraphedLearner(plain, len)
    with pytest.raises(ValueError, match="leave it out"):
        GraphedLearner(buffer_on(device, prefetch=2), len)
    with pytest.raises(ValueError, match="make it a transform"):
        GraphedLearner(buffer_on(device, collate_fn=lambda rows: rows), len)
    with pytest.raises(ValueError, match="no batch size"):
        GraphedLearner(buffer_on(device, batch_size=None), len)
    with pytest.raises(ValueError, match="warmup must be at least 1"):
        GraphedLearner(buffer_on(device), len, warmup=0)
    with pytest.raises(ValueError, match="graph=True needs a CUDA device"):
        GraphedLearner(buffer_on("cpu"), len, graph=True)


def test_what_a_learner_cannot_do_is_said(place):
    buffer = buffer_on(place)
    learner = GraphedLearner(buffer, len)
    with pytest.raises(RuntimeError, match="empty storage"):
        learner.step()
    with pytest.raises(ValueError, match="count must be at least 1"):
        learner.steps(0)
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(learner)
    fill([buffer], 44)
    if place != "cpu":
        with buffer.storage.writing(), pytest.raises(RuntimeError, match="end it before"):
            learner.step()
    assert learner.step() is not None
    learner.close()
    learner.close()
    with pytest.raises(RuntimeError, match="is closed"):
        learner.step()


class Twice(SampleUnit):
    """Gives each row that the sampler has chosen two times, in a second dimension."""

    def expand(self, index: Any, info: dict[Any, Any], storage: Any) -> tuple[Any, dict[Any, Any]]:
        return torch.stack([index, index], -1), info


@pytest.mark.parametrize("unit", [None, Twice()])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_batches_have_the_layout_of_samples(place, unit, shape):
    """Sample units, rows that have dimensions of their own, and nested TensorDicts."""
    buffers = [buffer_on(place, sample_unit=unit) for _ in range(2)]
    rows = TensorDict(
        {"a": torch.rand(20, *shape, 3), "b": TensorDict({"c": torch.rand(20, *shape)}, [20])},
        [20, *shape],
        device="cpu",
    )
    for buffer in buffers:
        buffer.extend(rows)
    learner = GraphedLearner(buffers[0], lambda batch: batch.clone())
    for _ in range(3):
        torch.manual_seed(6)
        found = learner.step()
        torch.manual_seed(6)
        assert_same_tensordict(found, buffers[1].sample().clone())


def test_a_generator_that_is_set_later_draws(place):
    ours, theirs, buffer, other = both(place, lambda: DeviceRandomSampler(place))
    learner = GraphedLearner(buffer, ours.update)
    learner.step()
    theirs.update(other.sample())
    for each in (buffer, other):
        each.set_rng(torch.Generator(place).manual_seed(3))
    before = learner._reads._static
    assert learner.step()["index"].tolist() == other.sample()["index"].tolist()
    assert learner._reads._static is not before  # and no graph that draws by the other one is left


def test_a_storage_whose_memory_has_moved_is_read_anew(place):
    buffer = buffer_on(place)
    fill([buffer], 44)
    learner = GraphedLearner(buffer, lambda batch: batch["observation"].clone())
    learner.step()
    before = learner._reads._static
    with buffer.storage.writing():
        leaf = buffer.storage._storage["observation"]
        leaf.set_(torch.full_like(leaf, 7))
    assert learner.step().eq(7).all()
    assert learner._reads._static is not before  # and no graph that reads the old memory is left


def test_interrupted_replays_are_waited_for(monkeypatch):
    """An interrupt between a replay and its count must not let the host write too early."""
    step = GraphedStep.__new__(GraphedStep)
    step._replays, step._device = 0, torch.device("cpu")

    def replay() -> None:
        raise KeyboardInterrupt

    step._graph = SimpleNamespace(replay=replay)
    monkeypatch.setattr(_graphed_step, "_turn_on", lambda _: nullcontext())
    with pytest.raises(KeyboardInterrupt):
        step.replay(3)
    assert step._replays == 1
