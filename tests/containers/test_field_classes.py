"""Classes that are rebuilt field by field, and those like attrs and pydantic that are not.

Each tensor moves, or `on_unknown` reports where it stays.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import warnings
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from catalogue import ramp
from support import assert_same, oracle

import tdcopier

pytestmark = pytest.mark.usefixtures("nothing_is_told")


# ---- cached properties ---------------------------------------------------------------------------


class OwnCache:
    """Keeps what it computes under its own name, as `functools.cached_property` does."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self.function = function

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, cls: type) -> Any:
        if owner is None:
            return self
        value = owner.__dict__[self.name] = self.function(owner)
        return value


class Doubles:
    """Reads its first tensor with `first`."""

    @functools.cached_property
    def doubled(self) -> torch.Tensor:
        return self.first() * 2

    @OwnCache
    def parts(self) -> Any:
        return {"x": [self.first() + 1]}

    @functools.cached_property
    def count(self) -> int:
        return 7


class CachedList(Doubles, list):
    def first(self) -> Any:
        return self[0]


class CachedDeque(Doubles, deque):
    def first(self) -> Any:
        return self[0]


class CachedDict(Doubles, dict):
    def first(self) -> Any:
        return self["x"]


class CachedUserDict(Doubles, UserDict):
    def first(self) -> Any:
        return self["x"]


class CachedFrozen(CachedDict):
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("is frozen")


class CachedOrdered(Doubles, OrderedDict):
    def first(self) -> Any:
        return self["x"]


class Fields(NamedTuple):
    x: Any


class CachedNamed(Doubles, Fields):
    def first(self) -> Any:
        return self.x


class CachedTuple(Doubles, tuple):
    def first(self) -> Any:
        return self[0]


@dataclasses.dataclass
class CachedDataclass(Doubles):
    x: Any

    def first(self) -> Any:
        return self.x


@dataclasses.dataclass(frozen=True)
class CachedFrozenDataclass(Doubles):
    x: Any

    def first(self) -> Any:
        return self.x


CACHED: list[Callable[[Any], Any]] = [
    lambda leaf: CachedList([leaf]), lambda leaf: CachedDeque([leaf], 3),
    lambda leaf: CachedDict(x=leaf), lambda leaf: CachedUserDict(x=leaf),
    lambda leaf: CachedFrozen(x=leaf), lambda leaf: CachedOrdered(x=leaf),
    CachedNamed, lambda leaf: CachedTuple([leaf]), CachedDataclass, CachedFrozenDataclass,
]  # fmt: skip


@pytest.mark.parametrize("make", CACHED)
def test_a_cached_property_with_tensors_is_computed_again(ends, make):
    source_device, target = ends
    leaf = ramp(source_device, 3)
    source = make(leaf)
    kept = source.doubled, source.parts, source.count
    for moved, expected in (
        (tdcopier.copy([source], target, on_unknown="raise")[0], leaf.to(target)),
        (tdcopier.gather([source], [2, 0], target, on_unknown="raise")[0], leaf[[2, 0]].to(target)),
    ):
        assert type(moved) is type(source)
        assert vars(moved)["count"] == 7
        assert not {"doubled", "parts"} & vars(moved).keys()
        assert_same(moved.doubled, expected * 2)
        assert_same(moved.parts["x"][0], expected + 1)
    assert (source.doubled, source.parts, source.count) == kept


# ---- fields that an override keeps elsewhere -----------------------------------------------------


@dataclasses.dataclass
class Underscored:
    """Keeps each field under another name, without a property."""

    x: Any
    n: int = 3

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, f"_{name}", value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self, f"_{name}")


@dataclasses.dataclass
class Doubling:
    x: Any

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        return value * 2 if name == "x" else value


@dataclasses.dataclass
class Defaulting:
    x: Any = None


def test_a_field_that_is_kept_elsewhere_without_a_property_moves(device, leaf):
    source = Underscored(leaf)
    moved = tdcopier.copy([source], device, on_unknown="raise")[0]
    assert vars(moved).keys() == vars(source).keys()
    assert_same(moved.x, oracle(leaf, device))
    moved.x = 5
    assert moved.x == 5
    assert moved.n == 3
    assert source.x is leaf


def test_a_field_that_an_override_computes_is_refused(device, leaf):
    with pytest.raises(TypeError, match=r"^data\[0\] is a Doubling, whose field 'x' is"):
        tdcopier.copy([Doubling(leaf)], device)


def test_a_field_that_only_the_class_has_moves(device, leaf):
    source = Defaulting(4)
    del source.x
    Defaulting.x = leaf
    try:
        assert_same(tdcopier.copy(source, device).x, oracle(leaf, device))
    finally:
        Defaulting.x = None


# ---- attributes beside fields and items ----------------------------------------------------------


@dataclasses.dataclass
class Masked:
    x: Any
    given: dataclasses.InitVar[Any] = None

    def __post_init__(self, given: Any) -> None:
        self.mask = self.x > 0


class Slotted(dict):
    __slots__ = ("extra",)


def with_attribute(value: Any, attribute: Any) -> Any:
    value.extra = attribute
    return value


