"""A step that is replayed as a CUDA graph gives the values of one that runs without."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.utils._pytree import tree_map_only

pytest.importorskip("torchrl")

from learner_cases import Learner, assert_equal_steps, both, buffer_on
from torchrl.envs.transforms import RewardScaling
from torchrl_support import CAPACITY, SAMPLERS, fill

from tdcopier.torchrl import (
    DeviceRandomSampler,
    GraphedLearner,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
)

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("no_collections")]


@pytest.mark.parametrize("name", ["drawn", "read ahead", "random", "weighted", "slices"])
def test_a_graph_gives_the_values_of_steps_without_one(device, name):
    make = SAMPLERS.get(name, lambda: DeviceRandomSampler(device))
    ours, theirs, buffer, other = both(device, make)
    found: list[list[Any]] = []
    for model, sampled, graph in ((ours, buffer, None), (theirs, other, False)):
        learner = GraphedLearner(
            sampled, model.update, graph=graph, read_ahead=name == "read ahead"
        )
        torch.manual_seed(5)
        found.append([learner.step().clone() for _ in range(9)])
        assert learner.stats.replays == (6 if graph is None else 0)
        assert learner.stats.captures == (1 if graph is None else 0)
        learner.close()
    assert_equal_steps(*found)
    assert ours.values() == theirs.values()


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


@pytest.mark.parametrize("before", [2, 5])
@pytest.mark.parametrize("why", CHANGES)
def test_another_graph_is_captured_after_a_change(device, why, before):
    """Also after one before the first capture, which an optimizer's new state must not be in."""
    ours, theirs, buffer, other = both(device, lambda: DeviceRandomSampler(device))
    found: list[list[Any]] = []
    for model, sampled, graph in ((ours, buffer, None), (theirs, other, False)):
        learner = GraphedLearner(sampled, model.update, graph=graph, warmup=2)
        torch.manual_seed(5)
        steps = [learner.step().clone() for _ in range(before)]
        CHANGES[why](model, sampled)
        steps += [learner.step().clone() for _ in range(6)]
        if graph is None:
            assert learner.stats.captures == (1 if before == 2 else 2)
            assert learner.stats.replays == before - 2 + 4
            assert why in (learner.stats.why_captured or why)
        found.append(steps)
    assert_equal_steps(*found)
    assert ours.values() == theirs.values()


@pytest.mark.parametrize("ahead", [False, True])
def test_rows_that_were_loaded_are_learned_from_next(device, ahead):
    _, _, buffer, other = both(device, lambda: DeviceRandomSampler(device))
    learner = GraphedLearner(
        buffer, lambda batch: batch["observation"].float().mean(), read_ahead=ahead
    )
    for _ in range(5):
        learner.step()
    state = other.state_dict()
    tree_map_only(torch.Tensor, torch.Tensor.zero_, state["_storage"]["_storage"])
    buffer.load_state_dict(state)
    assert [learner.step().item() for _ in range(6)] == [0.0] * 6


def test_changes_at_each_step_give_a_warning(device):
    ours, _, buffer, _ = both(device, lambda: DeviceRandomSampler(device))
    learner = GraphedLearner(buffer, ours.update, warmup=1)

    def decay() -> None:
        for number in range(10):
            ours.optimizer.param_groups[0]["lr"] = 1.0 / (number + 1)
            learner.steps(2)

    with pytest.warns(UserWarning, match="Give a learning rate that changes as a tensor"):
        decay()


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


@pytest.mark.parametrize("error", ["needs the host", "mine"])
def test_a_capture_that_fails_beside_the_reading_loses_nothing(device, error):
    """The rows that were read ahead are those of the step after it."""
    ours, theirs, buffer, other = both(device, lambda: DeviceRandomSampler(device))
    fails = [error]

    def update(batch: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and fails:
            if fails.pop() == "mine":
                raise RuntimeError("mine")
            batch["index"].sum().item()
        return ours.update(batch)

    learner = GraphedLearner(buffer, update, warmup=2, read_ahead=True)
    reference = GraphedLearner(other, theirs.update, graph=False, read_ahead=True)
    torch.manual_seed(5)
    found = [learner.step().clone() for _ in range(2)]
    with pytest.raises(RuntimeError, match=error):
        learner.step()
    torch.manual_seed(6)
    found += [learner.step().clone() for _ in range(4)]
    torch.manual_seed(5)
    wanted = [reference.step().clone() for _ in range(2)]
    torch.manual_seed(6)
    wanted += [reference.step().clone() for _ in range(4)]
    assert_equal_steps(found, wanted)


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
