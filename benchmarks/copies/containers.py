"""Times containers and opaque values: trees without tensors, so without work for the device."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from tool.measure import BURST, Bench
from tool.tables import OURS
from tool.target_forms import Target, at_most, none
from tool.way import GET, Way
from torch.utils import _pytree as pytree

import tdcopier
from copies.directions import synchroniser
from copies.ways import multi_tensor_copier, ours
from tdcopier._commands.interleave import summarise

OPAQUE_VALUES = 1000
CONTAINERS = 200
MAX_OPAQUE_US = 0.1
MAX_INTEGERS_US = 100.0
EMPTY, OPAQUE, INTEGERS = "empty list", "opaque values", "integers in a dict of lists"
COMPARED = (EMPTY, OPAQUE, INTEGERS)
"""The trees that are also timed with the other ways."""
UNWRAPPED = "the containers' integers in one list"


class Note:
    """A plain user class, whose instances are opaque."""


class Pair(NamedTuple):
    first: int
    second: int


@dataclasses.dataclass
class Record:
    first: int
    second: int


KINDS: dict[str, Callable[[int, int], Any]] = {
    "list": lambda first, second: [first, second],
    "tuple": lambda first, second: (first, second),
    "dict": lambda first, second: {"first": first, "second": second},
    "named tuple": Pair,
    "dataclass": Record,
    "OrderedDict": lambda first, second: OrderedDict(first=first, second=second),
}
"""Containers of two values whose cost is reported."""


def trees() -> dict[str, tuple[Any, int]]:
    """Return each tree that is timed, and its number of opaque values."""
    integers = range(2 * CONTAINERS)
    mixed = [(i, f"text {i}", None, Note())[i % 4] for i in range(OPAQUE_VALUES)]
    return {
        EMPTY: ([], 0),
        OPAQUE: (mixed, OPAQUE_VALUES),
        INTEGERS: ({f"key_{k}": list(range(32 * k, 32 * (k + 1))) for k in range(30)}, 960),
        UNWRAPPED: (list(integers), len(integers)),
        **{
            kind: ([make(i, i + 1) for i in integers[::2]], len(integers))
            for kind, make in KINDS.items()
        },
    }


def run(bench: Bench) -> dict[str, Any]:
    device, made = bench.device, trees()
    synchroniser([device])()
    every = {
        (tree, way.name): way._replace(name=f"{tree}, {way.name}", prepare=itemgetter(tree))
        for tree in made
        for way in ways(device)
        if tree in COMPARED or way.name == OURS
    }
    times, processor = bench.interleaved(
        "containers",
        list(every.values()),
        [{name: tree for name, (tree, _) in made.items()}],
        lambda: None,  # nothing is enqueued, and synchronising would take longer
        rounds=bench.rounds(1 / BURST, least=5),
    )
    cases: dict[str, dict[str, Any]] = {}
    us: dict[str, dict[str, float]] = {tree: {} for tree in made}
    for (tree, name), way in every.items():
        found = summarise(times[way.name])
        us[tree][name] = found.median_us
        case = cases.setdefault(tree, _seen(*made[tree], device))
        case["contenders"][name] = found._asdict()
        if name != OURS:
            case["ratios"][name] = found.median_us / us[tree][OURS]
    own = ways(device)[0]
    return {
        "what": "What containers and opaque values cost: start_copy() and get(), without tensors",
        "settings": {
            **bench.settings(),
            "opaque_values": "ints, strings, None and instances of a plain class, in turn",
            "per_container": f"of {CONTAINERS} with two ints each, less the same ints in one list",
        },
        "cases": cases,
        "us_per_opaque_value": {
            way: (taken_us - us[EMPTY][way]) / OPAQUE_VALUES for way, taken_us in us[OPAQUE].items()
        },
        "us_per_container": {
            kind: (us[kind][OURS] - us[UNWRAPPED][OURS]) / CONTAINERS
            if cases[kind]["opaque_values_seen"] == cases[kind]["opaque_values"]
            else None  # a container that the engine did not walk into is opaque
            for kind in KINDS
        },
        "changed_values": sum(changes(own.run(tree), tree) for tree, _ in made.values()),
        "processor": processor,
    }


def _seen(tree: Any, opaque_values: int, device: torch.device) -> dict[str, Any]:
    """Return the result of a tree without its times."""
    handle = tdcopier.start_copy(tree, device)
    handle.get()
    seen = handle.stats.opaque_leaves
    counts = {"opaque_values": opaque_values, "opaque_values_seen": seen}
    return {**counts, "contenders": {}, "ratios": {}}


def ways(device: torch.device) -> list[Way]:
    """Return every way of copying a tree that can run here, ours first."""

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    pytrees = Way("torch.utils._pytree.tree_map", lambda tree: pytree.tree_map(move, tree))
    found = [ours(device, GET), pytrees]
    peer = multi_tensor_copier()
    if peer is not None and device.type == "cuda":
        start = peer.start_copy
        found.append(Way("multi_tensor_copier", lambda tree: start(tree, device), GET))
    return found


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    what = "containers and values that came back as another type or object, all trees"
    yield none(what, result["changed_values"])


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    what = f"one opaque value, of {OPAQUE_VALUES} in a list"
    yield at_most(what, result["us_per_opaque_value"][OURS], MAX_OPAQUE_US, "us")
    integers = result["cases"][INTEGERS]
    what = f"{integers['opaque_values']} {INTEGERS}, the whole call"
    yield at_most(what, integers["contenders"][OURS]["median_us"], MAX_INTEGERS_US, "us")


def changes(result: Any, source: Any) -> int:
    """Count the containers of another type, and the keys and values that are other objects."""
    got, expected = _parts(result), _parts(source)
    differing = sum(a is not b for a, b in zip(got, expected, strict=False))
    return differing + abs(len(got) - len(expected))


def _parts(tree: Any) -> list[Any]:
    """Return types of containers, keys and values, in the order of the walk."""
    if isinstance(tree, dict):
        children = [part for pair in tree.items() for part in pair]
    elif isinstance(tree, (list, tuple)):
        children = list(tree)
    elif dataclasses.is_dataclass(tree):
        children = [getattr(tree, field.name) for field in dataclasses.fields(tree)]
    else:
        return [tree]
    return [type(tree), *(part for child in children for part in _parts(child))]
