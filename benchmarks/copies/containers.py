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
from torch.utils import _pytree as pytree

import tdcopier
from copies.directions import synchroniser
from copies.ways import multi_tensor_copier
from tdcopier._commands.interleave import Contender, Summary, ratio_of_medians, summarise

OPAQUE_VALUES = 1000
CONTAINERS = 200
MAX_OPAQUE_US = 0.1
MAX_INTEGERS_US = 100.0
PYTREE = "torch.utils._pytree.tree_map"


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


class Case(NamedTuple):
    """One tree that is timed."""

    tree: Any
    opaque_values: int
    compared: bool = False
    """Whether it is also timed with the other ways."""


EMPTY, OPAQUE, INTEGERS = "empty list", "opaque values", "integers in a dict of lists"
UNWRAPPED = "the containers' integers in one list"


def cases() -> dict[str, Case]:
    integers = range(2 * CONTAINERS)
    found = {
        EMPTY: Case([], 0, compared=True),
        OPAQUE: Case(_mixed_values(OPAQUE_VALUES), OPAQUE_VALUES, compared=True),
        INTEGERS: Case(
            {f"key_{k}": list(range(32 * k, 32 * (k + 1))) for k in range(30)}, 960, compared=True
        ),
        UNWRAPPED: Case(list(integers), len(integers)),
    }
    for kind, make in KINDS.items():
        filled = [make(i, i + 1) for i in integers[::2]]
        found[kind] = Case(filled, len(integers))
    return found


def run(bench: Bench) -> dict[str, Any]:
    device, trees = bench.device, cases()
    synchroniser([device])()
    found, processor = _timed(bench, trees)
    seen = {case: _opaque_values_seen(timed.tree, device) for case, timed in trees.items()}
    ours = ways(device)[OURS]
    return {
        "what": "What containers and opaque values cost: start_copy() and get(), without tensors",
        "settings": {
            **bench.settings(),
            "opaque_values": "ints, strings, None and instances of a plain class, in turn",
            "per_container": f"of {CONTAINERS} with two ints each, less the same ints in one list",
        },
        "cases": {
            case: _case_result(timed, seen[case], found[case]) for case, timed in trees.items()
        },
        "us_per_opaque_value": {
            way: (summary.median_us - found[EMPTY][way].median_us) / OPAQUE_VALUES
            for way, summary in found[OPAQUE].items()
        },
        "us_per_container": {
            kind: (found[kind][OURS].median_us - found[UNWRAPPED][OURS].median_us) / CONTAINERS
            if seen[kind] == trees[kind].opaque_values
            else None  # a container that the engine did not walk into is opaque
            for kind in KINDS
        },
        "changed_values": sum(changes(ours(each.tree), each.tree) for each in trees.values()),
        "processor": processor,
    }


def _timed(
    bench: Bench, trees: dict[str, Case]
) -> tuple[dict[str, dict[str, Summary]], dict[str, Any]]:
    """Return summaries by tree and way, and the processor's."""
    contenders = {
        (case, way): Contender(f"{case}, {way}", copy, itemgetter(case))
        for case, timed in trees.items()
        for way, copy in ways(bench.device).items()
        if timed.compared or way == OURS
    }
    times, processor = bench.interleaved(
        "structure",
        list(contenders.values()),
        [{case: timed.tree for case, timed in trees.items()}],
        lambda: None,  # nothing is enqueued, and synchronising would take longer
        rounds=bench.rounds(1 / BURST, least=5),
    )
    found: dict[str, dict[str, Summary]] = {case: {} for case in trees}
    for (case, way), contender in contenders.items():
        found[case][way] = summarise(times[contender.name])
    return found, processor


def _case_result(timed: Case, seen: int, found: dict[str, Summary]) -> dict[str, Any]:
    return {
        "opaque_values": timed.opaque_values,
        "opaque_values_seen": seen,
        "contenders": {way: summary._asdict() for way, summary in found.items()},
        "ratios": {
            way: ratio_of_medians(summary, found[OURS])
            for way, summary in found.items()
            if way != OURS
        },
    }


def ways(device: torch.device) -> dict[str, Callable[[Any], Any]]:
    """Return every way of copying a tree that can run here, ours first."""

    def move(value: Any) -> Any:
        return value.to(device) if isinstance(value, torch.Tensor) else value

    found: dict[str, Callable[[Any], Any]] = {
        OURS: lambda tree: tdcopier.start_copy(tree, device).get(),
        PYTREE: lambda tree: pytree.tree_map(move, tree),
    }
    peer = multi_tensor_copier()
    if peer is not None and device.type == "cuda":
        found["multi_tensor_copier"] = lambda tree: peer.start_copy(tree, device).get()
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


def _mixed_values(count: int) -> list[Any]:
    return [(index, f"text {index}", None, Note())[index % 4] for index in range(count)]


def _opaque_values_seen(tree: Any, device: torch.device) -> int:
    handle = tdcopier.start_copy(tree, device)
    handle.get()
    return handle.stats.opaque_leaves
