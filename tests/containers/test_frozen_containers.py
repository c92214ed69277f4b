"""Mappings and sequences that refuse to have items set are rebuilt; others follow `on_unknown`."""

from __future__ import annotations

import re
import warnings
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from catalogue import ramp
from support import assert_same, oracle
from torch.fx.immutable_collections import immutable_dict, immutable_list

import tdcopier


@pytest.fixture
def leaf() -> torch.Tensor:
    return ramp("cpu", 3)


def refuses(self: Any, *_: Any, **__: Any) -> Any:
    raise TypeError(f"a {type(self).__name__} does not change")


class FrozenDict(dict):
    """Its copy is itself, and it keeps its hash in a slot, as frozendict does."""

    __slots__ = ("_hash",)
    __setitem__ = update = pop = clear = refuses
    __copy__ = lambda self: self  # noqa: E731

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            self._hash = hash(frozenset(self.items()))
        return self._hash


class FrozenList(list):
    __setitem__ = append = extend = refuses

    def __reduce__(self) -> Any:
        return type(self), (tuple(self),)


class FrozenDeque(deque):
    __setitem__ = refuses


class FrozenUserDict(UserDict):
    """Has an attribute that its constructor does not take."""

    is_frozen = False

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.is_frozen = True

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.is_frozen:
            refuses(self)
        super().__setitem__(key, value)


class Configured(dict):
    """Freezes by an option that a copy keeps and the constructor needs, as Box does."""

    def __init__(self, items: Any = (), *, frozen: bool = False) -> None:
        self.config = {"frozen": False}
        for key, value in dict(items).items():
            self[key] = Configured(value, frozen=frozen) if type(value) is dict else value
        self.config["frozen"] = frozen

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.config["frozen"]:
            refuses(self)
        super().__setitem__(key, value)

    def __copy__(self) -> Any:
        return Configured(self, **self.config)


class FrozenOrdered(OrderedDict):
    def __setitem__(self, key: Any, value: Any) -> None:
        if hasattr(self, "is_frozen"):
            refuses(self)
        super().__setitem__(key, value)

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.is_frozen = True


class Summed(dict):
    """Its constructor takes something from the items."""

    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.first = next(iter(self.values()))


