"""Flattening and rebuilding TensorDicts: cases that could mislead the walk, and what it keeps."""

from __future__ import annotations

import gc
import weakref
from dataclasses import make_dataclass
from typing import Any

import pytest
import torch
from support import are_released, assert_same

import tdcopier
from tdcopier._containers.delegated_parts import plain_parts

tensordict = pytest.importorskip("tensordict")
from tensordict import TensorClass, TensorDict, lazy_stack, tensorclass  # noqa: E402

from tdcopier.tensordict import _nodes  # noqa: E402


class Shadowing(TensorClass["shadow"]):
    device: torch.Tensor
    is_locked: torch.Tensor
    to: torch.Tensor
    values: torch.Tensor


class Doubling(TensorClass):
    x: torch.Tensor

    def __post_init__(self) -> None:
        self.x = self.x * 2


class Tagged(TensorDict):
    """A user's class with a method."""

    def first(self) -> Any:
        return next(iter(self.values()))


def nested(device: str = "cpu") -> TensorDict:
    return TensorDict(
        {
            "a": torch.arange(6.0).reshape(3, 2),
            "b": {"c": torch.ones(3), "d": {"e": torch.ones(3)}},
        },
        batch_size=[3],
    ).to(device)


def test_fields_with_the_names_of_methods_do_not_mislead(device):
    fields = ("device", "is_locked", "to", "values")
    source = Shadowing(**{name: torch.full((2,), float(i)) for i, name in enumerate(fields)})
    for tree in (source, TensorDict({"nested": source}, [])):
        handle = tdcopier.start_copy([tree], device)
        moved = handle.get()[0]
        moved = moved if tree is source else moved.get("nested")
        assert handle.stats[:5] == (4, 0, 0, 0, 0)
        assert type(moved) is Shadowing
        assert moved._tensordict.device == torch.device(device)
        for i, name in enumerate(fields):
            assert_same(getattr(moved, name), torch.full((2,), float(i)).to(device))


def test_what_a_collection_reads_from_elsewhere_is_not_looked_for():
    class Remote:
        def values(self) -> list[torch.Tensor]:
            raise AssertionError("would read all of it")

    assert plain_parts(Remote()) == []
    members = [nested(), nested()]
    assert len(plain_parts(lazy_stack(members))) == 6
    assert len(plain_parts(Shadowing(*[torch.ones(2)] * 4))) == 4


@pytest.mark.parametrize("large", [False, True], ids=["in the call", "by workers"])
def test_the_structure_may_be_changed_as_soon_as_the_call_has_returned(device, large):
    source = nested()
    source["large"] = torch.ones(3, 400_000 if large else 4)
    expected = source.to(device)
    handle = tdcopier.async_to(source, device)
    assert handle.stats.background is large
    del source["a"]
    source["b", "new"] = torch.zeros(3)
    source["b"].rename_key_("c", "renamed")
    source.batch_size = []
    assert_same(handle.get(), expected)


def test_a_class_that_looks_at_what_it_is_given_gets_it_when_it_has_arrived(device):
    source = Doubling(x=torch.ones(3), batch_size=[3])
    for tree in (source, TensorDict({"t": source}, [3]), lazy_stack([source, source])):
        expected = tree.to(device)
        handle = tdcopier.async_to(tree, device)
        assert_same(handle.get(), expected)
        assert handle.stats.packed_leaves == 0
        assert handle.stats.delegated_leaves >= 1


def test_the_layout_of_the_supported_versions_is_known():
    assert _nodes.IS_KNOWN_LAYOUT


def test_a_subclass_keeps_its_class_and_names(device):
    source = Tagged({"x": torch.ones(2, 3), "y": {"z": torch.ones(2)}}, [2], names=["rows"])
    handle = tdcopier.async_to([source, source.copy().lock_()], device)
    free, locked = handle.get()
    assert handle.stats[:5] == (4, 0, 0, 0, 0)
    assert_same(free, source.to(device))
    assert (type(free), free.names, free["y"].names) == (Tagged, ["rows"], ["rows"])
    assert (free.is_locked, locked.is_locked, locked["y"].is_locked) == (False, True, True)
    assert_same(free.first(), source["x"].to(device))


def test_a_leaf_that_nobody_can_read_is_named_by_its_keys(device):
    source = nested()
    source["b", "d", "e"].untyped_storage().resize_(4)
    with pytest.raises(ValueError, match=r"^data\[1\]\['b'\]\['d'\]\['e'\] reaches beyond"):
        tdcopier.start_copy([0, source], device)


