"""`copy_opaque`: opaque values are copied too, all of them or none."""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from container_classes import Pair
from support import raises_exactly
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TypedTensorDict,
    tensorclass,
)
from thread_support import at_once

import tdcopier


def fill(source: Any, destination: Any) -> tdcopier.stats.CopyStats:
    handle = tdcopier.start_copy_into(source, destination, copy_opaque=True)
    assert handle.get() is destination
    return handle.stats


@dataclasses.dataclass
class Settings:
    x: torch.Tensor
    rate: Any = 0.0


@dataclasses.dataclass
class Slotted:
    __slots__ = ("rate", "x")
    x: torch.Tensor
    rate: Any


@tensorclass
class Clip:
    x: torch.Tensor
    rate: Any


class Typed(TypedTensorDict):
    x: torch.Tensor
    rate: Any


class Attributes(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return self[name]


# ---- containers ----------------------------------------------------------------------------------

MAKERS: dict[str, tuple[Callable[[torch.Tensor, Any], Any], Callable[[Any], Any]]] = {
    "dict": (lambda x, rate: {"x": x, "rate": rate}, lambda tree: tree["rate"]),
    "OrderedDict": (
        lambda x, rate: collections.OrderedDict(x=x, rate=rate),
        lambda tree: tree["rate"],
    ),
    "defaultdict": (
        lambda x, rate: collections.defaultdict(list, x=x, rate=rate),
        lambda tree: tree["rate"],
    ),
    "a subclass of dict": (lambda x, rate: Attributes(x=x, rate=rate), lambda tree: tree.rate),
    "UserDict": (
        lambda x, rate: collections.UserDict(x=x, rate=rate),
        lambda tree: tree["rate"],
    ),
    "list": (lambda x, rate: [x, rate], lambda tree: tree[1]),
    "deque": (lambda x, rate: collections.deque([x, rate], 2), lambda tree: tree[1]),
    "dataclass": (Settings, lambda tree: tree.rate),
    "dataclass with slots": (Slotted, lambda tree: tree.rate),
    "TensorDict": (
        lambda x, rate: TensorDict({"x": x}).set_non_tensor("rate", rate),
        lambda tree: tree.get_non_tensor("rate"),
    ),
    "nested TensorDict": (
        lambda x, rate: TensorDict({"x": x, "in": TensorDict().set_non_tensor("rate", rate)}),
        lambda tree: tree.get_non_tensor(("in", "rate")),
    ),
    "lazy stack": (
        lambda x, rate: LazyStackedTensorDict(
            TensorDict({"x": x}).set_non_tensor("rate", rate),
            TensorDict({"x": x.clone()}).set_non_tensor("rate", "second"),
        ),
        lambda tree: tree[0].get_non_tensor("rate"),
    ),
    "stack of data": (
        lambda x, rate: TensorDict({"x": x, "each": NonTensorStack("first", rate)}),
        lambda tree: tree.get("each").tolist()[1],
    ),
    "stack of stacks": (
        lambda x, rate: TensorDict(
            {"x": x, "each": NonTensorStack(NonTensorStack("a", "b"), NonTensorStack("c", rate))}
        ),
        lambda tree: tree.get("each").tolist()[1][1],
    ),
    "typed TensorDict": (
        lambda x, rate: Typed(x=x, rate=NonTensorData(rate)),
        lambda tree: tree._source["rate"],
    ),
    "tensorclass": (lambda x, rate: Clip(x, rate, batch_size=[]), lambda tree: tree.rate),
    "tuple of values in a dict": (
        lambda x, rate: {"x": x, "in": (0, rate)},
        lambda tree: tree["in"][1],
    ),
    "tuples of values in a list": (
        lambda x, rate: [x, ((), (0, (rate,)), "a", (1, 2))],
        lambda tree: tree[1][1][1][0],
    ),
    "named tuple of values": (
        lambda x, rate: [x, Pair(0, rate)],
        lambda tree: tree[1].right,
    ),
    "dict in a tuple": (lambda x, rate: (x, {"rate": rate}), lambda tree: tree[1]["rate"]),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_value_arrives_in_a_container_of_its_kind(device, name):
    make, rate_of = MAKERS[name]
    new, old = "new rate", "old rate"
    source, destination = make(torch.ones(3), new), make(torch.zeros(3, device=device), old)
    before = _classes(destination)
    handle = tdcopier.start_copy_into(source, destination, copy_opaque=True)
    assert rate_of(destination) == new  # at once
    assert handle.get() is destination
    assert handle.stats.opaque_differences == 0
    assert _classes(destination) == before
    assert rate_of(source) == new
    stale = tdcopier.start_copy_into(destination, make(torch.zeros(3), old))
    stale.get()
    assert stale.stats.opaque_differences == 1
    assert stale.stats.packed_leaves == handle.stats.packed_leaves
    again = tdcopier.start_copy_into(source, destination)
    assert again.get() is destination
    assert again.stats.opaque_differences == 0
    leaf = next(leaf for path, leaf, _ in tdcopier._C.pairs_with_paths(destination, destination))
    assert leaf.tolist() == [1, 1, 1]


def _classes(tree: Any) -> Any:
    """Returns the classes of a tree's containers, as a string."""
    if isinstance(tree, dict | collections.UserDict):
        return type(tree), {key: _classes(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple | collections.deque):
        return type(tree), [_classes(value) for value in tree]
    return type(tree)


def test_values_fill_a_tree_of_other_classes():
    source = TensorDict({"x": torch.ones(2), "name": "new"})
    destination = {"x": torch.zeros(2), "name": "old"}
    fill(source, destination)
    assert destination["name"] == "new"
    back = TensorDict({"x": torch.zeros(2), "name": "old"})
    fill({"x": torch.ones(2), "name": "new"}, back)
    assert back["name"] == "new"
    named = {"p": Pair(0, 1)}
    fill({"p": Pair(1, 2)}, named)
    assert named == {"p": Pair(1, 2)}
    deeper = {"p": (1, 2)}
    fill({"p": [3, 4]}, deeper)
    assert deeper == {"p": (3, 4)}


def test_a_tensordict_keeps_its_properties_and_gets_data_of_the_same_class():
    from tensordict import MetaData

    def make(value: str) -> TensorDict:
        data = MetaData(data=value, batch_size=[2])
        return TensorDict({"x": torch.zeros(2), "m": data, "n": value}, [2], names=["time"])

    destination = make("old")
    fill(make("new"), destination)
    assert (destination["m"], destination["n"]) == ("new", "new")
    assert type(destination.get("m")) is MetaData
    for name in "mn":
        assert destination.get(name).batch_size == (2,)
        assert destination.get(name).names == ["time"]


def test_the_destination_gets_the_objects_of_the_source():
    values = [{1}, object(), np.array(["a"]), "".join(["a", "b"])]
    destination: list[Any] = [None] * len(values)
    fill(values, destination)
    assert all(got is value for got, value in zip(destination, values, strict=True))


def test_equal_values_stay_the_objects_that_they_are():
    kept: list[Any] = ["".join(["a", "b"]), (1, "".join(["a", "b"])), float("nan")]
    destination = list(kept)
    fill(["".join(["a", "b"]), (1, "".join(["a", "b"])), float("nan")], destination)
    assert all(got is value for got, value in zip(destination, kept, strict=True))
    fill(["ab", (2, "".join(["a", "b"])), 0.0], destination)
    assert destination == ["ab", (2, "ab"), 0.0]
    assert destination[1][1] is kept[1][1]


def test_attributes_of_containers_stay_as_they_are():
    source, destination = (
        torch.nn.BatchNorm1d(2).state_dict(),
        copy.deepcopy(torch.nn.BatchNorm1d(2).state_dict()),
    )
    source._metadata[""]["version"] = 7
    metadata = copy.deepcopy(destination._metadata)
    source["note"], destination["note"] = "new", "old"
    fill(source, destination)
    assert destination["note"] == "new"
    assert destination._metadata == metadata != source._metadata


def test_values_of_a_swapped_pair_are_those_at_the_call():
    one, other = {"n": 1}, {"n": 2}
    fill([one, other], [other, one])
    assert (one["n"], other["n"]) == (2, 1)


def test_leaves_that_are_delegated_are_filled_too():
    destination = {"x": torch.zeros(2), "n": 1}
    stats = fill({"x": torch.ones(2, requires_grad=True) * 1, "n": 2}, destination)
    assert stats.delegated_leaves == 1
    assert destination["n"] == 2
    assert destination["x"].tolist() == [1, 1]


def test_it_is_the_same_with_checks_of_sources(device, monkeypatch):
    monkeypatch.setattr("tdcopier._checking.enabled", True)
    destination = {"x": torch.zeros(2, device=device), "n": 1}
    fill({"x": torch.ones(2), "n": 2}, destination)
    assert (destination["n"], destination["x"].tolist()) == (2, [1, 1])


# ---- one value in two places ---------------------------------------------------------------------


def test_one_tuple_in_two_containers_is_replaced_in_each():
    shared = (0.9, 0.999)
    destination = [{"betas": shared}, {"betas": shared}, {"betas": shared}]
    fill([{"betas": (0.8, 0.999)}, {"betas": (0.7, 0.999)}, {"betas": (0.9, 0.999)}], destination)
    assert [group["betas"][0] for group in destination] == [0.8, 0.7, 0.9]
    assert destination[2]["betas"] is shared


def test_one_container_in_two_places_takes_one_value():
    shared = {"n": 1, "in": (1, 2)}
    fill([{"n": 3, "in": (3, float("nan"))}, {"n": 3, "in": (3, float("nan"))}], [shared, shared])
    assert shared["n"] == 3
    for one, other in [(3, 4), (1, 4), (4, 1)]:
        shared["n"] = 1
        message = (
            "source[0]['n'] differs from source[1]['n'], but destination[0]['n'] and "
            "destination[1]['n'] are the same place: give the destination two containers"
        )
        source = [{"n": one, "in": shared["in"]}, {"n": other, "in": shared["in"]}]
        with raises_exactly(ValueError, message):
            fill(source, [shared, shared])
        assert shared["n"] == 1


# ---- threads -------------------------------------------------------------------------------------


def test_threads_fill_trees_of_their_own_from_one(device):
    source = {"x": torch.arange(100.0), "groups": [{"n": n, "in": (n, "a")} for n in range(50)]}

    def work(number: int) -> None:
        destination = {
            "x": torch.zeros(100, device=device),
            "groups": [{"n": -1, "in": (-1, "b")} for _ in range(50)],
        }
        for _ in range(20):
            fill(source, destination)
            assert destination["groups"] == source["groups"]
            assert destination["x"].tolist() == source["x"].tolist()
            for group in destination["groups"]:
                group["n"] = group["n"] + 1 + number

    at_once(4, work)
