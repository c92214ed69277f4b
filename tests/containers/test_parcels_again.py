"""Parcels of a tree like the one before, whose head is known, and of one that differs a little."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_same
from tensordict import TensorDict

import tdcopier
from tdcopier import _C, pack

Pair = collections.namedtuple("Pair", "a b")


def tree_of(**changes: Any) -> Any:
    """A tree; each change is of one value in it."""
    values: dict[str, Any] = {
        "key": "x",
        "number": 7,
        "large": 10**9,
        "fraction": 0.0,
        "flag": True,
        "constants": (1, "two", (3.0, None)),
        "leaf": torch.arange(6.0).view(2, 3),
        "batch_size": (2,),
        "names": None,
        "order": ("first", "second"),
        "outer": list,
        **changes,
    }
    inner = {values["key"]: values["leaf"], "n": values["number"], "l": values["large"]}
    made = TensorDict({"obs": torch.ones(2, 2)}, values["batch_size"], names=values["names"])
    rest = {values["order"][0]: torch.zeros(2), values["order"][1]: torch.ones(2)}
    plain = [inner, values["fraction"], values["flag"], values["constants"], made, rest]
    return values["outer"](plain)


VARIANTS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "key": {"key": "y"},
    "an equal key that is another object": {"key": "".join(["", "x"])},
    "a key that is a number": {"key": 3},
    "small number": {"number": 8},
    "True for a number": {"number": True},
    "large number": {"large": 10**9 + 1},
    "an equal number that is another object": {"large": int("1000000000")},
    "fraction": {"fraction": 0.5},
    "negative zero": {"fraction": -0.0},
    "flag": {"flag": False},
    "a number for a flag": {"flag": 1},
    "constants": {"constants": (1, "two", (3.0, 0))},
    "a list in the constants": {"constants": (1, ["two"], (3.0, None))},
    "shape": {"leaf": torch.arange(6.0).view(3, 2)},
    "dimensions": {"leaf": torch.arange(6.0)},
    "dtype": {"leaf": torch.arange(6.0).view(2, 3).int()},
    "transposed": {"leaf": torch.arange(6.0).view(3, 2).t()},
    "expanded": {"leaf": torch.arange(3.0).expand(2, 3)},
    "array": {"leaf": np.arange(6.0, dtype=np.float32).reshape(2, 3)},
    "no leaf": {"leaf": "text"},
    "needs a gradient": {"leaf": torch.arange(6.0).view(2, 3).requires_grad_()},
    "batch size": {"batch_size": ()},
    "names": {"names": ["time"]},
    "order of keys": {"order": ("second", "first")},
    "tuple": {"outer": tuple},
    "named tuple": {"outer": lambda values: Pair(values, [])},
}


def same_bits(got: Any, expected: Any) -> bool:
    return type(got) is type(expected) and repr(got) == repr(expected)  # -0.0 is not 0.0


@pytest.mark.parametrize("changed", VARIANTS)
def test_a_tree_that_differs_a_little_is_packed_as_it_is(changed, device):
    trees = [tree_of(), tree_of(**VARIANTS[changed])]
    for each in [0, 0, 1, 0, 1, 1, 0]:
        expected = tdcopier.copy(trees[each], device)
        assert_same(tdcopier.copy(pack(trees[each]), device), expected, is_same=same_bits)


def test_values_that_change_in_place_are_packed_as_they_are_now():
    names, extra = ["one"], {"deep": [1]}
    for name in ("two", "three"):
        tree = {"leaf": torch.ones(2), "names": names, "extra": (extra,), "td": TensorDict({}, [2])}
        assert pack(tree).tree()["names"] == names
        assert pack(tree).tree()["extra"] == (extra,)
        names.append(name)
        extra[name] = [name]


def test_bytes_are_the_same_whether_the_head_was_known_or_not():
    first = bytes(pack(tree_of()))
    for changed, _ in itertools.product(VARIANTS, range(2)):  # which drive known ones out
        pack(tree_of(**VARIANTS[changed]))
        assert bytes(pack(tree_of())) == first


def test_memory_that_the_call_of_another_tree_gives_does_not_change_what_is_packed():
    """`out` runs any code, which may pack a tree that takes the known one's place."""

    def out(nbytes: int) -> torch.Tensor:
        for number in range(20):
            pack({f"key {number}": torch.ones(3), "b": torch.ones(5)})
        return torch.empty(nbytes, dtype=torch.uint8)

    tree = {"a": torch.arange(3.0), "b": torch.arange(5.0)}
    for _ in range(3):
        assert_same(_C.pack(tree, lambda nbytes, _: out(nbytes)).tree(), tree, is_same=same_bits)
