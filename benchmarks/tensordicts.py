"""All TensorDict benchmarks in one result: copies, cost of a node, copies into existing tensors."""

from __future__ import annotations

from typing import Any

import into
import td_copies
import td_nodes
import tensordict
from directions import d2h, h2d, start_workers
from measure import Bench
from tables import OURS
from targets import at_least, at_most, counts, none

MIN_SPEEDUPS = {
    ("flat", td_copies.TO): 15.0,
    ("flat", td_copies.CONSOLIDATED): 25.0,
    ("control", td_copies.TO): 2.5,
}
"""Host to device, by batch and other way: the target for its time over ours."""
MAX_REBUILD_US = {td_nodes.NESTED: 3.0, td_nodes.CLASSES: 10.0}
MAX_INTO_SHARE = 0.5  # target for the time over that of a copy that allocates


def run(bench: Bench) -> dict[str, Any]:
    """Return the result of this benchmark, without the machine."""
    ways = {direction.name: direction for direction in (h2d(bench.device), d2h(bench.device))}
    for direction in ways.values():
        start_workers(direction)
    result = {
        "what": "TensorDicts: time from the call to the TensorDict on the target",
        "settings": {"tensordict": tensordict.__version__, **bench.settings()},
        "copies": {name: td_copies.run(bench, direction) for name, direction in ways.items()},
        "nodes": td_nodes.run(bench, ways["h2d"]),
        "into": {name: into.run(bench, direction) for name, direction in ways.items()},
    }
    return {**result, "targets": targets(result, speed=bench.is_real)}


def targets(result: dict[str, Any], *, speed: bool = True) -> list[dict[str, Any]]:
    """Return each target and whether it is hit; without ``speed``, only those on counts."""
    flat, filled = result["copies"]["h2d"]["flat"], result["into"]["h2d"]
    chunk = filled["counts"][into.into(into.CHUNK)]
    seen = "packed leaves, transfers, H2D memcpys seen from outside"
    chunks = f"copy_into() one earlier chunk: {seen}"
    found = [
        none(
            "places of tdcopier's results that differ from td.to(), all batches",
            count_wrong(result),
        ),
        counts(f"flat: {seen}", flat, "memcpys", flat["leaves"], 1),
        counts(chunks, chunk, "memcpys", filled["leaves"], 3),
    ]
    return found + _speed_targets(result) if speed else found


def count_wrong(result: dict[str, Any]) -> int:
    """Count the wrong places in the results of our own ways."""
    copied = [batch["wrong"] for batches in result["copies"].values() for batch in batches.values()]
    filled = [found["wrong"] for found in result["into"].values()]
    ours = sum(n for wrong in copied + filled for way, n in wrong.items() if way.startswith(OURS))
    fresh = sum(wrong[into.FRESH] for wrong in filled)
    return ours + fresh + sum(result["nodes"]["wrong"].values())


def _speed_targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for (name, way), least in MIN_SPEEDUPS.items():
        batch = result["copies"]["h2d"][name]
        ratio = batch["failed"][way] if way in batch["failed"] else batch["ratios"][way]
        found.append(at_least(f"{name}, host to device, {way} over tdcopier", ratio, least))
    for kind, most_us in MAX_REBUILD_US.items():
        rebuild_us = result["nodes"]["us_per_node"][kind][td_nodes.REBUILD]
        what = f"putting one {kind} node together, of {result['nodes']['nodes']}"
        found.append(at_most(what, rebuild_us, most_us, "us"))
    share = result["into"]["h2d"]["ratios"][into.into(into.CHUNK)]
    what = f"detection batch into {into.CHUNK}, over {into.FRESH}"
    return [*found, at_most(what, share, MAX_INTO_SHARE)]
