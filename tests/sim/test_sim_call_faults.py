"""Injected failures of events and of new threads: which call fails, and that no other does."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from sim_support import fresh as fresh
from sim_support import marker, pinned
from support import run_python

pytestmark = pytest.mark.sim

# ---- recording events ----------------------------------------------------------------------------


def test_the_nth_recording_of_an_event_fails_and_enqueues_nothing(sim: ModuleType) -> None:
    stream = torch.sim.current_stream()
    event = torch.sim.Event()
    with sim.hold(stream), sim.fail_event_record(2) as fault:
        marker(stream)
        assert not fault.fired
        with pytest.raises(torch.AcceleratorError) as caught:
            event.record(stream)
        assert fault.struck == "the recording of an event on sim:0"
        assert event.query()  # it was not recorded, so it waits for nothing
        event.record(stream)
        assert not event.query()
    assert str(caught.value).startswith("the recording of an event on sim:0 was made to fail")
    event.synchronize()


def test_an_event_that_could_not_be_recorded_again_keeps_its_first_record(sim: ModuleType) -> None:
    stream, held = torch.sim.Stream(), torch.sim.Stream()
    event = marker(stream)
    event.synchronize()
    with sim.hold(held), sim.fail_event_record():
        with pytest.raises(torch.AcceleratorError):
            event.record(held)
        event.synchronize()  # does not wait for work on `held`


def test_a_filter_counts_the_recordings_on_one_device(sim: ModuleType) -> None:
    with sim.fail_event_record(device="sim:1") as fault:
        marker(torch.sim.current_stream("sim:0"))
        torch.ones(2, device="sim:0").to("sim:1")  # its internal events are not counted
        assert not fault.fired
        with pytest.raises(torch.AcceleratorError, match="an event on sim:1"):
            marker(torch.sim.current_stream("sim:1"))


# ---- querying events -----------------------------------------------------------------------------


def test_the_nth_query_of_an_event_raises_and_the_event_stays_right(sim: ModuleType) -> None:
    stream = torch.sim.current_stream()
    with sim.hold(stream):
        event = marker(stream)
        with sim.fail_event_query(2) as fault:
            assert not event.query()
            assert not fault.fired
            with pytest.raises(torch.AcceleratorError) as caught:
                event.query()
            assert fault.struck == "the query of an event of sim:0"
            assert not event.query()
    event.synchronize()
    assert event.query()
    assert str(caught.value).startswith("the query of an event of sim:0 was made to fail")
    assert caught.value.error_code == 900  # as on ROCm during a capture elsewhere


def test_queries_fail_as_often_and_with_the_code_that_was_asked_for(sim: ModuleType) -> None:
    event = marker(torch.sim.current_stream())
    event.synchronize()
    with sim.fail_event_query(2, times=3, code=719):
        told = []
        for _ in range(6):
            try:
                told.append(event.query())
            except torch.AcceleratorError as error:
                told.append(error.error_code)
    assert told == [True, 719, 719, 719, True, True]


def test_a_query_that_fails_breaks_no_stream(sim: ModuleType) -> None:
    stream = torch.sim.current_stream()
    target = torch.zeros(1, device="sim")
    with sim.fail_event_query(times=2):
        for _ in range(2):
            with pytest.raises(torch.AcceleratorError):
                marker(stream).query()
        target.copy_(pinned(5), non_blocking=True)
        stream.synchronize()
    assert target.tolist() == [5]


def test_a_filter_counts_the_queries_of_one_device(sim: ModuleType) -> None:
    near, far = (marker(torch.sim.current_stream(device)) for device in ("sim:0", "sim:1"))
    near.synchronize()
    with sim.fail_event_query(device=1) as fault:
        assert near.query()
        assert torch.sim.Event("sim:1").query()  # never recorded: not counted
        assert not fault.fired
        with pytest.raises(torch.AcceleratorError, match="an event of sim:1"):
            far.query()


def test_disarmed_faults_of_events_strike_nothing(sim: ModuleType) -> None:
    faults = [sim.fail_event_record(), sim.fail_event_query(), sim.fail_thread()]
    for fault in faults:
        fault.disarm()
    event = marker(torch.sim.current_stream())
    event.synchronize()
    assert event.query()
    assert not any(fault.fired for fault in faults)


# ---- starting threads ----------------------------------------------------------------------------

THREADS = """
import torch, tdcopier
from pathlib import Path
from tdcopier import _C, sim

sim.enable(devices=1)
_C.set_most_workers(3)
batch = [torch.arange(1 << 19)]  # 4 MiB: not inline

def names():
    comms = Path("/proc/self/task").glob("*/comm")
    return sorted(name for comm in comms if (name := comm.read_text().strip()).startswith("tdc-"))

def copy_is_right():
    return torch.equal(tdcopier.copy(batch, "sim")[0].cpu(), batch[0])
"""


@pytest.mark.parametrize(("n", "made"), [(1, 0), (2, 1)])
def test_a_pool_has_the_threads_before_the_one_that_fails(n: int, made: int) -> None:
    code = f"""
with sim.fail_thread({n}) as fault:
    assert copy_is_right()
    assert fault.struck == "the creation of a thread"
print([name for name in names() if name.startswith("tdc-worker")])
assert copy_is_right()  # also later: a pool is made once
"""
    assert run_python(THREADS + code) == f"{[f'tdc-worker-{i}' for i in range(made)]}\n"


def test_pools_that_exist_are_not_affected() -> None:
    code = """
assert copy_is_right()
before = names()
with sim.fail_thread() as fault:
    assert copy_is_right()
    assert not fault.fired
assert names() == before and "tdc-worker-0" in before
"""
    run_python(THREADS + code)


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, -1])
@pytest.mark.parametrize("kind", ["event_record", "event_query", "thread"])
def test_counting_calls_begins_with_one(sim: ModuleType, kind: str, n: int) -> None:
    with pytest.raises(ValueError, match=f"the first one is number 1, got {n}"):
        getattr(sim, f"fail_{kind}")(n)


def test_faults_that_could_never_strike_are_refused(sim: ModuleType) -> None:
    with pytest.raises(ValueError, match="strikes at least once, got times=0"):
        sim.fail_event_query(times=0)
    with pytest.raises(ValueError, match="expected a simulated device"):
        sim.fail_event_record(device="cpu")
    with pytest.raises(RuntimeError, match=r"there is no device sim:7; .*enable\(devices="):
        sim.fail_event_query(device=7)
