"""Times what grows with a tree: containers, opaque values, and leaves.

Trees without tensors have no work for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tool.measure import BURST, Bench
from tool.tables import OURS
from tool.target_forms import Target, at_most, count_wrong, none
from tool.way import GET, Way
from torch.utils import _pytree as pytree

import tdcopier
from copies.directions import synchroniser
from copies.ways import differences, multi_tensor_copier, ours

OPAQUE_VALUES = 1000
MAX_OPAQUE_US = 0.1
MAX_INTEGERS_US = 100.0
LEAVES = (1_000, 10_000, 100_000)
LEAF_SHAPE = (16,)  # floats: 64 bytes
MOST_GROWTH = 1.5
SHARE_OF_GROWTH = 0.06  # of the repeats: the largest tree takes as long as a hundred of the least
EMPTY, OPAQUE, INTEGERS = "empty list", "opaque values", "integers in a dict of lists"


class Note:
    """A plain user class, whose instances are opaque."""


def trees() -> dict[str, tuple[Any, int]]:
    """Return each tree that is timed, and its number of opaque values."""
    mixed = [(i, f"text {i}", None, Note())[i % 4] for i in range(OPAQUE_VALUES)]
    lists = {f"key_{k}": list(range(32 * k, 32 * (k + 1))) for k in range(30)}
    return {EMPTY: ([], 0), OPAQUE: (mixed, OPAQUE_VALUES), INTEGERS: (lists, 30 * 32)}


def run(bench: Bench) -> dict[str, Any]:
    device, made = bench.device, trees()
    synchroniser([device])()
    cases = {
        name: {
            "opaque_values": opaque_values,
            **bench.compared(
                f"containers, {name}",
                ways(device),
                [tree],
                lambda: None,  # nothing is enqueued, and synchronising would take longer
                rounds=bench.rounds(1 / BURST, least=5),
            ),
        }
        for name, (tree, opaque_values) in made.items()
    }
    us = {
        name: {way: times["median_us"] for way, times in case["contenders"].items()}
        for name, case in cases.items()
    }
    own = ways(device)[0]
    growth = growths(bench)
    return {
        "what": "What grows with a tree: start_copy() and get() of opaque values, and of leaves",
        "cases": cases,
        "us_per_opaque_value": {
            way: (taken_us - us[EMPTY][way]) / OPAQUE_VALUES for way, taken_us in us[OPAQUE].items()
        },
        "growth": growth,
        "ns_per_leaf": {
            str(count): 1000 * growth["contenders"][_of(count)]["median_us"] / count
            for count in LEAVES
        },
        "changed_values": sum(changes(own.run(tree), tree) for tree, _ in made.values()),
    }


def growths(bench: Bench) -> dict[str, dict[str, Any]]:
    """Time copies to the device of dicts with few leaves, and with many. The collector is on."""
    device = bench.device
    trees = {
        count: {f"leaf_{i}": torch.full(LEAF_SHAPE, float(i)) for i in range(count)}
        for count in LEAVES
    }

    def copies(count: int) -> Way:
        return Way(_of(count), lambda _: tdcopier.start_copy(trees[count], device), GET)

    found = bench._replace(keep_gc=True).compared(
        "growth",
        [copies(count) for count in LEAVES],
        [None],
        synchroniser([device]),
        reference=_of(LEAVES[0]),
        rounds=bench.rounds(SHARE_OF_GROWTH, least=2),
        burst=1,
    )
    wrong = {
        _of(count): len(differences(copies(count).run(None), tree, device))
        for count, tree in trees.items()
    }
    return {**found, "wrong": wrong}


def _of(count: int) -> str:
    return f"{OURS}, {count:,} leaves"


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
    yield none("growth: leaves that differ from .to()", count_wrong([result["growth"]]))


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    what = f"one opaque value, of {OPAQUE_VALUES} in a list"
    yield at_most(what, result["us_per_opaque_value"][OURS], MAX_OPAQUE_US, "us")
    integers = result["cases"][INTEGERS]
    what = f"{integers['opaque_values']} {INTEGERS}, the whole call"
    yield at_most(what, integers["contenders"][OURS]["median_us"], MAX_INTEGERS_US, "us")
    least, *_, most = LEAVES
    grown = result["ns_per_leaf"][str(most)] / result["ns_per_leaf"][str(least)]
    yield at_most(f"a leaf of {most:,} over one of {least:,}", grown, MOST_GROWTH)


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
    else:
        return [tree]
    return [type(tree), *(part for child in children for part in _parts(child))]
