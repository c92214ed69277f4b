"""The option `on_unknown` of calls that take a state: values in which tensors may be hidden."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
import warnings
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from park_support import LARGE, is_resident, trained
from tensordict import TensorDict
from torch import nn

import tdcopier
from tdcopier._containers import unknown

CALLS = [tdcopier.park, tdcopier.snapshot]


class Trainer:
    """Has a model, an optimizer and more, and no rule."""

    def __init__(self, device: str) -> None:
        self.model, self.optimizer = trained(device)
        self.name = "run"


class Average:
    """Averages weights, and has a state dict."""

    def __init__(self, device: str) -> None:
        self.shadow = {str(i): torch.full((3,), float(i), device=device) for i in range(5)}

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow}


class Slots:
    __slots__ = ("empty", "model")

    def __init__(self, device: str) -> None:
        self.model = nn.Linear(2, 2).to(device)


class Models(nn.Module):
    """Has modules in a plain list, so torch does not know them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.models = [nn.Linear(2, 2).to(device)]


class Items(collections.UserDict[str, Any]):
    pass


@dataclasses.dataclass
class Settings:
    rate: float


def with_model(value: Any, device: str) -> Any:
    value.model = nn.Linear(2, 2).to(device)
    return value


def closure(device: str) -> Any:
    model = nn.Linear(2, 2).to(device)
    return lambda: model


def array_of(value: Any) -> np.ndarray:
    made = np.empty(1, object)
    made[0] = value
    return made


@pytest.fixture(autouse=True)
def nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unknown, "_told", {})


KEPT = nn.ModuleList()


def kept(device: str) -> nn.Module:
    """Returns a module that a test may refer to weakly."""
    KEPT.append(nn.Linear(2, 2).to(device))
    return KEPT[-1]


UNKNOWN = {
    "trainer": (
        Trainer,
        f"a {__name__}.Trainer, a class that tdcopier does not know",
        "Give {0}.model and {0}.optimizer.",
    ),
    "namespace": (
        lambda device: types.SimpleNamespace(parts=[{"a": nn.Linear(2, 2).to(device)}]),
        "a types.SimpleNamespace, a class that tdcopier does not know",
        "Give {0}.parts[0]['a'].",
    ),
    "slots": (Slots, f"a {__name__}.Slots, a class", "Give {0}.model."),
    "partial": (
        lambda device: functools.partial(print, nn.Linear(2, 2).to(device)),
        "a functools.partial, a class",
        "Give {0}.args[0].",
    ),
    "weak reference": (
        lambda device: weakref.ref(kept(device)),
        "a weakref.ReferenceType, a class",
        "Give {0}().",
    ),
    "set in an object": (
        lambda device: types.SimpleNamespace(all={torch.ones(2, device=device)}),
        "a types.SimpleNamespace, a class",
        "Give {0}.all (an item).",
    ),
    "nothing seen": (
        lambda device: types.SimpleNamespace(rate=1),
        "a types.SimpleNamespace, a class",
        "Give modules, optimizers, state dicts, TensorDicts, or tensors, in any nesting of "
        "containers, or register its class with tdcopier.register_container.",
    ),
    "set": (lambda device: {1, 2}, "a set, whose values have no order", "Give a list of it."),
    "array": (
        lambda device: array_of(torch.ones(2, device=device)),
        "a numpy.ndarray of objects that has tensors in it, or values that may",
        "Give its tolist().",
    ),
}

HIDING = {
    "module": (
        Models,
        "a Models, whose parameters and buffers have no tensors, but its attributes have",
        "Give {0}.inner.models[0].",
    ),
    "dict": (
        lambda device: with_model(Items(epoch=3), device),
        "an Items, whose items have no tensors, but its attributes have",
        "Give {0}.model.",
    ),
    "dataclass": (
        lambda device: with_model(Settings(0.1), device),
        "a Settings, whose items have no tensors, but its attributes have",
        "Give {0}.model.",
    ),
    "method": (
        lambda device: nn.Linear(2, 2).to(device).parameters,
        "a method, which is code",
        "Give {0}.__self__.",
    ),
    "closure": (closure, "a function, which is code", "Give {0}.__closure__[0].cell_contents."),
}

