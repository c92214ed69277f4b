"""The schedule: one step at a time, in an order that a seed picks and reproduces."""

from __future__ import annotations

import gc
import itertools
import re

import pytest
import torch
from sim_support import fresh as fresh
from sim_support import pinned
from support import run_python

import tdcopier

pytestmark = pytest.mark.sim


def two_streams_write(sim) -> list[int]:
    """Two streams write to the same place without order: the schedule picks the last one."""
    place = torch.zeros(1, dtype=torch.int32, device="sim")
    for value in (1, 2):
        with torch.sim.stream(torch.sim.Stream()):
            place.copy_(torch.tensor([value], dtype=torch.int32).pin_memory(), non_blocking=True)
    torch.sim.synchronize()
    return place.tolist()


def test_seeds_pick_every_order(sim):
    seen: dict[int, set[int]] = {}
    for seed in range(30):
        with sim.schedule(seed) as schedule:
            (value,) = two_streams_write(sim)
        seen.setdefault(value, set()).add(schedule.fingerprint)
    assert sorted(seen) == [1, 2]
    assert not seen[1] & seen[2]  # another order has another fingerprint


def test_a_seed_picks_the_same_order_each_time(sim):
    for seed in range(10):
        runs = []
        for _ in range(2):
            with sim.schedule(seed) as schedule:
                values = two_streams_write(sim)
            runs.append((values, schedule.steps, schedule.fingerprint, schedule.choices))
        assert runs[0] == runs[1]
        assert runs[0][3] > 0


def test_a_seed_picks_the_same_order_in_another_process(sim):
    program = """
        import torch
        import tdcopier
        from tdcopier import sim

        sim.enable(devices=2)
        {warm_up}
        source = torch.arange(30)
        with sim.schedule(5) as schedule:
            handles = [tdcopier.start_copy([source, source[:7]], "sim:0") for _ in range(3)]
            with torch.sim.stream(torch.sim.Stream()):
                for handle in handles:
                    handle.wait()
        print(schedule.fingerprint, schedule.choices, *schedule.steps)
        """
    warm_up = "tdcopier.copy([torch.ones(9)], 'sim:0')"
    cold = run_python(program.replace("{warm_up}", ""))
    assert cold == run_python(program.replace("{warm_up}", warm_up))
    assert "h2d" in cold


def test_work_that_was_enqueued_runs_before_at_and_after_any_call(sim):
    """A stream may run ahead of the host or lag by any amount."""
    positions = set()
    for seed in range(100):
        with sim.schedule(seed):
            stream = torch.sim.Stream()
            events = [stream.record_event() for _ in range(3)]
            positions.add(tuple(event.query() for event in events))
    assert {(True,) * 3, (True, True, False), (True, False, False), (False,) * 3} <= positions


def test_who_waits_for_itself_is_told_of_a_deadlock(sim):
    with sim.schedule(1), torch.sim.stream(torch.sim.Stream()):
        stream = torch.sim.current_stream()
        with sim.hold(stream):
            event = stream.record_event()
            with pytest.raises(RuntimeError, match="deadlock") as caught:
                event.synchronize()
    text = str(caught.value)
    assert "the main thread waits for operation" in text
    assert f"stream {stream.stream_id} of sim:0 is held before operation" in text


def test_after_a_deadlock_the_program_goes_on(sim):
    with sim.schedule(1):
        stream = torch.sim.Stream()
        hold = sim.hold(stream)
        event = stream.record_event()
        with pytest.raises(RuntimeError, match="deadlock"):
            event.synchronize()
        hold.release()
        event.synchronize()
        assert event.query()
    torch.sim.synchronize()


@pytest.mark.parametrize("elements", [10, 1 << 20], ids=["inline", "background"])
def test_get_of_a_copy_that_cannot_end_is_a_deadlock(sim, copy_stream, elements):
    # If other threads have used the device, the schedule waits so long before it reports that.
    with sim.schedule(3, timeout_s=5), sim.hold(copy_stream):
        handle = tdcopier.start_copy([torch.ones(elements)], "sim:0")
        with pytest.raises(sim.DeadlockError, match="is held before operation"):
            handle.get()


def test_a_deadlock_that_comes_through_torch_leaves_the_schedule_by_its_name(sim):
    def wait_for_a_stream_that_is_held() -> None:
        with sim.schedule(1), sim.hold(stream):
            stream.record_event().synchronize()

    stream = torch.sim.Stream()
    with pytest.raises(sim.DeadlockError, match="no thread can continue"):
        wait_for_a_stream_that_is_held()


def test_two_streams_that_wait_for_each_other_are_named(sim):
    with sim.schedule(1):
        gate = sim.Gate()
        first, second = torch.sim.Stream(), torch.sim.Stream()
        sim.busy(gate, first)
        second.wait_event(first.record_event())
        event = second.record_event()
        with pytest.raises(RuntimeError, match="deadlock") as caught:
            event.synchronize()
        gate.open()
    text = str(caught.value)
    for stream, operation in ((first, "gate"), (second, "wait")):
        assert re.search(
            rf"stream {stream.stream_id} of sim:0 waits in operation \d+ \({operation}\)", text
        )


def test_backward_works_within_a_schedule(sim):
    with sim.schedule(4):
        leaf = torch.ones(3, device="sim", requires_grad=True)
        (leaf * 2).sum().backward()
        assert leaf.grad.tolist() == [2, 2, 2]


def test_time_does_not_pass(sim):
    with sim.schedule(1), sim.pace("h2d", latency_us=60_000_000):
        sim.busy(3600)
        assert torch.ones(2).to("sim").tolist() == [1, 1]


