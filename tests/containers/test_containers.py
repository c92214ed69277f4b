"""Containers of many classes are rebuilt in their own class; other values are passed through."""

from __future__ import annotations

import copy
import dataclasses
import enum
import gc
import sys
import time
import types
import weakref
from collections import ChainMap, Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
import torch
from catalogue import CONTAINERS, EVERY_CONTAINER_IN_ANOTHER, ramp
from container_classes import (
    AttributeDict,
    Box,
    FrozenSample,
    Numbered,
    Output,
    Prepared,
    Sample,
    SlottedSample,
    Tagged,
    Versioned,
    Window,
)
from each_case import together
from support import are_released, assert_same, oracle

import tdcopier

WRAPS = CONTAINERS | {"every container in another": EVERY_CONTAINER_IN_ANOTHER}
UNRELATED = (type, types.ModuleType, types.FunctionType)
CYCLIC = ("dict whose attributes are its items", "every container in another")


@pytest.fixture
def late(request, sim, device, copy_stream):
    """A leaf that is not staged and whose tree is not built until the test releases its stream."""
    tdcopier.limits.set_staging_bytes(4 << 20)
    tdcopier.pinned.staging_bytes(device)
    return torch.ones(2 << 20)  # needs two staging buffers, and there is one


# ---- classes and contents are kept ---------------------------------------------------------------


def test_an_ordered_dict_can_be_reordered_as_before(device, leaf):
    ordered = OrderedDict(a=leaf, b=1, c=2)
    ordered.move_to_end("a")
    moved = tdcopier.copy(ordered, device)
    assert list(moved) == ["b", "c", "a"]
    moved.move_to_end("b")
    assert list(moved) == ["c", "a", "b"]


def test_a_state_dict_keeps_the_versions_of_its_modules(device):
    """Without `_metadata`, a module takes a current checkpoint for one of an old version."""
    states = torch.nn.BatchNorm1d(3).state_dict()
    for moved in (
        tdcopier.copy(states, device),
        tdcopier.copy(tdcopier.copy(states, device), "cpu"),
    ):
        assert type(moved) is OrderedDict
        assert moved._metadata == states._metadata == {"": {"version": 2}}
        torch.nn.BatchNorm1d(3).load_state_dict(moved)
    assert not vars(tdcopier.copy(OrderedDict(a=1), device))


def test_a_defaultdict_makes_missing_values_with_the_same_factory(device, leaf):
    moved = tdcopier.copy(defaultdict(list, a=leaf), device)
    assert moved["missing"] == []
    assert tdcopier.copy(defaultdict(None, a=leaf), device).default_factory is None


def test_a_counter_counts_on(device):
    moved = tdcopier.copy(Counter("aab"), device)
    moved.update("b")
    assert moved == Counter(a=2, b=2)


def test_a_deque_keeps_to_its_maximum_length(device, leaf):
    moved = tdcopier.copy(deque([1, leaf], maxlen=2), device)
    moved.append("new")
    assert moved[0].device == torch.device(device)
    assert len(moved) == 2


def test_a_named_tuple_has_its_names_and_its_attributes(device, leaf):
    tagged = Tagged(leaf, "y")
    tagged.origin = "a file"
    moved = tdcopier.copy(tagged, device)
    assert moved.x.device == torch.device(device)
    assert (moved.y, moved.origin) == ("y", "a file")


def test_a_structseq_has_its_names(device):
    found = torch.max(ramp("cpu", 2, 3), dim=1)
    moved = tdcopier.copy(found, device)
    assert type(moved) is torch.return_types.max
    assert (moved.values.tolist(), moved.indices.tolist()) == ([2, 5], [2, 2])
    assert moved.values.device == torch.device(device)


def test_neither_init_nor_post_init_of_a_dataclass_runs_again(device, leaf):
    prepared = Prepared(leaf, scale=3)
    prepared.history.append("cropped")
    moved = tdcopier.copy(prepared, device)
    assert moved.history == ["scaled by 3", "cropped"]
    assert moved.cache == "an attribute that is no field"
    assert not hasattr(moved, "never_set")


def test_a_frozen_dataclass_stays_frozen(device, leaf):
    moved = tdcopier.copy(FrozenSample(leaf), device)
    assert moved.image.device == torch.device(device)
    with pytest.raises(dataclasses.FrozenInstanceError):
        moved.image = None


def test_items_that_are_fields_too_agree_in_the_result(device, leaf):
    moved = tdcopier.copy(Output(logits=leaf, loss=0.5), device)
    assert moved["logits"] is moved.logits
    assert moved.logits.device == torch.device(device)


