"""Overlapping copies in thousands of orders of events: values, order, lifetime, no deadlock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from not_yet import NOT_YET
from play_schedules import Played, play, prepare
from scenario_table import PASSING, SCENARIOS, orders_of
from scenario_world import one_processor

import tdcopier

pytestmark = pytest.mark.sim

# By default `orders_of` each; `make test-gpu` plays 2,000. A longer run:
# TDCOPIER_TEST_SCHEDULES=10000 make test-py, or python tests/support/play_schedules.py.
SEEDS = os.environ.get("TDCOPIER_TEST_SCHEDULES")
FIRST_SEED = int(os.environ.get("TDCOPIER_TEST_FIRST_SEED", "0"))
# In all others with one transfer for each copy, those of two copies are in flight at once in many
# of the orders.
ONE_AFTER_THE_OTHER = ("let_go_by_another_thread", "failures_are_told_each_time")


@pytest.fixture(scope="module", autouse=True)
def moved_once(sim: ModuleType) -> Iterator[None]:
    """Moves the threads to one processor for all orders, and not for each order anew."""
    prepare()
    with one_processor():
        yield


@pytest.mark.parametrize("name", PASSING)
def test_every_order_of_events_is_right(sim, name):
    total, seeds = Played(), int(SEEDS or orders_of(name))
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        total.add(play(name, seed)[0])
    if SCENARIOS[name].one_transfer_a_job and name not in ONE_AFTER_THE_OTHER:
        assert len(total.fingerprints) >= seeds // 10


def test_a_gather_dropped_before_leaves_the_order_as_it_is(sim):
    name = "the_device_numbers_the_rows_that_it_reads"
    index = torch.zeros(1, dtype=torch.int64, device="sim")
    for seed in range(8):
        tdcopier.gather([torch.zeros(1).pin_memory()], index, "sim")
        _, first = play(name, seed)
        _, again = play(name, seed)
        assert again.steps == first.steps


@pytest.mark.parametrize("name", NOT_YET)
def test_what_the_engine_does_not_do_yet_is_seen_to_fail(sim, name):
    found = None
    for seed in range(int(SEEDS or 100)):
        try:
            play(name, seed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # some scenarios interrupt themselves
            found = error
            break
    assert found is not None, f"take {name} out of NOT_YET: every order of it is right"


@pytest.mark.parametrize("name", PASSING)
def test_the_same_seed_gives_the_same_order_again(sim, name):
    for seed in range(2):
        _, first = play(name, seed)
        _, again = play(name, seed)
        assert again.steps == first.steps
        assert (again.fingerprint, again.choices) == (first.fingerprint, first.choices)