def test_neither_the_handle_nor_the_result_keeps_the_source(device):
    source = nested()
    leaves = [source["a"], source["b", "c"], source["b", "d", "e"]]
    references = [weakref.ref(leaf) for leaf in leaves] + [weakref.ref(source)]
    handle = tdcopier.async_to(source, device)
    result = handle.get()
    del source, leaves
    gc.collect()
    assert are_released(references)
    assert result["b", "c"].sum().item() == 3


def test_nested_dicts_are_taken_as_well(device):
    tree = {"x": torch.ones(2), "y": [nested(), {"z": torch.zeros(1)}]}
    got = tdcopier.async_to(tree, device).get()
    assert_same(got["x"], tree["x"].to(device))
    assert_same(got["y"][0], tree["y"][0].to(device))
    assert got["y"][0].device == torch.device(device)
    assert type(tdcopier.to(tree, device)["y"][1]) is dict


def deep(depth: int) -> TensorDict:
    td = TensorDict({"x": torch.ones(2)})
    for _ in range(depth):
        td = TensorDict({"next": td})
    return td


@pytest.mark.parametrize("is_locked", [False, True])
def test_what_is_nested_as_deep_as_its_own_to_can_go_arrives(device, is_locked):
    source = deep(440)
    if is_locked:
        source.lock_()
    expected = source.to(device)
    with tdcopier.tensordict.backend() as use:
        switched = source.to(device)
    for got in (tdcopier.to(source, device), switched):
        below, wanted = got, expected
        while "next" in below._tensordict:
            assert (below.device, below.is_locked) == (wanted.device, wanted.is_locked)
            below, wanted = below._tensordict["next"], wanted._tensordict["next"]
        assert_same(below["x"], wanted["x"])
    assert use.by_engine == 1


@pytest.mark.parametrize("where", ["TensorDict", "lazy stack"])
def test_what_contains_itself_is_an_error_and_the_next_copy_works(device, where):
    source = deep(2)
    if where == "TensorDict":
        source["next"]._tensordict["again"] = source
    else:
        source["next"]._tensordict["again"] = lazy_stack([deep(1), deep(1)])
        source["next", "again"].tensordicts[1] = source
    with pytest.raises(RecursionError):
        tdcopier.async_to(source, device)
    with tdcopier.tensordict.backend(), pytest.raises(RecursionError):
        source.to(device)
    del source["next"]._tensordict["again"]
    assert_same(tdcopier.to(source, device), source.to(device))


def test_options_are_those_of_start_copy(device):
    handle = tdcopier.async_to(nested(), device, pack_cpu_tensors=False)
    handle.get()
    assert (handle.stats.packed_leaves, handle.stats.alone_leaves) == (0, 3)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no_such'"):
        tdcopier.async_to(nested(), device, no_such=True)
    with pytest.raises(ValueError, match="min_packed_alignment_bytes"):
        tdcopier.to(nested(), device, min_packed_alignment_bytes=0)


def test_leaves_of_a_flat_one_are_named_by_their_keys_alone(device):
    source = tensordict.TensorDict({"x": torch.ones(3), "y": torch.ones(3)}, [])
    source["y"].untyped_storage().resize_(4)
    with pytest.raises(ValueError, match=r"^data\['y'\] reaches beyond"):
        tdcopier.start_copy(source, device)


def test_a_result_has_names_of_its_own(device):
    source = tensordict.TensorDict({"x": torch.ones(3)}, [3], names=["rows"])
    moved = tdcopier.to(source, device)
    moved.names = ["other"]
    assert source.names == ["rows"]
    assert moved._td_dim_names is not source._td_dim_names


def test_rules_that_the_walk_keeps_change_with_a_registration(sim, device):
    """The walk asks Python for the rule of a class of tensordict once in a program."""
    data = TensorDict({"a": torch.ones(2)})
    assert tdcopier.copy(data, device).device == torch.device(device)

    def flatten(value: TensorDict) -> tuple[list[torch.Tensor], list[str]]:
        return list(value.values()), list(value.keys())

    def unflatten(children: list[torch.Tensor], keys: list[str]) -> dict[str, torch.Tensor]:
        return dict(zip(keys, children, strict=True))

    tdcopier.containers.register(TensorDict, flatten, unflatten)
    try:
        assert type(tdcopier.copy(data, device)) is dict
    finally:
        tdcopier.containers.unregister(TensorDict)
    assert type(tdcopier.copy(data, device)) is TensorDict


def test_the_walk_meets_more_classes_than_it_keeps_rules_of(sim, device):
    def named(number: int) -> type:
        return make_dataclass(f"Local{number}", [("a", torch.Tensor)])

    classes = [tensorclass(named(number)) for number in range(20)]
    for cls in classes * 2:
        assert type(tdcopier.copy(cls(torch.ones(2), batch_size=[]), device)) is cls
