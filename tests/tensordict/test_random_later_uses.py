"""Random programs of later uses: the result of a copy can be used as that of `.to()`."""

from __future__ import annotations

import os

import pytest
from later_use_programs import ENTRIES, USES, program_of
from play_later_uses import Played, play_seeds

pytestmark = pytest.mark.sim

# A longer run: TDCOPIER_TEST_LATER_USES=10000 make test-py, or
# python tests/support/play_later_uses.py --minutes 60.
PARTS = 4
SEEDS = int(os.environ.get("TDCOPIER_TEST_LATER_USES", "400")) // PARTS
FIRST_SEED = int(os.environ.get("TDCOPIER_TEST_FIRST_SEED", "0"))


@pytest.mark.parametrize("part", range(PARTS))
def test_each_later_use_does_what_it_does_after_to(sim, part):
    first = FIRST_SEED + part * SEEDS
    played = play_seeds(range(first, first + SEEDS))
    assert played.programs >= SEEDS // 2
    assert sum(played.uses.values()) >= 2 * played.programs
    results = sum(count for name, count in played.uses.items() if name.endswith(": result"))
    assert results >= 0.8 * sum(played.uses.values())


def test_a_seed_is_one_program():
    programs = [program_of(seed) for seed in range(300)]
    assert programs == [program_of(seed) for seed in range(300)]
    assert {program.entry for program in programs} == set(ENTRIES)
    assert {use for program in programs for use, _ in program.uses} == set(USES)
    assert isinstance(Played(), Played)