def test_work_that_is_left_runs_to_its_end_with_the_schedule(sim):
    with sim.schedule(1):
        event = torch.sim.Stream().record_event()
    assert event.query()


def test_work_that_cannot_go_on_is_left_to_the_streams(sim):
    gate = sim.Gate()
    with sim.schedule(1):
        sim.busy(gate)
        event = torch.sim.current_stream().record_event()
    assert not event.query()
    gate.open()
    event.synchronize()


def test_an_exception_names_the_seed(sim):
    with pytest.raises(ZeroDivisionError) as caught, sim.schedule(77):
        _ = 1 // 0
    if hasattr(caught.value, "__notes__"):
        assert caught.value.__notes__ == ["tdcopier.sim: in the schedule with seed 77"]


def test_garbage_collection_is_off_meanwhile_and_as_it_was_after(sim):
    gc.enable()
    with sim.schedule(1):
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    with sim.schedule(1):
        pass
    assert not gc.isenabled()


def test_one_schedule_at_a_time(sim):
    with sim.schedule(1):
        with pytest.raises(RuntimeError, match="a schedule is already active"), sim.schedule(2):
            pass
        assert torch.ones(1).to("sim").tolist() == [1]


def test_no_schedule_begins_while_a_stream_is_held(sim):
    with (
        sim.hold(torch.sim.current_stream()),
        pytest.raises(RuntimeError, match=r"stream 0 of sim:0 is held: release it"),
        sim.schedule(1),
    ):
        pass
    with sim.schedule(1):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "a seed must be between 0 and"),
        ({"seed": 2**64}, "a seed must be between 0 and"),
        ({"seed": 0, "timeout_s": 0}, "the timeout must be between"),
    ],
)
def test_bad_arguments_are_refused(sim, arguments, message):
    with pytest.raises(ValueError, match=message):
        sim.schedule(**arguments)


def test_the_process_may_end_within_a_schedule():
    output = run_python(
        """
        import sys
        import torch
        import tdcopier
        from tdcopier import sim

        sim.enable()
        schedule = sim.schedule(1)
        schedule.__enter__()
        handle = tdcopier.start_copy([torch.ones(1 << 20)], "sim:0")
        print("leaving")
        """
    )
    assert output == "leaving\n"


def test_streams_that_a_schedule_makes_are_the_same_ones_each_time(sim):
    ids = []
    for _ in range(2):
        with sim.schedule(1):
            ids.append([torch.sim.Stream().stream_id for _ in range(3)])
    assert ids[0] == ids[1]
    assert len(set(itertools.chain(*ids))) == 3


@pytest.mark.timeout(20)
def test_a_held_stream_with_work_is_told_of_and_not_waited_for(sim):
    stream = torch.sim.Stream()
    with sim.hold(stream):
        stream.record_event()
        with pytest.raises(RuntimeError, match="is held: release it"), sim.schedule(1):
            pass


def test_what_a_copy_leaves_behind_changes_no_schedule(sim):
    """Even if the consumer's stream is still running when the schedule begins."""

    def run() -> tuple[int, int]:
        with sim.schedule(0) as schedule:
            for _ in range(20):
                torch.sim.Stream("sim:0").record_event()  # could run at each point
            for _ in range(6):
                tdcopier.start_copy([torch.ones(9)], "sim:1").wait()
        return schedule.fingerprint, schedule.choices

    expected = run()
    for _ in range(3):
        stream = torch.sim.current_stream("sim:1")
        with sim.pace("h2d", latency_us=20_000):
            torch.ones(3).pin_memory().to("sim:1", non_blocking=True)
            tdcopier.start_copy([torch.ones(9)], "sim:1").wait()
            torch.ones(3).pin_memory().to("sim:1", non_blocking=True)
            tdcopier.start_copy([torch.ones(9)], "sim:1").wait()
            assert not stream.query()
            assert run() == expected


def test_transfers_in_flight_are_counted(sim):
    with sim.schedule(1) as schedule:
        source = torch.ones(4).pin_memory()
        streams = [torch.sim.Stream() for _ in range(3)]
        for stream in streams:
            with sim.hold(stream), torch.sim.stream(stream):
                source.to("sim", non_blocking=True)
            stream.synchronize()
        one_by_one = schedule.most_transfers_in_flight
        holds = [sim.hold(stream) for stream in streams]
        for stream in streams:
            with torch.sim.stream(stream):
                source.to("sim", non_blocking=True)
        for hold in holds:
            hold.release()
    assert (one_by_one, schedule.most_transfers_in_flight) == (1, 3)


def test_a_schedule_cannot_be_entered_twice(sim):
    schedule = sim.schedule(1)
    with schedule:
        thread = schedule.thread(lambda: 7)
        with pytest.raises(RuntimeError, match="this schedule is already active"), schedule:
            pass
        assert thread.join() == 7


@pytest.mark.hazardous
def test_the_error_of_a_dropped_gather_is_raised_by_a_schedule_and_hides_no_hazard(sim):
    source, table = pinned(*[1.0] * 1024), torch.zeros(3).pin_memory()
    index = torch.tensor([7]).to("sim")

    def program() -> None:
        tdcopier.start_gather([table], index, "sim")
        with sim.hold():
            source.to("sim", non_blocking=True)
            source.add_(1)

    with pytest.raises(sim.HazardError), sim.detect():
        program()
    torch.sim.synchronize()
    with pytest.raises(IndexError, match="index 7 is out of bounds"), sim.schedule(0):
        pass
    with sim.schedule(0):  # it has been raised
        pass
