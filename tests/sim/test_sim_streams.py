"""Streams of the simulated device: when their work runs, and how they wait for one another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from sim_support import BRIEFLY, becomes, is_reused, marker
from sim_support import fresh as fresh
from sim_support import gate as gate
from thread_support import switch_interval

from tdcopier.sim import Gate, Hold

pytestmark = pytest.mark.sim


def never_preempted() -> AbstractContextManager[None]:
    """Lets other Python threads run only while this one waits without the GIL.

    So a wait that keeps the GIL hangs every time, and not only now and then.
    """
    return switch_interval(1000)


def test_a_held_stream_begins_nothing_until_it_is_released(sim: ModuleType) -> None:
    stream = torch.sim.Stream()
    with sim.hold(stream):
        done = marker(stream)
        assert not becomes(done.query, BRIEFLY)
        assert not stream.query()
    done.synchronize()
    assert done.query()
    assert stream.query()


def test_holding_also_stops_what_was_enqueued_before(sim: ModuleType, gate: Gate) -> None:
    stream = torch.sim.Stream()
    sim.busy(gate, stream)
    gate.wait_until_reached()
    done = marker(stream)
    with sim.hold(stream):
        gate.open()
        assert not becomes(done.query, BRIEFLY)
    done.synchronize()


def test_an_operation_that_runs_when_its_stream_is_held_finishes(
    sim: ModuleType, gate: Gate
) -> None:
    stream = torch.sim.Stream()
    block = torch.empty(1000, device="sim")
    address = block.data_ptr()
    sim.busy(gate, stream)
    gate.wait_until_reached()
    block.record_stream(stream)
    del block  # freed when the operation, the last of its stream, is done
    with sim.hold(stream):
        assert torch.empty(1000, device="sim").data_ptr() != address
        gate.open()
        assert is_reused(address)


def test_holds_of_one_stream_are_counted(sim: ModuleType) -> None:
    stream = torch.sim.Stream()
    first, second = sim.hold(stream), sim.hold(stream)
    done = marker(stream)
    first.release()
    first.release()  # the second call must not release the other hold
    assert not becomes(done.query, BRIEFLY)
    second.release()
    done.synchronize()


def test_a_hold_ends_with_its_block_also_on_an_exception(sim: ModuleType) -> None:
    stream = torch.sim.Stream()

    def fail_while_holding() -> None:
        with sim.hold(stream):
            raise KeyError

    with pytest.raises(KeyError):
        fail_while_holding()
    marker(stream).synchronize()


def test_holding_is_for_streams_of_the_simulation(sim: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected a stream of a simulated device"):
        sim.hold(torch.Stream(device="cpu"))


def test_other_streams_go_on_while_one_is_held(sim: ModuleType) -> None:
    held, free = torch.sim.Stream(), torch.sim.Stream()
    with sim.hold(held):
        marker(held)
        marker(free).synchronize()
        assert not held.query()


def test_a_busy_stream_takes_the_time_it_was_told(sim: ModuleType) -> None:
    stream = torch.sim.Stream()
    start = torch.sim.Event(enable_timing=True)
    end = torch.sim.Event(enable_timing=True)
    start.record(stream)
    sim.busy(0.02, stream)
    end.record(stream)
    end.synchronize()
    assert start.elapsed_time(end) >= 20


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_rejected(sim: ModuleType, seconds: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 3600 seconds"):
        sim.busy(seconds)


def test_every_thread_has_its_own_current_stream_and_device() -> None:
    seen = []
    with torch.sim.device(1), torch.sim.stream(torch.sim.Stream(1)):
        thread = threading.Thread(
            target=lambda: seen.append(
                (torch.sim.current_device(), torch.sim.current_stream(1).stream_id)
            )
        )
        thread.start()
        thread.join()
        assert torch.sim.current_stream(1).stream_id != 0
    assert seen == [(0, 0)]


def test_the_stream_context_restores_device_and_streams() -> None:
    other = torch.sim.Stream(1)
    with torch.sim.stream(other):
        assert torch.sim.current_device() == 1
        assert torch.sim.current_stream() == other
        with torch.sim.stream(None):
            assert torch.accelerator.current_stream() == other
    assert torch.sim.current_device() == 0
    assert torch.sim.current_stream(1) == torch.sim.default_stream(1)


def test_the_generic_classes_of_torch_work_too(sim: ModuleType) -> None:
    stream = torch.Stream(device="sim:1")
    event = torch.Event(device="sim:1")
    with stream:
        assert torch.accelerator.current_stream() == stream
        with sim.hold():  # holds the current stream
            event.record()
            assert not event.query()
    event.synchronize()
    stream.synchronize()
    assert torch.sim.current_device() == 0


def test_new_streams_come_from_a_pool_of_32_for_each_priority() -> None:
    normal = {torch.sim.Stream().stream_id for _ in range(40)}
    high = {torch.sim.Stream(priority=-1).stream_id for _ in range(40)}
    assert len(normal) == len(high) == 32
    assert not normal & high
    assert 0 not in normal | high


def test_waiting_for_a_stream_lets_other_python_threads_run(sim: ModuleType) -> None:
    waits: list[Callable[[], object]] = [
        lambda: torch.sim.synchronize(0),
        lambda: torch.accelerator.synchronize(0),
        lambda: torch.sim.default_stream().synchronize(),
        lambda: marker(torch.sim.default_stream()).synchronize(),
        lambda: torch.ones(3).to("sim"),
        lambda: on_device.cpu(),
        lambda: on_device.sum(),
        lambda: on_device.tolist(),
    ]
    on_device = torch.ones(3).to("sim")

    def release_when_told(hold: Hold, told: threading.Event) -> None:
        told.wait()
        hold.release()

    for wait in waits:
        hold = sim.hold(torch.sim.default_stream())
        sim.busy(0, torch.sim.default_stream())
        told = threading.Event()
        helper = threading.Thread(target=release_when_told, args=(hold, told))
        helper.start()
        with never_preempted():
            told.set()
            wait()
        helper.join()


def test_a_stream_has_a_thread_of_its_own_name_whoever_enqueues_first(sim: ModuleType) -> None:
    """A thread inherits its name, and a schedule recognizes the engine's workers by theirs."""
    names: list[str] = []

    def enqueue() -> None:
        own = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        own.write_text("tdc-worker-9999")
        for _ in range(64):  # every stream of the pool
            torch.empty(1, device="sim:1").copy_(torch.ones(1, device="sim:1"), non_blocking=True)
            torch.sim.set_stream(torch.sim.Stream(1))
        torch.sim.synchronize(1)
        own.write_text("python")
        names.extend(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))

    thread = threading.Thread(target=enqueue)
    thread.start()
    thread.join()
    assert "sim-1-1" in names
    assert "tdc-worker-9999" not in names
