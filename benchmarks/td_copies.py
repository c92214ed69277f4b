"""Times host-synchronised copies of TensorDicts and tensorclasses, against their own methods."""

from __future__ import annotations

from typing import Any

from baselines import OURS
from copies import BURST, MIN_ROUNDS, Progress, count_of
from directions import HOST, Direction, synchroniser
from measure import Contender, collector_paused, compared, interleave, steps, summarise
from quiet import QuietProcessor
from td_batches import BATCHES, Batch, count_leaves, differences, total_bytes

import tdcopier

TO = "td.to()"
CONSOLIDATED = "td.consolidate().to()"
PINNED = "td.pin_memory().to(non_blocking=True)"


def run(
    direction: Direction, repeats: int, progress: Progress, *, keep_gc: bool
) -> dict[str, dict[str, Any]]:
    """Return the result of every batch in one direction, by the batch's name.

    Args:
        direction: Source and target of the copies.
        repeats: Calls with the fastest batches; others get a fraction of that.
        progress: Returns a wrapper of the rounds for a label.
        keep_gc: Leave Python's garbage collector on while timing.

    """
    return {
        name: _batch(direction, name, batch, repeats, progress, keep_gc=keep_gc)
        for name, batch in BATCHES.items()
    }


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


def _batch(
    direction: Direction,
    name: str,
    batch: Batch,
    repeats: int,
    progress: Progress,
    *,
    keep_gc: bool,
) -> dict[str, Any]:
    rounds = max(MIN_ROUNDS, round(repeats * batch.repeat_share / BURST))
    made = [batch.make(seed) for seed in range(batch.pool)]
    sources = made if direction.source == HOST else [td.to(direction.source) for td in made]
    expected = sources[0].to(direction.target)
    synchronise = synchroniser(direction.devices)
    synchronise()
    outcomes = {way: tried(way, sources[0], expected, direction) for way in contenders(direction)}
    failed = {way.name: found for way, found in outcomes.items() if isinstance(found, str)}
    label = f"TensorDict {direction.name}, {name}"
    with collector_paused(not keep_gc), QuietProcessor() as quiet:
        times = interleave(
            [way for way in outcomes if way.name not in failed],
            sources,
            synchronise,
            rounds=rounds,
            progress=progress(label),
            before_round=quiet.seek,
            burst=BURST,
        )
        own = steps(
            lambda td: tdcopier.async_to(td, direction.target),
            sources,
            synchronise,
            rounds=rounds,
            before_round=quiet.seek,
        )
    stats, counted = count_of(lambda: tdcopier.async_to(sources[0], direction.target), direction)
    return {
        "leaves": count_leaves(made[0]),
        "bytes": total_bytes(made[0]),
        "sources": len(sources),
        **compared(times, OURS, BURST),
        "steps": {step: summarise(taken)._asdict() for step, taken in own.items()},
        "stats": stats,
        "memcpys": counted.memcpys,
        "memcpys_counted_by": counted.counted_by,
        "wrong": {
            way.name: len(found) for way, found in outcomes.items() if way.name not in failed
        },
        "failed": failed,
        "processor": quiet.described(),
    }
