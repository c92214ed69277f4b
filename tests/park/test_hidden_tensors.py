"""The option `on_unknown` of calls that take a state: values in which tensors may be hidden."""

from __future__ import annotations

import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hidden_states import (
    CALLS,
    HIDDEN,
    PLAIN,
    STATES,
    Average,
    Models,
    Said,
    Trainer,
    closure,
    state_with,
)
from park_support import LARGE, is_resident
from tensordict import TensorDict
from torch import nn

import tdcopier

pytestmark = pytest.mark.usefixtures("nothing_is_told")

# ---- nothing was found ---------------------------------------------------------------------------


@pytest.fixture(
    params=[(name, place) for name in HIDDEN for place in STATES],
    ids=lambda both: f"{both[0]} {both[1]}",
)
def hidden(request: pytest.FixtureRequest, device: str) -> tuple[Callable[[], Any], Said]:
    """Returns what makes a state, and what is said of it."""
    return state_with(*request.param, device)


@pytest.mark.parametrize("call", CALLS)
def test_a_state_without_other_tensors_is_refused_with_what_to_give(call, hidden):
    make, said = hidden
    for option in ({}, {"on_unknown": None}, {"on_unknown": "raise"}):
        with pytest.raises(TypeError) as caught:
            call(make(), **option)
        said.check(str(caught.value))
        assert 'on_unknown="ignore"' in str(caught.value)


@pytest.mark.parametrize("call", CALLS)
def test_it_is_warned_of_once_on_request(call, hidden):
    make, said = hidden
    state = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            handle = call(state, on_unknown="warn")
            assert "0 bytes" in repr(handle)
    (warning,) = caught
    assert warning.category is tdcopier.containers.UnknownTypeWarning
    assert warning.filename == __file__
    said.check(str(warning.message))


