"""The learners of the docs learn alike by hand, with `GraphedLearner`, and in a graph."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict

pytest.importorskip("torchrl")

from tdcopier.torchrl import (
    DeviceRandomSampler,
    GraphedLearner,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
)

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


learners = example("learners")


def rows(observation: Callable[[], torch.Tensor], action: torch.Tensor) -> TensorDict:
    count = len(action)
    never = torch.zeros(count, 1, dtype=torch.bool)
    after = {
        "observation": observation(),
        "reward": torch.randn(count, 1),
        "done": never,
        "terminated": never,
    }
    leaves = {"observation": observation(), "action": action, "next": after}
    return TensorDict(leaves, [count], device="cpu")


def of_states() -> TensorDict:
    return rows(lambda: torch.randn(90, 3), torch.rand(90, 2) * 1.8 - 0.9)


def of_frames() -> TensorDict:
    actions = torch.nn.functional.one_hot(torch.randint(0, 6, (30,)), 6)
    return rows(lambda: torch.randint(0, 256, (30, 4, 84, 84), dtype=torch.uint8), actions)


LEARNERS: dict[str, tuple[Callable[[str], Any], Callable[[], TensorDict]]] = {
    "sac": (lambda device: learners.sac(3, 2, device, width=32), of_states),
    "td3": (lambda device: learners.td3(3, 2, device, width=32), of_states),
    "dqn": (lambda device: learners.dqn(6, device), of_frames),
}


def start(name: str, device: str) -> tuple[Any, PackedTensorDictReplayBuffer]:
    torch.manual_seed(1)
    make, data = LEARNERS[name]
    buffer = PackedTensorDictReplayBuffer(
        storage=PackedLazyTensorStorage(100, sample_device=device, pinned=True),
        sampler=DeviceRandomSampler(device),
        batch_size=16,
    )
    buffer.extend(data())
    return make(device), buffer


def losses_of(step: Callable[[], TensorDict], count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(2)
    found = []
    for _ in range(count):
        losses = step()
        names = [key for key in losses.keys() if "loss" in key]  # noqa: SIM118, of a TensorDict
        found.append({key: losses[key].clone().cpu() for key in names})
    return found


@pytest.mark.parametrize("name", LEARNERS)
def test_steps_are_those_of_a_loop_that_is_written_by_hand(name):
    agent, buffer = start(name, "cpu")
    with GraphedLearner(buffer, agent.update) as learner:
        found = losses_of(learner.step, 6)
    agent, buffer = start(name, "cpu")
    wanted = losses_of(lambda: agent.update(buffer.sample()), 6)
    assert len({float(losses[key].mean()) for losses in found for key in losses}) >= 6
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.cuda
@pytest.mark.parametrize("name", LEARNERS)
def test_a_graph_gives_the_losses_of_steps_without_one(name, device, monkeypatch):
    """Up to the order in which kernels add, which torch leaves open for some."""
    found = []
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    for graph in (True, False):
        agent, buffer = start(name, device)
        with GraphedLearner(buffer, agent.update, graph=graph) as learner:
            found.append(losses_of(learner.step, 30))
            assert learner.stats.replays == (27 if graph else 0)
    for ours, theirs in zip(*found, strict=True):
        for key in ours:
            torch.testing.assert_close(ours[key], theirs[key], rtol=1e-3, atol=1e-4)


def test_the_pendulum_swings(monkeypatch, tmp_path):
    pytest.importorskip("gymnasium")
    pendulum = example("pendulum")
    monkeypatch.setattr(pendulum, "RANDOM", 384)
    returns = pendulum.train(400, "cpu")
    assert len(returns) == 2
    assert all(-2000 < each < 0 for each in returns)
    pendulum.draw({"seed 0": returns}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 5_000