@together("container", WRAPS)
def test_the_source_is_left_as_it_was(device, registered_box, leaf, container):
    tree = WRAPS[container].wrap(leaf)
    before = oracle(tree, "cpu")  # new containers around the same leaf
    tdcopier.copy(tree, device)
    assert_same(tree, before)
    assert holds(tree, leaf)


def holds(tree: Any, wanted: Any) -> bool:
    """Whether the tree, as the garbage collector sees it, leads to this very object."""
    seen: dict[int, Any] = {}
    waiting = [tree]
    while waiting:
        value = waiting.pop()
        if value is wanted:
            return True
        if id(value) not in seen and not isinstance(value, UNRELATED):
            seen[id(value)] = value
            waiting += gc.get_referents(value)
    return False


@together("container", WRAPS)
@pytest.mark.parametrize("elements", [3, 1 << 19], ids=["inline", "background"])
@pytest.mark.parametrize("to_host", [False, True], ids=["H2D", "D2H"])
def test_containers_do_not_keep_their_sources(device, registered_box, container, elements, to_host):
    source, target = (device, "cpu") if to_host else ("cpu", device)
    leaf = torch.ones(elements, device=source)
    alive = weakref.ref(leaf)
    handle = tdcopier.start_copy(WRAPS[container].wrap(leaf), target)
    del leaf
    if container in CYCLIC:
        gc.collect()
    assert are_released([alive])  # without any call for the result
    assert type(handle.get()) is type(WRAPS[container].wrap(None))


def test_one_container_in_two_places_becomes_two(device, leaf):
    sample = Sample(leaf)
    first, second = tdcopier.copy([sample, sample], device)
    assert first is not second
    assert first.image is not second.image


@pytest.mark.sim
def test_containers_changed_after_the_call_do_not_change_the_result(sim, device, late, copy_stream):
    containers = {
        "sample": Sample(late, "cat"),
        "slotted": SlottedSample(late, "cat"),
        "numbered": Numbered(late, number=1),
        "prepared": Prepared(late, scale=1),
        "counter": Counter(a=late),
    }
    with sim.hold(copy_stream):
        handle = tdcopier.start_copy(containers, device)
        containers["sample"].label = containers["slotted"].label = "dog"
        containers["numbered"].number = 2
        containers["numbered"].clear()
        containers["prepared"].cache = "changed"
        containers["counter"].clear()
    moved = handle.get()
    assert (moved["sample"].label, moved["slotted"].label) == ("cat", "cat")
    assert (moved["numbered"].number, len(moved["numbered"])) == (1, 1)
    assert moved["prepared"].cache == "an attribute that is no field"
    assert list(moved["counter"]) == ["a"]


@pytest.mark.sim
@pytest.mark.parametrize("make", [lambda leaf: Tagged(leaf, 1), lambda leaf: Versioned(3, leaf)])
def test_attributes_of_a_tuple_changed_after_the_call_do_not_change_the_result(
    sim, device, late, copy_stream, make
):
    source = make(late)
    source.version = "at the call"
    with sim.hold(copy_stream):
        handle = tdcopier.start_copy(source, device)
        source.version = "later"
    assert handle.get().version == "at the call"


def test_attributes_of_a_deque_are_kept(device, leaf):
    window = Window([leaf], maxlen=2)
    window.stride = 5
    assert vars(tdcopier.copy(window, device)) == {"stride": 5}


def test_attributes_in_slots_of_a_subclass_of_a_dataclass_are_kept(device, leaf):
    class Weighted(SlottedSample):
        __slots__ = ("weight",)

    sample = Weighted(leaf)
    sample.weight = 2
    moved = tdcopier.copy(sample, device)
    assert type(moved) is Weighted
    assert moved.weight == 2


class SortedKeys(dict):
    """Iterates in the order of keys; a copy also stores its items in this order."""

    def __iter__(self) -> Any:
        return iter(sorted(dict.__iter__(self)))

    def __copy__(self) -> Any:
        made = SortedKeys()
        for key in self:
            made[key] = self[key]
        return made


def test_a_dict_whose_copies_store_their_items_in_another_order_is_rebuilt(device, leaf):
    value = SortedKeys(b=leaf, a=leaf + 1)
    moved = tdcopier.copy(value, device)
    assert type(moved) is SortedKeys
    assert list(moved) == ["a", "b"]
    for key in value:
        assert_same(moved[key], oracle(value[key], device))


class Subject(dict):
    """Its `__copy__` reads an item, as that of torchio's does, and may need another argument."""

    def __copy__(self) -> Any:
        assert isinstance(self["x"], torch.Tensor)
        return type(self)(self)


class NamedSubject(Subject):
    def __init__(self, items: Any, *, name: str = "") -> None:
        if not name:
            raise ValueError("it needs a name")
        super().__init__(items)


