"""All scenarios by name, and those that the engine does not pass yet.

Each takes a :class:`scenario_world.ScenarioWorld`, checks all values itself, and is deterministic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from channel_scenarios import CHANNELS
from company_scenarios import COMPANY
from consumer_scenarios import CONSUMERS
from deferred_scenarios import HELD
from fault_scenarios import FAULTS
from not_yet import NOT_YET
from pair_scenarios import PAIRS
from parcel_scenarios import PARCELS
from park_scenarios import PARK
from row_scenarios import ROWS
from scenario_world import ScenarioWorld
from scenarios import ONE_TRANSFER_EACH, SEVERAL_TRANSFERS


class Scenario(NamedTuple):
    run: Callable[[ScenarioWorld], None]
    one_transfer_a_job: bool = False


SCENARIOS: dict[str, Scenario] = {
    **{run.__name__: Scenario(run, one_transfer_a_job=True) for run in ONE_TRANSFER_EACH},
    **{
        run.__name__: Scenario(run)
        for scenarios in (
            SEVERAL_TRANSFERS,
            ROWS,
            HELD,
            CONSUMERS,
            PAIRS,
            COMPANY,
            FAULTS,
            PARK,
            PARCELS,
            CHANNELS,
        )
        for run in scenarios
    },
}

PASSING = [name for name in SCENARIOS if name not in NOT_YET]

ORDERS = 20
MORE_ORDERS = {
    "windows_are_sent_in_groups": 32,
    "polled_while_workers_stage": 32,
    **dict.fromkeys(("workers_share_two_buffers", "results_that_python_has_seen_are_dropped"), 100),
}
"""In how many orders a scenario is played by default: 1.3 times as many as it takes at most to find
a broken engine, which `test_broken_engines.py` checks.
"""


def orders_of(scenario: str) -> int:
    return MORE_ORDERS.get(scenario, ORDERS)


unknown = NOT_YET.keys() - SCENARIOS.keys()
assert not unknown, f"there are no such scenarios: {unknown}"