STATES = {
    "alone": (lambda value: value, "state"),
    "in a dict": (lambda value: {"epoch": 3, "x": value}, "state['x']"),
    "in a tuple in a list": (lambda value: [None, (value, 3)], "state[1][0]"),
}


def check(text: str, found: str, remedy: str, path: str) -> None:
    assert text.startswith(f"{path} is {found}"), text
    assert ". " + remedy.format(path)[:-1] in text, text


# ---- nothing was found ---------------------------------------------------------------------------


@pytest.mark.parametrize("place", STATES)
@pytest.mark.parametrize("name", [*UNKNOWN, *HIDING])
@pytest.mark.parametrize("call", CALLS)
def test_a_state_without_other_tensors_is_refused_with_what_to_give(device, call, name, place):
    make, found, remedy = {**UNKNOWN, **HIDING}[name]
    state_of, path = STATES[place]
    for option in ({}, {"on_unknown": None}, {"on_unknown": "raise"}):
        with pytest.raises(TypeError) as caught:
            call(state_of(make(device)), **option)
        check(str(caught.value), found, remedy, path)
        assert 'on_unknown="ignore"' in str(caught.value)


@pytest.mark.parametrize("place", STATES)
@pytest.mark.parametrize("name", [*UNKNOWN, *HIDING])
@pytest.mark.parametrize("call", CALLS)
def test_it_is_warned_of_once_on_request(device, call, name, place):
    make, found, remedy = {**UNKNOWN, **HIDING}[name]
    state_of, path = STATES[place]
    state = state_of(make(device))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            handle = call(state, on_unknown="warn")
            assert "0 bytes" in repr(handle)
    (warning,) = caught
    assert warning.category is tdcopier.UnknownTypeWarning
    assert warning.filename == __file__
    check(str(warning.message), found, remedy, path)


