"""Times containers and opaque values: trees without tensors, so without work for the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tool.measure import BURST, Bench
from tool.tables import OURS
from tool.target_forms import Target, at_most, none
from tool.way import GET, Way
from torch.utils import _pytree as pytree

from copies.directions import synchroniser
from copies.ways import multi_tensor_copier, ours

OPAQUE_VALUES = 1000
MAX_OPAQUE_US = 0.1
MAX_INTEGERS_US = 100.0
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
    return {
        "what": "What containers and opaque values cost: start_copy() and get(), without tensors",
        "cases": cases,
        "us_per_opaque_value": {
            way: (taken_us - us[EMPTY][way]) / OPAQUE_VALUES for way, taken_us in us[OPAQUE].items()
        },
        "changed_values": sum(changes(own.run(tree), tree) for tree, _ in made.values()),
    }


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
    else:
        return [tree]
    return [type(tree), *(part for child in children for part in _parts(child))]
