"""Times host-synchronised copies of TensorDicts and tensorclasses, against their own methods."""

from __future__ import annotations

from typing import Any

from copies import timed
from directions import HOST, Direction, synchroniser
from measure import BURST, MIN_ROUNDS, Bench, Contender
from tables import OURS
from td_batches import BATCHES, Batch, count_leaves, differences, total_bytes

import tdcopier

TO = "td.to()"
CONSOLIDATED = "td.consolidate().to()"
PINNED = "td.pin_memory().to(non_blocking=True)"


def run(bench: Bench, direction: Direction) -> dict[str, dict[str, Any]]:
    """Return the result of every batch in one direction, by the batch's name."""
    return {name: _batch(bench, direction, name, batch) for name, batch in BATCHES.items()}


def contenders(direction: Direction) -> list[Contender]:
    """Return every way of copying a TensorDict, ours first.

    Consolidating and pinning are part of the copy and timed, because each step has a new batch.
    """
    target = direction.target
    found = [
        Contender(OURS, lambda td: tdcopier.async_to(td, target).get()),
        Contender(TO, lambda td: td.to(target)),
        Contender(CONSOLIDATED, lambda td: td.consolidate().to(target)),
    ]
    if direction.source == HOST:
        found.append(Contender(PINNED, lambda td: td.pin_memory().to(target, non_blocking=True)))
    return found


def tried(way: Contender, source: Any, expected: Any, direction: Direction) -> list[str] | str:
    """Return the places where a way's result is wrong, or the error that it raises.

    Errors of our own way are raised; those of other ways are results, since not all support all
    batches.
    """
    try:
        result = way.run(way.prepare(source))
        synchroniser(direction.devices)()
    except Exception as error:
        if way.name == OURS:
            raise
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return differences(result, expected)


def sources_of(direction: Direction, batch: Batch) -> list[Any]:
    """Return the batches of a kind on the direction's source device."""
    made = [batch.make(seed) for seed in range(batch.pool)]
    return made if direction.source == HOST else [td.to(direction.source) for td in made]


def _batch(bench: Bench, direction: Direction, name: str, batch: Batch) -> dict[str, Any]:
    sources = sources_of(direction, batch)
    expected = sources[0].to(direction.target)
    outcomes = {way: tried(way, sources[0], expected, direction) for way in contenders(direction)}
    failed = {way.name: found for way, found in outcomes.items() if isinstance(found, str)}
    right = {way: places for way, places in outcomes.items() if way.name not in failed}
    return {
        "leaves": count_leaves(sources[0]),
        "bytes": total_bytes(sources[0]),
        **timed(
            bench,
            direction,
            f"TensorDict, {name}",
            list(right),
            sources,
            lambda td: tdcopier.async_to(td, direction.target),
            bench.rounds(batch.repeat_share / BURST, MIN_ROUNDS),
        ),
        "wrong": {way.name: len(places) for way, places in right.items()},
        "failed": failed,
    }
