"""Events of the simulated device: what they wait for, and what waits for them."""

from __future__ import annotations

import gc
from types import ModuleType

import pytest
import torch
from sim_support import BRIEFLY, becomes, marker
from sim_support import fresh as fresh
from sim_support import gate as gate

from tdcopier.sim import Gate

pytestmark = pytest.mark.sim


def test_an_event_that_was_never_recorded_counts_as_reached() -> None:
    event = torch.sim.Event()
    assert event.query()
    event.synchronize()
    event.wait(torch.sim.Stream())


def test_a_stream_waits_for_an_event_of_another(sim: ModuleType) -> None:
    first, second = torch.sim.Stream(), torch.sim.Stream()
    with sim.hold(first):
        marker(first).wait(second)
        done = marker(second)
        assert not becomes(done.query, BRIEFLY)
    done.synchronize()


def test_recording_again_does_not_change_earlier_waits(sim: ModuleType) -> None:
    first, second, third = (torch.sim.Stream() for _ in range(3))
    event = torch.sim.Event()
    with sim.hold(first):
        event.record(first)
        event.wait(second)
        event.record(third)
        event.synchronize()  # the third stream is free
        done = marker(second)
        assert not becomes(done.query, BRIEFLY)
    done.synchronize()


def test_recording_again_makes_an_event_unreached(sim: ModuleType) -> None:
    stream = torch.sim.Stream()
    event = marker(stream)
    event.synchronize()
    with sim.hold(stream):
        event.record(stream)
        assert not event.query()
    event.synchronize()


def test_a_wait_is_for_the_record_of_before_not_for_later_work(sim: ModuleType, gate: Gate) -> None:
    first, second = torch.sim.Stream(), torch.sim.Stream()
    event = marker(first)
    sim.busy(gate, first)
    event.wait(second)
    marker(second).synchronize()
    assert not first.query()
    gate.open()


def test_a_wait_outlives_its_event(sim: ModuleType) -> None:
    first, second = torch.sim.Stream(), torch.sim.Stream()
    with sim.hold(first):
        event = marker(first)
        event.wait(second)
        del event
        gc.collect()
        done = marker(second)
        assert not becomes(done.query, BRIEFLY)
    done.synchronize()


def test_events_without_timing_have_no_distance() -> None:
    event = marker(torch.sim.Stream())
    event.synchronize()
    with pytest.raises((RuntimeError, ValueError), match="timing"):
        event.elapsed_time(event)
