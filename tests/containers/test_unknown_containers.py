"""Mappings and sequences that are no dicts, lists or deques follow `on_unknown`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

import tdcopier


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
