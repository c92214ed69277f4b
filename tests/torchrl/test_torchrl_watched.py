"""A learner knows what its function depends on, and sees each change that a graph would miss."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("torchrl")

from tensordict import TensorDict
from tensordict.nn import TensorDictParams

from tdcopier.torchrl._graphed_step import changed_names
from tdcopier.torchrl._watched import Watched

OF_MODULE = nn.Linear(2, 2)


def uses_a_global() -> Any:
    return [OF_MODULE(x) for x in ()]


def calls_one_that_uses_a_global() -> Any:
    return uses_a_global()


class WithState:
    def __init__(self, model: nn.Module) -> None:
        self.parts = {"list": [model]}

    def update(self) -> Any:
        return self.learn()

    def learn(self) -> Any:
        return self.parts

    def __call__(self) -> Any:
        return self.learn()


class WithSlots:
    __slots__ = ("model",)

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def update(self) -> Any:
        return self.model


class Agent(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update(self) -> Any:
        return self.optimizer


def by_closure(model: nn.Module) -> Any:
    return lambda: model


def by_default(model: nn.Module) -> Any:
    def update(found: Any = model) -> Any:
        return found

    return update


@pytest.mark.parametrize(
    "make",
    [
        by_closure,
        by_default,
        lambda model: model,
        lambda model: functools.partial(print, model),
        lambda model: functools.partial(print, end=model),
        lambda model: WithState(model).update,
        WithState,
        lambda model: WithSlots(model).update,
        lambda model: functools.wraps(print)(by_closure(model)),
    ],
)
def test_modules_are_found_where_a_function_has_them(make):
    model = nn.Linear(2, 2)
    watched = Watched([make(model)])
    watched.remember()
    assert watched.difference() is None
    model.weight = nn.Parameter(torch.zeros(2, 2))
    assert "was replaced" in watched.difference()


@pytest.mark.parametrize("function", [uses_a_global, calls_one_that_uses_a_global])
def test_globals_are_found(function, monkeypatch):
    watched = Watched([function])
    watched.remember()
    monkeypatch.setattr(OF_MODULE, "training", False)
    assert "training and evaluation" in watched.difference()


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


CHANGES = {
    "a parameter": lambda m, o: setattr(m[0], "bias", nn.Parameter(torch.zeros(2))),
    "data of a parameter": lambda m, o: setattr(m[0].bias, "data", torch.zeros(2)),
    "a buffer": lambda m, o: setattr(m[1], "running_mean", torch.zeros(2)),
    "a child": lambda m, o: m.__setitem__(0, nn.Linear(2, 2)),
    "a further child": lambda m, o: m.append(nn.ReLU()),
    "mode of a child": lambda m, o: m[1].eval(),
    "requires_grad": lambda m, o: m[0].bias.requires_grad_(False),
    "learning rate": lambda m, o: o.param_groups[0].update(lr=0.1),
    "learning rate of numpy": lambda m, o: o.param_groups[0].update(lr=np.float64(0.1)),
    "betas in a list": lambda m, o: o.param_groups[0].update(betas=[0.5, 0.5]),
    "betas": lambda m, o: o.param_groups[0].update(betas=(0.5, 0.5)),
    "state": lambda m, o: o.state[m[0].bias].update(exp_avg=torch.zeros(2)),
    "state is gone": lambda m, o: o.state.clear(),
    "a further group": lambda m, o: o.add_param_group({"params": [torch.zeros(2)]}),
}
NO_CHANGES = {
    "nothing": lambda m, o: None,
    "values": lambda m, o: m[0].bias.data.fill_(3),
    "loaded": lambda m, o: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}),
    "a step": lambda m, o: o.step(),
    "gradients": lambda m, o: o.zero_grad(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_once(name):
    model, optimizer = model_and_optimizer()
    watched = Watched([lambda: (model, optimizer)])
    assert watched.difference() is None  # nothing is remembered yet
    watched.remember()
    CHANGES[name](model, optimizer)
    assert watched.difference() is not None
    watched.remember()
    assert watched.difference() is None


@pytest.mark.parametrize("name", NO_CHANGES)
def test_values_that_change_in_place_are_no_change(name):
    model, optimizer = model_and_optimizer()
    watched = Watched([lambda: (model, optimizer)])
    watched.remember()
    NO_CHANGES[name](model, optimizer)
    assert watched.difference() is None


def test_parameters_in_a_tensordict_are_seen():
    holder = nn.Module()
    holder.params = TensorDictParams(TensorDict({"a": {"b": nn.Parameter(torch.ones(2))}}))
    watched = Watched([lambda: holder])
    watched.remember()
    holder.params["a", "b"].data.fill_(2)
    assert watched.difference() is None
    holder.params.data.set_(("a", "b"), torch.zeros(2))
    assert watched.difference() is None
    holder.params._param_td._tensordict["a"]._tensordict["b"] = nn.Parameter(torch.ones(2))
    assert watched.difference() is not None


def test_what_is_given_is_watched_too():
    model, optimizer = model_and_optimizer()
    watched = Watched([len, model, optimizer])
    watched.remember()
    optimizer.param_groups[0]["lr"] = 3.0
    assert "learning rate" in watched.difference()


def test_optimizers_are_made_capturable_with_their_steps(device):
    model = nn.Linear(2, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 2, device=device)).sum().backward()
    optimizer.step()
    elsewhere = torch.optim.Adam([torch.zeros(2, device="meta")])
    Watched([lambda: (optimizer, elsewhere)]).make_capturable(torch.device(device))
    assert not elsewhere.param_groups[0]["capturable"]
    assert optimizer.param_groups[0]["capturable"]
    for parameter in model.parameters():
        step = optimizer.state[parameter]["step"]
        assert step.device == parameter.device
        assert step.item() == 1


def test_an_optimizer_of_a_module_is_found():
    agent = Agent(nn.Linear(2, 2))
    watched = Watched([agent.update])
    watched.remember()
    agent.optimizer.param_groups[0]["lr"] = 0.2
    assert "learning rate" in watched.difference()
    agent.optimizer = torch.optim.SGD([torch.zeros(2)], lr=0.1)
    assert watched.difference() is not None


def test_a_learning_rate_in_a_tensor_on_the_host_is_a_number():
    """Torch reads it when it launches a kernel; one on a device is read there."""
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([torch.zeros(2)], lr=rate)
    watched = Watched([optimizer])
    watched.remember()
    assert watched.difference() is None
    rate.fill_(0.2)
    assert "learning rate" in watched.difference()


class Trainer:
    def __init__(self) -> None:
        self.mean, self.last = torch.zeros(2), torch.zeros(2)
        self.count, self.frames = 0, 0

    def update(self) -> None:
        self.mean = 0.9 * self.mean
        self.count += 1


def test_only_what_the_code_names_is_looked_at():
    trainer = Trainer()
    watched = Watched([trainer.update])
    watched.remember()
    trainer.last, trainer.frames = torch.ones(2), 5
    assert watched.difference() is None
    trainer.mean = torch.ones(2)
    assert "was replaced" in watched.difference()


class CountsInPython:
    """As a target network that is replaced at every third step."""

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count = (self.count + 1) % 3


def test_what_python_counts_and_binds_is_named():
    trainer, target, total = Trainer(), CountsInPython(), 0

    def update() -> None:
        nonlocal total
        trainer.update()
        target.step()
        total += 1

    watched = Watched([update])
    before = watched.counters()
    assert changed_names(before, watched.counters()) == []
    update()
    names = ["CountsInPython.count", "Trainer.count", "Trainer.mean", "total"]
    assert changed_names(before, watched.counters()) == names


def test_memory_that_a_graph_writes_to_is_kept_alive():
    model, _ = model_and_optimizer()
    gradient = weakref.ref(model[0].weight.grad)
    watched = Watched([model])
    watched.remember()
    model.zero_grad()
    assert gradient() is not None


def test_gradients_can_be_put_back():
    model, _ = model_and_optimizer()
    watched = Watched([model])
    before = watched.gradients()
    wanted = model[0].weight.grad
    model.zero_grad()
    for parameter, gradient in before:
        parameter.grad = gradient
    assert model[0].weight.grad is wanted
