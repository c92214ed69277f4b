"""Injected failures: which calls they affect, how they are reported, and when they end."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from sim_support import fresh as fresh
from sim_support import marker, pinned

import tdcopier

pytestmark = pytest.mark.sim


# ---- allocations ---------------------------------------------------------------------------------


def test_the_nth_device_allocation_fails_and_no_other(sim: ModuleType) -> None:
    before = sim.memory_stats(0)
    with sim.fail_device_allocation(2) as fault:
        torch.empty(100, device="sim")
        assert not fault.fired
        assert fault.struck is None
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(100, device="sim")
        assert fault.fired
        assert fault.struck == "an allocation of 400 bytes on sim:0"
        torch.empty(100, device="sim")
    message = "sim:0 is out of memory: an allocation of 400 bytes on sim:0 was made to fail"
    assert str(caught.value).startswith(message)
    after = sim.memory_stats(0)
    assert after.allocations - before.allocations == 2
    assert after.allocated_bytes == before.allocated_bytes


def test_a_filter_counts_the_allocations_of_one_device(sim: ModuleType) -> None:
    with sim.fail_device_allocation(device="sim:1") as fault:
        torch.empty(1, device="sim:0")
        torch.empty(0, device="sim:1")  # of no bytes: not counted
        assert not fault.fired
        with pytest.raises(torch.OutOfMemoryError, match="sim:1 is out of memory"):
            torch.empty(1, device="sim:1")


def test_memory_that_is_kept_for_reuse_does_not_prevent_a_failure(sim: ModuleType) -> None:
    torch.empty(1000, device="sim")
    with sim.fail_device_allocation(), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1000, device="sim")
    torch.empty(1000).pin_memory()
    with sim.fail_pinned_allocation(), pytest.raises(torch.AcceleratorError):
        torch.empty(1000, pin_memory=True)


def test_every_way_to_make_a_tensor_is_an_allocation(sim: ModuleType) -> None:
    """Including functions that use a kernel of torch's own, such as `zeros`."""
    leaf = torch.ones(2, 3)
    makers: list[Callable[[], object]] = [
        lambda: torch.empty(6, device="sim"),
        lambda: torch.empty_strided((2, 3), (1, 2), device="sim"),
        lambda: torch.empty(0, device="sim").resize_(6),
        lambda: torch.zeros(6, device="sim"),
        lambda: leaf.to("sim"),
    ]
    for make in makers:
        with sim.fail_device_allocation() as fault:
            with pytest.raises(torch.OutOfMemoryError):
                make()
            assert fault.struck == "an allocation of 24 bytes on sim:0"


def test_the_nth_pinned_allocation_fails_as_cuda_lets_it_fail(sim: ModuleType) -> None:
    before = sim.pinned_bytes().in_use
    with sim.fail_pinned_allocation(2) as fault:
        torch.empty(100, pin_memory=True)
        torch.empty(100, device="sim")  # not counted
        assert not fault.fired
        with pytest.raises(torch.AcceleratorError) as caught:
            torch.empty(100, pin_memory=True)
        assert fault.struck == "an allocation of 400 pinned bytes"
        torch.empty(100, pin_memory=True)
    assert isinstance(caught.value, RuntimeError)
    assert str(caught.value).startswith(
        "out of memory that can be pinned: an allocation of 400 pinned bytes was made to fail"
    )
    assert sim.pinned_bytes().in_use == before


def test_a_pinned_allocation_may_report_another_error_of_the_device(sim: ModuleType) -> None:
    with sim.fail_pinned_allocation(code=700) as fault:
        with pytest.raises(torch.AcceleratorError) as caught:
            torch.empty(100, pin_memory=True)
        assert str(caught.value).startswith(f"{fault.struck} was made to fail")
        assert caught.value.error_code == 700
        torch.empty(100, pin_memory=True)


@pytest.mark.parametrize(("code", "why"), [(2, "cannot lock that memory"), (700, "error 700")])
def test_the_pinning_of_existing_memory_fails_with_the_code_of_the_fault(sim, code, why) -> None:
    with sim.fail_pinned_allocation(code=code), pytest.raises(ValueError, match=why):
        tdcopier.pin_memory_(torch.ones(100), "sim:0")


def test_what_is_disarmed_strikes_nothing(sim: ModuleType) -> None:
    faults = [
        sim.fail_device_allocation(),
        sim.fail_pinned_allocation(),
        sim.fail_transfer(),
        sim.fail_transfer(when="execution"),
    ]
    for fault in faults:
        fault.disarm()
        fault.disarm()
    assert pinned(3).to("sim").tolist() == [3]
    assert not any(fault.fired for fault in faults)


