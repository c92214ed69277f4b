"""A learner knows what its function depends on, and sees each change that a graph would miss."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torchrl")

from tensordict import TensorDict
from tensordict.nn import TensorDictParams

from tdcopier.torchrl._watched import Watched

OF_MODULE = nn.Linear(2, 2)


def uses_a_global() -> Any:
    return [OF_MODULE(x) for x in ()]


def calls_one_that_uses_a_global() -> Any:
    return uses_a_global()


class WithState:
    def __init__(self, model: nn.Module) -> None:
        self.parts = {"list": [model]}

    def update(self) -> None:
        pass

    def __call__(self) -> None:
        pass


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
        lambda model: functools.wraps(print)(by_closure(model)),
    ],
)
def test_modules_are_found_where_a_function_has_them(make):
    model = nn.Linear(2, 2)
    watched = Watched.of(make(model))
    watched.remember()
    assert watched.difference() is None
    model.weight = nn.Parameter(torch.zeros(2, 2))
    assert "was replaced" in watched.difference()


@pytest.mark.parametrize("function", [uses_a_global, calls_one_that_uses_a_global])
def test_globals_are_found(function, monkeypatch):
    watched = Watched.of(function)
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
    watched = Watched.of(lambda: (model, optimizer))
    assert watched.difference() is None  # nothing is remembered yet
    watched.remember()
    CHANGES[name](model, optimizer)
    assert watched.difference() is not None
    watched.remember()
    assert watched.difference() is None


@pytest.mark.parametrize("name", NO_CHANGES)
def test_values_that_change_in_place_are_no_change(name):
    model, optimizer = model_and_optimizer()
    watched = Watched.of(lambda: (model, optimizer))
    watched.remember()
    NO_CHANGES[name](model, optimizer)
    assert watched.difference() is None


def test_parameters_in_a_tensordict_are_seen():
    holder = nn.Module()
    holder.params = TensorDictParams(TensorDict({"a": {"b": nn.Parameter(torch.ones(2))}}))
    watched = Watched.of(lambda: holder)
    watched.remember()
    holder.params["a", "b"].data.fill_(2)
    assert watched.difference() is None
    holder.params.data.set_(("a", "b"), torch.zeros(2))
    assert watched.difference() is None
    holder.params._param_td._tensordict["a"]._tensordict["b"] = nn.Parameter(torch.ones(2))
    assert watched.difference() is not None


def test_what_is_given_is_watched_too():
    model, optimizer = model_and_optimizer()
    watched = Watched.of(len, [model, optimizer])
    watched.remember()
    optimizer.param_groups[0]["lr"] = 3.0
    assert "learning rate" in watched.difference()


def test_optimizers_are_made_capturable_with_their_steps(device):
    model = nn.Linear(2, 2).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3, 2, device=device)).sum().backward()
    optimizer.step()
    Watched.of(lambda: optimizer).make_capturable()
    assert optimizer.param_groups[0]["capturable"]
    for parameter in model.parameters():
        step = optimizer.state[parameter]["step"]
        assert step.device == parameter.device
        assert step.item() == 1
