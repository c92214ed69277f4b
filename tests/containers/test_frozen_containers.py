"""Mappings and sequences that refuse to have items set are rebuilt."""

from __future__ import annotations

import pytest
import torch
from catalogue import ramp
from frozen_classes import MAPPINGS, SEQUENCES, FrozenDict, FrozenList, FrozenUserDict, hashed
from support import assert_same, oracle

import tdcopier


@pytest.mark.parametrize("kind", MAPPINGS)
def test_a_frozen_mapping_is_rebuilt(ends, kind):
    source_device, target = ends
    leaf = ramp(source_device, 3)
    source = MAPPINGS[kind]({"b": leaf, "a": "text"})
    handle = tdcopier.start_copy([source], target, on_unknown="raise")
    moved = handle.get()[0]
    assert type(moved) is type(source)
    assert list(moved) == ["b", "a"]
    assert_same(moved["b"], oracle(leaf, target))
    assert moved["a"] == "text"
    assert source["b"] is leaf
    assert handle.stats[:5] == (1, 0, 0, 0, 1)
    rows = tdcopier.explain([source], target).rows
    assert [row.path for row in rows] == ["data[0]['b']", "data[0]['a']"]
    for name in getattr(source, "__dict__", {}):
        if name not in ("data", "first"):
            assert getattr(moved, name) == getattr(source, name)
    if kind == "with something of its items":
        assert moved.first is moved["b"]


@pytest.mark.parametrize("kind", MAPPINGS)
def test_rows_of_a_frozen_mapping_are_gathered(device, leaf, kind):
    moved = tdcopier.gather([MAPPINGS[kind]({"b": leaf, "a": "text"})], [2, 0], device)[0]
    assert_same(moved["b"], oracle(leaf, device)[[2, 0]])


@pytest.mark.parametrize("kind", SEQUENCES)
def test_a_frozen_sequence_is_rebuilt(device, leaf, kind):
    source = SEQUENCES[kind]([leaf, "text", [leaf]])
    moved = tdcopier.copy([source], device, on_unknown="raise")[0]
    assert type(moved) is type(source)
    assert len(moved) == 3
    assert_same(moved[0], oracle(leaf, device))
    assert moved[1] == "text"
    assert_same(moved[2], oracle([leaf], device))
    assert getattr(moved, "maxlen", None) == getattr(source, "maxlen", None)
    assert getattr(moved, "name", None) == getattr(source, "name", None)
    assert_same(tdcopier.gather([source], [1], device)[0][2][0], oracle(leaf, device)[[1]])


def test_a_hash_that_the_source_keeps_is_not_that_of_the_result(device, leaf):
    moved = tdcopier.copy(hashed(FrozenDict(a=leaf)), device)
    assert hash(moved) == hash(frozenset(moved.items()))


@pytest.mark.parametrize("cls", [FrozenDict, FrozenUserDict, FrozenList])
def test_an_empty_one_is_rebuilt(device, cls):
    value = cls({} if cls is not FrozenList else [])
    assert type(tdcopier.copy(value, device)) is cls


def test_a_frozen_one_is_filled_by_a_copy_into_and_its_values_are_not_replaced(device, leaf):
    there = FrozenDict(x=torch.zeros(3, device=device), n=1)
    tdcopier.copy_into(FrozenDict(x=leaf, n=2), there)
    assert there["x"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"destination\['n'\] differs .* in a FrozenDict, which"):
        tdcopier.copy_into(FrozenDict(x=leaf + 1, n=2), there, copy_opaque=True)
    assert there["x"].tolist() == [0, 1, 2]


# ---- of libraries --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_frozen", [True, False])
def test_a_box_stays_as_frozen_as_it_is(device, leaf, is_frozen):
    box = pytest.importorskip("box")
    source = box.Box({"a": leaf, "in": {"b": leaf, "many": [leaf, 1]}}, frozen_box=is_frozen)
    moved = tdcopier.copy([source], device, on_unknown="raise")[0]
    assert_same(moved.a, oracle(leaf, device))
    assert_same(moved["in"].b, oracle(leaf, device))
    assert_same(moved["in"].many[0], oracle(leaf, device))
    for one, other in ((moved, source), (moved["in"], source["in"])):
        assert type(one) is box.Box
        assert one._box_config["frozen_box"] is other._box_config["frozen_box"] is is_frozen
    assert type(moved["in"].many) is type(source["in"].many)


def test_a_frozendict_is_rebuilt(device, leaf):
    frozendict = pytest.importorskip("frozendict")
    source = hashed(frozendict.frozendict(a=leaf, b=frozendict.frozendict(c=leaf), n=1))
    moved = tdcopier.copy([source], device, on_unknown="raise")[0]
    assert type(moved) is type(source)
    assert_same(moved["a"], oracle(leaf, device))
    assert_same(moved["b"]["c"], oracle(leaf, device))
    assert hash(moved) == hash(frozenset(moved.items()))
    empty = frozendict.frozendict()
    assert tdcopier.copy([empty], device)[0] == empty
