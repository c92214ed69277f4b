"""The simulated accelerator: what it promises to the tests that are built on it.

``sim`` is a fixture: the module ``tdcopier.sim``, enabled with two devices.
"""

from __future__ import annotations

import contextlib
import copy
import faulthandler
import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from tdcopier.sim import Gate, Hold

pytestmark = pytest.mark.sim


@pytest.fixture(autouse=True)
def fresh(sim: ModuleType) -> Iterator[None]:
    """Each test starts and ends with idle devices, no limits, empty caches and zero counts."""

    def tidy() -> None:
        for index in range(torch.sim.device_count()):
            sim.set_memory_limit_bytes(index, None)
            sim.synchronize(index)
            if sim.memory_stats(index).allocated_bytes > 0:
                gc.collect()
        torch.sim.empty_cache()
        sim.empty_pinned_cache()
        sim.reset_counts()
        for index in range(torch.sim.device_count()):
            torch.sim.reset_peak_memory_stats(index)
        sim.reset_peak_pinned_bytes()

    # Who waits for a stream that it holds itself waits for ever: the process ends with a traceback.
    faulthandler.dump_traceback_later(60, exit=True)
    tidy()
    yield
    tidy()
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def gate(sim: ModuleType, fresh: None) -> Iterator[Gate]:
    """A gate that is open at the end of the test, so that a failure leaves no stream waiting."""
    gate = sim.Gate()
    yield gate
    gate.open()


def marker(stream: torch.Stream) -> torch.Event:
    """An event that tells when what the stream has now is done."""
    event = torch.sim.Event(stream.device)
    event.record(stream)
    return event


