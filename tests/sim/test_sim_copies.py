"""Copies to, from and on the simulated device: when they run, and which bytes they move."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from sim_support import BRIEFLY, becomes, marker, pinned
from sim_support import fresh as fresh
from thread_support import at_once

pytestmark = pytest.mark.sim


@pytest.mark.hazardous
def test_a_copy_to_the_device_reads_pinned_memory_when_it_runs(sim: ModuleType) -> None:
    source = pinned(1, 2)
    with sim.hold():
        target = source.to("sim", non_blocking=True)
        source.fill_(7)
    assert target.tolist() == [7, 7]


def test_a_copy_to_the_host_writes_pinned_memory_when_it_runs(sim: ModuleType) -> None:
    source = torch.tensor([1.0, 2.0], device="sim")
    target = pinned(0, 0)
    with sim.hold():
        target.copy_(source, non_blocking=True)
        assert not becomes(lambda: target[0].item() != 0, BRIEFLY)
    torch.sim.synchronize()
    assert target.tolist() == [1, 2]


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_of_pageable_memory_are_done_when_they_return(
    sim: ModuleType, non_blocking: bool
) -> None:
    stream = torch.sim.current_stream()
    sim.busy(0.02)
    on_device = torch.ones(3).to("sim", non_blocking=non_blocking)
    assert stream.query()
    sim.busy(0.02)
    assert torch.zeros(3).copy_(on_device, non_blocking=non_blocking).tolist() == [1, 1, 1]
    assert stream.query()


def test_a_move_to_the_host_that_does_not_block_goes_to_pinned_memory(sim: ModuleType) -> None:
    on_device = torch.ones(3, device="sim")
    with sim.hold():
        on_host = on_device.to("cpu", non_blocking=True)
        assert on_host.is_pinned()
        assert not torch.sim.current_stream().query()
    torch.sim.synchronize()
    assert on_host.tolist() == [1, 1, 1]


def test_a_blocking_copy_of_pinned_memory_is_done_when_it_returns(sim: ModuleType) -> None:
    source = pinned(1, 2)
    sim.busy(0.02)
    target = source.to("sim")
    assert torch.sim.current_stream().query()
    source.fill_(7)
    assert target.tolist() == [1, 2]


@pytest.mark.parametrize("target_device", ["sim:0", "sim:1"])
def test_a_copy_on_the_device_does_not_wait(sim: ModuleType, target_device: str) -> None:
    source = torch.ones(3, device="sim:0")
    target = torch.zeros(3, device=target_device)
    with sim.hold(torch.sim.current_stream(0)):
        target.copy_(source)
        assert not torch.sim.current_stream(0).query()
    assert target.tolist() == [1, 1, 1]


@pytest.mark.hazardous
def test_a_copy_runs_on_the_current_stream_of_its_thread(sim: ModuleType) -> None:
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
def test_a_copy_between_devices_is_ordered_with_both(sim: ModuleType, held: str) -> None:
    """Source bytes written before are read, target bytes written before are overwritten."""
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
    change: Callable[[torch.Tensor], torch.Tensor], non_blocking: bool
) -> None:
    host = torch.arange(24.0).view(4, 6)
    expected = change(host)
    assert torch.equal(expected.to("sim", non_blocking=non_blocking).cpu(), expected)
    assert torch.equal(change(host.to("sim")).cpu(), expected)
    assert torch.equal(change(host.pin_memory()).to("sim:1", non_blocking=True).cpu(), expected)
    assert torch.equal(change(host.to("sim")).to("sim:1").cpu(), expected)


@pytest.mark.parametrize("non_blocking", [False, True])
def test_layouts_and_dtypes_are_converted_on_the_way(non_blocking: bool) -> None:
    host = torch.arange(24).view(4, 6)
    target = torch.zeros(8, 6, dtype=torch.float64, device="sim")
    target[::2].copy_(host, non_blocking=non_blocking)
    back = torch.zeros(6, 4, dtype=torch.float32).pin_memory()
    back.t().copy_(target[::2], non_blocking=non_blocking)
    torch.sim.synchronize()
    assert torch.equal(back, host.t().float())
    assert target[1::2].abs().sum().item() == 0


def test_overlapping_targets_are_refused_when_they_are_given() -> None:
    target = torch.zeros(1, device="sim").expand(3)
    with pytest.raises(RuntimeError, match="single memory location"):
        target.copy_(torch.arange(3))
    line = torch.arange(6.0, device="sim")
    with pytest.raises(RuntimeError, match="single memory location"):
        line[:4].view(2, 2).copy_(line[2:].view(2, 2).t())
    assert line.tolist() == [0, 1, 2, 3, 4, 5]


def test_what_fails_on_a_stream_is_told_to_who_waits_for_it() -> None:
    bits = torch.zeros(4, dtype=torch.bits8, device="sim")
    target = torch.zeros(4, device="sim")
    target.copy_(bits)  # there is no such conversion
    with pytest.raises(RuntimeError, match="stream of the simulated device failed"):
        torch.sim.synchronize()
    torch.sim.synchronize()  # reported once
    assert target.tolist() == [0] * 4


def test_a_smaller_source_is_expanded() -> None:
    target = torch.zeros(2, 3, device="sim")
    target.copy_(torch.arange(3))
    assert target.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_view_of_pinned_memory_keeps_its_block_for_the_copy(sim: ModuleType) -> None:
    base = torch.arange(100.0).pin_memory()
    with sim.hold():
        target = base[50:].to("sim", non_blocking=True)
        address = base.data_ptr()
        del base
        assert torch.empty(100).pin_memory().data_ptr() != address
    assert target[0].item() == 50


def test_transfers_are_counted_by_direction_when_they_are_enqueued(sim: ModuleType) -> None:
    source = torch.ones(10).pin_memory()
    with sim.hold():
        a = source.to("sim", non_blocking=True)
        b = torch.empty(5, dtype=torch.float64, device="sim").copy_(a[::2])
        c = torch.empty(5, dtype=torch.float64).pin_memory().copy_(b, non_blocking=True)
        once = sim.Transfers(1, 40)
        expected = sim.Counts(h2d=once, d2h=once, d2d=sim.Transfers(0, 0), within=once)
        assert sim.counts() == expected
    torch.sim.synchronize()
    assert c.tolist() == [1] * 5
    a.to("sim:1")
    assert sim.counts().d2d == (1, 40)
    assert sim.counts().within == (1, 40)
    sim.reset_counts()
    assert sim.counts() == ((0, 0),) * 4


def test_operators_that_run_on_the_host_are_not_counted(sim: ModuleType) -> None:
    a = torch.ones(4, device="sim")
    assert torch.equal((a + 1)[1:] * 2, torch.full((3,), 4.0, device="sim"))
    a[::2].add_(1)
    assert sim.counts() == ((0, 0),) * 4
    a[0].item()
    torch.ones(0).to("sim")
    assert sim.counts() == ((0, 0), (1, 4), (0, 0), (0, 0))


def test_eight_threads_do_not_mix_up_their_data() -> None:
    def work(number: int) -> None:
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
                assert bool((back == value).all()), (number, step, "there and back")
                assert bool((other.cpu() == value).all()), (number, step, "to the other device")

    at_once(8, work)