def test_a_dict_whose_copy_reads_its_items_is_made_by_its_constructor(device, leaf):
    moved = tdcopier.copy([Subject(x=leaf)], device)[0]
    assert type(moved) is Subject
    assert_same(moved["x"], oracle(leaf, device))


def test_a_dict_whose_copy_reads_its_items_is_refused_if_its_constructor_fails(device, leaf):
    with pytest.raises(
        TypeError,
        match=r"(?s)^data\[0\] is a NamedSubject, a mapping that cannot be rebuilt .*: register it",
    ):
        tdcopier.start_copy([NamedSubject({"x": leaf}, name="n")], device)


def test_a_tuple_is_what_it_holds_whatever_iterating_over_it_yields(device, leaf):
    class Sparse(NamedTuple):
        first: Any
        second: Any

        def __iter__(self):
            return (child for child in (self.first, self.second) if child is not None)

    moved = tdcopier.copy([Sparse(None, leaf)], device)[0]
    assert moved.first is None
    assert moved.second.device == torch.device(device)


def test_a_dict_whose_attributes_are_its_items_stays_one(device, leaf):
    source = AttributeDict(image=leaf)
    moved = tdcopier.copy(source, device)
    assert moved.image is moved["image"]
    assert moved.image.device == torch.device(device)
    moved.new = 1
    assert moved["new"] == 1
    assert source.image is source["image"] is leaf


def test_a_packed_sequence_can_be_unpacked_on_the_device(device):
    from torch.nn.utils import rnn

    packed = rnn.pack_sequence([ramp("cpu", 3, 2), ramp("cpu", 1, 2)])
    moved = tdcopier.copy({"sequence": packed}, device)["sequence"]
    assert type(moved) is rnn.PackedSequence
    assert moved.data.device == torch.device(device)
    padded, lengths = rnn.pad_packed_sequence(moved)
    assert (padded.shape, lengths.tolist()) == ((3, 2, 2), [3, 1])


# ---- opaque values -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda leaf: torch.Size([2]), lambda leaf: types.SimpleNamespace(x=leaf), Box,
        lambda leaf: {leaf}, lambda leaf: frozenset([1]), lambda leaf: iter([leaf]),
        lambda leaf: types.MappingProxyType({"a": leaf}), lambda leaf: ChainMap({"a": leaf}),
        lambda leaf: Sample, lambda leaf: torch.nn, lambda leaf: range(3),
    ],
    ids=[
        "torch.Size", "SimpleNamespace", "unknown object", "set", "frozenset", "iterator",
        "MappingProxyType", "ChainMap", "dataclass itself", "module", "range",
    ],
)  # fmt: skip
def test_what_is_no_container_is_the_same_object(device, leaf, make):
    value = make(leaf)
    handle = tdcopier.start_copy([value, leaf], device)
    assert handle.get()[0] is value
    assert handle.stats[:5] == (1, 0, 0, 0, 1)


class Shape(Sample, enum.Enum):
    ROUND = ("round", 1)


class Direction(tuple, enum.Enum):
    LEFT = (0, 1)


@pytest.mark.parametrize("member", [Shape.ROUND, Direction.LEFT], ids=["dataclass", "tuple"])
def test_members_of_an_enumeration_are_opaque_whatever_they_are_made_of(device, leaf, member):
    assert tdcopier.copy([member, leaf], device)[0] is member


@pytest.mark.parametrize(
    "value", [sys.version_info, sys.flags], ids=["sys.version_info", "sys.flags"]
)
def test_a_structseq_that_python_makes_only_once_is_opaque(device, leaf, value):
    assert tdcopier.copy([value, leaf], device)[0] is value


def test_a_time_is_equal_to_what_it_was(device):
    now = time.gmtime()
    moved = tdcopier.copy([now], device)[0]
    assert (moved, moved.tm_zone, moved.tm_gmtoff) == (now, now.tm_zone, now.tm_gmtoff)


# ---- the garbage collector -----------------------------------------------------------------------


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_cycle_through_a_handle_and_a_container_is_collected(
    device, registered_box, container, asked
):
    class Owner:
        pass

    owner = Owner()
    owner.handle = tdcopier.start_copy([CONTAINERS[container].wrap(owner), ramp("cpu", 2)], device)
    if asked:
        owner.handle.get()
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None


def test_a_class_that_was_looked_up_is_not_kept(device, leaf):
    @dataclasses.dataclass
    class Local:
        image: Any

    tdcopier.copy(Local(leaf), device)
    alive = weakref.ref(Local)
    del Local
    gc.collect()
    assert alive() is None


def test_a_shallow_copy_of_what_comes_out_is_what_it_is_of_the_source(device, registered_box, leaf):
    for name, container in CONTAINERS.items():
        moved = tdcopier.copy(container.wrap(leaf), device)
        assert type(copy.copy(moved)) is type(moved), name
