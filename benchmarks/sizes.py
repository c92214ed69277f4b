"""Times copies to the device by the number of leaves, from 10 to 100,000."""

from __future__ import annotations

from typing import Any

import torch
from baselines import OURS, PER_LEAF_TO, PINNED, per_leaf
from copies import Progress, start_workers
from copy_targets import at_most
from directions import h2d, synchroniser
from limits import flat_bytes
from measure import PREPARED, Contender, collector_paused, interleave, summarise
from quiet import QuietProcessor

import tdcopier
from tdcopier.workloads import flat_dict, map_tensors, total_bytes

COUNTS = (10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
FLOATS = 64  # per leaf
MOST_SIMULATED = 10_000
MOST_BY_TO = 10_000  # limit for .to() per leaf: more leaves take seconds and show nothing new
BURST = 3
WARM_UP = 1
MIN_ROUNDS = 3
ROUNDS_OF_LEAVES = 60  # batches with more leaves get fewer rounds
SMALL, LARGE = 1_000, 100_000
MAX_GROWTH = 1.5


def run(device: torch.device, repeats: int, progress: Progress, *, keep_gc: bool) -> dict[str, Any]:
    """Return the result of this benchmark, without the machine.

    Args:
        device: The target.
        repeats: As for the other benchmarks; the more leaves, the fewer rounds.
        progress: Returns a wrapper of the rounds for a label.
        keep_gc: Leave Python's garbage collector on while timing.

    """
    start_workers(h2d(device))
    result = {
        "what": "Host to device: the cost of a copy against the number of its leaves",
        "settings": {
            "leaf": f"{FLOATS} float32, side by side in a dict",
            "collector": "on" if keep_gc else "paused",
            "order": f"interleaved, bursts of {BURST} calls, shuffled per round",
            "processor": "each round on one that no neighbour slows down, where there is one",
        },
        "sizes": {
            str(count): _size(device, count, repeats, progress, keep_gc=keep_gc)
            for count in counts(device)
        },
    }
    return {**result, "targets": targets(result, speed=device.type != "sim")}


def targets(result: dict[str, Any], *, speed: bool = True) -> list[dict[str, Any]]:
    """Return each target and whether it is hit; without ``speed``, only those on values."""
    wrong = sum(sum(found["wrong"].values()) for found in result["sizes"].values())
    found = [
        {
            "what": "copies that differ from their source, all sizes and ways",
            "wanted": "0",
            "found": wrong,
            "hit": wrong == 0,
        }
    ]
    if not speed:
        return found
    small, large = (result["sizes"][str(count)]["us_per_leaf"][OURS] for count in (SMALL, LARGE))
    what = f"tdcopier, cost of a leaf among {LARGE:,} over that among {SMALL:,}"
    return [*found, at_most(what, large / small, MAX_GROWTH)]


def counts(device: torch.device) -> list[int]:
    """Return the leaf counts of the batches, without the largest ones on the simulated device."""
    return [n for n in COUNTS if device.type != "sim" or n <= MOST_SIMULATED]


def contenders(device: torch.device, count: int) -> list[Contender]:
    """Return the ways that are timed for ``count`` leaves, ours first."""
    found = [Contender(OURS, lambda tree: tdcopier.start_copy(tree, device).get())]
    if count <= MOST_BY_TO:
        found.append(per_leaf(PER_LEAF_TO, lambda leaf: leaf.to(device)))
    found.append(
        Contender(
            PINNED,
            lambda tree: map_tensors(tree, lambda leaf: leaf.to(device, non_blocking=True)),
            lambda tree: map_tensors(tree, torch.Tensor.pin_memory),
            PREPARED,
        )
    )
    return found


def rounds_of(count: int, repeats: int) -> int:
    """Return how many bursts each way gets for ``count`` leaves."""
    return max(MIN_ROUNDS, round(repeats / BURST * min(1.0, ROUNDS_OF_LEAVES / count)))


def differs(result: Any, source: dict[str, torch.Tensor], device: torch.device) -> bool:
    """Return whether a copy has wrong keys, devices or bytes."""
    if list(result) != list(source) or {leaf.device for leaf in result.values()} != {device}:
        return True
    return not torch.equal(flat_bytes(result).cpu(), flat_bytes(source))


def _size(
    device: torch.device, count: int, repeats: int, progress: Progress, *, keep_gc: bool
) -> dict[str, Any]:
    source = flat_dict(leaves=count, floats=FLOATS)
    ways = contenders(device, count)
    synchronise = synchroniser([device])
    wrong = {way.name: int(_is_wrong(way, source, device)) for way in ways}
    with collector_paused(not keep_gc), QuietProcessor() as quiet:
        times = interleave(
            ways,
            [source],
            synchronise,
            rounds=rounds_of(count, repeats),
            warm_up=WARM_UP,
            progress=progress(f"{count:,} leaves"),
            before_round=quiet.seek,
            burst=BURST,
        )
    summaries = {way: summarise(taken) for way, taken in times.items()}
    return {
        "leaves": count,
        "bytes": total_bytes(source),
        "contenders": {way: summary._asdict() for way, summary in summaries.items()},
        "us_per_leaf": {way: summary.median_us / count for way, summary in summaries.items()},
        "wrong": wrong,
        "processor": quiet.described(),
    }


def _is_wrong(way: Contender, source: dict[str, torch.Tensor], device: torch.device) -> bool:
    result = way.run(way.prepare(source))
    synchroniser([device])()
    return differs(result, source, device)
