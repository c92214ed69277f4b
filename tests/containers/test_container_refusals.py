"""Containers that cannot be rebuilt, contain themselves or are too deep; how leaves are named."""

from __future__ import annotations

import re
from collections import OrderedDict, UserDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import CONTAINERS
from container_classes import Box, Pair, Sample
from support import raises_exactly

import tdcopier

# ---- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("container", "path"),
    [
        ("list", "data[0]"), ("tuple", "data[1]"), ("dict", "data[('a', 1)]"),
        ("named tuple", "data.left"), ("subclass of a named tuple", "data.x"),
        ("tuple subclass", "data[0]"), ("structseq with hidden fields", "data[0]"),
        ("deque with a maximum length", "data[1]"), ("`OrderedDict` subclass", "data['first']"),
        ("`OrderedDict`", "data['first']"), ("`defaultdict`", "data['a']"),
        ("dict subclass", "data['a']"), ("`UserDict` subclass", "data['a']"),
        ("dataclass", "data.image"), ("dataclass with slots", "data.image"),
        ("class that is registered", "data[0]"),
    ],
)  # fmt: skip
def test_a_path_is_written_as_python_reaches_the_leaf(device, registered_box, container, path):
    tree = CONTAINERS[container].wrap(np.zeros(1, np.longdouble))
    with pytest.raises(TypeError, match=re.escape(f"{path} is a numpy array of dtype")) as caught:
        tdcopier.start_copy(tree, device)
    assert str(caught.value).startswith(path)


# ---- containers that cannot be rebuilt -----------------------------------------------------------


class Unmade:
    """Its constructor takes more than the items, and a copy made by other ways is not equal."""

    def __init__(self, name: str, items: Any) -> None:
        super().__init__(items)
        self.name = name


class Frozen(Unmade, dict):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise RuntimeError("is frozen")


class Uncopied(Unmade, UserDict):
    def __copy__(self) -> Any:
        raise LookupError("no copies")


class Selfish(Unmade, list):
    def __copy__(self) -> Any:
        return self


class Degrading(Unmade, list):
    def __copy__(self) -> Any:
        return list(self)


class Forgetful(Unmade, dict):
    def __copy__(self) -> Any:
        return type(self)("copy", [])


class Shrinking(Unmade, list):
    def __copy__(self) -> Any:
        return type(self)("copy", [])


class Once(OrderedDict):
    """Its copy has a state of its own, which a copy of that cannot restore."""

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.made = True

    def __setstate__(self, state: Any) -> None:
        raise RuntimeError("is made already")


def _once() -> Once:
    value = Once({"a": 1})
    del value.made
    return value


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_once, "Once, a mapping that cannot be rebuilt (RuntimeError: is made already)"),
        (
            lambda: Frozen("x", {"a": 1}),
            "Frozen, a mapping that cannot be rebuilt (RuntimeError: is frozen)",
        ),
        (
            lambda: Uncopied("x", {"a": 1}),
            "Uncopied, a mapping that cannot be rebuilt (LookupError: no copies)",
        ),
        (
            lambda: Selfish("x", [1]),
            "Selfish, a sequence that cannot be rebuilt (copy.copy of it gives the same object, "
            "not a new one)",
        ),
        (
            lambda: Degrading("x", [1]),
            "Degrading, a sequence that cannot be rebuilt (copy.copy of it gives another class, "
            "list)",
        ),
        (
            lambda: Forgetful("x", {"a": 1}),
            "Forgetful, a mapping that cannot be rebuilt (its copy has other keys)",
        ),
        (
            lambda: Shrinking("x", [1]),
            "Shrinking, a sequence that cannot be rebuilt (its copy has another length)",
        ),
    ],
    ids=lambda value: value.split(",")[0] if isinstance(value, str) else "",
)
def test_a_container_that_cannot_be_rebuilt_is_named_with_its_path(device, leaf, make, reason):
    message = f"data['a'].right is a {reason}: register it with tdcopier.containers.register"
    with pytest.raises(TypeError) as caught:
        tdcopier.start_copy({"a": Pair(leaf, make())}, device)
    assert type(caught.value) is TypeError
    assert str(caught.value) == message
    assert tdcopier.copy([leaf], device)[0].tolist() == [0, 1, 2]


def test_a_container_that_cannot_be_rebuilt_can_be_registered(device, registry, leaf):
    tdcopier.containers.register(
        Frozen,
        lambda f: (f.values(), list(f)),
        lambda c, keys: Frozen("x", zip(keys, c, strict=True)),
    )
    moved = tdcopier.copy(Frozen("x", {"a": leaf}), device)
    assert type(moved) is Frozen
    assert moved["a"].device == torch.device(device)


# ---- depth and cycles ----------------------------------------------------------------------------


def test_1000_containers_of_other_classes_are_copied(device, registered_box, leaf):
    wraps = [Sample, Box, lambda child: Pair(child, 1), lambda child: deque([child])]
    unwraps = [lambda s: s.image, lambda b: b.children[0], lambda p: p.left, lambda d: d[0]]
    tree = leaf
    for i in range(1000):
        tree = wraps[i % 4](tree)
    moved = tdcopier.copy(tree, device)
    for i in reversed(range(1000)):
        moved = unwraps[i % 4](moved)
    assert moved.tolist() == [0, 1, 2]
    with pytest.raises(RecursionError, match="more than 1000 containers deep"):
        tdcopier.start_copy([tree], device)


def _sample() -> Sample:
    sample = Sample(1)
    sample.image = sample
    return sample


def _box() -> Box:
    box = Box()
    box.children = (box,)
    return box


def _ordered() -> OrderedDict[str, Any]:
    ordered: OrderedDict[str, Any] = OrderedDict()
    ordered["again"] = ordered
    return ordered


def _named() -> list[Any]:
    outer: list[Any] = []
    outer.append(Pair(outer, 1))
    return outer


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (_sample, ".image" * 8), (_box, "[0]" * 8), (_ordered, "['again']" * 8),
        (_named, "[0].left" * 4),
    ],
    ids=["dataclass", "registered", "OrderedDict", "named tuple"],
)  # fmt: skip
def test_a_cycle_through_containers_of_other_classes_raises_recursion_error(
    device, registered_box, leaf, make, step
):
    message = (
        f"data is nested more than 1000 containers deep, from data{step}... on: "
        "does it contain itself?"
    )
    with raises_exactly(RecursionError, message):
        tdcopier.start_copy(make(), device)
    assert tdcopier.copy([leaf], device)[0].tolist() == [0, 1, 2]
