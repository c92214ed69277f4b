"""Times host-synchronised copies of the named workloads in one direction, and counts transfers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tool.measure import BURST, MIN_ROUNDS, Bench, steps, summaries
from tool.tables import OURS
from tool.target_forms import Target, at_least, at_most, counts, none

import tdcopier
from copies import limits
from copies.directions import DMA, MEMCPY, Count, Direction, count_transfers, synchroniser
from copies.ways import PER_LEAF_TO, contenders, differences
from tdcopier._commands.interleave import LIMIT, WAY, Contender, compared, interleave
from tdcopier.workloads import WORKLOADS, Workload, leaves, map_tensors, total_bytes

LIMIT_WORDS = {DMA: "one DMA of the same bytes", MEMCPY: "the best memcpy of them"}


def run(bench: Bench, direction: Direction, names: Sequence[str]) -> dict[str, Any]:
    """Return the figures of one direction and some workloads, and their targets."""
    workloads = {name: _workload(bench, direction, name) for name in names}
    return {
        "what": "Time from the call to the tree on the target, outputs built and host synchronised",
        "settings": {
            "source": str(direction.source),
            "target": str(direction.target),
            **bench.settings(),
        },
        "workloads": workloads,
        "targets": targets(direction, workloads),
    }


def rounds_of(direction: Direction, workload: Workload, repeats: int) -> int:
    """Return how many bursts each contender gets with a workload."""
    share = workload.repeat_share
    if share < 1:
        share *= direction.large_share
    return max(MIN_ROUNDS, round(repeats * share / BURST))


def sources_of(direction: Direction, workload: Workload) -> list[Any]:
    return [
        map_tensors(workload.make(seed), lambda leaf: leaf.to(direction.source))
        for seed in range(workload.pool)
    ]


def _workload(bench: Bench, direction: Direction, name: str) -> dict[str, Any]:
    sources = sources_of(direction, WORKLOADS[name])
    size_bytes = total_bytes(sources[0])
    crews = limits.crews()
    ways = contenders(direction) + limits.contenders(direction, size_bytes, crews)
    wrong = {way.name: len(wrong_leaves(way, sources[0], direction)) for way in ways}
    found = timed(
        bench,
        direction,
        name,
        ways,
        sources,
        lambda tree: tdcopier.start_copy(tree, direction.target),
        rounds_of(direction, WORKLOADS[name], bench.repeats),
    )
    medians_us = {way: times["median_us"] for way, times in found["contenders"].items()}
    threads = [crew.threads for crew in crews]
    return {
        "leaves": len(leaves(sources[0])),
        "bytes": size_bytes,
        **found,
        "kinds": {way.name: way.kind for way in ways},
        "limits": limits.found_limits(direction, size_bytes, threads, medians_us, OURS),
        "wrong": wrong,
    }


def timed(
    bench: Bench,
    direction: Direction,
    label: str,
    ways: Sequence[Contender],
    sources: Sequence[Any],
    start: Callable[[Any], tdcopier.AsyncCopyHandle],
    rounds: int,
) -> dict[str, Any]:
    """Return the times of all ways, and the steps and transfers of our own copies.

    The sources are on the source device; ``start`` starts our own copy of one. The number of rounds
    is that of the bursts of each way.
    """
    synchronise = synchroniser(direction.devices)
    progress = bench.progress(f"{direction.name}, {label}")
    with bench.quiet() as quiet:
        how: dict[str, Any] = {"rounds": rounds, "before_round": quiet.seek}
        times = interleave(ways, sources, synchronise, progress=progress, burst=BURST, **how)
        own = steps(start, sources, synchronise, **how)
    stats, counted = count_of(lambda: start(sources[0]), direction)
    return {
        "sources": len(sources),
        **compared(times, OURS, BURST),
        "steps": summaries(own),
        "stats": stats,
        "memcpys": counted.memcpys,
        "memcpys_counted_by": counted.counted_by,
        "processor": quiet.described(),
    }


def wrong_leaves(way: Contender, source: Any, direction: Direction) -> list[str]:
    """Run a way once, and return the paths of leaves that differ from those of ``.to()``."""
    with way.around():
        result = way.run(way.prepare(source))
        synchroniser(direction.devices)()
    if way.kind == LIMIT:
        return ["<bytes>"] if limits.differs(result, source) else []
    return differences(result, source, direction.target)


def count_of(
    start: Callable[[], tdcopier.AsyncCopyHandle], direction: Direction
) -> tuple[dict[str, Any], Count]:
    """Return the handle's own counters, and the transfers that an outside counter saw."""
    synchronise = synchroniser(direction.devices)

    def once() -> dict[str, Any]:
        handle = start()
        handle.get()
        synchronise()
        return dict(handle.stats._asdict())

    return count_transfers(direction, once)


# ---- targets -------------------------------------------------------------------------------------


def targets(direction: Direction, workloads: dict[str, Any]) -> list[Target]:
    """Return every target whose workload was run; those on speed not for the simulated device."""
    wrong = [(way, n) for each in workloads.values() for way, n in each["wrong"].items()]
    ours, others = (sum(n for way, n in wrong if (way == OURS) is own) for own in (True, False))
    found = [none("leaves of tdcopier's result that differ from .to(), all workloads", ours)]
    if others:
        what = "leaves and limits of others that differ from .to(), all workloads"
        found.append(none(what, others))
    if direction.devices[0].type != "sim":
        found += _speed_targets(direction, workloads)
    if "detection_batch" in workloads:
        seen = f"{direction.name.upper()} memcpys seen from outside"
        what = f"detection batch: packed leaves, transfers, {seen}"
        found.append(counts(what, workloads["detection_batch"], 528, 3))
    return found


def _speed_targets(direction: Direction, workloads: dict[str, Any]) -> Iterator[Target]:
    if "detection_batch" in workloads:
        speedup = workloads["detection_batch"]["ratios"][PER_LEAF_TO]
        what = f"detection batch, {PER_LEAF_TO} over tdcopier"
        yield at_least(what, speedup, direction.min_speedup)
    for name, wanted in direction.over_limits.items():
        if name in workloads:
            limits_found = workloads[name]["limits"]
            ratio = min(limits_found[limit]["ours_over"] for limit in wanted.limits)
            words = [LIMIT_WORDS[limit] for limit in wanted.limits]
            slower = words[0] if len(words) == 1 else f"the slower of ({', '.join(words)})"
            yield at_most(f"{name}, tdcopier over {slower}", ratio, wanted.most)
    for name, least in direction.min_over_best.items():
        if name in workloads:
            way, ratio = best_other(workloads[name])
            what = f"{name}, best of the other ways ({way}) over tdcopier"
            yield at_least(what, ratio, least)


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
