"""Times copies of TensorDicts and tensorclasses against their own methods.

The result also has the copies into existing tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tensordict
from tool.measure import BURST, MIN_ROUNDS, Bench
from tool.tables import OURS
from tool.target_forms import Target, at_least, at_most, counts, none
from tool.way import GET, Way

import tdcopier
from copies import into_existing as into
from copies.directions import HOST, Direction, with_host
from copies.td_batches import BATCHES, differences, leaves_of
from copies.timed import Kind, timed
from tdcopier.workloads import Workload

TO = "td.to()"
CONSOLIDATED = "td.consolidate().to()"
PINNED = "td.pin_memory().to(non_blocking=True)"
MIN_SPEEDUPS = {("flat", TO): 15.0, ("flat", CONSOLIDATED): 25.0, ("control", TO): 2.5}
"""Host to device, by batch and other way: the target for its time over ours."""
MAX_INTO_SHARE = 0.5  # target for the time over that of a copy that allocates


def run(bench: Bench) -> dict[str, Any]:
    both = with_host(bench.device)
    return {
        "what": "TensorDicts: time from the call to the TensorDict on the target",
        "tensordict": tensordict.__version__,
        "copies": {
            name: {batch: _batch(bench, direction, batch, kind) for batch, kind in BATCHES.items()}
            for name, direction in both.items()
        },
        "into": {name: into.run(bench, direction) for name, direction in both.items()},
    }


def value_targets(result: dict[str, Any]) -> Iterator[Target]:
    flat, filled = result["copies"]["h2d"]["flat"], result["into"]["h2d"]
    seen = "packed leaves, transfers, H2D memcpys seen from outside"
    what = "places of tdcopier's results that differ from td.to(), all batches"
    yield none(what, count_wrong(result))
    yield counts(f"flat: {seen}", flat, flat["leaves"], 1)
    what = f"copy_into() one earlier chunk: {seen}"
    yield counts(what, filled, filled["leaves"], 3)


def speed_targets(result: dict[str, Any]) -> Iterator[Target]:
    for (name, way), least in MIN_SPEEDUPS.items():
        batch = result["copies"]["h2d"][name]
        ratio = batch["failed"][way] if way in batch["failed"] else batch["ratios"][way]
        yield at_least(f"{name}, host to device, {way} over tdcopier", ratio, least)
    share = result["into"]["h2d"]["ratios"][into.into(into.CHUNK)]
    yield at_most(f"detection batch into {into.CHUNK}, over {into.FRESH}", share, MAX_INTO_SHARE)


def count_wrong(result: dict[str, Any]) -> int:
    """Count the wrong places in the results of our own ways."""
    copied = [batch["wrong"] for batches in result["copies"].values() for batch in batches.values()]
    filled = [found["wrong"] for found in result["into"].values()]
    ours = sum(n for wrong in copied + filled for way, n in wrong.items() if way.startswith(OURS))
    fresh = sum(wrong[into.FRESH] for wrong in filled)
    return ours + fresh


def ways(direction: Direction) -> list[Way]:
    """Return every way of copying a TensorDict, ours first.

    Consolidating and pinning are part of the copy and timed, because each step has a new batch.
    """
    target = direction.target
    found = [
        Way(OURS, lambda td: tdcopier.async_to(td, target), GET),
        Way(TO, lambda td: td.to(target)),
        Way(CONSOLIDATED, lambda td: td.consolidate().to(target)),
    ]
    if direction.source == HOST:
        found.append(Way(PINNED, lambda td: td.pin_memory().to(target, non_blocking=True)))
    return found


def _batch(bench: Bench, direction: Direction, name: str, batch: Workload) -> dict[str, Any]:
    return timed(
        bench,
        f"TensorDict, {name}",
        direction,
        TENSORDICT.sources(batch.make, batch.pool, direction),
        ways(direction),
        rounds=bench.rounds(batch.repeat_share / BURST, MIN_ROUNDS),
        kind=TENSORDICT,
    )


TENSORDICT = Kind(
    lambda td, device: td if device == HOST else td.to(device),  # which would name the device
    leaves_of,
    tdcopier.async_to,
    lambda result, source, device: differences(result, source.to(device)),
)
