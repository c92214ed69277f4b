"""Targets of the copy benchmarks, and whether they are hit."""

from __future__ import annotations

from typing import Any

from baselines import OURS, PER_LEAF_TO
from directions import DMA, MEMCPY, Direction, OverLimit
from measure import WAY

LIMIT_WORDS = {DMA: "one DMA of the same bytes", MEMCPY: "the best memcpy of them"}


def targets(direction: Direction, workloads: dict[str, Any]) -> list[dict[str, Any]]:
    """Return every target whose workload was run.

    Speed targets are left out on the simulated device, whose times mean nothing.
    """
    wrong = sum(sum(found["wrong_leaves"].values()) for found in workloads.values())
    ours = sum(found["wrong_leaves"][OURS] for found in workloads.values())
    found: list[dict[str, Any]] = [
        {
            "what": "leaves of tdcopier's result that differ from .to(), all workloads",
            "wanted": "0",
            "found": ours,
            "hit": ours == 0,
        }
    ]
    if wrong != ours:
        found.append(
            {
                "what": "leaves and limits of others that differ from .to(), all workloads",
                "wanted": "0",
                "found": wrong - ours,
                "hit": False,
            }
        )
    if direction.devices[0].type != "sim":
        found += _speed_targets(direction, workloads)
    batch = workloads.get("detection_batch")
    if batch is not None:
        found.append(_counts(direction, batch))
    return found


def _speed_targets(direction: Direction, workloads: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    if "detection_batch" in workloads:
        speedup = workloads["detection_batch"]["ratios"][PER_LEAF_TO]
        found.append(
            at_least(
                f"detection batch, {PER_LEAF_TO} over tdcopier", speedup, direction.min_speedup
            )
        )
    for name, wanted in direction.over_limits.items():
        if name in workloads:
            found.append(_over_limit(name, workloads[name], wanted))
    for name, least in direction.min_over_best.items():
        if name in workloads:
            way, ratio = best_other(workloads[name])
            what = f"{name}, best of the other ways ({way}) over tdcopier"
            found.append(at_least(what, ratio, least))
    return found


def best_other(found: dict[str, Any]) -> tuple[str, float]:
    """Return the fastest way other than ours, and how many times longer it takes.

    Ways that receive prepared sources, for example pinned ones, do only part of the work and do not
    count.
    """
    ways = {
        way: ratio
        for way, ratio in found["ratios"].items()
        if found["kinds"][way] == WAY and not way.startswith(OURS)
    }
    best = min(ways, key=ways.__getitem__)
    return best, ways[best]


def at_least(what: str, found: float, least: float) -> dict[str, Any]:
    return {
        "what": what,
        "wanted": f">= {least:g}",
        "found": round(found, 2),
        "hit": found >= least,
    }


def at_most(what: str, found: float, most: float, unit: str = "") -> dict[str, Any]:
    return {
        "what": what,
        "wanted": f"<= {most:g}{unit and f' {unit}'}",
        "found": round(found, 3),
        "hit": found <= most,
    }


def _over_limit(name: str, found: dict[str, Any], wanted: OverLimit) -> dict[str, Any]:
    ratios = [found["limits"][limit]["ours_over"] for limit in wanted.limits]
    words = [LIMIT_WORDS[limit] for limit in wanted.limits]
    slower = words[0] if len(words) == 1 else f"the slower of ({', '.join(words)})"
    return at_most(f"{name}, tdcopier over {slower}", min(ratios), wanted.most)


def _counts(direction: Direction, batch: dict[str, Any]) -> dict[str, Any]:
    seen = f"{direction.name.upper()} memcpys seen from outside"
    stats = batch["stats"]
    counts = [stats["packed_leaves"], stats["transfers"], batch[f"{direction.name}_memcpys"]]
    return {
        "what": f"detection batch: packed leaves, transfers, {seen}",
        # One transfer per dtype, or one kernel that gathers everything into host memory.
        "wanted": "[528, n, n], n <= 3",
        "found": counts,
        "hit": counts[0] == 528 and 1 <= counts[1] == counts[2] <= 3,
    }