@pytest.mark.parametrize("name", [*UNKNOWN, *HIDING])
def test_it_is_left_as_it_is_on_request(device, name):
    value = {**UNKNOWN, **HIDING}[name][0](device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        parked = tdcopier.park(value, on_unknown="ignore")
        assert parked.bytes == 0
        parked.resume()
        assert tdcopier.snapshot({"x": value}, on_unknown="ignore").get().keys() == {"x"}


def test_what_an_object_hides_is_parked_when_it_is_given(device):
    trainer = Trainer(device)
    with tdcopier.parked(trainer.model, trainer.optimizer, on_unknown="raise") as parked:
        assert not is_resident(trainer.model)
    assert parked.bytes > 0


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


class Colour(enum.Enum):
    RED = 1


PLAIN = [
    None, 3, "text", np.float32(1), Colour.RED, torch.float32, torch.device("cpu"), torch.Size([2]),
    torch.Generator(), print, dict,
]  # fmt: skip


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


# ---- beside tensors ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("call", CALLS)
def test_each_value_of_the_option_does_as_it_says_beside_tensors(device, call, name):
    make, found, remedy = UNKNOWN[name]
    state = {"ok": torch.ones(LARGE, device=device), "in": [make(device)]}
    path = "state['in'][0]"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for option in ({}, {"on_unknown": None}, {"on_unknown": "ignore"}):
            handle = call(state, **option)
            assert f"{4 * LARGE} bytes" in repr(handle)
            getattr(handle, "resume", handle.wait if call is tdcopier.park else handle.get)()
        with pytest.raises(TypeError) as refused:
            call(state, on_unknown="raise")
        with pytest.raises(tdcopier.UnknownTypeWarning):  # an error of the filter changes nothing
            call(state, on_unknown="warn")
    assert is_resident(state["ok"])
    check(str(refused.value), found, remedy, path)
    with pytest.warns(tdcopier.UnknownTypeWarning) as caught:
        handle = call(state, on_unknown="warn")
    check(str(caught[0].message), found, remedy, path)
    if isinstance(handle, tdcopier.Parked):
        assert handle.is_parked
        handle.resume()


@pytest.mark.parametrize("option", [None, "ignore", "warn", "raise"])
@pytest.mark.parametrize("call", CALLS)
def test_plain_data_is_never_reported(device, call, option):
    state = [torch.ones(LARGE, device=device), *PLAIN, closure(device)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = call(state, on_unknown=option)
    assert f"{4 * LARGE} bytes" in repr(handle)
    if isinstance(handle, tdcopier.Parked):
        handle.resume()


class OnlyItsOwnTo:
    def __init__(self, device: str) -> None:
        self.tensor = torch.ones(2, device=device)

    def to(self, device: Any) -> OnlyItsOwnTo:
        return self


READ_ONCE = {
    "generator": (lambda device: (x for x in [torch.ones(2, device=device)]), "an iterator"),
    "set": (lambda device: {torch.ones(2, device=device)}, "a set, whose values have no order"),
    "own .to": (OnlyItsOwnTo, "an OnlyItsOwnTo, and only its own `.to` knows its tensors"),
}


@pytest.mark.parametrize("name", READ_ONCE)
@pytest.mark.parametrize("call", CALLS)
def test_tensors_that_are_left_for_sure_are_refused_unless_the_option_lets_them(
    device, call, name, monkeypatch
):
    make, found = READ_ONCE[name]
    ones = torch.ones(LARGE, device=device)
    for option in (None, "raise"):
        with pytest.raises(TypeError) as caught:
            call([ones, make(device)], on_unknown=option)
        assert str(caught.value).startswith(f"state[1] is {found}")
    assert is_resident(ones)
    if name == "generator" and call is tdcopier.snapshot:
        monkeypatch.setitem(unknown._told, id(types.GeneratorType), None)
        for option in ("ignore", "warn"):
            with pytest.raises(
                TypeError, match=r"^state\[1\] is a generator, which copy\.deepcopy"
            ):
                call([ones, make(device)], on_unknown=option)
        return
    handle = call([ones, make(device)], on_unknown="ignore")
    with pytest.warns(tdcopier.UnknownTypeWarning, match=r"^state\[1\] is "):
        also = call([torch.ones(LARGE, device=device), make(device)], on_unknown="warn")
    for each in (handle, also):
        if isinstance(each, tdcopier.Parked):
            each.resume()
        assert f"{4 * LARGE} bytes" in repr(each)


# ---- other calls, and mistakes -------------------------------------------------------------------


def test_a_block_and_a_stager_take_the_option(device):
    state = {"ok": torch.ones(LARGE, device=device), "x": Trainer(device)}
    with (
        pytest.raises(TypeError, match=r"^state\['x'\] is a "),
        tdcopier.parked(state, on_unknown="raise"),
    ):
        pass
    with (
        pytest.warns(tdcopier.UnknownTypeWarning, match=r"^state\['x'\]") as caught,
        tdcopier.parked(state, on_unknown="warn"),
    ):
        pass
    assert caught[0].filename == __file__
    with (
        tdcopier.SnapshotStager(on_unknown="raise") as stager,
        pytest.raises(TypeError, match=r"^state\['x'\] is a "),
    ):
        stager.stage(state)
    with tdcopier.SnapshotStager(on_unknown="ignore") as stager:
        assert "x" in stager.stage({"x": Trainer(device)}).result()


@pytest.mark.parametrize(("value", "error"), [("never", ValueError), (True, TypeError)])
@pytest.mark.parametrize(
    "call",
    [
        tdcopier.park,
        tdcopier.snapshot,
        lambda state, on_unknown: tdcopier.parked(state, on_unknown=on_unknown).__enter__(),
        lambda state, on_unknown: tdcopier.SnapshotStager(on_unknown=on_unknown),
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
