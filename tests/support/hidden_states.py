"""States with values in which tensors may be hidden, and what is said of each.

In the tables, `{0}` in the remedy is the path of the value.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from park_support import trained
from torch import nn

import tdcopier

CALLS = [tdcopier.park, tdcopier.snapshot]


class Trainer:
    """Has a model, an optimizer and more, and no rule."""

    def __init__(self, device: str) -> None:
        self.model, self.optimizer = trained(device)
        self.name = "run"

    def run(self) -> None:
        raise NotImplementedError


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


def closure_over_trainer(device: str) -> Any:
    trainer = Trainer(device)
    return lambda: trainer


def array_of(value: Any) -> np.ndarray:
    made = np.empty(1, object)
    made[0] = value
    return made


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
        "Give an item of {0}.all.",
    ),
    "object in a set": (
        lambda device: types.SimpleNamespace(all=frozenset([Slots(device)])),
        "a types.SimpleNamespace, a class",
        "Give item.model (item is an item of {0}.all).",
    ),
    "nothing seen": (
        lambda device: types.SimpleNamespace(rate=1),
        "a types.SimpleNamespace, a class",
        "Give modules, optimizers, state dicts, TensorDicts, or tensors, in any nesting of "
        "containers, or register its class with tdcopier.containers.register.",
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
        "Give the object that the method {0} is bound to.",
    ),
    "closure": (
        closure,
        "a function, which is code",
        "Give the variable model that the function {0} captured.",
    ),
    "object in a closure": (
        closure_over_trainer,
        "a function, which is code",
        "Give trainer.model (trainer is the variable trainer that the function {0} captured) and "
        "trainer.optimizer (trainer is the variable trainer that the function {0} captured).",
    ),
    "method of an object": (
        lambda device: Trainer(device).run,
        "a method, which is code",
        "Give self.model (self is the object that the method {0} is bound to) and self.optimizer "
        "(self is the object that the method {0} is bound to).",
    ),
}

STATES = {
    "alone": (lambda value: value, "state"),
    "in a dict": (lambda value: {"epoch": 3, "x": value}, "state['x']"),
    "in a tuple in a list": (lambda value: [None, (value, 3)], "state[1][0]"),
}

HIDDEN = {**UNKNOWN, **HIDING}


class Said(NamedTuple):
    """The text about a value in an error or a warning."""

    found: str
    remedy: str
    path: str

    def check(self, text: str) -> None:
        assert text.startswith(f"{self.path} is {self.found}"), text
        assert ". " + self.remedy.format(self.path)[:-1] in text, text


def state_with(name: str, place: str, device: str) -> tuple[Callable[[], Any], Said]:
    """Returns what makes a state with that value of `HIDDEN`, and what is said of it."""
    make, found, remedy = HIDDEN[name]
    state_of, path = STATES[place]
    return lambda: state_of(make(device)), Said(found, remedy, path)


class Colour(enum.Enum):
    RED = 1


PLAIN = [
    None, 3, "text", np.float32(1), Colour.RED, torch.float32, torch.device("cpu"), torch.Size([2]),
    torch.Generator(), print, dict,
]  # fmt: skip
