"""Random programs of all public calls, each in one random order of events, against a model.

Every program has copies of at least two features in flight at once: two calls, or two directions.
"""

from __future__ import annotations

import os

import pytest
from failing_machine import FailingCopies
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from model_memory import Tables

pytestmark = pytest.mark.sim

# A longer run: TDCOPIER_TEST_EXAMPLES=5000 make test-py. It draws new programs each time. The
# short one is the same each time, so it finds what a change breaks in some seconds.
EXAMPLES = os.environ.get("TDCOPIER_TEST_EXAMPLES")


@pytest.mark.timeout(900)  # a failure is shrunk before it is reported
def test_random_programs_of_all_calls_behave_as_to_does_in_any_order_of_events(sim):
    FailingCopies.sim, FailingCopies.tables = sim, Tables()
    run_state_machine_as_test(
        FailingCopies,
        settings=settings(
            max_examples=int(EXAMPLES or 40),
            stateful_step_count=30,
            derandomize=EXAMPLES is None,
            database=None,
            deadline=None,
            print_blob=True,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