@pytest.mark.parametrize("name", HIDDEN)
def test_it_is_left_as_it_is_on_request(device, name):
    value = HIDDEN[name][0](device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parked = tdcopier.park(value, on_unknown="ignore")
        assert parked.nbytes == 0
        parked.resume()
        assert tdcopier.snapshot({"x": value}, on_unknown="ignore").get().keys() == {"x"}


def test_what_an_object_hides_is_parked_when_it_is_given(device):
    trainer = Trainer(device)
    with tdcopier.parked(trainer.model, trainer.optimizer, on_unknown="raise") as parked:
        assert not is_resident(trainer.model)
    assert parked.nbytes > 0


def test_a_long_list_of_tensors_is_cut_and_a_state_dict_named(device):
    with pytest.raises(TypeError) as caught:
        tdcopier.park([Average(device)])
    assert (
        "Give state[0].shadow['0'], state[0].shadow['1'], state[0].shadow['2'] and 2 more in it, "
        "or state[0].state_dict() if that has the same tensors."
    ) in str(caught.value)
    assert tdcopier.snapshot([Average(device)], on_unknown="raise").get()[0]["shadow"]["4"].sum()


@pytest.mark.parametrize("call", CALLS)
def test_tensors_of_an_object_on_the_host_are_not_named(device, call):
    state = types.SimpleNamespace(model=nn.Linear(2, 2), also=TensorDict({"a": torch.ones(2)}))
    with pytest.raises(TypeError, match=r"not know: .*\. Give modules, optimizers"):
        call(state)
    state.also = TensorDict({"a": torch.ones(2, device=device)})
    with pytest.raises(TypeError, match=r"Give state\.also\."):
        call(state)


# ---- beside an optimizer or a module without tensors ---------------------------------------------


def fresh(device: str) -> torch.optim.Optimizer:
    return torch.optim.Adam(nn.Linear(2, 2).to(device).parameters())


@pytest.mark.parametrize("option", [None, "ignore", "warn", "raise"])
@pytest.mark.parametrize("call", CALLS)
def test_nothing_is_said_of_states_that_have_no_tensors_yet(device, call, option):
    optimizer = fresh(device)
    states = [
        optimizer,
        {"optimizer": optimizer, "epoch": 3},
        torch.optim.SGD(nn.Linear(2, 2).to(device).parameters(), momentum=0.9),
        optimizer.state_dict(),  # plain data
        nn.ReLU(),
        [],
        {},
        PLAIN,
        [nn.Module(), closure(device)],
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for state in states:
            assert "0 bytes" in repr(call(state, on_unknown=option))


@pytest.mark.parametrize("call", CALLS)
def test_an_object_beside_an_optimizer_is_refused_if_it_is_seen_to_hide_more(device, call):
    optimizer = fresh(device)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    call([optimizer, scheduler, types.SimpleNamespace(optimizer=optimizer, rate=1), {1}])
    for value, inside in (
        (Trainer(device), r"model and state\[1\]\.optimizer"),
        (types.SimpleNamespace(optimizer=fresh(device)), "optimizer"),
        (Models(device), r"inner\.models\[0\]"),
    ):
        with pytest.raises(TypeError, match=rf"^state\[1\] is a .*\. Give state\[1\]\.{inside}\."):
            call([optimizer, value])
    with pytest.raises(TypeError, match=r"^state is a .*StepLR, .*\. Give state\.optimizer, or"):
        tdcopier.park(scheduler)


# ---- other calls, and mistakes -------------------------------------------------------------------


def test_a_block_and_a_stager_take_the_option(device):
    state = {"ok": torch.ones(LARGE, device=device), "x": Trainer(device)}
    with (
        pytest.raises(TypeError, match=r"^state\['x'\] is a "),
        tdcopier.parked(state, on_unknown="raise"),
    ):
        pass
    with (
        pytest.warns(tdcopier.containers.UnknownTypeWarning, match=r"^state\['x'\]") as caught,
        tdcopier.parked(state, on_unknown="warn"),
    ):
        pass
    assert caught[0].filename == __file__
    with (
        tdcopier.checkpoint.SnapshotStager(on_unknown="raise") as stager,
        pytest.raises(TypeError, match=r"^state\['x'\] is a "),
    ):
        stager.stage(state)
    with tdcopier.checkpoint.SnapshotStager(on_unknown="ignore") as stager:
        assert "x" in stager.stage({"x": Trainer(device)}).result()


@pytest.mark.parametrize(("value", "error"), [("never", ValueError), (True, TypeError)])
@pytest.mark.parametrize(
    "call",
    [
        tdcopier.park,
        tdcopier.snapshot,
        lambda state, on_unknown: tdcopier.parked(state, on_unknown=on_unknown).__enter__(),
        lambda state, on_unknown: tdcopier.checkpoint.SnapshotStager(on_unknown=on_unknown),
    ],
)
def test_another_value_of_the_option_is_refused(device, call, value, error):
    with pytest.raises(error, match=r'on_unknown must be "ignore", "warn", "raise" or None; got'):
        call([torch.ones(3, device=device)], on_unknown=value)


def test_a_state_on_the_host_is_refused_whatever_the_option(device):
    for option in ("ignore", None):
        with pytest.raises(ValueError, match=r"^nothing to park: 2 tensors are on cpu"):
            tdcopier.park([nn.Linear(2, 2), Trainer(device)], on_unknown=option)
    with pytest.raises(ValueError, match=r"\. state\[1\] is a .*Give state\[1\]\.model and"):
        tdcopier.park([nn.Linear(2, 2), Trainer(device)])
    with pytest.raises(TypeError, match=r"^state\[1\] is a "):
        tdcopier.park([nn.Linear(2, 2), Trainer(device)], on_unknown="raise")


def test_a_weak_proxy_of_a_tensor_is_refused(device):
    tensor = torch.ones(3, device=device)
    for option in (None, "ignore"):
        with pytest.raises(TypeError, match=r"^state\['x'\] is a ProxyType, and only"):
            tdcopier.park({"x": weakref.proxy(tensor)}, on_unknown=option)


@pytest.mark.parametrize("call", CALLS)
def test_an_object_with_a_dead_weak_proxy_is_looked_into(device, call):
    gone = nn.Linear(2, 2)
    state = types.SimpleNamespace(proxy=weakref.proxy(gone), model=nn.Linear(2, 2).to(device))
    del gone
    with pytest.raises(TypeError, match=r"Give state\.model\."):
        call(state)


@pytest.mark.parametrize("call", CALLS)
def test_a_module_whose_methods_raise_is_looked_into(device, call):
    class Broken(nn.Linear):
        def named_parameters(self, *_: object, **__: object) -> Any:
            raise RuntimeError("no parameters here")

    state = types.SimpleNamespace(model=Broken(2, 2))
    state.model._parameters["weight"] = nn.Parameter(torch.ones(2, 2, device=device))
    with pytest.raises(TypeError, match=r"Give state\.model"):
        call(state)
