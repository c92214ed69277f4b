"""Cost and correctness of copies that run beside kernels and beside other copies."""

from __future__ import annotations

from typing import Any

import company_both_ways
import company_kernels
import company_loop
import company_refill
import company_waiting
import torch
from baselines import OURS
from company_both_ways import BOTH, PINNED
from copies import Progress, start_workers
from copy_targets import at_most
from directions import d2h, h2d
from measure import collector_paused

MAX_WITH_METRICS = 1.02
MAX_BESIDE_KERNELS_US = 1000.0
MAX_BOTH_WAYS_US = 5600.0
MAX_SHARE = 0.05


def run(device: torch.device, repeats: int, progress: Progress, *, keep_gc: bool) -> dict[str, Any]:
    """Return the result of this benchmark, without the machine.

    Args:
        device: The accelerator; a second one of its kind is used too if there is one.
        repeats: As for the other benchmarks; most rounds take long here, so there are fewer.
        progress: Returns a wrapper of the rounds for a label.
        keep_gc: Leave Python's garbage collector on while timing.

    """
    for direction in (h2d(device), d2h(device)):
        start_workers(direction)
    with collector_paused(not keep_gc):
        result = {
            "what": "Copies beside kernels and beside other copies",
            "settings": {
                "collector": "on" if keep_gc else "paused",
                "order": "interleaved, shuffled per round",
                "processor": "wherever threads are put: one that is tied ties those that it starts",
            },
            "loop": company_loop.run(device, repeats, progress),
            "kernels": company_kernels.run(device, repeats, progress),
            "both_ways": company_both_ways.run(device, repeats, progress),
            "waiting": company_waiting.run(device, repeats, progress),
            "refill": company_refill.run(device, repeats, progress),
        }
    return {**result, "targets": targets(result, speed=device.type != "sim")}


def targets(result: dict[str, Any], *, speed: bool = True) -> list[dict[str, Any]]:
    """Return each target and whether it is hit; without ``speed``, only those on values."""
    wrong = count_wrong(result)
    refill = result["refill"]
    ours = [row for row in refill["rows"] if row["way"] == OURS]
    refilled = sum(row["wrong"] for row in ours)
    found = [
        {
            "what": "steps, copies and trees with another value than the source's, refills apart",
            "wanted": "0",
            "found": wrong,
            "hit": wrong == 0,
        },
        {
            "what": f"batches that a refill after wait() made wrong, of {refill['rounds']} each",
            "wanted": "0",
            "found": refilled,
            "hit": refilled == 0,
        },
    ]
    if not speed:
        return found
    for feed, ratio in result["loop"]["with_over_without"].items():
        if feed.startswith(OURS):
            found.append(
                at_most(f"{feed}: step with metrics over without", ratio, MAX_WITH_METRICS)
            )
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


def count_wrong(result: dict[str, Any]) -> int:
    """Count wrong values in all parts except refills, where torch's own asynchronous way races."""
    both_ways = sum(sum(ways.values()) for ways in result["both_ways"]["wrong"].values())
    parts = (result["loop"]["wrong"], result["kernels"]["wrong"])
    return both_ways + sum(sum(part.values()) for part in parts)