def test_faults_count_each_for_itself(sim: ModuleType) -> None:
    with sim.fail_device_allocation(1) as first, sim.fail_device_allocation(2) as second:
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(1, device="sim")
        torch.empty(1, device="sim")
        assert first.fired
        assert second.fired


def test_a_fault_ends_with_its_block_also_on_an_exception(sim: ModuleType) -> None:
    def fail_while_armed() -> None:
        with sim.fail_device_allocation(2):
            raise KeyError

    with pytest.raises(KeyError):
        fail_while_armed()
    for _ in range(3):
        torch.empty(1, device="sim")


# ---- transfers that fail when they are enqueued --------------------------------------------------

MOVES: dict[str, Callable[[], object]] = {
    "h2d": lambda: torch.ones(8).to("sim:0"),
    "d2h": lambda: _on(0).cpu(),
    "d2d": lambda: _on(0).to("sim:1"),
    "within": lambda: _on(0).clone(),
}
ROUTES = {
    "h2d": "from the host to sim:0",
    "d2h": "from sim:0 to the host",
    "d2d": "from sim:0 to sim:1",
    "within": "from sim:0 to sim:0",
}


def _on(index: int) -> torch.Tensor:
    return torch.empty(8, device=f"sim:{index}")


@pytest.mark.parametrize("direction", MOVES)
def test_a_transfer_of_a_direction_fails_in_the_call_and_is_named(
    sim: ModuleType, direction: str
) -> None:
    others = [move for name, move in MOVES.items() if name != direction]
    with sim.fail_transfer(direction=direction) as fault:
        for move in others:
            move()
        assert not fault.fired
        before = sim.counts()
        with pytest.raises(torch.AcceleratorError) as caught:
            MOVES[direction]()
        assert fault.struck == f"a transfer {direction} of 32 bytes {ROUTES[direction]}"
        assert sim.counts() == before  # it was not enqueued
        MOVES[direction]()
    assert str(caught.value).startswith(f"{fault.struck} was made to fail when it was enqueued")


def test_a_filter_counts_the_transfers_of_one_device(sim: ModuleType) -> None:
    with sim.fail_transfer(3, device=1) as fault:
        torch.ones(1).to("sim:0")
        torch.ones(1).to("sim:1")
        _on(0).to("sim:1")
        assert not fault.fired
        with pytest.raises(torch.AcceleratorError, match="from sim:1 to sim:0"):
            _on(1).to("sim:0")


def test_what_stands_in_for_kernels_is_not_counted_and_does_not_fail(sim: ModuleType) -> None:
    a = torch.ones(4, device="sim")
    with sim.fail_transfer() as fault:
        a = a + 1
        assert not fault.fired
    assert a.tolist() == [2] * 4


# ---- transfers that fail when they run -----------------------------------------------------------


def test_a_transfer_that_fails_when_it_runs_is_told_by_all_that_is_behind_it(
    sim: ModuleType,
) -> None:
    stream = torch.sim.Stream()
    source, target = pinned(5), torch.zeros(1, device="sim")
    torch.sim.synchronize()
    before = marker(stream)
    with sim.fail_transfer(when="execution") as fault:
        with torch.sim.stream(stream), sim.hold(stream):
            target.copy_(source, non_blocking=True)  # the call succeeds
            assert fault.fired
            behind = marker(stream)
            assert not behind.query()
        for ask in (behind.synchronize, behind.query, stream.synchronize, stream.query) * 2:
            with pytest.raises(torch.AcceleratorError) as caught:
                ask()
            assert str(caught.value).startswith(
                "a transfer h2d of 4 bytes from the host to sim:0 was made to fail when it ran"
            )
        with pytest.raises(torch.AcceleratorError, match="when it ran"):
            sim.synchronize()
        before.synchronize()
        assert torch.sim.current_stream().query()  # the other streams continue
    assert target.tolist() == [0]


