"""Times a training loop that is fed by copies, against one with batches that are on the device.

For a loop, the duration of a copy matters less than the delay of the step and the time for which
the host is busy with the copy. Some loops enqueue few large kernels; in the others the host is as
busy with many small ones as the device, so that each microsecond of a copy delays the step.
"""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import cycle
from operator import getitem
from typing import Any, NamedTuple

import torch
from copies.directions import synchroniser
from copies.limits import flat_bytes
from copies.ways import PER_LEAF_TO, PINNED, multi_tensor_copier
from tool.measure import Bench, shuffled, summaries
from tool.tables import OURS, RESIDENT
from tool.target_forms import Target, at_most, count_wrong, none

import tdcopier
from loops.learner import SMALL_KERNELS, STEPS, SmallKernels, Work, block
from tdcopier.workloads import WORKLOADS, leaves, map_tensors, total_bytes

STEP_MS = 3.4  # duration of each step's kernels
WARM_UP = 2
CHECK_EVERY = 10  # the whole batch is compared at every tenth step, three leaves at each
READ_BYTES = 1 << 14  # at the end of a leaf, because its last bytes arrive last
HOST_WORK_US = 1000.0
MAX_TOGETHER_US = 80.0
COPIES_TO_WARM_UP = 10
COMPARE_EVERY = 10  # copies beside other work of the host


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
        "settings": {
            **bench.settings(),
            "work": f"{work.count} multiplications of matrices, {tuple(work.factor.shape)}, "
            f"{work.factor.dtype}, for about {STEP_MS:g} ms a step",
            "small kernels": f"{SMALL_KERNELS} a step, for the TensorDicts",
            "order": f"blocks of {STEPS} steps, shuffled per round",
            "ahead": "start_copy() of the next batch before the step, wait() at its beginning; the "
            "host begins a step when the one before the last is done",
        },
        "loops": {
            name: _loop(bench, name, work if wanted.is_large_work else small)
            for name, wanted in WANTED.items()
            if name in WORKLOADS or importlib.util.find_spec("tensordict")
        },
        "beside_host_work": beside_host_work(bench),
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    wrong = count_wrong(result["loops"].values()) + result["beside_host_work"]["wrong"]
    yield none("steps and batches with another value than the source's, all feeds", wrong)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for name, loop in result["loops"].items():
        wanted = WANTED[name]
        ratio, host_us = loop["ratios"][OURS], loop["copy_calls"][OURS]["median_us"]
        calls = f"{name}, host in the copy calls of a step"
        yield at_most(f"{name}, step over that {RESIDENT}", ratio, wanted.over_resident)
        yield at_most(calls, host_us, wanted.copy_calls_us, "us")
    between = f"{HOST_WORK_US:g} us of other work between"
    what = f"detection batch, start_copy() and get() with {between}"
    together_us = result["beside_host_work"]["together"]["median_us"]
    yield at_most(what, together_us, MAX_TOGETHER_US, "us")