def becomes(condition: Callable[[], bool], within: float = 10.0) -> bool:
    """Whether the condition becomes true in time. A short time shows that something waits."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
    return True


BRIEFLY = 0.03


def is_reused(address: int) -> bool:
    """Whether a tensor of 1000 floats on the current device is given this address, sooner or later.

    Those that are given others are kept, so that each attempt sees one block more.
    """
    kept = []

    def found() -> bool:
        kept.append(torch.empty(1000, device="sim"))
        return kept[-1].data_ptr() == address

    return becomes(found, within=2.0)


@contextlib.contextmanager
def never_preempted() -> Iterator[None]:
    """Other Python threads run only while this one waits and lets them.

    So whoever waits and keeps the interpreter's lock hangs for sure, and not only with bad luck.
    """
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


class TestEnabling:
    def test_enabling_again_with_the_same_number_does_nothing(self, sim: ModuleType) -> None:
        sim.enable(devices=2)
        assert sim.is_enabled()
        assert torch.sim.device_count() == 2

    def test_enabling_with_another_number_says_so(self, sim: ModuleType) -> None:
        with pytest.raises(RuntimeError, match=r"enabled with 2 device.* enabled with 3"):
            sim.enable(devices=3)

    @pytest.mark.parametrize("devices", [0, -1, 17])
    def test_a_number_of_devices_out_of_range_is_rejected(
        self, sim: ModuleType, devices: int
    ) -> None:
        with pytest.raises(ValueError, match=f"1 to 16, got {devices}"):
            sim.enable(devices=devices)

    def test_importing_registers_nothing(self) -> None:
        result = run_python("""
            import torch
            before = torch.accelerator.current_accelerator()
            from tdcopier import sim
            assert not sim.is_enabled()
            assert torch.accelerator.current_accelerator() == before
            assert not hasattr(torch, "sim")
            try:
                sim.hold()
            except RuntimeError as error:
                assert "not enabled" in str(error), error
            else:
                raise AssertionError("held a stream of a device that does not exist")
        """)
        assert result.returncode == 0, result.stderr

    def test_another_backend_in_its_place_is_respected(self) -> None:
        result = run_python("""
            import torch
            torch.utils.rename_privateuse1_backend("other")
            from tdcopier import sim
            try:
                sim.enable()
            except RuntimeError as error:
                assert "'other'" in str(error), error
            else:
                raise AssertionError("two backends in one place")
            assert not sim.is_enabled()
        """)
        assert result.returncode == 0, result.stderr

    def test_it_is_the_accelerator_of_torch(self) -> None:
        assert torch.accelerator.current_accelerator() == torch.device("sim")
        assert torch.accelerator.device_count() == 2
        assert torch.get_device_module("sim") is torch.sim


class TestStreams:
    def test_a_held_stream_begins_nothing_until_it_is_released(self, sim: ModuleType) -> None:
        stream = torch.sim.Stream()
        with sim.hold(stream):
            done = marker(stream)
            assert not becomes(done.query, BRIEFLY)
            assert not stream.query()
        done.synchronize()
        assert done.query()
        assert stream.query()

    def test_holding_also_stops_what_was_enqueued_before(self, sim: ModuleType, gate: Gate) -> None:
        stream = torch.sim.Stream()
        sim.busy(gate, stream)
        gate.wait_until_reached()
        done = marker(stream)
        with sim.hold(stream):
            gate.open()
            assert not becomes(done.query, BRIEFLY)
        done.synchronize()

    def test_an_operation_that_runs_when_its_stream_is_held_finishes(
        self, sim: ModuleType, gate: Gate
    ) -> None:
        stream = torch.sim.Stream()
        block = torch.empty(1000, device="sim")
        address = block.data_ptr()
        sim.busy(gate, stream)
        gate.wait_until_reached()
        block.record_stream(stream)
        del block  # comes back when the operation, the last of its stream, is done
        with sim.hold(stream):
            assert torch.empty(1000, device="sim").data_ptr() != address
            gate.open()
            assert is_reused(address)

    def test_holds_of_one_stream_are_counted(self, sim: ModuleType) -> None:
        stream = torch.sim.Stream()
        first, second = sim.hold(stream), sim.hold(stream)
        done = marker(stream)
        first.release()
        first.release()  # the second call must not take the other hold away
        assert not becomes(done.query, BRIEFLY)
        second.release()
        done.synchronize()

    def test_a_hold_ends_with_its_block_also_on_an_exception(self, sim: ModuleType) -> None:
        stream = torch.sim.Stream()

        def fail_while_holding() -> None:
            with sim.hold(stream):
                raise KeyError

        with pytest.raises(KeyError):
            fail_while_holding()
        marker(stream).synchronize()

    def test_holding_is_for_streams_of_the_simulation(self, sim: ModuleType) -> None:
        with pytest.raises(ValueError, match="expected a stream of a simulated device"):
            sim.hold(torch.Stream(device="cpu"))

    def test_other_streams_go_on_while_one_is_held(self, sim: ModuleType) -> None:
        held, free = torch.sim.Stream(), torch.sim.Stream()
        with sim.hold(held):
            marker(held)
            marker(free).synchronize()
            assert not held.query()

    def test_a_busy_stream_takes_the_time_it_was_told(self, sim: ModuleType) -> None:
        stream = torch.sim.Stream()
        start = torch.sim.Event(enable_timing=True)
        end = torch.sim.Event(enable_timing=True)
        start.record(stream)
        sim.busy(0.02, stream)
        end.record(stream)
        end.synchronize()
        assert start.elapsed_time(end) >= 20

    @pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
    def test_a_time_that_is_none_is_rejected(self, sim: ModuleType, seconds: float) -> None:
        with pytest.raises(ValueError, match="between 0 and 3600 seconds"):
            sim.busy(seconds)

    def test_every_thread_has_its_own_current_stream_and_device(self) -> None:
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

    def test_the_stream_context_restores_device_and_streams(self) -> None:
        other = torch.sim.Stream(1)
        with torch.sim.stream(other):
            assert torch.sim.current_device() == 1
            assert torch.sim.current_stream() == other
            with torch.sim.stream(None):
                assert torch.accelerator.current_stream() == other
        assert torch.sim.current_device() == 0
        assert torch.sim.current_stream(1) == torch.sim.default_stream(1)

    def test_the_generic_classes_of_torch_work_too(self, sim: ModuleType) -> None:
        stream = torch.Stream(device="sim:1")
        event = torch.Event(device="sim:1")
        with stream:
            assert torch.accelerator.current_stream() == stream
            with sim.hold():  # the current stream
                event.record()
                assert not event.query()
        event.synchronize()
        stream.synchronize()
        assert torch.sim.current_device() == 0

    def test_new_streams_come_from_a_pool_of_32_for_each_priority(self) -> None:
        normal = {torch.sim.Stream().stream_id for _ in range(40)}
        high = {torch.sim.Stream(priority=-1).stream_id for _ in range(40)}
        assert len(normal) == len(high) == 32
        assert not normal & high
        assert 0 not in normal | high

    def test_waiting_for_a_stream_lets_other_python_threads_run(self, sim: ModuleType) -> None:
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

    def test_devices_that_do_not_exist_are_refused_by_name(self) -> None:
        for use in (
            lambda: torch.empty(1, device="sim:2"),
            lambda: torch.sim.set_device(2),
            lambda: torch.Stream(device="sim:2"),
            lambda: torch.sim.current_stream(2),
            lambda: torch.accelerator.set_device_index(2),
        ):
            with pytest.raises(RuntimeError, match=r"no device sim:2; the simulation has 2"):
                use()
        with pytest.raises(ValueError, match="expected a simulated device, got cpu"):
            torch.sim.set_device("cpu")


class TestEvents:
    def test_an_event_that_was_never_recorded_counts_as_reached(self) -> None:
        event = torch.sim.Event()
        assert event.query()
        event.synchronize()
        event.wait(torch.sim.Stream())

    def test_a_stream_waits_for_an_event_of_another(self, sim: ModuleType) -> None:
        first, second = torch.sim.Stream(), torch.sim.Stream()
        with sim.hold(first):
            marker(first).wait(second)
            done = marker(second)
            assert not becomes(done.query, BRIEFLY)
        done.synchronize()

    def test_recording_again_does_not_change_earlier_waits(self, sim: ModuleType) -> None:
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

    def test_recording_again_makes_an_event_unreached(self, sim: ModuleType) -> None:
        stream = torch.sim.Stream()
        event = marker(stream)
        event.synchronize()
        with sim.hold(stream):
            event.record(stream)
            assert not event.query()
        event.synchronize()

    def test_a_wait_is_for_the_record_of_before_not_for_later_work(
        self, sim: ModuleType, gate: Gate
    ) -> None:
        first, second = torch.sim.Stream(), torch.sim.Stream()
        event = marker(first)
        sim.busy(gate, first)
        event.wait(second)
        marker(second).synchronize()
        assert not first.query()
        gate.open()

    def test_a_wait_outlives_its_event(self, sim: ModuleType) -> None:
        first, second = torch.sim.Stream(), torch.sim.Stream()
        with sim.hold(first):
            event = marker(first)
            event.wait(second)
            del event
            gc.collect()
            done = marker(second)
            assert not becomes(done.query, BRIEFLY)
        done.synchronize()

    def test_events_without_timing_have_no_distance(self) -> None:
        event = marker(torch.sim.Stream())
        event.synchronize()
        with pytest.raises((RuntimeError, ValueError), match="timing"):
            event.elapsed_time(event)


class TestCopies:
    def test_a_copy_to_the_device_reads_pinned_memory_when_it_runs(self, sim: ModuleType) -> None:
        source = pinned(1, 2)
        with sim.hold():
            target = source.to("sim", non_blocking=True)
            source.fill_(7)
        assert target.tolist() == [7, 7]

    def test_a_copy_to_the_host_writes_pinned_memory_when_it_runs(self, sim: ModuleType) -> None:
        source = torch.tensor([1.0, 2.0], device="sim")
        target = pinned(0, 0)
        with sim.hold():
            target.copy_(source, non_blocking=True)
            assert not becomes(lambda: target[0].item() != 0, BRIEFLY)
        torch.sim.synchronize()
        assert target.tolist() == [1, 2]

    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_copies_of_pageable_memory_are_done_when_they_return(
        self, sim: ModuleType, non_blocking: bool
    ) -> None:
        stream = torch.sim.current_stream()
        sim.busy(0.02)
        on_device = torch.ones(3).to("sim", non_blocking=non_blocking)
        assert stream.query()
        sim.busy(0.02)
        assert torch.zeros(3).copy_(on_device, non_blocking=non_blocking).tolist() == [1, 1, 1]
        assert stream.query()

    def test_a_move_to_the_host_that_does_not_block_goes_to_pinned_memory(
        self, sim: ModuleType
    ) -> None:
        on_device = torch.ones(3, device="sim")
        with sim.hold():
            on_host = on_device.to("cpu", non_blocking=True)
            assert on_host.is_pinned()
            assert not torch.sim.current_stream().query()
        torch.sim.synchronize()
        assert on_host.tolist() == [1, 1, 1]

    def test_a_blocking_copy_of_pinned_memory_is_done_when_it_returns(
        self, sim: ModuleType
    ) -> None:
        source = pinned(1, 2)
        sim.busy(0.02)
        target = source.to("sim")
        assert torch.sim.current_stream().query()
        source.fill_(7)
        assert target.tolist() == [1, 2]

    @pytest.mark.parametrize("target_device", ["sim:0", "sim:1"])
    def test_a_copy_on_the_device_does_not_wait(self, sim: ModuleType, target_device: str) -> None:
        source = torch.ones(3, device="sim:0")
        target = torch.zeros(3, device=target_device)
        with sim.hold(torch.sim.current_stream(0)):
            target.copy_(source)
            assert not torch.sim.current_stream(0).query()
        assert target.tolist() == [1, 1, 1]

    def test_a_copy_runs_on_the_current_stream_of_its_thread(self, sim: ModuleType) -> None:
        side = torch.sim.Stream()
        source, target = pinned(1), torch.zeros(1, device="sim")
        torch.sim.synchronize()
        with sim.hold(side):
            with torch.sim.stream(side):
                target.copy_(source, non_blocking=True)
            assert target.tolist() == [0]  # the default stream does not wait for the other
        side.synchronize()
        assert target.tolist() == [1]

    @pytest.mark.parametrize("held", ["sim:0", "sim:1"])
    def test_a_copy_between_devices_is_ordered_with_both(self, sim: ModuleType, held: str) -> None:
        """Source bytes written before are seen, target bytes written before are overwritten."""
        new, old, result = pinned(5), pinned(3), pinned(0)
        source = torch.zeros(1, device="sim:0")
        target = torch.zeros(1, device="sim:1")
        with sim.hold(torch.sim.current_stream(held)):
            source.copy_(new, non_blocking=True)
            target.copy_(old, non_blocking=True)
            target.copy_(source)
            result.copy_(target, non_blocking=True)
            done = marker(torch.sim.current_stream(1))
            assert not becomes(done.query, BRIEFLY)
        done.synchronize()
        assert result.item() == 5

    @pytest.mark.parametrize("non_blocking", [False, True])
    @pytest.mark.parametrize(
        "change",
        [
            lambda t: t.t(),
            lambda t: t[:, ::2],
            lambda t: t[1:],
            lambda t: t.to(torch.int16),
            lambda t: t.t().to(torch.float64),
            lambda t: t[:1].expand(4, 6),
            lambda t: torch.complex(t, -t).conj(),
            lambda t: torch.complex(t, -t).conj().imag,
            lambda t: t[:0],
            lambda t: t[0, 0],
        ],
        ids=[
            "transposed",
            "strided",
            "sliced",
            "cast",
            "both",
            "expanded",
            "conjugate",
            "negated",
            "empty",
            "scalar",
        ],
    )
    def test_any_layout_survives_the_round_trip(
        self, change: Callable[[torch.Tensor], torch.Tensor], non_blocking: bool
    ) -> None:
        host = torch.arange(24.0).view(4, 6)
        expected = change(host)
        assert torch.equal(expected.to("sim", non_blocking=non_blocking).cpu(), expected)
        assert torch.equal(change(host.to("sim")).cpu(), expected)
        assert torch.equal(change(host.pin_memory()).to("sim:1", non_blocking=True).cpu(), expected)
        assert torch.equal(change(host.to("sim")).to("sim:1").cpu(), expected)

    @pytest.mark.parametrize("non_blocking", [False, True])
    def test_layouts_and_dtypes_are_converted_on_the_way(self, non_blocking: bool) -> None:
        host = torch.arange(24).view(4, 6)
        target = torch.zeros(8, 6, dtype=torch.float64, device="sim")
        target[::2].copy_(host, non_blocking=non_blocking)
        back = torch.zeros(6, 4, dtype=torch.float32).pin_memory()
        back.t().copy_(target[::2], non_blocking=non_blocking)
        torch.sim.synchronize()
        assert torch.equal(back, host.t().float())
        assert target[1::2].abs().sum().item() == 0

    def test_overlapping_targets_are_refused_when_they_are_given(self) -> None:
        target = torch.zeros(1, device="sim").expand(3)
        with pytest.raises(RuntimeError, match="single memory location"):
            target.copy_(torch.arange(3))
        line = torch.arange(6.0, device="sim")
        with pytest.raises(RuntimeError, match="single memory location"):
            line[:4].view(2, 2).copy_(line[2:].view(2, 2).t())
        assert line.tolist() == [0, 1, 2, 3, 4, 5]

    def test_what_fails_on_a_stream_is_told_to_who_waits_for_it(self) -> None:
        bits = torch.zeros(4, dtype=torch.bits8, device="sim")
        target = torch.zeros(4, device="sim")
        target.copy_(bits)  # there is no such conversion
        with pytest.raises(RuntimeError, match="stream of the simulated device failed"):
            torch.sim.synchronize()
        torch.sim.synchronize()  # once
        assert target.tolist() == [0] * 4

    def test_a_smaller_source_is_expanded(self) -> None:
        target = torch.zeros(2, 3, device="sim")
        target.copy_(torch.arange(3))
        assert target.tolist() == [[0, 1, 2], [0, 1, 2]]

    def test_a_view_of_pinned_memory_keeps_its_block_for_the_copy(self, sim: ModuleType) -> None:
        base = torch.arange(100.0).pin_memory()
        with sim.hold():
            target = base[50:].to("sim", non_blocking=True)
            address = base.data_ptr()
            del base
            assert torch.empty(100).pin_memory().data_ptr() != address
        assert target[0].item() == 50

    def test_transfers_are_counted_by_direction_when_they_are_enqueued(
        self, sim: ModuleType
    ) -> None:
        source = torch.ones(10).pin_memory()
        with sim.hold():
            a = source.to("sim", non_blocking=True)
            b = torch.empty(5, dtype=torch.float64, device="sim").copy_(a[::2])
            c = torch.empty(5, dtype=torch.float64).pin_memory().copy_(b, non_blocking=True)
            expected = sim.Counts(
                h2d=sim.Transfers(1, 40), d2h=sim.Transfers(1, 40), d2d=sim.Transfers(1, 40)
            )
            assert sim.counts() == expected
        torch.sim.synchronize()
        assert c.tolist() == [1] * 5
        a.to("sim:1")
        assert sim.counts().d2d == (2, 80)
        sim.reset_counts()
        assert sim.counts() == ((0, 0),) * 3

    def test_operators_that_run_on_the_host_are_not_counted(self, sim: ModuleType) -> None:
        a = torch.ones(4, device="sim")
        assert torch.equal((a + 1)[1:] * 2, torch.full((3,), 4.0, device="sim"))
        a[::2].add_(1)
        assert sim.counts() == ((0, 0),) * 3
        a[0].item()
        torch.ones(0).to("sim")
        assert sim.counts() == ((0, 0), (1, 4), (0, 0))


class TestDeviceMemory:
    def test_a_freed_block_is_reused_at_once_by_its_stream(self, sim: ModuleType) -> None:
        source = pinned(1)
        with sim.hold():
            blocks = [torch.empty(1, device="sim") for _ in range(3)]
            addresses = [block.data_ptr() for block in blocks]
            for block in blocks:
                block.copy_(source, non_blocking=True)  # pending work does not matter
            del block
            while blocks:
                del blocks[0]
            again = [torch.empty(100, device="sim") for _ in range(3)]
            assert [block.data_ptr() for block in again] == addresses[::-1]  # last in, first out

    def test_a_freed_block_is_not_shared_with_other_streams_or_sizes(self) -> None:
        address = torch.empty(1000, device="sim").data_ptr()
        with torch.sim.stream(torch.sim.Stream()):
            assert torch.empty(1000, device="sim").data_ptr() != address
        assert torch.empty(2000, device="sim").data_ptr() != address
        assert torch.empty(1000, device="sim:1").data_ptr() != address
        assert torch.empty(1000, device="sim").data_ptr() == address

    def test_reuse_without_ordering_destroys_bytes_that_another_stream_needs(
        self, sim: ModuleType
    ) -> None:
        """The mistake that record_stream is there to prevent must show."""
        side, result = torch.sim.Stream(), pinned(0)
        source, overwrite = pinned(1), pinned(9)
        block = source.to("sim", non_blocking=True)
        torch.sim.synchronize()
        with sim.hold(side):
            with torch.sim.stream(side):
                result.copy_(block, non_blocking=True)
            del block
            overwriting = overwrite.to("sim", non_blocking=True)
            torch.sim.current_stream().synchronize()
        side.synchronize()
        assert result.item() == 9
        assert overwriting.item() == 9

    def test_a_recorded_stream_delays_reuse_until_its_work_is_done(self, sim: ModuleType) -> None:
        side = torch.sim.Stream()
        block = torch.empty(1000, device="sim")
        address = block.data_ptr()
        with sim.hold(side):
            busy_then = marker(side)
            block.record_stream(side)
            del block
            assert torch.empty(1000, device="sim").data_ptr() != address
        busy_then.synchronize()
        assert is_reused(address)

    def test_only_work_of_before_the_free_delays_reuse(self, sim: ModuleType) -> None:
        side = torch.sim.Stream()
        block = torch.empty(1000, device="sim")
        address = block.data_ptr()
        block.record_stream(side)
        marker(side).synchronize()
        with sim.hold(side):
            del block
            marker(side)
            assert torch.empty(1000, device="sim").data_ptr() == address

    def test_recording_the_own_stream_changes_nothing(self, sim: ModuleType) -> None:
        block = torch.empty(1000, device="sim")
        address = block.data_ptr()
        block.record_stream(torch.sim.current_stream())
        with sim.hold():
            marker(torch.sim.current_stream())
            del block
            assert torch.empty(1000, device="sim").data_ptr() == address

    def test_a_block_belongs_to_the_stream_of_its_allocation(self) -> None:
        side = torch.sim.Stream()
        with torch.sim.stream(side):
            block = torch.empty(1000, device="sim")
        address = block.data_ptr()
        del block  # while another stream is current
        with torch.sim.stream(side):
            assert torch.empty(1000, device="sim").data_ptr() == address

    def test_statistics_are_kept_by_device_in_blocks_of_512_bytes(self, sim: ModuleType) -> None:
        before = sim.memory_stats(0)
        assert before[:4] == (0, 0, 0, 0)
        a, b = torch.empty(1, device="sim"), torch.empty(129, device="sim")
        assert a.data_ptr() % 512 == b.data_ptr() % 512 == 0
        assert sim.memory_stats("sim:0") == (1536, 1536, 1536, 1536, before.allocations + 2)
        del a
        assert sim.memory_stats(0)[:4] == (1024, 1536, 1536, 1536)
        assert torch.sim.memory_allocated() == 1024
        assert torch.sim.max_memory_allocated() == 1536
        assert torch.sim.memory_reserved() == 1536
        assert torch.accelerator.memory.memory_allocated(0) == 1024
        torch.sim.empty_cache()
        torch.sim.reset_peak_memory_stats()
        assert sim.memory_stats(0)[:4] == (1024, 1024, 1024, 1024)
        assert sim.memory_stats(1)[:4] == (0, 0, 0, 0)

    def test_memory_that_pending_work_may_touch_stays(self, sim: ModuleType) -> None:
        side = torch.sim.Stream()
        with sim.hold(side):
            marker(side)
            torch.empty(1, device="sim")
            torch.sim.empty_cache()
            assert torch.sim.memory_reserved() == 512
        side.synchronize()
        torch.sim.empty_cache()
        assert torch.sim.memory_reserved() == 0

    def test_fresh_memory_does_not_read_as_zero(self) -> None:
        assert torch.empty(100_000, dtype=torch.uint8, device="sim").eq(0xA5).all().item()

    def test_no_elements_need_no_memory(self, sim: ModuleType) -> None:
        empty = torch.empty(0, device="sim:1")
        assert empty.device == torch.device("sim:1")
        assert empty.data_ptr() == 0
        assert sim.memory_stats(1).allocated_bytes == 0

    def test_beyond_the_limit_memory_is_out(self, sim: ModuleType) -> None:
        sim.set_memory_limit_bytes("sim:0", 2048)
        kept = torch.empty(1024, dtype=torch.uint8, device="sim")
        with pytest.raises(torch.OutOfMemoryError, match=r"sim:0 is out of memory.*2048"):
            torch.empty(1025, dtype=torch.uint8, device="sim")
        torch.empty(4096, dtype=torch.uint8, device="sim:1")
        torch.empty(512, dtype=torch.uint8, device="sim")
        torch.empty(1024, dtype=torch.uint8, device="sim")  # the unused block makes room
        del kept
        sim.set_memory_limit_bytes("sim:0", None)
        torch.empty(4096, dtype=torch.uint8, device="sim")

    def test_a_negative_limit_is_rejected(self, sim: ModuleType) -> None:
        with pytest.raises(ValueError, match="must not be negative"):
            sim.set_memory_limit_bytes(0, -1)


class TestPinnedMemory:
    def test_pinned_memory_is_known_as_such(self) -> None:
        assert torch.ones(3).pin_memory().is_pinned()
        assert torch.empty(3, pin_memory=True).is_pinned()
        assert torch.ones(3).pin_memory()[1:].is_pinned()
        assert not torch.ones(3).is_pinned()
        assert torch.arange(3).pin_memory().tolist() == [0, 1, 2]
        assert torch.empty(0).pin_memory().numel() == 0

    @pytest.mark.parametrize("direction", ["to device", "to host"])
    def test_a_freed_block_is_reused_after_the_copies_that_use_it(
        self, sim: ModuleType, direction: str
    ) -> None:
        on_device = torch.zeros(1000, device="sim")
        torch.sim.synchronize()
        on_host = torch.ones(1000).pin_memory()
        address = on_host.data_ptr()
        with sim.hold():
            if direction == "to device":
                on_device.copy_(on_host, non_blocking=True)
            else:
                on_host.copy_(on_device, non_blocking=True)
            del on_host
            other = torch.empty(1000, pin_memory=True)
            assert other.data_ptr() != address
        torch.sim.synchronize()
        assert torch.empty(1000, pin_memory=True).data_ptr() == address

    def test_a_block_without_copies_is_reused_at_once(self, sim: ModuleType) -> None:
        with sim.hold():
            marker(torch.sim.current_stream())
            address = torch.empty(1000, pin_memory=True).data_ptr()
            assert torch.empty(1000, pin_memory=True).data_ptr() == address

    def test_pinned_bytes_are_counted(self, sim: ModuleType) -> None:
        assert sim.pinned_bytes() == (0, 0, 0)
        a = torch.empty(100, dtype=torch.uint8, pin_memory=True)
        b = torch.empty(513, dtype=torch.uint8, pin_memory=True)
        assert sim.pinned_bytes() == sim.PinnedBytes(in_use=1536, current=1536, peak=1536)
        del a
        assert sim.pinned_bytes() == (1024, 1536, 1536)
        sim.empty_pinned_cache()
        assert sim.pinned_bytes() == (1024, 1024, 1536)
        sim.reset_peak_pinned_bytes()
        assert sim.pinned_bytes() == (1024, 1024, 1024)
        del b


class TestOperators:
    def test_operators_see_what_the_current_stream_was_given_before(
        self, sim: ModuleType, gate: Gate
    ) -> None:
        source = pinned(1, 2)
        sim.busy(gate)
        target = source.to("sim", non_blocking=True)
        opener = threading.Thread(target=gate.open)
        opener.start()
        assert (target * 2).tolist() == [2, 4]
        opener.join()

    def test_operators_do_not_wait_for_other_streams(self, sim: ModuleType) -> None:
        side = torch.sim.Stream()
        target = torch.zeros(1, device="sim")
        source = pinned(5)
        with sim.hold(side):
            with torch.sim.stream(side):
                target.copy_(source, non_blocking=True)
            early = target + 1
        torch.sim.current_stream().wait_stream(side)
        assert early.tolist() == [1]
        assert (target + 1).tolist() == [6]

    def test_the_usual_operators_work(self) -> None:
        a = torch.arange(6.0, device="sim").view(2, 3)
        assert (a + a * 2 - 1).tolist() == [[-1, 2, 5], [8, 11, 14]]
        assert (a > 2).tolist() == [[False] * 3, [True] * 3]
        assert a[a > 2].tolist() == [3, 4, 5]
        assert a[:, [2, 0]].tolist() == [[2, 0], [5, 3]]
        assert a.sum().item() == 15
        assert torch.equal(a, a.clone())
        assert not torch.equal(a, a + 1)
        assert torch.cat([a, a]).shape == (4, 3)
        assert torch.stack([a, a], 1).shape == (2, 2, 3)
        assert (a @ a.t()).tolist() == [[5, 14], [14, 50]]
        a[0] = 7
        a[:, 1:].mul_(2)
        assert a.tolist() == [[7, 14, 14], [3, 8, 10]]
        assert repr(a[1]) == "tensor([ 3.,  8., 10.], device='sim:0')"
        assert a.device == torch.device("sim:0")

    def test_views_share_memory(self) -> None:
        a = torch.zeros(2, 6, device="sim")
        for view in (
            a.t(),
            a.view(3, 4),
            a.reshape(12),
            a.unfold(1, 2, 2),
            a[:, 1],
            a.view(torch.int32),
            torch.view_as_complex(a.view(2, 3, 2)),
            a.unbind(1)[3],
            a.split(2, 1)[1],
        ):
            assert view.untyped_storage().data_ptr() == a.untyped_storage().data_ptr()

    def test_tensors_move_by_all_the_usual_names(self) -> None:
        a = torch.arange(3.0)
        assert a.sim().is_sim
        assert a.sim(1).device == torch.device("sim:1")
        assert not a.is_sim
        assert a.to("sim:1").cpu().equal(a)
        assert torch.nn.Linear(2, 2).sim(1).weight.device.index == 1
        with torch.device("sim:1"):
            assert torch.zeros(2).device.index == 1

    def test_deep_copies_stay_on_their_device(self) -> None:
        a = torch.arange(6.0).view(2, 3).to("sim:1")
        pair = copy.deepcopy([a, a.t()])
        a.zero_()
        assert pair[0].device == torch.device("sim:1")
        assert pair[0].tolist() == [[0, 1, 2], [3, 4, 5]]
        assert pair[1].untyped_storage().data_ptr() == pair[0].untyped_storage().data_ptr()

    def test_gradients_flow_through_moves(self) -> None:
        a = torch.tensor([1.0, 2.0], requires_grad=True)
        ((a.to("sim") ** 2).to("sim:1").sum() * 3).cpu().backward()
        assert a.grad is not None
        assert a.grad.tolist() == [6, 12]
        b = torch.nn.Parameter(torch.ones(2, device="sim"))
        (b * 5).sum().backward()
        assert b.grad.tolist() == [5, 5]

    def test_a_tensor_that_grows_keeps_its_bytes_in_stream_order(self, sim: ModuleType) -> None:
        source = pinned(1, 2)
        with sim.hold():
            a = source.to("sim", non_blocking=True)
            a.resize_(1000)
            source.fill_(4)
        assert a[:2].tolist() == [4, 4]
        a.untyped_storage().resize_(0)
        assert a.untyped_storage().nbytes() == 0

    def test_storages_can_be_set(self) -> None:
        a = torch.arange(6.0, device="sim")
        b = torch.empty(0, device="sim").set_(a.untyped_storage(), 1, (2, 2), (3, 1))
        assert b.tolist() == [[1, 2], [4, 5]]
        c = torch.empty(0, device="sim").set_(b)
        assert c.data_ptr() == b.data_ptr()
        assert c.set_().numel() == 0

    def test_random_numbers_follow_the_seed_of_the_host(self) -> None:
        torch.manual_seed(3)
        a = torch.randn(4, device="sim")
        state = torch.sim.get_rng_state()
        b = torch.randn(4, device="sim")
        torch.sim.set_rng_state(state)
        assert torch.equal(torch.randn(4, device="sim"), b)
        torch.manual_seed(3)
        assert torch.equal(torch.randn(4), a.cpu())

    def test_only_tensors_of_the_host_can_be_pinned(self) -> None:
        with pytest.raises(RuntimeError, match="pin"):
            torch.empty(2, device="sim", pin_memory=True)


class TestManyAtOnce:
    def test_eight_threads_do_not_mix_up_their_data(self) -> None:
        failures: list[object] = []

        def work(number: int) -> None:
            try:
                stream = torch.sim.Stream(number % 2)
                with torch.sim.stream(stream):
                    for step in range(30):
                        value = 100 * number + step
                        there = torch.full((2000,), value).pin_memory().sim(non_blocking=True)
                        other = there.to(f"sim:{1 - number % 2}")
                        back = torch.empty(2000, dtype=torch.int64, pin_memory=True)
                        back.copy_(there, non_blocking=True)
                        event = marker(stream)
                        del there
                        event.synchronize()
                        if not bool((back == value).all()):
                            failures.append((number, step, "there and back"))
                        if not bool((other.cpu() == value).all()):
                            failures.append((number, step, "to the other device"))
            except Exception as error:  # reported by the thread that started this one
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    def test_the_process_ends_with_held_streams_and_copies_in_flight(self) -> None:
        result = run_python("""
            import atexit, torch
            from tdcopier import sim

            def late():  # runs after the device has been shut down
                a = torch.ones(3).to("sim") + 1
                torch.sim.synchronize()
                with sim.hold():
                    assert a.tolist() == [2, 2, 2]
                print(kept.tolist(), pinned.tolist())

            atexit.register(late)
            sim.enable()
            pinned = torch.ones(4).pin_memory()
            kept = torch.zeros(4, device="sim")
            side = torch.sim.Stream()
            hold, again = sim.hold(), sim.hold(side)
            sim.busy(sim.Gate())
            sim.busy(3600)
            kept.copy_(pinned, non_blocking=True)
            event = torch.sim.Event()
            event.record()
            event.wait(side)
            with torch.sim.stream(side):
                pinned.copy_(kept, non_blocking=True)
        """)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip() == "[1.0, 1.0, 1.0, 1.0] [1.0, 1.0, 1.0, 1.0]"

    def test_a_forked_child_is_told_to_be_spawned(self) -> None:
        result = run_python("""
            import os, torch, warnings
            from tdcopier import sim
            warnings.simplefilter("ignore")
            sim.enable()
            a = torch.ones(3).to("sim")
            child = os.fork()
            if child == 0:
                status = 3
                try:
                    a.cpu()
                except RuntimeError as error:
                    del a
                    status = 0 if "spawn" in str(error) else 4
                os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            assert a.tolist() == [1, 1, 1]
        """)
        assert result.returncode == 0, result.stderr
