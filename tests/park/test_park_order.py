"""Parking beside kernels, other streams, other copies and other threads."""

from __future__ import annotations

import sys
import threading
import warnings

import pytest
import torch
from park_support import LARGE, assert_values, trained, values_of

import tdcopier


def test_a_copy_reads_what_is_enqueued_before_the_call(device, accelerator, stall):
    tensor = torch.zeros(LARGE, device=device)
    small = torch.zeros(10, device=device)
    threes, fours = torch.full_like(tensor, 3), torch.full_like(small, 4)
    accelerator.synchronize()
    with stall(accelerator.current_stream()):
        tensor.copy_(threes)
        small.copy_(fours)
        parked = tdcopier.park([tensor, small])
        assert not parked.ready()
    parked.resume()
    assert tensor.eq(3).all()
    assert small.eq(4).all()


@pytest.mark.sim
def test_the_host_does_not_wait_for_kernels_in_the_call(sim):
    tensor, small = torch.zeros(LARGE, device="sim"), torch.zeros(10, device="sim")
    tdcopier.park([tensor, small]).resume()  # pins memory
    torch.sim.synchronize()
    gate = sim.Gate()
    sim.busy(gate)
    parked = tdcopier.park([tensor, small])
    assert not parked.ready()
    gate.open()
    parked.wait_parked()
    parked.resume()


def test_work_after_a_resume_sees_the_values_on_the_stream_of_the_call(
    device, accelerator, stall, ordered_stream
):
    tensor = torch.full((LARGE,), 3.0, device=device)
    parked = tdcopier.park([tensor])
    parked.wait_parked()
    seen = torch.zeros(LARGE, device=device)
    with stall(ordered_stream):
        parked.resume()
        seen.copy_(tensor)
    assert seen.eq(3).all()


def test_a_resumed_state_follows_the_stream_that_is_current(device, accelerator):
    tensor = torch.full((LARGE,), 3.0, device=device)
    side = accelerator.Stream(device)
    parked = tdcopier.park([tensor])
    with accelerator.stream(side):
        parked.resume()
        tensor.mul_(2)
    accelerator.current_stream().wait_stream(side)
    assert tensor.eq(6).all()


def test_the_memory_can_be_used_at_once(device, accelerator):
    for number in range(10):
        state = [torch.full((LARGE,), float(number), device=device) for _ in range(4)]
        parked = tdcopier.park(state)
        other = [torch.full((LARGE,), -1.0, device=device) for _ in range(4)]
        assert all(t.eq(-1).all() for t in other)
        del other
        parked.resume()
        assert all(t.eq(number).all() for t in state)


def test_a_copy_beside_a_parked_state_and_its_resume(device):
    model, optimizer = trained(device)
    expected = values_of(model, optimizer)
    batch = [torch.full((n,), float(n)) for n in (3, 40_000, LARGE)]
    first = tdcopier.start_copy(batch, device)
    parked = tdcopier.park([model, optimizer])
    second = tdcopier.start_copy(batch, device)
    parked.resume()
    third = tdcopier.start_copy(first.get(), "cpu")
    for handle in (first, second, third):
        assert [t.mean().item() for t in handle.get()] == [3, 40_000, LARGE]
    assert_values(expected, model, optimizer)


def test_threads_park_states_of_their_own(device):
    failures: list[BaseException] = []
    barrier = threading.Barrier(4)

    def work(number: int) -> None:
        try:
            tensors = [torch.full((n,), float(number), device=device) for n in (5, LARGE)]
            barrier.wait()
            for _ in range(20):
                with tdcopier.parked(tensors):
                    pass
                for tensor in tensors:
                    tensor.add_(1)
            assert all(t.eq(number + 20).all() for t in tensors)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_of_threads_that_park_the_same_state_one_succeeds(device):
    tensors = [torch.full((n,), 3.0, device=device) for n in (5, LARGE, 7, LARGE)]
    for _ in range(20):
        handles, refused = [], []
        barrier = threading.Barrier(3)

        def work(barrier=barrier, handles=handles, refused=refused):
            barrier.wait()
            try:
                handles.append(tdcopier.park(tensors))
            except (RuntimeError, ValueError) as error:
                refused.append(error)

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(handles) == 1, refused
        handles[0].resume()
        assert all(t.eq(3).all() for t in tensors)


@pytest.mark.sim
def test_every_stream_sees_what_a_handle_resumed_that_another_thread_dropped(sim):
    tensor = torch.full((LARGE,), 3.0, device="sim")
    handles = [tdcopier.park([tensor])]
    handles[0].wait_parked()

    def drop() -> None:
        with torch.sim.stream(torch.sim.Stream("sim:0")), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handles.clear()

    with sim.pace("h2d", latency_us=100_000):
        thread = threading.Thread(target=drop)
        thread.start()
        thread.join()
        assert tensor.eq(3).all()


def test_two_handles_of_parts_of_a_state_are_resumed_in_any_order(device):
    model, optimizer = trained(device)
    expected = values_of(model, optimizer)
    of_model, of_optimizer = tdcopier.park(model), tdcopier.park(optimizer)
    of_model.resume()
    of_optimizer.resume()
    assert_values(expected, model, optimizer)


@pytest.mark.parametrize("direction", ["into the state", "out of it"])
def test_memory_that_another_copy_still_uses_is_not_used_again(
    device, ordered_stream, stall, direction
):
    """The copy should have been waited for: it gets or gives any values, and no one else does."""
    tensor = torch.full((LARGE,), 3.0, device=device)
    host = torch.full((LARGE,), 5.0).pin_memory()
    other = torch.empty(LARGE, device=device)
    tdcopier.park([tensor]).resume()  # pins memory
    torch.accelerator.synchronize()
    with stall(ordered_stream):
        if direction == "into the state":
            handle = tdcopier.start_copy_into([host], [tensor])
        else:
            handle = tdcopier.start_copy_into([tensor], [other])
        parked = tdcopier.park([tensor])
        eights = [torch.full((LARGE,), 8.0, device=device) for _ in range(4)]
    handle.wait_staged()
    torch.accelerator.synchronize()
    assert all(t.eq(8).all() for t in eights)
    assert direction == "into the state" or other.eq(3).all()
    parked.resume()


def test_threads_may_park_and_resume_what_they_share(device):
    """One of them may find the state parked; no values are lost."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            tensors = [torch.full((500,), float(n), device=device) for n in range(8)]
            torch.accelerator.synchronize()
            barrier, failures = threading.Barrier(2), []

            def work(state, barrier=barrier, failures=failures):
                barrier.wait()
                try:
                    tdcopier.park(state).resume()
                except ValueError:  # parked by the other one
                    return
                except BaseException as error:
                    failures.append(error)

            threads = [
                threading.Thread(target=work, args=(part,)) for part in (tensors[:6], tensors[2:])
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not failures
            torch.accelerator.synchronize()
            assert all(bool((t == n).all()) for n, t in enumerate(tensors))
    finally:
        sys.setswitchinterval(interval)