def _loop(bench: Bench, name: str, work: Work | SmallKernels) -> dict[str, Any]:
    device, rounds = bench.device, bench.rounds(0.03)
    sources = sources_of(name)
    reader = Reader(sources, device)
    ways = feeds(device) if name in WORKLOADS else feeds_of_tensordicts(device)
    prepared = {feed.name: [feed.prepare(source) for source in sources] for feed in ways}
    step_us: dict[str, list[float]] = {feed.name: [] for feed in ways}
    copy_calls_us: dict[str, list[float]] = {feed.name: [] for feed in ways}
    wrong = {feed.name: 0 for feed in ways}
    synchroniser([device])()
    how = {"rounds": rounds, "warm_up": WARM_UP}
    with bench.quiet() as quiet:
        progress = bench.progress(f"loop, {name}")
        for index, feed in shuffled(ways, progress, before_round=quiet.seek, **how):
            found = block(Batches(feed, prepared[feed.name], index), reader.read, work, device)
            wrong[feed.name] += sum(reader.count_wrong(index))
            if index >= 0:
                step_us[feed.name].append(found.step_us)
                copy_calls_us[feed.name] += found.batch_us
    steps = summaries(step_us)
    resident_us = steps[RESIDENT]["median_us"]
    return {
        "leaves": len(leaves(as_plain(sources[0]))),
        "bytes": total_bytes(as_plain(sources[0])),
        "sources": len(sources),
        "steps_per_block": STEPS,
        "step": steps,
        "ratios": {way: found["median_us"] / resident_us for way, found in steps.items()},
        "copy_calls": summaries(copy_calls_us),
        "checked_steps": (WARM_UP + rounds) * STEPS,
        "checked_batches": (WARM_UP + rounds) * (STEPS // CHECK_EVERY),
        "wrong": wrong,
        "processor": quiet.described(),
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


# ---- how a loop is fed, and what a step reads ----------------------------------------------------


class Feed(NamedTuple):
    """One way to copy the batches of a loop to the device."""

    name: str
    start: Callable[[Any], Any]
    """Called before a step with the source of the next one; returns the argument of ``finish``."""
    finish: Callable[[Any], Any]
    """Called at the beginning of a step; returns the batch that the current stream may read."""
    prepare: Callable[[Any], Any] = lambda tree: tree
    """Called once per source, not timed."""


def feeds(device: torch.device) -> list[Feed]:
    """Return every feed that can run here: the reference of the ratios, then ours, then others."""

    def same(value: Any) -> Any:
        return value

    def wait(handle: tdcopier.AsyncCopyHandle) -> Any:
        return handle.wait()

    def to(tree: Any, non_blocking: bool = False) -> Any:
        return map_tensors(tree, lambda leaf: leaf.to(device, non_blocking=non_blocking))

    def pinned(tree: Any) -> Any:
        return map_tensors(tree, torch.Tensor.pin_memory)

    found = [
        Feed(RESIDENT, same, same, to),
        Feed(OURS, lambda tree: tdcopier.start_copy(tree, device), wait),
        prepared_feed(device),
        Feed(PER_LEAF_TO, same, to),
        Feed(PINNED, same, lambda tree: to(tree, non_blocking=True), pinned),
    ]
    peer = multi_tensor_copier()
    if peer is not None and device.type == "cuda":
        start = peer.start_copy
        found.append(
            Feed("multi_tensor_copier", lambda tree: start(tree, device), lambda h: h.get())
        )
    return found


def feeds_of_tensordicts(device: torch.device) -> list[Feed]:
    """Return the same for TensorDicts."""

    def to(td: Any, non_blocking: bool = False) -> Any:
        return td.to(device, non_blocking=non_blocking)

    return [
        Feed(RESIDENT, lambda td: td, lambda td: td, to),
        Feed(OURS, lambda td: tdcopier.async_to(td, device), lambda handle: handle.wait()),
        prepared_feed(device),
        Feed("td.to()", lambda td: td, to),
    ]


def prepared_feed(device: torch.device) -> Feed:
    """Return a feed by one plan for all sources of the same layout."""
    plans: list[tdcopier.PreparedCopy] = []

    def planned(tree: Any) -> Any:
        for plan in plans:
            if plan.why_not(tree) is None:
                return plan, tree
        plans.append(tdcopier.prepare(tree, device, reuse_outputs=True))
        return plans[-1], tree

    return Feed(
        f"{OURS}, prepared, outputs reused",
        lambda plan_and_tree: plan_and_tree[0].start_copy(plan_and_tree[1]),
        lambda handle: handle.wait(),
        planned,
    )


class Batches:
    """Iterates over the batches of a feed; each call starts the copy for the next step.

    Args:
        feed: The feed.
        sources: Sources that the feed has prepared, one per step in turn.
        first: Index of the first step's source. Its copy starts at once.

    """

    def __init__(self, feed: Feed, sources: list[Any], first: int) -> None:
        self._feed = feed
        first %= len(sources)
        self._sources = cycle([*sources[first:], *sources[:first]])
        self._coming = feed.start(next(self._sources))

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        batch = self._feed.finish(self._coming)
        self._coming = self._feed.start(next(self._sources))
        return batch


class Reader:
    """Reads three leaves of the batch in each step, in stream order, as a model would.

    It sums their last bytes. If a step begins before its batch has arrived, the sum differs from
    that of the source. Some batches are kept, and compared as a whole after the block.
    """

    def __init__(self, sources: list[Any], device: torch.device) -> None:
        everywhere = routes(as_plain(sources[0]))
        self.routes = [everywhere[0], everywhere[len(everywhere) // 2], everywhere[-1]]
        self.sums_expected = [self._sums(source) for source in sources]
        self.bytes_expected = [flat_bytes(as_plain(source)).to(device) for source in sources]
        self.sums = torch.zeros(STEPS, len(self.routes), dtype=torch.int64, device=device)
        self.kept: list[tuple[int, Any]] = []
        """Numbers of steps, with the batches that they had."""

    def read(self, batch: Any, step: int) -> None:
        for found, leaf in zip(self.sums[step], self._leaves(batch), strict=True):
            found.copy_(sum_of_last_bytes(leaf))
        if (step + 1) % CHECK_EVERY == 0:
            self.kept.append((step, batch))

    def count_wrong(self, first: int) -> tuple[int, int]:
        """Count the steps of a block that read wrong values, and its wrong batches; then reset.

        The first step's source had the index ``first``.
        """
        count = len(self.sums_expected)
        steps = sum(
            sums != self.sums_expected[(first + step) % count]
            for step, sums in enumerate(self.sums.tolist())
        )
        batches = sum(
            not torch.equal(
                flat_bytes(as_plain(batch)), self.bytes_expected[(first + step) % count]
            )
            for step, batch in self.kept
        )
        self.sums.fill_(-1)
        self.kept.clear()
        return steps, batches

    def _leaves(self, batch: Any) -> list[torch.Tensor]:
        return [reduce(getitem, route, batch) for route in self.routes]

    def _sums(self, batch: Any) -> list[int]:
        return [int(sum_of_last_bytes(leaf)) for leaf in self._leaves(batch)]


def routes(tree: Any) -> list[tuple[Any, ...]]:
    """Return the keys and indices that lead to each leaf, in the order of the containers."""
    if isinstance(tree, torch.Tensor):
        return [()]
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return [(key, *route) for key, child in children for route in routes(child)]


def sum_of_last_bytes(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.reshape(-1).view(torch.uint8)[-READ_BYTES:].sum()


# ---- a caller that does other work before get() --------------------------------------------------


def beside_host_work(bench: Bench) -> dict[str, Any]:
    """Return times of ``start_copy()`` and of ``get()``, with host work between them.

    The values of every tenth copy are compared.
    """
    device, calls = bench.device, bench.rounds(0.5, least=10)
    sources = [WORKLOADS["detection_batch"].make(seed) for seed in range(4)]
    expected = [flat_bytes(source).to(device) for source in sources]
    times_us: dict[str, list[float]] = {"start_copy": [], "get": [], "together": []}
    wrong = 0
    synchronise = synchroniser([device])
    with bench.quiet() as quiet:
        progress = bench.progress("copies beside work of the host")
        for index in progress(range(COPIES_TO_WARM_UP + calls)):
            if index % COMPARE_EVERY == 0:
                quiet.seek()
            synchronise()
            result, start_us, get_us = _start_work_get(sources[index % len(sources)], device)
            if index % COMPARE_EVERY == 0:
                wrong += not torch.equal(flat_bytes(result), expected[index % len(sources)])
            del result
            if index >= COPIES_TO_WARM_UP:
                for name, us in zip(times_us, (start_us, get_us, start_us + get_us), strict=True):
                    times_us[name].append(us)
    found = {"host_work_us": HOST_WORK_US, **summaries(times_us)}
    return {**found, "wrong": wrong, "processor": quiet.described()}


def _start_work_get(source: Any, device: torch.device) -> tuple[Any, float, float]:
    ticks = [time.perf_counter_ns()]
    handle = tdcopier.start_copy(source, device)
    ticks.append(time.perf_counter_ns())
    work_on_host(HOST_WORK_US)
    ticks.append(time.perf_counter_ns())
    result = handle.get()
    ticks.append(time.perf_counter_ns())
    return result, (ticks[1] - ticks[0]) / 1e3, (ticks[3] - ticks[2]) / 1e3


def work_on_host(us: float) -> int:
    """Do arithmetic in Python until the time is over."""
    end = time.perf_counter_ns() + us * 1e3
    total = 0
    while time.perf_counter_ns() < end:
        for number in range(50):
            total += number * number
    return total
