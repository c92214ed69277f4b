"""Dataclasses whose fields are properties or other descriptors: moved where they are stored."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from support import assert_same, oracle

import tdcopier


def field_over(attribute: str) -> property:
    """Returns a property that keeps its value in another attribute."""
    return property(
        lambda self: getattr(self, attribute), lambda self, new: setattr(self, attribute, new)
    )


@dataclasses.dataclass
class OverAttribute:
    x: Any
    n: int


OverAttribute.x = field_over("_x")  # after the decorator, which would take it for a default
OverAttribute.n = field_over("_n")


@dataclasses.dataclass
class OverOwnName:
    x: Any
    n: int


OverOwnName.x = property(
    lambda self: self.__dict__["x"], lambda self, new: self.__dict__.__setitem__("x", new)
)


@dataclasses.dataclass
class OverSlot:
    __slots__ = ("_n", "_x")
    x: Any
    n: int


OverSlot.x = field_over("_x")
OverSlot.n = field_over("_n")


class Stored:
    """A descriptor that keeps a value under a name of its own."""

    def __get__(self, owner: Any, cls: type) -> Any:
        return self if owner is None else owner.__dict__["stored x"]

    def __set__(self, owner: Any, new: Any) -> None:
        owner.__dict__["stored x"] = new


@dataclasses.dataclass
class OverDescriptor:
    x: Any
    n: int


OverDescriptor.x = Stored()


@dataclasses.dataclass
class InTwoPlaces:
    x: Any
    n: int

    def __post_init__(self) -> None:
        self._first = self._x


InTwoPlaces.x = property(
    lambda self: self._x, lambda self, new: self.__dict__.update(_x=new, _first=new)
)


@dataclasses.dataclass
class WithLength:
    x: Any
    n: int


WithLength.n = property(lambda self: len(self.x), lambda self, new: None)


@dataclasses.dataclass
class Computing:
    x: Any
    n: int


Computing.x = property(lambda self: self._x + 0, lambda self, new: setattr(self, "_x", new))

OUTSIDE: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(eq=False)
class KeptOutside:
    x: Any
    n: int


KeptOutside.x = property(OUTSIDE.get, OUTSIDE.__setitem__)


@pytest.mark.parametrize("how", ["property", "same name", "slots", "descriptor", "two places"])
def test_a_field_that_a_property_keeps_elsewhere_moves(device, leaf, how):
    sample = {
        "property": OverAttribute,
        "same name": OverOwnName,
        "slots": OverSlot,
        "descriptor": OverDescriptor,
        "two places": InTwoPlaces,
    }[how](leaf, 4)
    moved = tdcopier.copy([sample], device, on_unknown="raise")[0]
    assert type(moved) is type(sample)
    assert_same(moved.x, oracle(leaf, device))
    assert moved.n == 4
    assert sample.x is leaf
    moved.x = None
    assert sample.x is leaf  # they share no memory of the class
    rows = tdcopier.gather([sample], [1], device)[0]
    assert_same(rows.x, oracle(leaf, device)[[1]])
    assert sample.x is leaf


@dataclasses.dataclass
class TwoOverAttributes:
    x: Any
    y: Any
    z: Any

    def __post_init__(self) -> None:
        self._also_y = self._y


TwoOverAttributes.x = field_over("_first")
TwoOverAttributes.y = field_over("_y")


def test_two_fields_that_have_one_object_elsewhere_move_on_their_own(device, leaf):
    for shared in (leaf, [leaf]):
        moved = tdcopier.copy([TwoOverAttributes(shared, shared, shared)], device)[0]
        for name in ("x", "y", "z"):
            assert_same(getattr(moved, name), oracle(shared, device))
        assert len({id(moved.x), id(moved.y), id(moved.z)}) == 3
        assert moved._first is moved.x
        assert moved._y is moved._also_y is moved.y


@dataclasses.dataclass
class Alike:
    """Two fields that read one attribute, and so cannot be told apart."""

    x: Any
    y: Any


Alike.x = field_over("_both")
Alike.y = field_over("_both")


def test_two_fields_over_one_attribute_are_refused(device, leaf):
    with pytest.raises(TypeError, match=r"^data is a Alike, whose field 'x' .* the same object"):
        tdcopier.copy(Alike(leaf, leaf), device)


def test_a_field_that_is_computed_is_computed_again(device, leaf):
    moved = tdcopier.copy(WithLength(leaf, -1), device)
    assert moved.n == len(leaf)
    assert moved.x.device == torch.device(device)


@pytest.mark.parametrize("made", ["Computing", "Registered"])
def test_a_field_whose_place_is_not_known_is_refused(device, leaf, made):
    sample = {"Computing": Computing, "Registered": KeptOutside}[made](leaf, 1)
    with pytest.raises(
        TypeError, match=rf"^data\['s'\] is a {type(sample).__name__}, whose field 'x'"
    ):
        tdcopier.copy({"s": sample}, device)
    assert sample.x is leaf or made == "Computing"
