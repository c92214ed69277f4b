"""Plays random gathers and scatters of rows of pinned storages; as a program, as many as you like.

    python tests/support/play_rows.py --cases 100000 --jobs 4
    python tests/support/play_rows.py --seed 4711

A seed makes one storage of all kinds of leaves (`row_worlds.py`), which is pinned, and then plays a
number of cases with it. Index, batch and storage are overwritten at the earliest permitted moment,
and some results are compared only after the next case. Cases with other values than those of
`storage[index]` are counted, and printed with their seed.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from played_seeds import DEVICE_TYPE, Tally, played_by_arguments, print_played
from row_worlds import Pick, World, filled, last_places, same, spoil

import tdcopier

CASES = 25  # of a seed
A_BATCH = 20  # seeds that a process plays at a time

Check = Callable[[], bool]


@dataclass
class Played(Tally):
    """The outcome of a number of cases."""

    cases: int = 0
    wrong: list[str] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)


def play_seeds(seeds: range) -> Played:
    total = Played()
    for seed in seeds:
        total.add(Game(seed, f"{DEVICE_TYPE}:0").play())
    return total


class Game:
    """The cases of a seed. Those that come after an unexpected error are not played."""

    def __init__(self, seed: int, device: str) -> None:
        self.seed, self.device = seed, device
        self.dice = random.Random(seed)
        torch.manual_seed(seed)
        self.world = World(self.dice)
        self.played = Played()
        self.reading: list[Any] = []
        """Handles of gathers that may still read the storage."""
        self.later: list[tuple[str, Check]] = []
        """Results that have not been compared yet."""

    def play(self) -> Played:
        case = ""
        try:
            with tdcopier.pin_memory_(self.world.storage, self.device):
                for number in range(CASES):
                    case = f"seed {self.seed}, case {number}: "
                    case += self._case(case)
                    self.played.cases += 1
                    while len(self.later) > self.dice.choice((0, 0, 1, 2)):
                        self._compare(*self.later.pop(0))
                for name, check in self.later:
                    self._compare(name, check)
                self._may_write()
        except Exception as error:
            self.played.wrong.append(f"{case}: {type(error).__name__}: {error}; {self.world}")
        return self.played

    def _compare(self, case: str, check: Check) -> None:
        if not check():
            self.played.wrong.append(f"{case}: other values; {self.world}")

    def _case(self, case: str) -> str:
        """Play one case, and return its kind."""
        world, dice = self.world, self.dice
        scatters = world.takes_scatters and dice.random() < 0.3
        there = world.takes_numbers_there and dice.random() < 0.5
        # The device checks no rows of a storage without bytes.
        is_bad = dice.random() < 0.06 and (world.has_bytes or not there)
        pick = world.pick(unique=scatters and not there, numbers_only=there or is_bad, bad=is_bad)
        given = pick.given.to(self.device) if there else pick.given
        kind = "scatter" if scatters else "gather"
        kind += ", index on the device" if there else f", {type(pick.given).__name__}"
        kind += ", out of range" if pick.bad else ""
        play = self._scatter if scatters else self._gather
        check, how = play(pick, given, there)
        self.played.kinds[kind + how] += 1
        self.later.append((f"{case}{kind}{how}", check))
        return kind + how

    def _may_write(self) -> None:
        """Wait until the storage may be written, which is before its gathers are done."""
        while self.reading:
            self.reading.pop().wait_gathered()

    # ---- gathers -----------------------------------------------------------------------------

    def _gather(self, pick: Pick, given: Any, there: bool) -> tuple[Check, str]:
        world, dice = self.world, self.dice
        target = "cpu" if not there and dice.random() < 0.15 else self.device
        shape = pick.shape(world.lead_shape)
        whole = (*shape, *world.lead_shape[pick.lead :])
        expected = None if pick.bad else [table[pick.key].clone() for table in world.tables]
        out = how = None
        if dice.random() < 0.4 and (there or not pick.bad):
            gaps = not (pick.bad or there) and dice.random() < 0.2
            leaves = [
                filled((*shape, *table.shape[pick.lead :]), table.dtype, target, gaps)
                for table in world.tables
            ]
            out = world.build(leaves, whole)
        how = f", to {target[:3]}" + (", out=" if out is not None else "")

        def start() -> Any:
            return tdcopier.start_gather(world.storage, given, target, out=out)

        if pick.bad and not there:
            return _raises(start), how
        if pick.bad:
            return self._reported(pick, start()), how
        handle = start()
        spoil(given)
        if dice.random() < 0.3:
            result = handle.get()
        else:
            self.reading.append(handle)
            if dice.random() < 0.5:
                self._may_write()
                world.change()
            result = handle.wait()
        is_out = out is None or result is out
        return lambda: is_out and world.is_same(result, expected, whole, target), how

    def _reported(self, pick: Pick, handle: Any) -> Check:
        """Read the rows that are in range from a gather of which others are not."""
        good = [place for place, row in enumerate(pick.key.tolist()) if self.world.has(row)]
        rows = pick.key[good]
        expected = [table[rows] for table in self.world.tables]
        result = handle.wait()
        is_raised = _raises(handle.get)() and _raises(handle.wait_gathered)()
        found = [leaf[good] for leaf in self.world.leaves(result)]
        return lambda: is_raised and all(map(same, found, expected))

    # ---- scatters ----------------------------------------------------------------------------

    def _scatter(self, pick: Pick, given: Any, there: bool) -> tuple[Check, str]:
        world, dice = self.world, self.dice
        on = self.device if there or dice.random() < 0.7 else "cpu"
        shape = pick.shape(world.lead_shape)
        whole = (*shape, *world.lead_shape[pick.lead :])
        values = [world.values((*shape, *t.shape[pick.lead :]), t.dtype) for t in world.tables]
        self._may_write()
        expected = [table.clone() for table in world.tables]
        batch = world.build([leaf.to(on, copy=True) for leaf in values], whole)
        how = f", from {on[:3]}"

        def start() -> Any:
            return tdcopier.start_scatter(batch, world.storage, given)

        if pick.bad and not there:
            is_right = _raises(start)() and self._holds(expected)
            return lambda: is_right, how
        rows, places = last_places(pick.key, world.lead_shape[0]) if there else (None, None)
        for table, leaf in zip(expected, values, strict=True):
            if there:
                table[rows] = leaf.flatten(0, len(shape) - 1)[places]
            else:
                table[pick.key] = leaf
        handle = start()
        spoil(given)
        if pick.bad:
            is_right = _raises(handle.get)()
        else:
            if dice.random() < 0.7:
                handle.wait_staged()
                for leaf in world.leaves(batch):
                    leaf.zero_()
            is_right = (handle.get() if dice.random() < 0.5 else handle.wait()) is world.storage
        is_right = is_right and self._holds(expected)
        return lambda: is_right, how

    def _holds(self, expected: list[torch.Tensor]) -> bool:
        return all(map(same, self.world.tables, expected))


def _raises(call: Callable[[], object]) -> Check:
    """Call at once; the check is whether it raised an `IndexError`."""
    try:
        call()
    except IndexError:
        return lambda: True
    return lambda: False


# ---- as a program --------------------------------------------------------------------------------


def main() -> int:
    total = played_by_arguments(__doc__, play_seeds, Played(), "cases", CASES, A_BATCH)
    print_played(total.kinds, total.wrong)
    print(f"{total.cases:,} cases on {DEVICE_TYPE}, torch {torch.__version__}: "
          f"{len(total.wrong)} wrong")  # fmt: skip
    return bool(total.wrong)


if __name__ == "__main__":
    sys.exit(main())
