"""Copies beside one that fails, its windows, and failures of delegated leaves and consumers.

`tests/promises/test_errors.py` makes every step of every call fail.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from fault_support import (
    BUFFER_BYTES,
    ROUTES,
    assert_fails_every_time,
    assert_gives_back,
    assert_no_staging_is_lost,
    in_use,
)
from fault_support import warm as warm
from filled_leaves import values_of
from sim_support import BRIEFLY, becomes
from sim_support import fresh as fresh
from support import are_released

import tdcopier
from tdcopier import _C

pytestmark = pytest.mark.sim

# ---- several windows -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("when", ["enqueue", "execution"])
@pytest.mark.parametrize("buffers", [1, 2, 16])
def test_one_window_fails_while_others_are_in_flight(sim, device, copy_stream, when, n, buffers):
    tdcopier.limits.set_staging_bytes(buffers * BUFFER_BYTES)
    before = in_use(sim)
    source = torch.full((5 * BUFFER_BYTES // 4,), 1.0)
    alive = weakref.ref(source)
    hold = sim.hold(copy_stream)
    with sim.fail_transfer(n, direction="h2d", when=when) as fault:
        handle = tdcopier.start_copy([source], device)
        del source
        if buffers < n:  # they are returned when the first ones were read
            hold.release()
        assert becomes(lambda: fault.fired)
        if when == "enqueue" and buffers == 16:  # raised at once: no thread waits for the stream
            assert_fails_every_time(handle, torch.AcceleratorError, fault.struck)
        hold.release()
        with pytest.raises(torch.AcceleratorError):
            handle.get()
        assert_fails_every_time(handle, torch.AcceleratorError, fault.struck)
        assert tdcopier.pinned.staging_bytes(device) <= buffers * BUFFER_BYTES
    assert are_released([alive])
    assert_fails_every_time(handle, torch.AcceleratorError, fault.struck)
    del handle
    copy_stream.synchronize()
    assert values_of(tdcopier.copy([torch.full((5 * BUFFER_BYTES // 4,), 2.0)], device)) == {2}
    assert_no_staging_is_lost(device)
    assert_gives_back(sim, before)


@pytest.mark.parametrize("buffers", [1, 3])
def test_copies_that_wait_for_staging_go_on_when_another_fails(sim, device, copy_stream, buffers):
    """Each copy waits for buffers of the one before; the second one fails."""
    tdcopier.limits.set_staging_bytes(buffers * BUFFER_BYTES)
    elements = 3 * BUFFER_BYTES // 4
    with sim.fail_transfer(5, direction="h2d") as fault:
        with sim.hold(copy_stream):
            handles = [
                tdcopier.start_copy([torch.full((elements,), float(i))], device) for i in range(4)
            ]
        failed = 0
        for i, handle in enumerate(handles):
            try:
                moved = handle.get()
            except torch.AcceleratorError as error:
                message = str(error)
                failed += 1
            else:
                assert values_of(moved) == {i}
        assert fault.struck in message
    assert failed == 1
    assert tdcopier.pinned.staging_bytes(device) <= buffers * BUFFER_BYTES
    assert_no_staging_is_lost(device)


def test_staging_stays_within_its_bound_when_the_device_fails_again_and_again(sim, device):
    tdcopier.limits.set_staging_bytes(2 * BUFFER_BYTES)
    for n in range(1, 9):
        with sim.fail_transfer(1 + n % 3, when="execution") as fault:
            handle = tdcopier.start_copy([torch.ones(3 * BUFFER_BYTES // 4)], device)
            with pytest.raises(torch.AcceleratorError):
                handle.get()
            assert fault.fired
            assert (
                tdcopier.pinned.staging_bytes(device) <= 2 * BUFFER_BYTES
            )  # does not raise either
        del handle
        assert tdcopier.pinned.staging_bytes(device) <= 2 * BUFFER_BYTES
    assert_no_staging_is_lost(device)


def test_staging_that_cannot_be_pinned_waits_for_a_buffer_that_comes_back(sim, device, copy_stream):
    tdcopier.limits.set_staging_bytes(_C.STAGING_BUFFER_BYTES)
    tdcopier.pinned.staging_bytes(device)
    first, second = torch.full((1_000,), 1.0), torch.full((1_000,), 2.0)
    with sim.hold(copy_stream):
        before = tdcopier.start_copy([first], device)  # occupies the only buffer
        tdcopier.limits.set_staging_bytes(_C.DEFAULT_STAGING_LIMIT_BYTES)
        _C.testing.set_max_inline_bytes(0)  # a worker waits for it
        try:
            with sim.fail_pinned_allocation(1) as fault:
                handle = tdcopier.start_copy([second], device)
                assert becomes(lambda: fault.fired)
        finally:
            _C.testing.set_max_inline_bytes(_C.MAX_INLINE_BYTES)
        assert not handle.ready()
    assert handle.get()[0].eq(2).all()
    assert before.get()[0].eq(1).all()
    assert handle.stats.fallbacks == 1


# ---- which call raises, and when -----------------------------------------------------------------


def test_a_failure_that_is_not_known_at_wait_brings_the_consumers_stream_down(
    sim, device, accelerator, copy_stream
):
    consumer = accelerator.Stream(device=device)
    with sim.fail_transfer(when="execution") as fault:
        with sim.hold(copy_stream):
            handle = tdcopier.start_copy([torch.ones(4)], device)
            handle.wait(consumer)
            assert not handle.ready()
        with pytest.raises(torch.AcceleratorError, match="made to fail when it ran"):
            consumer.synchronize()
        assert handle.ready()
        assert_fails_every_time(handle, torch.AcceleratorError, fault.struck)
    consumer.synchronize()
    assert_fails_every_time(handle, torch.AcceleratorError, fault.struck)
    assert tdcopier.copy([torch.ones(2)], device)[0].tolist() == [1, 1]


def test_a_device_error_that_is_told_once_is_told_every_time_by_the_handle(
    sim, device, copy_stream
):
    """Some backends report an error only once: the code that receives it must store it."""
    bits = torch.zeros(4, dtype=torch.bits8, device=device)
    target = torch.zeros(4, device=device)
    torch.sim.synchronize(device)
    with sim.hold(copy_stream):
        with torch.sim.stream(copy_stream):
            target.copy_(bits)  # there is no such conversion
        handle = tdcopier.start_copy([torch.ones(4)], device)
    for ask in (handle.get, handle.wait, handle.get):
        with pytest.raises(RuntimeError, match="stream of the simulated device failed"):
            ask()
        assert handle.ready()
    assert tdcopier.copy([torch.ones(2)], device)[0].tolist() == [1, 1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_consumer_whose_own_stream_has_failed_does_not_stop_later_copies(
    sim, device, accelerator, when
):
    """The run-ahead limit polls events on that stream, which never complete."""
    tdcopier.limits.set_run_ahead(2)
    consumer = accelerator.Stream(device=device)
    pinned = torch.ones(4).pin_memory()
    on_device = torch.zeros(4, device=device)
    accelerator.synchronize()
    with accelerator.stream(consumer), sim.fail_transfer(direction="d2h", when="execution"):
        handles = [tdcopier.start_copy([torch.ones(4)], device)]
        if when == "after":
            handles[0].wait()
        pinned.copy_(on_device, non_blocking=True)
        with pytest.raises(torch.AcceleratorError):
            consumer.synchronize()
        for _ in range(4):
            handles.append(tdcopier.start_copy([torch.ones(4)], device))
            handles[-1].wait()
    for value in range(6):
        handle = tdcopier.start_copy([torch.full((4,), float(value))], device)
        assert handle.wait()[0].tolist() == [value] * 4


# ---- delegated leaves ----------------------------------------------------------------------------


@pytest.mark.parametrize("starter_is_consumer", [True, False])
def test_a_delegated_leaf_that_fails_on_the_device_after_the_call_fails_the_copy(
    sim, device, other_device, accelerator, starter_is_consumer
):
    """Torch copies it between devices in the background: ready() sees the end, get() the error."""
    source = torch.full((4,), 3.0).to(other_device).requires_grad_()
    starter = accelerator.Stream(device=device)
    consumer = starter if starter_is_consumer else accelerator.Stream(device=device)
    with sim.fail_transfer(direction="d2d", when="execution") as fault:
        with sim.hold(accelerator.current_stream(other_device)):
            with accelerator.stream(starter):
                handle = tdcopier.start_copy([source, torch.ones(3)], device)
            assert handle.stats.delegated_leaves == 1
            assert not becomes(handle.ready, within=BRIEFLY)
        assert becomes(handle.ready)
        with accelerator.stream(consumer):
            assert_fails_every_time(handle, torch.AcceleratorError, fault.struck)
    with accelerator.stream(consumer):
        assert_fails_every_time(handle, torch.AcceleratorError, fault.struck)
    assert tdcopier.copy([source], device)[0].tolist() == [3] * 4


def test_a_delegated_leaf_that_fails_after_wait_is_told_by_get(
    sim, device, other_device, accelerator
):
    source = torch.full((4,), 3.0).to(other_device).requires_grad_()
    with sim.fail_transfer(direction="d2d", when="execution") as fault:
        with sim.hold(accelerator.current_stream(other_device)):
            handle = tdcopier.start_copy([source], device)
            handle.wait()
        assert becomes(handle.ready)
        with pytest.raises(torch.AcceleratorError):
            handle.get()
        assert_fails_every_time(handle, torch.AcceleratorError, fault.struck)


@pytest.mark.parametrize(("places", "target"), [ROUTES["H2D"], ROUTES["D2H"]], ids=["H2D", "D2H"])
@pytest.mark.parametrize("when", ["enqueue", "execution"])
def test_a_delegated_leaf_that_fails_in_the_call_fails_the_copy(sim, places, target, when):
    source = torch.full((4,), 3.0).to(places[0]).requires_grad_()
    before = in_use(sim)
    with sim.fail_transfer(when=when) as fault:
        handle = tdcopier.start_copy([source], target)
        assert_fails_every_time(handle, torch.AcceleratorError, fault.struck)
    del handle
    assert tdcopier.copy([source], target)[0].tolist() == [3] * 4
    assert_gives_back(sim, before)


@pytest.mark.parametrize("n", range(1, 4))
def test_without_an_event_after_delegated_leaves_the_values_are_right(sim, device, n):
    """The host waits for them: the call does not fail after it has started other leaves."""
    needs_gradient = torch.ones(4, requires_grad=True)
    filled = [torch.zeros(4, device=device), torch.zeros(3, device=device)]
    calls = {
        "H2D": lambda: tdcopier.start_copy([needs_gradient, torch.ones(3)], device),
        "D2H": lambda: tdcopier.start_copy(
            [torch.ones(4, device=device).requires_grad_(), torch.ones(3, device=device)], "cpu"
        ),
        "into": lambda: tdcopier.start_copy_into([needs_gradient, torch.ones(3)], filled),
    }
    for name, call in calls.items():
        with sim.fail_event_record(n) as fault:
            handle = call()
            try:
                moved = handle.get()
            except torch.AcceleratorError:
                assert n == 1 or name == "into"  # an order that only an event can give
                continue
        assert [leaf.tolist() for leaf in moved] == [[1] * 4, [1] * 3]
        assert handle.stats.fallbacks == int(fault.fired)


def test_a_failed_delegated_leaf_does_not_end_a_copy_that_still_reads_its_sources(
    sim, device, other_device, copy_stream
):
    """ready() lets the caller write to the sources, so not while workers still read them."""
    tdcopier.limits.set_staging_bytes(BUFFER_BYTES)
    tdcopier.pinned.staging_bytes(device)
    large = torch.full((3 * BUFFER_BYTES // 4,), 1.0)
    delegated = torch.ones(4).to(other_device).requires_grad_()
    with sim.hold(copy_stream), sim.fail_transfer(direction="d2d") as fault:
        handle = tdcopier.start_copy([large, delegated], device)
        assert fault.fired
        # One buffer is filled; the rest of the source is still to be read.
        assert not becomes(handle.ready, within=BRIEFLY)
    assert becomes(handle.ready)
    assert_fails_every_time(handle, torch.AcceleratorError, fault.struck)
