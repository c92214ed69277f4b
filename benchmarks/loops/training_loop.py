"""Times a training loop that is fed by copies, against one with batches that are on the device.

For a loop, the duration of a copy matters less than the delay of the step and the time for which
the host is busy with the copy. Some loops enqueue few large kernels; in the others the host is as
busy with many small ones as the device, so that each microsecond of a copy delays the step.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import torch
from copies.directions import synchroniser
from copies.limits import flat_bytes
from copies.ways import (
    PER_LEAF_TO,
    REUSED,
    multi_tensor_copier,
    ours,
    per_leaf,
    pinned_beforehand,
    prepared,
)
from tool.measure import Bench, summaries
from tool.tables import OURS, RESIDENT
from tool.target_forms import Target, at_most, count_wrong, none
from tool.way import GET, WAIT, Way

import tdcopier
from loops.learner import SmallKernels, Work
from loops.steps import Check, compared
from tdcopier.workloads import WORKLOADS, leaves, total_bytes

STEP_MS = 3.4  # duration of each step's kernels
READ_BYTES = 1 << 14  # at the end of a leaf, because its last bytes arrive last


class Wanted(NamedTuple):
    """A batch that feeds the loop, and upper limits for a loop that tdcopier feeds."""

    over_resident: float
    """Time of a step over that with a batch that is on the device already."""
    copy_calls_us: float
    """Time of the host in the copy calls of a step."""
    pool: int
    """Number of batches with different values to cycle through."""
    is_large_work: bool = True
    """Whether the kernels of a step are large."""


WANTED = {
    "detection_batch": Wanted(1.01, 150.0, pool=8),
    "detection_batch_with_images": Wanted(1.05, 500.0, pool=4),
    "atari_replay": Wanted(1.02, 300.0, pool=6),
    "control": Wanted(1.03, 100.0, pool=8, is_large_work=False),
    "agents": Wanted(1.03, 500.0, pool=4, is_large_work=False),
}
"""Targets by the batch that feeds the loop."""


def run(bench: Bench) -> dict[str, Any]:
    work, small = Work(bench.device, STEP_MS), SmallKernels(bench.device)
    return {
        "what": "A training loop: time of a step, and of the host in the calls that copy",
        "loops": {
            name: _loop(bench, name, work if wanted.is_large_work else small)
            for name, wanted in WANTED.items()
            if name in WORKLOADS or importlib.util.find_spec("tensordict")
        },
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    wrong = count_wrong(result["loops"].values())
    yield none("steps and batches with another value than the source's, all feeds", wrong)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, loop in result["loops"].items():
        wanted = WANTED[name]
        ratio, host_us = loop["ratios"][OURS], loop["copy_calls"][OURS]["median_us"]
        calls = f"{name}, host in the copy calls of a step"
        yield at_most(f"{name}, step over that {RESIDENT}", ratio, wanted.over_resident)
        yield at_most(calls, host_us, wanted.copy_calls_us, "us")


def _loop(bench: Bench, name: str, work: Work | SmallKernels) -> dict[str, Any]:
    sources = sources_of(name)
    synchroniser([bench.device])()
    feeds, checked = ways(bench.device, name), check(sources, bench.device)
    found, blocks = compared(
        bench,
        f"loop, {name}",
        feeds,
        sources,
        lambda way: checked,
        lambda way: work,
        rounds=bench.rounds(0.03),
        bound=True,
        warm_up=0,
    )
    calls = {name: [us for each in blocks for us in each[name].batch_us] for name in found["step"]}
    return {
        "leaves": len(leaves(as_plain(sources[0]))),
        "bytes": total_bytes(as_plain(sources[0])),
        **found,
        "copy_calls": summaries(calls),
    }


def sources_of(name: str) -> list[Any]:
    if name in WORKLOADS:
        make = WORKLOADS[name].make
    else:
        make = getattr(importlib.import_module("copies.td_batches"), name)
    return [make(seed) for seed in range(WANTED[name].pool)]


def as_plain(tree: Any) -> Any:
    """Return a TensorDict as nested dicts of the same leaves."""
    return tree.to_dict() if hasattr(tree, "to_dict") else tree


def ways(device: torch.device, name: str) -> list[Way]:
    """Return every way that can feed this loop: the reference of the ratios, then ours, others."""
    own = [ours(device, WAIT), prepared(REUSED, device, WAIT, reuse_outputs=True)]
    if name not in WORKLOADS:
        own[0] = own[0]._replace(start=lambda td: tdcopier.async_to(td, device))
        to = Way("td.to()", finish=lambda td: td.to(device))
        return [Way(RESIDENT, prepare=to.finish), *own, to]
    to = per_leaf(PER_LEAF_TO, lambda leaf: leaf.to(device))
    found = [Way(RESIDENT, prepare=to.finish), *own, to, pinned_beforehand(device)]
    peer = multi_tensor_copier()
    if peer is not None and device.type == "cuda":
        found.append(Way("multi_tensor_copier", lambda tree: peer.start_copy(tree, device), GET))
    return found


def check(sources: list[Any], device: torch.device) -> Check:
    """Compare the last bytes of three leaves at each step, and of some batches all bytes.

    If a step begins before its batch has arrived, a sum of these bytes differs.
    """
    everywhere = routes(as_plain(sources[0]))
    three = [everywhere[0], everywhere[len(everywhere) // 2], everywhere[-1]]

    def sums(batch: Any) -> torch.Tensor:
        found = [sum_of_last_bytes(reduce(getitem, route, batch)) for route in three]
        return torch.stack(found)

    right_sums = [sums(source) for source in sources]
    right_bytes = [flat_bytes(as_plain(source)).to(device) for source in sources]
    return Check(
        sums,
        lambda number: right_sums[number % len(sources)],
        lambda number, batch: torch.equal(
            flat_bytes(as_plain(batch)), right_bytes[number % len(sources)]
        ),
    )


def routes(tree: Any) -> list[tuple[Any, ...]]:
    """Return the keys and indices that lead to each leaf, in the order of the containers."""
    if isinstance(tree, torch.Tensor):
        return [()]
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [(key, *route) for key, child in children for route in routes(child)]


def sum_of_last_bytes(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.reshape(-1).view(torch.uint8)[-READ_BYTES:].sum()
