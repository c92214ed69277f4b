"""Ctrl-C before any line of Python that a loop runs when it asks for its next batch."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from not_yet import NOT_YET_INTERRUPTED
from prefetch_support import batch, value_of
from scheduled_reader import scheduled_reader

import tdcopier

pytestmark = pytest.mark.sim

BATCHES = 5
MOST_LINES = 200


@contextmanager
def interrupt_before_line(number: int) -> Iterator[None]:
    """Raise a KeyboardInterrupt where this thread comes to its n-th line of prefetching.

    Not where a `with` ends: Python runs no handler of signals between a block and its end.
    """
    seen = 0
    entered: set[tuple[FrameType, int]] = set()

    def is_end_of_with(frame: FrameType) -> bool:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if not line.lstrip().startswith("with "):
            return False
        is_end = (frame, frame.f_lineno) in entered
        entered.add((frame, frame.f_lineno))
        return is_end

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        if "/tdcopier/_prefetch" not in frame.f_code.co_filename:
            return None
        if event == "line" and not is_end_of_with(frame):
            seen += 1
            if seen == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
        entered.clear()


def rest_after_an_interrupt(sim: ModuleType, number: int, threaded: bool) -> list[int] | None:
    """Values of the batches that the loop still gets; None if nothing was interrupted."""
    with sim.schedule(number) as schedule, scheduled_reader(schedule):
        source = iter([batch(value) for value in range(BATCHES)])
        with tdcopier.prefetch(source, "sim:0", depth=1, threaded=threaded) as prefetcher:
            passing = iter(prefetcher)
            assert value_of(next(passing)) == 0
            try:
                with interrupt_before_line(number):
                    value = value_of(next(passing))
            except KeyboardInterrupt:
                return [value_of(moved) for moved in passing]
            assert value == 1
            return None


@pytest.mark.parametrize("threaded", [True, False], ids=["reader", "in the loop"])
def test_a_loop_that_was_interrupted_can_go_on(
    sim: ModuleType, threaded: bool, request: pytest.FixtureRequest
) -> None:
    name = "reader" if threaded else "in the loop"
    if name in NOT_YET_INTERRUPTED:
        request.applymarker(pytest.mark.xfail(reason=NOT_YET_INTERRUPTED[name], strict=True))
    with torch.sim.device(0):
        for number in range(1, MOST_LINES):
            rest = rest_after_an_interrupt(sim, number, threaded)
            if rest is None:
                assert number > 5
                return
            # The batch that was at hand, or was being read, may be lost with the call.
            lost = set(range(1, BATCHES)) - set(rest)
            assert rest == sorted(rest), f"interrupted before line {number}"
            assert len(lost) <= 1, f"interrupted before line {number}"
    pytest.fail(f"a batch takes more than {MOST_LINES} lines")