class Checked(dict):
    """Takes tensors and text only, so a None cannot take their place."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, (torch.Tensor, str)):
            refuses(self)
        super().__setitem__(key, value)


class Sealing(dict):
    """Cannot be copied again once an item was set."""

    def __init__(self, items: Any, *, name: str) -> None:
        super().__init__(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.is_sealed = True

    def __reduce__(self) -> Any:
        if hasattr(self, "is_sealed"):
            refuses(self)
        return sealing, (dict(self),)


def sealing(items: Any) -> Any:
    return Sealing(items, name="copy")


def named(value: Any) -> Any:
    value.name = "text"
    return value


def hashed(value: Any) -> Any:
    hash(value)
    return value


MAPPINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "immutable_dict of torch": immutable_dict,
    "its copy is itself": FrozenDict,
    "with its hash": lambda items: hashed(FrozenDict(items)),
    "UserDict": FrozenUserDict,
    "UserDict, named": lambda items: named(FrozenUserDict(items)),
    "by an option": lambda items: Configured(items, frozen=True),
    "in another": lambda items: Configured({"in": items, **items}, frozen=True)["in"],
    "OrderedDict": FrozenOrdered,
    "with something of its items": Summed,
    "checks its items": Checked,
    "cannot be copied after a change": sealing,
}
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "immutable_list of torch": immutable_list,
    "list": FrozenList,
    "list, named": lambda items: named(FrozenList(items)),
    "deque": lambda items: FrozenDeque(items, 5),
}


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


# ---- rebuilds that are not right are not used ----------------------------------------------------


class Renaming(dict):
    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__({key.upper(): value for key, value in dict(items).items()})


class Converting(dict):
    """Keeps other objects than it is given."""

    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__({key: value + 0 for key, value in dict(items).items()})


class Ordering(dict):
    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__(sorted(dict(items).items()))


class Reversing(list):
    """Its constructor and its copies have the opposite order."""

    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__(list(items)[::-1])

    __copy__ = refuses


class Guessing(dict):
    """Has an attribute that a constructor without the option makes another one."""

    __setitem__ = refuses

    def __init__(self, items: Any, option: Any = None) -> None:
        super().__init__(items)
        self.option = [option]


@pytest.mark.parametrize(
    "make",
    [
        lambda leaf: Renaming({"a": leaf}) and _lowered(Renaming({"a": leaf})),
        lambda leaf: Converting({"a": leaf}),
        lambda leaf: _reversed(Ordering({"a": leaf, "b": leaf})),
        lambda leaf: Guessing({"a": leaf}, option=leaf),
    ],
    ids=["other keys", "other objects", "another order", "other attributes"],
)
def test_a_constructor_that_changes_something_is_not_used(device, leaf, make):
    value = make(leaf)
    with pytest.raises(TypeError, match=r"^data\['x'\] is a \w+, a mapping that cannot be rebuilt"):
        tdcopier.copy({"x": value}, device)


def test_a_constructor_that_changes_the_order_of_equal_items_is_not_used(device, leaf):
    for items in ([leaf, leaf], [[leaf]] * 2, [FrozenDict(a=leaf)] * 2):
        with pytest.raises(TypeError, match=r"^data is a Reversing, a sequence that cannot be"):
            tdcopier.copy(Reversing(items), device)
    assert_same(tdcopier.copy(Reversing([leaf]), device)[0], oracle(leaf, device))


def _lowered(value: Any) -> Any:
    child = dict.pop(value, "A")
    dict.__setitem__(value, "a", child)
    return value


def _reversed(value: Any) -> Any:
    dict.__setitem__(value, "a", dict.pop(value, "a"))
    return value


class HostOnly(dict):
    """Keeps an item as it is on the host, and moves it there from elsewhere."""

    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__({key: value.cpu() for key, value in dict(items).items()})


def test_a_constructor_that_changes_moved_items_only_fails_the_copy(device, leaf):
    handle = tdcopier.start_copy([HostOnly({"a": leaf})], device)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"HostOnly was rebuilt .* another object at 'a'"):
            handle.get()


def test_functions_of_torchs_pytrees_are_used_only_if_they_fit(device, leaf):
    class Registered(dict):
        __setitem__ = refuses
        __copy__ = refuses

        def __init__(self, name: str, items: Any) -> None:
            super().__init__(items)

    make = lambda items: Registered("x", items)  # noqa: E731
    value = make({"b": leaf, "a": leaf + 1})
    with pytest.raises(TypeError, match=r"^data is a Registered, a mapping that cannot"):
        tdcopier.copy(value, device)
    for order, works in ((sorted, False), (list, True)):
        pytree._private_register_pytree_node(
            Registered,
            lambda v, order=order: ([v[key] for key in order(v)], order(v)),
            lambda children, keys: make(dict(zip(keys, children, strict=True))),
        )
        try:
            if works:
                moved = tdcopier.copy(value, device)
                assert type(moved) is Registered
                assert list(moved) == ["b", "a"]
                assert_same(moved["a"], oracle(leaf + 1, device))
            else:
                with pytest.raises(TypeError, match="Registered, a mapping that cannot"):
                    tdcopier.copy(value, device)
        finally:
            pytree._deregister_pytree_node(Registered)
            pytree.SUPPORTED_SERIALIZED_TYPES.pop(Registered, None)


# ---- containers that are no dicts, lists or deques -----------------------------------------------


class Map(Mapping):
    """A mapping that is not derived from dict, as immutabledict and PMap are."""

    def __init__(self, *items: Any, **more: Any) -> None:
        self._items = dict(*items, **more)

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Duck:
    """Has the methods of a mapping, and is none, as ConfigDict."""

    def __init__(self, items: Any) -> None:
        self._items = dict(items)
        self.keys, self.items = self._items.keys, self._items.items

    def __getitem__(self, key: Any) -> Any:
        return self._items[key]


class Vector(Sequence):
    def __init__(self, items: Any) -> None:
        self._items = tuple(items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class Registered:
    def __init__(self, items: Any) -> None:
        self._items = items


Mapping.register(Registered)

LIBRARIES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "immutabledict": ("immutabledict", lambda m, items: m.immutabledict(items)),
    "PMap": ("pyrsistent", lambda m, items: m.pmap(items)),
    "PVector": ("pyrsistent", lambda m, items: m.pvector(items.values())),
    "ConfigDict": ("ml_collections", lambda m, items: m.ConfigDict(items)),
    "FrozenConfigDict": ("ml_collections", lambda m, items: m.FrozenConfigDict(items)),
    "MultiDict": ("multidict", lambda m, items: m.MultiDict(items)),
    "FrozenList of aio-libs": ("frozenlist", lambda m, items: m.FrozenList(items.values())),
}
UNKNOWN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "mapping": Map,
    "duck type": Duck,
    "sequence": lambda items: Vector(items.values()),
    "registered as a mapping": Registered,
}


def unknown_value(kind: str, items: dict[str, Any]) -> Any:
    if kind in UNKNOWN:
        return UNKNOWN[kind](items)
    name, make = LIBRARIES[kind]
    return make(pytest.importorskip(name), items)


@pytest.mark.parametrize("kind", [*UNKNOWN, *LIBRARIES])
def test_other_mappings_and_sequences_follow_on_unknown(device, leaf, kind):
    value = unknown_value(kind, {"a": leaf})
    name = re.escape(type(value).__name__)
    tree = {"x": [leaf, value]}
    assert tdcopier.copy(tree, device)["x"][1] is value
    for call in (
        lambda: tdcopier.copy(tree, device, on_unknown="raise"),
        lambda: tdcopier.gather(tree, [0], device, on_unknown="raise"),
        lambda: list(tdcopier.prefetch([tree], device, on_unknown="raise")),
        lambda: tdcopier.prepare(tree, device, on_unknown="raise"),
    ):
        with pytest.raises(TypeError, match=rf"data\['x'\]\[1\] is an? [\w.]*{name}, a class"):
            call()
    with pytest.raises(TypeError, match=rf"^data is an? [\w.]*{name}, .* nothing would be copied"):
        tdcopier.copy(value, device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tdcopier._containers.unknown._told.clear()
        tdcopier.copy(tree, device, on_unknown="warn")
    assert [str(each.message).split(" is ")[0] for each in caught] == ["data['x'][1]"]
    row = tdcopier.explain(tree, device).rows[1]
    assert (row.path, row.treatment) == ("data['x'][1]", "opaque")
    assert row.reason.startswith("not looked into")


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
