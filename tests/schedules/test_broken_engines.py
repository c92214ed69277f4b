"""Each promise has a check that detects an engine which breaks it."""

from __future__ import annotations

import json
import os
import re
from typing import Any

import pytest
from build_broken_engines import ROOT, SITE, broken_sources
from defects import DEFECTS
from fork_server import run_forked
from scenario_table import orders_of

pytestmark = pytest.mark.sim

SEEDS = 1000
# Promises that Python keeps, and no part of the engine, with the tests of them.
NOT_THE_ENGINES = {
    "Check mode": "tests/copy/test_checking.py",
    "Prefetching": "tests/prefetch/test_prefetch_state.py",
}


def told_of(name: str) -> dict[str, Any]:
    """Plays with this defect, seed after seed, and returns the first finding."""
    if not SITE.exists():
        pytest.fail("there is no test build of the broken engines: `make broken-engines` makes it")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "tests" / "support")!r})
from build_broken_engines import show
show({name!r}, {SEEDS})
"""
    done = run_forked(code, 100, dict(os.environ))
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", DEFECTS)
def test_a_broken_engine_is_found(name):
    defect, told = DEFECTS[name], told_of(name)
    # If the detectors find the defect too, values may be right in the first order that shows it.
    errors = {defect.error, "HazardError"} if defect.hazard else {defect.error}
    assert told.get("error") in errors, told
    assert 1.3 * told["seed"] < orders_of(defect.scenario), "the scenario needs MORE_ORDERS"
    assert defect.hazard is None or defect.hazard in told["hazards"], told


def test_the_same_build_without_a_defect_is_right():
    assert told_of("") == {"seeds": SEEDS}


def test_every_promise_has_a_broken_engine_or_tests_of_its_own():
    promises = re.findall(
        r"^\*\*(.+?)\.\*\*", (ROOT / "docs/concepts/promises.md").read_text(), re.MULTILINE
    )
    assert {defect.promise for defect in DEFECTS.values()} == set(promises) - set(NOT_THE_ENGINES)
    for tests in NOT_THE_ENGINES.values():
        assert (ROOT / tests).exists()


def test_the_table_fits_the_code():
    assert len(broken_sources()) == len({defect.file for defect in DEFECTS.values()})
