"""Random programs of later uses: the result of a copy can be used as that of `.to()`."""

from __future__ import annotations

import os

import pytest
from later_use_programs import ENTRIES, USES, Program, difference, program_of
from play_later_uses import play_seeds

from tdcopier.tensordict import _nodes

pytestmark = pytest.mark.sim

# A longer run: TDCOPIER_TEST_LATER_USES=10000 make test-py, or
# python tests/support/play_later_uses.py --minutes 60.
PARTS = 4
SEEDS = int(os.environ.get("TDCOPIER_TEST_LATER_USES", "120")) // PARTS
FIRST_SEED = int(os.environ.get("TDCOPIER_TEST_FIRST_SEED", "0"))


@pytest.mark.parametrize("part", range(PARTS))
def test_each_later_use_does_what_it_does_after_to(sim, part):
    first = FIRST_SEED + part * SEEDS
    played = play_seeds(range(first, first + SEEDS))
    assert played.programs >= SEEDS // 2
    assert sum(played.uses.values()) >= 2 * played.programs
    results = sum(count for name, count in played.uses.items() if name.endswith(": result"))
    assert results >= 0.6 * sum(played.uses.values())


def test_a_seed_is_one_program():
    programs = [program_of(seed) for seed in range(300)]
    assert programs == [program_of(seed) for seed in range(300)]
    assert {program.entry for program in programs} == set(ENTRIES)
    assert {use for program in programs for use, _ in program.uses} == set(USES)


@pytest.mark.usefixtures("python_nodes")
def test_names_that_are_dropped_are_found_and_shrunk_to_the_copy_alone(sim, monkeypatch):
    make = _nodes.make_tensordict
    monkeypatch.setattr(
        _nodes,
        "make_tensordict",
        lambda entries, size, device, _: make(entries, size, device, None),
    )
    with pytest.raises(AssertionError, match=r"^seed \d+: .*names(.|\n)*uses=\(\)\)$"):
        play_seeds(range(200))


def test_an_error_of_another_device_belongs_to_the_use_that_caused_it():
    # Copies back leaves into others of the second device, of dtypes that torch cannot convert.
    uses = (("write", 441893806), ("remove", 967196462), ("copy back", 373050619))
    program = Program(("leaves of every dtype",), "alone", "D2D", "copy", "default", False, uses)
    assert [difference(program, "sim") for _ in range(20)] == [None] * 20
