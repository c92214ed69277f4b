"""Refusals of `copy_opaque`, and code of containers: nothing is written, or all is put back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from container_classes import Box, FrozenSample, Pair
from library_stand_ins import geometric
from tensordict import NonTensorStack, TensorDict

import tdcopier


def fill(source: Any, destination: Any) -> tdcopier.stats.CopyStats:
    handle = tdcopier.start_copy_into(source, destination, copy_opaque=True)
    assert handle.get() is destination
    return handle.stats


HELD = "a tuple that has other children than opaque values, so that the tuple cannot be replaced"


REFUSED: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "a tuple with a leaf": (lambda rate: (torch.zeros(1), rate), "[1]", f"it is in {HELD}"),
    "a tuple with a container": (lambda rate: [(rate, [])], "[0][0]", f"it is in {HELD}"),
    "a named tuple with a leaf": (
        lambda rate: Pair(torch.zeros(1), rate),
        ".right",
        f"it is in {HELD}",
    ),
    "a tuple in one with a leaf": (
        lambda rate: (torch.zeros(1), (1, rate)),
        "[1][1]",
        f"it is in {HELD}",
    ),
    "a frozen dataclass": (
        lambda rate: FrozenSample(torch.zeros(1), rate),
        ".label",
        "it is in a frozen dataclass (FrozenSample)",
    ),
    "a tuple in a frozen dataclass": (
        lambda rate: FrozenSample(torch.zeros(1), (1, rate)),
        ".label[1]",
        "it is in a frozen dataclass (FrozenSample)",
    ),
    "a locked TensorDict": (
        lambda rate: TensorDict({"in": TensorDict({"rate": rate})}).lock_(),
        "[('in', 'rate')]",
        "it is in a locked TensorDict: call unlock_() first",
    ),
    "a locked stack": (
        lambda rate: TensorDict({"each": NonTensorStack("a", rate)}).lock_(),
        "[('each', '1')]",
        "it is in a locked NonTensorStack: call unlock_() first",
    ),
    "a registered class": (
        lambda rate: Box(torch.zeros(1), rate),
        "[1]",
        "tdcopier cannot change the container_classes.Box that holds it",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_its_path_and_nothing_is_written(registered_box, name):
    make, path, reason = REFUSED[name]
    first = torch.zeros(5)
    source = {"n": 1, "first": torch.ones(5), "x": make("new")}
    destination = {"n": 0, "first": first, "x": make("old")}
    start = f"destination['x']{path} differs from source['x']{path} and cannot be replaced: "
    with pytest.raises(ValueError, match="^" + re.escape(start + reason)):
        fill(source, destination)
    assert first.tolist() == [0] * 5
    assert first._version == 0
    assert destination["n"] == 0
    handle = tdcopier.start_copy_into(source, destination)
    handle.get()
    assert handle.stats.opaque_differences == 2
    source["x"] = make("old")
    assert fill(source, destination).opaque_differences == 0


def test_a_value_in_no_container_is_refused():
    for source, destination in [(1, 2), ((1, 2), (1, 3)), (Pair(1, 2), Pair(1, 3))]:
        with pytest.raises(ValueError, match="it is in no container that can be changed"):
            fill(source, destination)
    assert fill((1, 2), (1, 2)).opaque_leaves == 2
    one = TensorDict({"n": "new"}).get("n")
    with pytest.raises(ValueError, match="give a TensorDict that holds it"):
        fill(one, TensorDict({"n": "old"}).get("n"))


class Holder:
    def __init__(self, number: int) -> None:
        self.kept = {"n": number}


@pytest.mark.parametrize("lasts", [True, False])
def test_a_container_in_one_of_a_registered_class_must_last(registry, lasts):
    def flatten(holder: Holder) -> tuple[list[Any], None]:
        return [torch.zeros(2), holder.kept if lasts else dict(holder.kept)], None

    tdcopier.containers.register(Holder, flatten, lambda children, _: Holder(0))
    destination = {"n": 1, "in": Holder(1)}
    if lasts:
        fill({"n": 2, "in": Holder(2)}, destination)
        assert (destination["n"], destination["in"].kept["n"]) == (2, 2)
        return
    with pytest.raises(ValueError, match="Holder makes the dict that holds it anew for each walk"):
        fill({"n": 2, "in": Holder(2)}, destination)
    assert (destination["n"], destination["in"].kept["n"]) == (1, 1)


def test_a_graph_is_refused(monkeypatch):
    library = geometric("stand-in", monkeypatch)

    def make(word: str) -> Any:
        return library.Data(x=torch.zeros(2), words=[word])

    destination = make("old")
    with pytest.raises(ValueError, match="makes the list that holds it anew for each walk"):
        fill(make("new"), destination)
    assert destination.words == ["old"]


def test_mistakes_in_leaves_leave_opaque_values_alone(device):
    destination = {"n": 1, "x": torch.zeros(2, device=device)}
    for wrong in (torch.zeros(3), torch.zeros(2).double(), "text"):
        with pytest.raises(ValueError, match=r"source\['x'\]"):
            fill({"n": 2, "x": wrong}, destination)
        assert destination["n"] == 1


# ---- code of containers --------------------------------------------------------------------------


class Picky(dict[str, Any]):
    """Takes no negative numbers, except in a copy that tests whether items can be replaced."""

    def __setitem__(self, key: str, value: Any) -> None:
        if value is not None and value == -1:
            raise LookupError("no negative numbers")
        super().__setitem__(key, value)


def test_values_are_put_back_if_a_container_raises():
    def make(number: int, last: int) -> dict[str, Any]:
        return {
            "n": number,
            "list": [number, (number, number)],
            "data": TensorDict({"n": str(number)}),
            "x": torch.full((2,), number),
            "picky": Picky(a=number, b=last),
        }

    source, destination = make(1, 1), make(0, 0)
    source["picky"] = {"a": 1, "b": -1}
    with pytest.raises(LookupError, match="no negative numbers"):
        fill(source, destination)
    wanted = make(0, 0)
    assert destination.pop("x").tolist() == wanted.pop("x").tolist()
    assert destination.pop("data")["n"] == wanted.pop("data")["n"]
    assert destination == wanted


@dataclasses.dataclass
class Shrinks:
    """Shrinks a tensor when a field is set."""

    number: int

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        for tensor in victims:
            tensor.untyped_storage().resize_(4)


victims: list[torch.Tensor] = []


def test_memory_is_looked_up_after_the_code_of_containers():
    source = {"a": torch.ones(50), "n": Shrinks(2)}
    destination = {"a": torch.zeros(50), "n": Shrinks(1)}
    victims.append(destination["a"])
    try:
        with pytest.raises(ValueError, match=r"destination\['a'\] reaches beyond its storage"):
            fill(source, destination)
    finally:
        victims.clear()
    assert destination["n"].number == 1


class Doubles(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value if value is None else value * 2)


def test_values_that_a_container_changes_count_as_differences():
    destination = Doubles(n=1)
    assert fill({"n": 2}, destination).opaque_differences == 1
    assert destination["n"] == 4
