"""Attributes and slots of derived containers that `copy.copy` loses are kept."""

from __future__ import annotations

from collections import UserDict, defaultdict, deque
from typing import Any

import pytest
import torch
from support import assert_same, oracle

import tdcopier


class SlottedDeque(deque):
    __slots__ = ("name",)


class SlottedUserDict(UserDict):
    __slots__ = ("name",)


class SlottedDefaults(defaultdict):
    __slots__ = ("name",)


class Counting(defaultdict):
    """Its constructor sets one of its attributes, and a copy calls it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.number = 0


class CountingDeque(deque):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.number = 0


VALUES = {
    "deque": lambda leaf: SlottedDeque([leaf], 4),
    "UserDict": lambda leaf: SlottedUserDict({0: leaf}),
    "defaultdict": lambda leaf: SlottedDefaults(list, {0: leaf}),
    "counting defaultdict": lambda leaf: Counting(list, {0: leaf}),
    "counting deque": lambda leaf: CountingDeque([leaf], 4),
}


@pytest.mark.parametrize("kind", VALUES)
def test_each_attribute_is_the_same_object(device, leaf, kind):
    source = VALUES[kind](leaf)
    source.name = object()
    if kind.startswith("counting"):
        source.number = 5
    moved = tdcopier.copy([source], device)[0]
    assert type(moved) is type(source)
    assert_same(moved[0], oracle(leaf, device))
    assert moved.name is source.name
    assert getattr(moved, "number", None) == getattr(source, "number", None)
    assert getattr(moved, "maxlen", None) == getattr(source, "maxlen", None)
    assert getattr(moved, "default_factory", None) is getattr(source, "default_factory", None)
    assert source[0] is leaf


class Unlimited(deque):
    """Its copy has no maximum length."""

    def __copy__(self) -> Any:
        return type(self)(self)


@pytest.mark.parametrize("cls", [list, dict, deque])
def test_an_attribute_may_have_the_name_of_a_method(device, cls):
    """A method is a descriptor too, but no property that keeps its value."""
    derived = type("Derived", (cls,), {"own": lambda self: 0})
    value = derived({0: torch.ones(3)} if cls is dict else [torch.ones(3)])
    for name in ("copy", "own"):
        setattr(value, name, [torch.tensor([4, 5])])
        moved = tdcopier.copy(value, device)
        assert getattr(moved, name) is getattr(value, name)
        with pytest.raises(TypeError, match=rf"data\.{name} has tensors in it"):
            tdcopier.copy(value, device, on_unknown="raise")
        delattr(value, name)


def test_a_copy_without_the_maximum_length_is_not_used(device, leaf):
    for children in ([], [leaf]):
        moved = tdcopier.copy(Unlimited(children, 4), device)
        assert type(moved) is Unlimited
        assert moved.maxlen == 4
        assert_same(list(moved), oracle(children, device))
