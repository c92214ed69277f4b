"""Plays random programs of later uses; as a program, for as long as you like.

    python tests/support/play_later_uses.py --minutes 60 --jobs 2 --json played.json
    python tests/support/play_later_uses.py --seed 4711

It ends at the first difference, with the seed and the shortest program that shows it.
"""

from __future__ import annotations

import gc
import itertools
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import tensordict
import torch
from later_use_programs import NotMade, Program, difference, play, program_of, shrink
from played_seeds import DEVICE_TYPE, Tally, parser_of, play_batches, prepare, write_json

A_BATCH = 50


@dataclass
class Played(Tally):
    """The outcome of a number of seeds."""

    programs: int = 0
    not_made: int = 0
    """Seeds whose source cannot be there, or whose entry refuses it."""
    uses: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    """By entry and direction."""
    kinds: Counter[str] = field(default_factory=Counter)
    peak_memory_mb: int = 0

    def add(self, other: Played) -> None:
        peak_memory_mb = max(self.peak_memory_mb, other.peak_memory_mb)
        super().add(other)
        self.peak_memory_mb = peak_memory_mb


def play_seeds(seeds: range) -> Played:
    """Plays programs.

    Raises:
        AssertionError: There is a difference. The text has the seed and a shorter program.
    """
    total = Played()
    for seed in seeds:
        program = program_of(seed)
        try:
            total.uses += play(program, DEVICE_TYPE)
        except NotMade:
            total.not_made += 1
            continue
        except AssertionError as error:
            raise AssertionError(_told(seed, program, str(error))) from error
        except Exception as error:
            raise RuntimeError(f"seed {seed} cannot be played: {program}") from error
        total.programs += 1
        total.copies[f"{program.entry}, {program.direction}"] += 1
        total.kinds.update(program.kinds)
    gc.collect()
    total.peak_memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return total


def _told(seed: int, program: Program, found: str) -> str:
    shorter = shrink(program, DEVICE_TYPE)
    first = difference(shorter, DEVICE_TYPE)
    return f"seed {seed}: {found}\n{program}\nThe shortest, {first}:\n{shorter}"


def _batches(first_seed: int, ends_at: float) -> Iterator[range]:
    for first in itertools.count(first_seed, A_BATCH):
        if time.monotonic() > ends_at:
            return
        yield range(first, first + A_BATCH)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--json", help="write what has been played to this file as it goes on")
    arguments = parser.parse_args()

    if arguments.seed is not None:
        prepare()
        print(program_of(arguments.seed))
        print(json.dumps(play_seeds(range(arguments.seed, arguments.seed + 1)).uses, indent=2))
        return

    started = time.monotonic()
    total = Played()

    def told(difference: str | None = None) -> dict[str, Any]:
        return {
            "programs": total.programs,
            "not_made": total.not_made,
            "uses": sum(total.uses.values()),
            "difference": difference,
            "first_seed": arguments.first_seed,
            "seconds": round(time.monotonic() - started, 1),
            "processes": arguments.jobs,
            "kinds": len(total.kinds),
            "peak_memory_mb": total.peak_memory_mb,
            "torch": torch.__version__,
            "tensordict": tensordict.__version__,
            "by_copy": dict(sorted(total.copies.items())),
            "by_use": dict(sorted(total.uses.items())),
        }

    batches = _batches(arguments.first_seed, started + 60 * arguments.minutes)
    try:
        for played in play_batches(play_seeds, batches, arguments.jobs, "programs"):
            total.add(played)
            write_json(arguments.json, told())
    except RuntimeError as error:
        write_json(arguments.json, told(str(error)))
        raise
    print(json.dumps(told(), indent=2))


if __name__ == "__main__":
    sys.exit(main())
