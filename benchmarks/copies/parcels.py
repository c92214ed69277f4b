"""Times parcels: reading one and copying it to the device, and packing, beside the batch itself.

A parcel comes as bytes, in each call: from a buffer, in pageable or pinned memory. Its layout is
one of the last that were read, or a new one. The limit is one copy by the engine of a buffer with
the same bytes, which takes everything but what a parcel costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import torch
from tool.measure import Bench
from tool.tables import LIMIT_PREFIX, OURS
from tool.target_forms import Target, at_most, count_wrong, none
from tool.way import GET, LIMIT, PREPARED, Way

import tdcopier
from copies.directions import Direction, synchroniser, with_host
from copies.limits import flat_bytes
from copies.timed import TREE, timed
from tdcopier.workloads import WORKLOADS

DETECTION, IMAGES = "detection batch", "detection batch with images"
BATCHES = {DETECTION: ("detection_batch", 1.0), IMAGES: ("detection_batch_with_images", 0.1)}
COLD_SHARE = 0.12
PINNED, TREE_ITSELF = f"{OURS}, pinned", f"{OURS}, the batch itself"
NEW_LAYOUT = f"{OURS}, new layout"
ONE, ONE_PINNED = f"{LIMIT_PREFIX}one buffer", f"{LIMIT_PREFIX}one pinned buffer"
MOST_OVER_ONE_US = {"warm": 70.0, "cold": 110.0}
MOST_OF_A_NEW_LAYOUT_US = 25.0
MOST_OF_PACK = 1.5
PACK, STAGED, VIEWS = "pack()", "walk and staging of start_copy", "tree()"


def run(bench: Bench) -> dict[str, Any]:
    direction = with_host(bench.device)["h2d"]
    cold = bench._replace(keep_gc=True)
    return {
        "what": "Parcels: time from the bytes to the tree on the device, and of packing",
        "copies": {
            "warm": {name: _copies(bench, direction, name, cold=False) for name in BATCHES},
            "cold": {name: _copies(cold, direction, name, cold=True) for name in BATCHES},
        },
        "packing": {name: _packing(bench, name) for name in BATCHES},
        "bytes": {name: _sizes(_make(name)(0)) for name in BATCHES},
    }


def _make(name: str) -> Callable[[int], Any]:
    return WORKLOADS[BATCHES[name][0]].make


def _sizes(tree: Any) -> dict[str, int]:
    parcel = tdcopier.pack(tree)
    layout = int.from_bytes(bytes(memoryview(parcel)[16:24]), "little")
    return {"parcel": parcel.nbytes, "layout": layout}


def ways(direction: Direction, new_layouts: bool) -> list[Way]:
    device = direction.target

    def start(buffer: Any) -> Any:
        return tdcopier.start_copy(tdcopier.Parcel.from_buffer(buffer), device)

    def one(buffer: torch.Tensor) -> Any:
        return tdcopier.start_copy(buffer, device)

    def pageable(tree: Any) -> torch.Tensor:
        return torch.frombuffer(bytearray(tdcopier.pack(tree)), dtype=torch.uint8)

    def pinned(tree: Any) -> torch.Tensor:
        return pageable(tree).pin_memory()

    own = Way(OURS, lambda buffer: start(buffer.numpy()), GET, pageable, PREPARED)
    found = [
        own,
        own._replace(name=PINNED, prepare=pinned),
        Way(TREE_ITSELF, lambda tree: tdcopier.start_copy(tree, device), GET),
        Way(ONE, one, GET, flat_bytes, LIMIT),
        Way(ONE_PINNED, one, GET, lambda tree: flat_bytes(tree).pin_memory(), LIMIT),
    ]
    if new_layouts:
        found.insert(2, Way(NEW_LAYOUT, _Renamed(start), GET, _Renamed.prepared, PREPARED))
    return found


class _Renamed:
    """Reads a parcel whose layout was never read before: another name stands in it in each call."""

    NAME = "name 00000000"
    _numbers = count()

    def __init__(self, start: Callable[[Any], Any]) -> None:
        self._start = start

    @classmethod
    def prepared(cls, tree: Any) -> tuple[bytearray, int]:
        buffer = bytearray(tdcopier.pack({cls.NAME: tree}))
        return buffer, buffer.index(cls.NAME.encode())

    def __call__(self, prepared: tuple[bytearray, int]) -> Any:
        buffer, at = prepared
        buffer[at + 5 : at + 13] = f"{next(self._numbers):08}".encode()
        return _Inside(self._start(buffer))


class _Inside:
    """A handle of a dict with one value, as the handle of that value."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def get(self) -> Any:
        (value,) = self._handle.get().values()
        return value


def _copies(bench: Bench, direction: Direction, name: str, *, cold: bool) -> dict[str, Any]:
    share = BATCHES[name][1] * (COLD_SHARE if cold else 1.0)
    found = timed(
        bench,
        f"parcels, {name}{', cold' if cold else ''}",
        direction,
        TREE.sources(_make(name), 2, direction),
        ways(direction, new_layouts=name == DETECTION),
        rounds=bench.rounds(share / 5, least=5) if not cold else bench.rounds(share, least=5),
        counted=False,
        cold=cold,
    )
    us = {way: times["median_us"] for way, times in found["contenders"].items()}
    found["over_one_us"] = {OURS: us[OURS] - us[ONE], PINNED: us[PINNED] - us[ONE_PINNED]}
    return found


def _packing(bench: Bench, name: str) -> dict[str, Any]:
    """Time packing; beside it, by its own clock, what start_copy() does before a transfer."""
    device, tree = bench.device, _make(name)(0)
    parcel = tdcopier.pack(tree)
    found = bench.compared(
        f"packing, {name}",
        [
            Way(OURS, lambda tree: tdcopier.start_copy(tree, device), GET),
            Way(PACK, tdcopier.pack),
            Way(VIEWS, lambda _: parcel.tree()),
        ],
        [tree],
        synchroniser([device]),
        rounds=bench.rounds(BATCHES[name][1] / 5, least=5),
    )
    steps = []
    with tdcopier.stats.time_steps():
        for _ in range(bench.rounds(BATCHES[name][1], least=10)):
            handle = tdcopier.start_copy(tree, device)
            handle.get()
            taken = handle.stats.steps
            steps.append(taken.flatten_us + taken.plan_us + taken.stage_us)
    found["contenders"][STAGED] = {"median_us": sorted(steps)[len(steps) // 2]}
    return found


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    parts = [copy for copies in result["copies"].values() for copy in copies.values()]
    yield none("parcels: leaves that differ from .to(), all batches and ways", count_wrong(parts))


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for caches, most in MOST_OVER_ONE_US.items():
        found = result["copies"][caches][DETECTION]
        for way, over in found["over_one_us"].items():
            what = f"{DETECTION}, {caches}: {way} over one buffer of the same bytes"
            yield at_most(what, over, most, "us")
    us = result["copies"]["warm"][DETECTION]["contenders"]
    new = us[NEW_LAYOUT]["median_us"] - us[OURS]["median_us"]
    yield at_most(f"{DETECTION}: a new layout over a known one", new, MOST_OF_A_NEW_LAYOUT_US, "us")
    packing = result["packing"][DETECTION]["contenders"]
    over = packing[PACK]["median_us"] / packing[STAGED]["median_us"]
    yield at_most(f"{DETECTION}: {PACK} over {STAGED}", over, MOST_OF_PACK)