def test_a_broken_stream_runs_nothing_until_the_fault_is_disarmed(sim: ModuleType) -> None:
    first, second, third = (torch.zeros(1, device="sim") for _ in range(3))
    source = pinned(5)
    torch.sim.synchronize()
    with sim.fail_transfer(when="execution"):
        first.copy_(source, non_blocking=True)
        second.copy_(source, non_blocking=True)
        lost = marker(torch.sim.current_stream())
        with pytest.raises(torch.AcceleratorError):
            torch.sim.synchronize()
        with pytest.raises(torch.AcceleratorError):
            first + 1
    torch.sim.synchronize()
    third.copy_(source, non_blocking=True)
    assert [leaf.item() for leaf in (first, second, third)] == [0, 0, 5]
    for _ in range(2):  # a failure lasts
        with pytest.raises(torch.AcceleratorError):
            lost.query()
        with pytest.raises(torch.AcceleratorError):
            lost.synchronize()
    marker(torch.sim.current_stream()).synchronize()


def test_a_failure_reaches_the_streams_that_wait_for_it(sim: ModuleType) -> None:
    source, target = pinned(5), torch.zeros(1, device="sim")
    torch.sim.synchronize()
    stream, waiter = torch.sim.Stream(), torch.sim.Stream(1)
    with sim.fail_transfer(when="execution"):
        with sim.hold(stream):
            with torch.sim.stream(stream):
                target.copy_(source, non_blocking=True)
            event = marker(stream)
            event.wait(waiter)
            behind = marker(waiter)
        for ask in (behind.synchronize, waiter.synchronize, behind.query):
            with pytest.raises(torch.AcceleratorError, match="h2d of 4 bytes"):
                ask()
        late = torch.sim.Stream(1)
        with pytest.raises(torch.AcceleratorError, match="h2d of 4 bytes"):
            event.wait(late)  # the failure is known by now, so the call raises it
        late.synchronize()
    waiter.synchronize()
    stream.synchronize()


def test_a_chosen_transfer_that_has_not_run_fails_after_its_fault_is_disarmed(
    sim: ModuleType,
) -> None:
    source, target = pinned(5), torch.zeros(1, device="sim")
    again, waiter = torch.zeros(1, device="sim"), torch.sim.Stream(1)
    with sim.hold():
        with sim.fail_transfer(when="execution"):
            target.copy_(source, non_blocking=True)
            event = marker(torch.sim.current_stream())
            event.wait(waiter)
            behind = marker(waiter)
        again.copy_(source, non_blocking=True)
        good = marker(torch.sim.current_stream())
    good.synchronize()
    for failed in (event, behind):
        with pytest.raises(torch.AcceleratorError):
            failed.synchronize()
    assert target.tolist() == [0]
    assert again.tolist() == [5]


def test_who_waits_for_its_own_transfer_is_told_by_the_call(sim: ModuleType) -> None:
    on_device = torch.ones(4, device="sim")
    with sim.fail_transfer(when="execution"), pytest.raises(torch.AcceleratorError, match="d2h"):
        on_device.cpu()
    assert on_device.cpu().tolist() == [1] * 4


def test_memory_of_a_broken_stream_is_used_again(sim: ModuleType) -> None:
    """The allocators check that the work is over, not that it succeeded."""
    source = pinned(5)
    side = torch.sim.Stream()
    before = sim.memory_stats(0)
    with sim.fail_transfer(when="execution"):
        with torch.sim.stream(side):
            target = source.to("sim", non_blocking=True)
        event = marker(side)
        target.record_stream(torch.sim.default_stream())
        del target, source
    with pytest.raises(torch.AcceleratorError):
        event.synchronize()
    torch.sim.synchronize()
    torch.sim.empty_cache()
    after = sim.memory_stats(0)
    assert after.allocated_bytes == before.allocated_bytes
    assert after.reserved_bytes == before.reserved_bytes


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, -1])
@pytest.mark.parametrize("kind", ["device_allocation", "pinned_allocation", "transfer"])
def test_counting_begins_with_one(sim: ModuleType, kind: str, n: int) -> None:
    with pytest.raises(ValueError, match=f"the first one is number 1, got {n}"):
        getattr(sim, f"fail_{kind}")(n)


def test_what_there_is_not_is_refused(sim: ModuleType) -> None:
    with pytest.raises(ValueError, match="expected one of the directions"):
        sim.fail_transfer(direction="up")
    with pytest.raises(ValueError, match="at 'enqueue' or at 'execution', not at 'later'"):
        sim.fail_transfer(when="later")
    with pytest.raises(ValueError, match="code must be positive; got 0"):
        sim.fail_pinned_allocation(code=0)
    with pytest.raises(ValueError, match="expected a simulated device"):
        sim.fail_transfer(device="cpu")
    with pytest.raises(RuntimeError, match=r"there is no device sim:7; .*enable\(devices="):
        sim.fail_device_allocation(device=7)