BESIDE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dataclass": (Masked, "mask"),
    "dict": (lambda leaf: with_attribute(CachedDict(x=leaf), {"a": [leaf]}), "extra"),
    "slot": (lambda leaf: with_attribute(Slotted(x=leaf), leaf), "extra"),
    "frozen dict": (lambda leaf: with_attribute(CachedFrozen(x=leaf), leaf + 0), "extra"),
    "UserDict": (lambda leaf: with_attribute(UserDict(x=leaf), leaf), "extra"),
    "OrderedDict": (lambda leaf: with_attribute(OrderedDict(x=leaf), (leaf,)), "extra"),
    "defaultdict": (
        lambda leaf: with_attribute(type("D", (collections.defaultdict,), {})(list, x=leaf), leaf),
        "extra",
    ),
    "list": (lambda leaf: with_attribute(CachedList([leaf]), leaf), "extra"),
    "tuple": (lambda leaf: with_attribute(CachedTuple([leaf]), leaf), "extra"),
    "named tuple": (lambda leaf: with_attribute(CachedNamed(leaf), leaf), "extra"),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_on_unknown_reports_tensors_in_attributes(device, leaf, kind):
    make, name = BESIDE[kind]
    value = make(leaf)
    tree = {"a": [1, {"b": (leaf, value)}]}
    path = f"data['a'][1]['b'][1].{name}"
    moved = tdcopier.copy(tree, device)["a"][1]["b"][1]
    assert getattr(moved, name) is getattr(value, name)
    for call in (
        lambda: tdcopier.copy(tree, device, on_unknown="raise"),
        lambda: tdcopier.gather(tree, [0], device, on_unknown="raise"),
        lambda: tdcopier.prepare(tree, device, on_unknown="raise"),
        lambda: list(tdcopier.prefetch([tree], device, on_unknown="raise")),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(path)} has tensors in it, and is an"):
            call()
    for expected in ([path], []):  # once for each class
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tdcopier.copy(tree, device, on_unknown="warn")
        assert [str(each.message).split(" has ")[0] for each in caught] == expected
    explained = tdcopier.explain(tree, device)
    assert explained.left_in_attributes == (path,)
    assert path in str(explained)
    assert explained.to_dict()["left_in_attributes"] == [path]


def test_attributes_without_tensors_are_not_reported(device, leaf):
    value = with_attribute(CachedDict(x=leaf), {"a": ["text", 3, object()]})
    tdcopier.copy([value], device, on_unknown="raise")
    explained = tdcopier.explain([value], device)
    assert explained.left_in_attributes == ()
    assert "attribute" not in str(explained)


# ---- classes of libraries, and classes like theirs -----------------------------------------------


class LikeAttrs:
    """Keeps its fields in slots, or in attributes of other names."""

    __slots__ = ("_y", "x")

    def __init__(self, x: Any, y: Any) -> None:
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "_y", y)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


class LikePydantic:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def __iter__(self) -> Any:
        return iter(vars(self).items())


def attrs_class(**options: Any) -> Callable[[Any], Any]:
    def make(leaf: Any) -> Any:
        attrs = pytest.importorskip("attrs")

        @attrs.define(**options)
        class Sample:
            x: Any = attrs.field(converter=lambda value: value)
            _y: Any = attrs.field(default=None, alias="other")

        return Sample(leaf, other=leaf)

    return make


def pydantic_class(**options: Any) -> Callable[[Any], Any]:
    def make(leaf: Any) -> Any:
        pydantic = pytest.importorskip("pydantic")

        class Sample(pydantic.BaseModel):
            model_config = pydantic.ConfigDict(arbitrary_types_allowed=True, **options)
            x: object
            _hidden: object = pydantic.PrivateAttr(None)

        sample = Sample(x=leaf, more=leaf)
        sample._hidden = leaf
        return sample

    return make


def msgspec_class(**options: Any) -> Callable[[Any], Any]:
    def make(leaf: Any) -> Any:
        msgspec = pytest.importorskip("msgspec")
        return msgspec.defstruct("Sample", ["x"], **options)(leaf)

    return make


NOT_TAKEN_APART: dict[str, Callable[[Any], Any]] = {
    "like attrs": lambda leaf: LikeAttrs(leaf, leaf),
    "like pydantic": lambda leaf: LikePydantic(x=leaf),
    "attrs": attrs_class(),
    "attrs, frozen": attrs_class(frozen=True),
    "attrs, without slots": attrs_class(slots=False),
    "pydantic": pydantic_class(),
    "pydantic, frozen, extra": pydantic_class(frozen=True, extra="allow"),
    "msgspec": msgspec_class(),
    "msgspec, frozen": msgspec_class(frozen=True, array_like=True, gc=False),
}


@pytest.mark.parametrize("kind", NOT_TAKEN_APART)
def test_objects_of_such_classes_are_reported(device, leaf, kind):
    value = NOT_TAKEN_APART[kind](leaf)
    tree = [leaf, value]
    assert tdcopier.copy(tree, device)[1] is value
    for call in (tdcopier.copy, lambda *args, **more: tdcopier.gather(tree, [0], device, **more)):
        with pytest.raises(TypeError, match=r"^data\[1\] is an? .*, a class that tdcopier does"):
            call(tree, device, on_unknown="raise")
    row = tdcopier.explain(tree, device).rows[1]
    assert (row.path, row.treatment) == ("data[1]", "opaque")


def attrs_dict(leaf: Any) -> Any:
    attrs = pytest.importorskip("attrs")

    @attrs.define
    class Sample(dict):
        x: Any

    value = Sample(leaf)
    value["a"] = leaf
    return value


def pydantic_dataclass(leaf: Any) -> Any:
    pydantic = pytest.importorskip("pydantic.dataclasses")

    @pydantic.dataclass(config={"arbitrary_types_allowed": True, "extra": "allow"})
    class Sample:
        a: object

    return Sample(a=leaf, x=leaf)


@pytest.mark.parametrize("make", [attrs_dict, pydantic_dataclass])
def test_fields_beside_those_that_move_are_reported(device, leaf, make):
    value = make(leaf)
    moved = tdcopier.copy(value, device)
    assert_same(moved["a"] if isinstance(moved, dict) else moved.a, oracle(leaf, device))
    with pytest.raises(TypeError, match=r"^data\.x has tensors in it"):
        tdcopier.copy(value, device, on_unknown="raise")
