"""All TensorDict benchmarks in one result: copies, cost of a node, copies into existing tensors."""

from __future__ import annotations

from typing import Any

import into
import td_copies
import td_nodes
import tensordict
import torch
from baselines import OURS
from copies import BURST, Progress, start_workers
from directions import d2h, h2d

MIN_SPEEDUPS = {
    ("flat", td_copies.TO): 15.0,
    ("flat", td_copies.CONSOLIDATED): 25.0,
    ("control", td_copies.TO): 2.5,
}
"""Host to device, by batch and other way: the target for its time over ours."""
MAX_REBUILD_US = {td_nodes.NESTED: 3.0, td_nodes.CLASSES: 10.0}
MAX_INTO_SHARE = 0.5  # target for the time over that of a copy that allocates


def run(device: torch.device, repeats: int, progress: Progress, *, keep_gc: bool) -> dict[str, Any]:
    """Return the result of this benchmark, without the machine.

    Args:
        device: The accelerator.
        repeats: Calls with the fastest batches; others get a fraction of that.
        progress: Returns a wrapper of the rounds for a label.
        keep_gc: Leave Python's garbage collector on while timing.

    """
    ways = {direction.name: direction for direction in (h2d(device), d2h(device))}
    for direction in ways.values():
        start_workers(direction)
    result = {
        "what": "TensorDicts: time from the call to the TensorDict on the target",
        "settings": {
            "tensordict": tensordict.__version__,
            "collector": "on" if keep_gc else "paused",
            "order": f"interleaved, bursts of {BURST} calls, shuffled per round",
            "processor": "each round on one that no neighbour slows down, where there is one",
        },
        "copies": {
            name: td_copies.run(direction, repeats, progress, keep_gc=keep_gc)
            for name, direction in ways.items()
        },
        "nodes": td_nodes.run(ways["h2d"], repeats, progress, keep_gc=keep_gc),
        "into": {
            name: into.run(direction, repeats, progress, keep_gc=keep_gc)
            for name, direction in ways.items()
        },
    }
    return {**result, "targets": targets(result, speed=device.type != "sim")}


def targets(result: dict[str, Any], *, speed: bool = True) -> list[dict[str, Any]]:
    """Return each target and whether it is hit; without ``speed``, only those on counts."""
    wrong = count_wrong(result)
    flat = result["copies"]["h2d"]["flat"]
    chunk = result["into"]["h2d"]["counts"][into.into(into.CHUNK)]
    found = [
        {
            "what": "places of tdcopier's results that differ from td.to(), all batches",
            "wanted": "0",
            "found": wrong,
            "hit": wrong == 0,
        },
        _counts("flat", flat["leaves"], flat),
        _counts("copy_into() one earlier chunk", result["into"]["h2d"]["leaves"], chunk, dtypes=3),
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
        speedup = batch["ratios"].get(way)  # None if the other way failed: not a hit
        found.append(
            {
                "what": f"{name}, host to device, {way} over tdcopier",
                "wanted": f">= {least:g}",
                "found": batch["failed"][way] if speedup is None else round(speedup, 2),
                "hit": speedup is not None and speedup >= least,
            }
        )
    for kind, most_us in MAX_REBUILD_US.items():
        rebuild_us = result["nodes"]["us_per_node"][kind][td_nodes.REBUILD]
        found.append(
            {
                "what": f"putting one {kind} node together, of {result['nodes']['nodes']}",
                "wanted": f"<= {most_us:g} us",
                "found": round(rebuild_us, 2),
                "hit": rebuild_us <= most_us,
            }
        )
    share = result["into"]["h2d"]["ratios"][into.into(into.CHUNK)]
    found.append(
        {
            "what": f"detection batch into {into.CHUNK}, over {into.FRESH}",
            "wanted": f"<= {MAX_INTO_SHARE:g}",
            "found": round(share, 3),
            "hit": share <= MAX_INTO_SHARE,
        }
    )
    return found


def _counts(what: str, leaves: int, found: dict[str, Any], dtypes: int = 1) -> dict[str, Any]:
    stats = found["stats"]
    wanted = [leaves, dtypes, dtypes]  # at most one transfer per dtype
    counts = [stats["packed_leaves"], stats["transfers"], found["memcpys"]]
    return {
        "what": f"{what}: packed leaves, transfers, H2D memcpys seen from outside",
        "wanted": str(wanted),
        "found": counts,
        "hit": counts[0] == leaves and 1 <= counts[1] == counts[2] <= dtypes,
    }
