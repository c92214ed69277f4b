"""Plays scenarios in many orders of events; as a program, for as long as you like.

    python tests/support/play_schedules.py --schedules 1000000 --jobs 2
    python tests/support/play_schedules.py --only between_devices --seed 4711

Every order is checked in the same way: values, hazards that ``tdcopier.sim`` detects, memory that
stays in use, and deadlocks. Freed memory is poisoned.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from played_seeds import Tally, batches_of, parser_of, play_batches, write_json
from scenario_table import PASSING, SCENARIOS
from scenario_world import ScenarioWorld, device_values, keep_on, one_processor

import tdcopier
from tdcopier import sim

DEVICES = ("sim:0", "sim:1")
TIMEOUT_S = float(os.environ.get("TDCOPIER_PLAY_TIMEOUT_S", "30"))
A_BATCH = 50  # seeds that a process plays at a time
_values: dict[str, torch.Tensor] = {}


@dataclass
class Played(Tally):
    """The outcome of a number of schedules."""

    schedules: int = 0
    overlapping: int = 0
    """Schedules in which transfers of two jobs were in flight at once."""
    fingerprints: set[tuple[str, int]] = field(default_factory=set)
    """Of the overlapping schedules: the scenario and a fingerprint of the choices."""
    choices: int = 0


def prepare() -> None:
    """Makes the state that all scenarios share, before memory in use is measured."""
    sim.enable(devices=len(DEVICES))
    if not _values:
        _values.update(device_values(DEVICES))
        # The memory in which devices report row numbers, which is never given back.
        index = torch.zeros(1, dtype=torch.int64, device=DEVICES[0])
        tdcopier.gather([torch.zeros(1).pin_memory()], index, DEVICES[0])


def run(name: str, seed: int) -> sim.Schedule:
    """Runs one scenario in one order. Requires `prepare`."""
    with one_processor(), sim.schedule(seed, timeout_s=TIMEOUT_S) as schedule:
        world = ScenarioWorld(sim, DEVICES, _values, schedule)
        SCENARIOS[name].run(world)
        world.finish()
    return schedule


def play(name: str, seed: int) -> tuple[Played, sim.Schedule]:
    """Plays one scenario in one order. Raises the first error that a check finds."""
    prepare()
    with sim.poison(), sim.detect(leaks=True):
        schedule = run(name, seed)
    # A job of these scenarios is one transfer, so two transfers in flight belong to two jobs.
    overlap = SCENARIOS[name].one_transfer_a_job and schedule.most_transfers_in_flight >= 2
    fingerprints = {(name, schedule.fingerprint)} if overlap else set()
    return Played(1, int(overlap), fingerprints, schedule.choices), schedule


def play_range(names: list[str], seeds: range) -> Played:
    """Plays each of the scenarios with each of the seeds."""
    total = Played()
    for seed in seeds:
        for name in names:
            try:
                total.add(play(name, seed)[0])
            except BaseException as error:
                raise RuntimeError(f"{name} fails in the schedule with seed {seed}") from error
    return total


def take_processor(taken: Any) -> None:
    """Pins this process, one of several, to the next processor."""
    with taken.get_lock():
        number, taken.value = taken.value, taken.value + 1
    processors = sorted(os.sched_getaffinity(0))
    prepare()
    keep_on({processors[number % len(processors)]})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--schedules", type=int, default=10_000, help="how many, all together")
    parser.add_argument("--only", choices=SCENARIOS, action="append", help="a scenario; repeatable")
    parser.add_argument("--json", help="write what has been shown to this file as it goes on")
    arguments = parser.parse_args()
    names = arguments.only or PASSING

    if arguments.seed is not None:
        for name in names:
            print(f"{name}, seed {arguments.seed}:")
            print("\n".join(f"  {step}" for step in play(name, arguments.seed)[1].steps))
        return

    seeds = -(-arguments.schedules // len(names))
    batches = batches_of(arguments.first_seed, seeds, A_BATCH)
    started = time.monotonic()
    total = Played()

    def told() -> dict[str, Any]:
        return {
            "scenarios": len(names),
            "schedules": total.schedules,
            "with_two_jobs_in_flight": total.overlapping,
            "distinct_among_these": len(total.fingerprints),
            "choices_per_schedule": round(total.choices / total.schedules, 1),
            "first_seed": arguments.first_seed,
            "seconds": round(time.monotonic() - started, 1),
            "processes": arguments.jobs,
            "torch": torch.__version__,
        }

    taken = multiprocessing.get_context("spawn").Value("i", 0)
    for played in play_batches(
        functools.partial(play_range, names), batches, arguments.jobs, "schedules",
        seeds * len(names), take_processor, (taken,),
    ):  # fmt: skip
        total.add(played)
        write_json(arguments.json, told())
    print(json.dumps(told(), indent=2))


if __name__ == "__main__":
    sys.exit(main())
