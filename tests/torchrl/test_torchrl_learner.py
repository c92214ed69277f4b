"""A learner whose steps may be one CUDA graph does the steps of a loop that is written by hand."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict_same import assert_same_tensordict
from torch import nn
from torch.utils._pytree import tree_map_only

pytest.importorskip("torchrl")

from torchrl.data.replay_buffers import SampleUnit
from torchrl.envs.transforms import RewardScaling
from torchrl_support import BATCH, CAPACITY, SAMPLERS, fill

from tdcopier.torchrl import (
    DeviceRandomSampler,
    GraphedLearner,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
    _graphed_step,
)
from tdcopier.torchrl._graphed_step import GraphedStep

pytestmark = pytest.mark.usefixtures("no_collections")


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


@pytest.fixture(params=["the device", "the host alone"])
def place(request, device):
    return device if request.param == "the device" else "cpu"


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
    ours, other, buffer, _ = both(place, lambda: DeviceRandomSampler(place))
    learners = [GraphedLearner(buffer, each.update) for each in (ours, other)]
    for _ in range(6):
        for learner in learners:
            assert learner.step()["loss"].isfinite()
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
    with pytest.raises(TypeError, match="got a list"):
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
    before = learner._static
    assert learner.step()["index"].tolist() == other.sample()["index"].tolist()
    assert learner._static is not before  # and no graph that draws by the other one is left


def test_a_storage_whose_memory_has_moved_is_read_anew(place):
    buffer = buffer_on(place)
    fill([buffer], 44)
    learner = GraphedLearner(buffer, lambda batch: batch["observation"].clone())
    learner.step()
    before = learner._static
    with buffer.storage.writing():
        leaf = buffer.storage._storage["observation"]
        leaf.set_(torch.full_like(leaf, 7))
    assert learner.step().eq(7).all()
    assert learner._static is not before  # and no graph that reads the old memory is left


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


# ---- graphs --------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("name", [None, "random", "weighted", "slices"])
def test_a_graph_gives_the_values_of_steps_without_one(device, name):
    make = SAMPLERS[name] if name else lambda: DeviceRandomSampler(device)
    ours, theirs, buffer, other = both(device, make)
    found: list[list[Any]] = []
    for model, sampled, graph in ((ours, buffer, None), (theirs, other, False)):
        learner = GraphedLearner(sampled, model.update, graph=graph)
        torch.manual_seed(5)
        found.append([learner.step().clone() for _ in range(9)])
        assert learner.stats.replays == (6 if graph is None else 0)
        assert learner.stats.captures == (1 if graph is None else 0)
        learner.close()
    assert_equal_steps(*found)
    assert ours.values() == theirs.values()


@pytest.mark.cuda
def test_a_generator_of_the_buffer_draws_in_the_graph(device):
    found = []
    for graph in (True, False):
        generator = torch.Generator(device).manual_seed(8)
        buffer = buffer_on(device, generator=generator)
        fill([buffer], 44)
        learner = GraphedLearner(buffer, lambda batch: batch["index"], graph=graph)
        found.append([learner.step().tolist() for _ in range(8)])
    assert found[0] == found[1]
    assert len({tuple(index) for index in found[0]}) == 8


@pytest.mark.cuda
def test_rows_that_are_written_between_replays_are_read(device):
    storage = PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True)
    buffer = PackedTensorDictReplayBuffer(
        storage=storage, sampler=DeviceRandomSampler(device), batch_size=64
    )
    learner = GraphedLearner(buffer, lambda batch: batch["a"], warmup=1)
    for number in range(40):
        rows = TensorDict({"a": torch.arange(20) + 100 * number}, [20], device="cpu")
        buffer.extend(rows.to(device) if number % 3 == 0 else rows)
        found = set(learner.step().tolist())
        first = max(0, number - 2)
        assert found <= {i + 100 * n for n in range(first, number + 1) for i in range(20)}
        if number % 5 == 0:
            assert any(value >= 100 * number for value in found)
    assert learner.stats.captures == 1


CHANGES: dict[str, Callable[[Learner, Any], Any]] = {
    "a parameter, a buffer": lambda ours, buffer: setattr(
        ours.model, "bias", nn.Parameter(torch.zeros(1, device=ours.model.bias.device))
    ),
    "learning rate": lambda ours, buffer: ours.optimizer.param_groups[0].update(lr=0.01),
    "training and evaluation": lambda ours, buffer: ours.model.eval(),
    "another storage": lambda ours, buffer: buffer.append_transform(
        RewardScaling(0.0, 2.0, in_keys=[("next", "reward")])
    ),
}


@pytest.mark.cuda
@pytest.mark.parametrize("why", CHANGES)
def test_another_graph_is_captured_after_a_change(device, why):
    ours, theirs, buffer, other = both(device, lambda: DeviceRandomSampler(device))
    found: list[list[Any]] = []
    for model, sampled, graph in ((ours, buffer, None), (theirs, other, False)):
        learner = GraphedLearner(sampled, model.update, graph=graph, warmup=2)
        torch.manual_seed(5)
        steps = [learner.step().clone() for _ in range(5)]
        CHANGES[why](model, sampled)
        steps += [learner.step().clone() for _ in range(6)]
        if graph is None:
            assert learner.stats.captures == 2
            assert learner.stats.replays == 3 + 4
            assert why in learner.stats.why_captured
        found.append(steps)
    assert_equal_steps(*found)
    assert ours.values() == theirs.values()


@pytest.mark.cuda
def test_another_graph_is_captured_when_the_buffer_was_loaded(device):
    _, _, buffer, other = both(device, lambda: DeviceRandomSampler(device))
    learner = GraphedLearner(buffer, lambda batch: batch["observation"].float().mean())
    for _ in range(5):
        learner.step()
    state = other.state_dict()
    tree_map_only(torch.Tensor, torch.Tensor.zero_, state["_storage"]["_storage"])
    buffer.load_state_dict(state)
    assert [learner.step().item() for _ in range(6)] == [0.0] * 6


@pytest.mark.cuda
def test_changes_at_each_step_give_a_warning(device):
    ours, _, buffer, _ = both(device, lambda: DeviceRandomSampler(device))
    learner = GraphedLearner(buffer, ours.update, warmup=1)

    def decay() -> None:
        for number in range(10):
            ours.optimizer.param_groups[0]["lr"] = 1.0 / (number + 1)
            learner.steps(2)

    with pytest.warns(UserWarning, match="Give a learning rate that changes as a tensor"):
        decay()


@pytest.mark.cuda
def test_a_step_that_a_graph_cannot_hold_is_named_and_nothing_is_lost(device):
    ours, _, buffer, _ = both(device, lambda: DeviceRandomSampler(device))

    def update(batch: Any) -> float:
        return ours.update(batch)["loss"].item()

    learner = GraphedLearner(buffer, update, warmup=2)
    assert learner.step() > 0
    assert learner.step() > 0
    before = ours.values()
    with pytest.raises(RuntimeError, match="needs the host"):
        learner.step()
    assert ours.values() == before
    assert all(parameter.grad is None for parameter in ours.model.parameters())
    assert torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
    other = GraphedLearner(buffer, update, graph=False)
    assert other.step() > 0
    working = GraphedLearner(buffer, ours.update, warmup=1)
    assert len({working.step()["loss"].item() for _ in range(4)}) == 4
    assert working.stats.replays == 3


@pytest.mark.cuda
def test_a_failed_capture_keeps_no_memory(device):
    """Torch returns no memory that several streams have used while it believes in a capture."""
    buffer = buffer_on(device)
    fill([buffer], 44)
    learner = GraphedLearner(buffer, lambda batch: batch["index"].sum().item(), warmup=1)
    learner.step()
    with pytest.raises(RuntimeError, match="needs the host"):
        learner.step()
    learner.close()
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    used = torch.zeros(1_000_000, device=device)
    used.record_stream(torch.cuda.Stream(device))
    del used
    torch.cuda.synchronize(device)
    torch.zeros(1, device=device)  # the allocator looks at what has ended
    assert torch.cuda.memory_allocated(device) <= before + 1024


@pytest.mark.cuda
def test_learners_on_two_streams_draw_what_each_draws_alone(device):
    buffer, streams = buffer_on(device), [torch.cuda.Stream(device) for _ in range(2)]
    fill([buffer], 44)
    learners = [GraphedLearner(buffer, lambda batch: batch["index"], warmup=1) for _ in streams]
    found: list[list[torch.Tensor]] = []
    for is_waiting in (True, False):
        torch.manual_seed(5)
        found.append([])
        for number in range(60):
            with torch.cuda.stream(streams[number % 2]):
                found[-1].append(learners[number % 2].step().clone())
            if is_waiting:
                torch.cuda.synchronize(device)
        torch.cuda.synchronize(device)
        found[-1] = found[-1][4:]  # those of the first time have no graph
    assert len(torch.stack(found[1]).unique(dim=0)) == len(found[1])
    assert torch.equal(torch.stack(found[0]), torch.stack(found[1]))


@pytest.mark.cuda
def test_the_caller_may_change_its_stream(device):
    ours, theirs, buffer, other = both(device, lambda: DeviceRandomSampler(device))
    learner = GraphedLearner(buffer, ours.update, warmup=1)
    streams = [torch.cuda.default_stream(device), torch.cuda.Stream(device)]
    torch.manual_seed(5)
    found = []
    for number in range(8):
        with torch.cuda.stream(streams[number % 2]):
            found.append(learner.step().clone())
    torch.cuda.synchronize(device)
    reference = GraphedLearner(other, theirs.update, graph=False)
    torch.manual_seed(5)
    assert_equal_steps(found, [reference.step().clone() for _ in range(8)])


@pytest.mark.cuda
def test_the_host_writes_as_soon_as_the_rows_are_read(device):
    """And not when the step ends, whose kernels take long."""
    buffer = buffer_on(device)
    fill([buffer], 44)

    def update(batch: Any) -> torch.Tensor:
        torch.cuda._sleep(2_000_000_000)  # a second or so
        return batch["observation"]

    learner = GraphedLearner(buffer, update, warmup=1)
    learner.step()
    learner.step()
    torch.cuda.synchronize(device)
    rows = buffer[:4].clone()
    learner.step()
    buffer.extend(rows)
    assert not torch.cuda.current_stream(device).query()
    torch.cuda.synchronize(device)


@pytest.mark.cuda
def test_a_step_that_counts_in_python_gives_a_warning(device):
    buffer, counted = buffer_on(device), SimpleNamespace(steps=0)
    fill([buffer], 44)

    def update(batch: Any) -> Any:
        counted.steps += 1
        return batch["observation"]

    learner = GraphedLearner(buffer, update, warmup=1)
    learner.step()
    with pytest.warns(UserWarning, match=r"SimpleNamespace\.steps"):
        learner.step()
    assert counted.steps == 2


@pytest.mark.cuda
def test_a_state_of_an_optimizer_may_be_loaded(device):
    ours, theirs, buffer, other = both(device, lambda: DeviceRandomSampler(device))
    found: list[list[Any]] = []
    for model, sampled, graph in ((ours, buffer, None), (theirs, other, False)):
        learner = GraphedLearner(sampled, model.update, graph=graph)
        state = Learner(device, capturable=False).optimizer.state_dict()
        torch.manual_seed(5)
        steps = [learner.step().clone() for _ in range(5)]
        model.optimizer.load_state_dict(state)
        if graph is False:
            model.optimizer.param_groups[0]["capturable"] = True
        found.append([*steps, *(learner.step().clone() for _ in range(6))])
        assert learner.stats.captures == (2 if graph is None else 0)
    assert_equal_steps(*found)
