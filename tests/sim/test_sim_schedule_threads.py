"""Threads in a schedule: those that take part, and those that run beside it."""

from __future__ import annotations

import threading

import pytest
import torch
from sim_support import fresh as fresh

from tdcopier import _sim

pytestmark = pytest.mark.sim


def test_threads_take_turns_as_the_seed_picks(sim):
    def turns(seed: int) -> str:
        seen: list[str] = []

        def work(name: str) -> str:
            for _ in range(3):
                schedule.point()
                seen.append(name)
            return name

        with sim.schedule(seed) as schedule:
            threads = [schedule.thread(work, name) for name in "ab"]
            assert [thread.join() for thread in threads] == ["a", "b"]
        return "".join(seen)

    orders = [turns(seed) for seed in range(40)]
    assert orders == [turns(seed) for seed in range(40)]
    assert len(set(orders)) > 5


def test_what_a_thread_raises_comes_out_of_join(sim):
    def fail() -> None:
        raise KeyError("lost")

    with sim.schedule(2) as schedule:
        thread = schedule.thread(fail)
        for _ in range(2):
            with pytest.raises(KeyError, match="lost"):
                thread.join()
    with pytest.raises(KeyError, match="lost"), sim.schedule(2) as schedule:
        schedule.thread(fail)  # joined at the end


def test_a_thread_that_waits_for_another_one_lets_it_go_on(sim):
    for seed in range(20):
        with sim.schedule(seed) as schedule:
            stream = torch.sim.Stream()
            hold = sim.hold(stream)
            event = stream.record_event()
            thread = schedule.thread(hold.release)
            event.synchronize()
            thread.join()


def test_a_thread_that_blocks_outside_of_the_simulation_is_found(sim):
    """It blocks on a Python lock whose owner needs the turn to release it."""
    lock = threading.Lock()

    def wait_for_each_other() -> None:
        with lock, sim.schedule(1, timeout_s=0.2) as schedule:
            schedule.thread(lock.acquire, timeout=20)
            while _sim.schedule_is_on():  # until the schedule gives up
                schedule.point()
            lock.release()
            schedule._threads[0].join()

    with pytest.raises(sim.DeadlockError, match=r"thread 0 has the turn and does not reach"):
        wait_for_each_other()
    assert not lock.locked()


def test_threads_that_do_not_take_part_run_beside_it(sim):
    results = []

    def beside() -> None:
        results.append(torch.arange(5).to("sim").tolist())

    with sim.schedule(4):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert torch.ones(2).to("sim").tolist() == [1, 1]
    assert results == [[0, 1, 2, 3, 4]]


def test_a_thread_can_be_started_only_within_the_schedule(sim):
    schedule = sim.schedule(1)
    with pytest.raises(RuntimeError, match="only while the schedule is on"):
        schedule.thread(print)


@pytest.mark.parametrize("fails", [False, True])
def test_no_thread_is_left_waiting_behind_a_schedule(sim, fails):
    gate, threads = sim.Gate(), []

    def leave_threads_waiting() -> None:
        with sim.schedule(0) as schedule:
            sim.busy(gate)
            wait = torch.ones(3).to
            threads.extend(schedule.thread(wait, "sim") for _ in range(3))
            assert not fails

    try:
        with pytest.raises(AssertionError if fails else sim.DeadlockError):
            leave_threads_waiting()
        assert [thread.is_joined for thread in threads] == [True] * 3
        assert not any(thread._thread.is_alive() for thread in threads)
    finally:
        gate.open()


def test_work_of_a_thread_beside_it_keeps_its_order_when_a_schedule_begins(sim):
    """The stream may be in the middle of an operation then."""
    for seed in range(10):
        place = torch.zeros(1, dtype=torch.int32, device="sim")
        values = [torch.tensor([i], dtype=torch.int32).pin_memory() for i in range(40)]
        stream = torch.sim.Stream()
        torch.sim.synchronize()

        def write(place=place, values=values, stream=stream) -> None:
            with torch.sim.stream(stream):
                for value in values:
                    place.copy_(value, non_blocking=True)

        beside = threading.Thread(target=write)
        beside.start()
        with sim.schedule(seed):
            beside.join()
            stream.synchronize()
            assert place.item() == 39


def test_a_stranger_may_release_what_everybody_waits_for(sim):
    stream = torch.sim.Stream()
    with sim.schedule(1):
        hold = sim.hold(stream)
        event = stream.record_event()

        def let_go() -> None:
            torch.ones(1).to("sim")  # makes this thread known to the simulation
            told.set()
            go_on.wait()
            hold.release()

        told, go_on = threading.Event(), threading.Event()
        beside = threading.Thread(target=let_go)
        beside.start()
        told.wait()
        go_on.set()
        event.synchronize()
        beside.join()


def test_a_thread_may_be_joined_when_the_schedule_is_over(sim):
    with sim.schedule(1) as schedule:
        thread = schedule.thread(lambda: 7)
    assert thread.join() == 7
    with sim.schedule(2):
        assert thread.join() == 7
