"""Cost and correctness of copies that run beside kernels and beside other copies."""

from __future__ import annotations

from typing import Any

import company_both_ways
import company_kernels
import company_loop
import company_refill
import company_waiting
from company_both_ways import BOTH, PINNED
from directions import d2h, h2d, start_workers
from measure import Bench, collector_paused
from tables import OURS
from targets import at_most, none

MAX_WITH_METRICS = 1.02
MAX_BESIDE_KERNELS_US = 1000.0
MAX_BOTH_WAYS_US = 5600.0
MAX_SHARE = 0.05


def run(bench: Bench) -> dict[str, Any]:
    """Return the result of this benchmark, without the machine.

    A second device of the same kind is used too if there is one.
    """
    for direction in (h2d(bench.device), d2h(bench.device)):
        start_workers(direction)
    with collector_paused(not bench.keep_gc):
        result = {
            "what": "Copies beside kernels and beside other copies",
            "settings": {
                **bench.settings(bound=False),
                "order": "interleaved, shuffled per round",
            },
            "loop": company_loop.run(bench),
            "kernels": company_kernels.run(bench),
            "both_ways": company_both_ways.run(bench),
            "waiting": company_waiting.run(bench),
            "refill": company_refill.run(bench),
        }
    return {**result, "targets": targets(result, speed=bench.is_real)}


def targets(result: dict[str, Any], *, speed: bool = True) -> list[dict[str, Any]]:
    """Return each target and whether it is hit; without ``speed``, only those on values."""
    refill = result["refill"]
    refilled = sum(row["wrong"] for row in refill["rows"] if row["way"] == OURS)
    others = "steps, copies and trees with another value than the source's, refills apart"
    refills = f"batches that a refill after wait() made wrong, of {refill['rounds']} each"
    found = [none(others, wrong_values(result)), none(refills, refilled)]
    if not speed:
        return found
    for feed, ratio in result["loop"]["with_over_without"].items():
        if feed.startswith(OURS):
            what = f"{feed}: step with metrics over without"
            found.append(at_most(what, ratio, MAX_WITH_METRICS))
    for earlier, times in result["kernels"]["times"].items():
        what = f"small copy to the device beside kernels, after {earlier}"
        found.append(at_most(what, times[OURS]["median_us"], MAX_BESIDE_KERNELS_US, "us"))
    both_us = result["both_ways"]["times"][PINNED][OURS][BOTH]["median_us"]
    found.append(at_most("pinned, both ways at once", both_us, MAX_BOTH_WAYS_US, "us"))
    for case, taken in result["waiting"]["cases"].items():
        if case.startswith(OURS):
            what = f"share of one processor, {case}"
            found.append(at_most(what, taken["median_share"], MAX_SHARE))
    return found


def wrong_values(result: dict[str, Any]) -> int:
    """Count wrong values in all parts except refills, where torch's own asynchronous way races."""
    both_ways = sum(sum(ways.values()) for ways in result["both_ways"]["wrong"].values())
    parts = (result["loop"]["wrong"], result["kernels"]["wrong"])
    return both_ways + sum(sum(part.values()) for part in parts)
