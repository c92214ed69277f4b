"""Deferred copies, staged by workers and sent by their consumer: otherwise like other copies."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from scenario_world import held
from sim_support import becomes
from support import are_released, assert_same, oracle, run_python
from torch.utils._python_dispatch import TorchDispatchMode

import tdcopier
from tdcopier import _C

LARGE = 1 << 20
"""4 MiB of floats, which workers stage."""
sizes = pytest.mark.parametrize("elements", [10, LARGE], ids=["inline", "background"])
DEFERRED = (_C.Sending.DEFERRED, _C.Sending.DEFERRED_ALONE, _C.Sending.DEFERRED_STAGED)
sendings = pytest.mark.parametrize("sending", DEFERRED)


def tree(elements: int, value: float = 1.0) -> dict[str, Any]:
    return {
        "large": torch.full((elements,), value),
        "small": [torch.arange(5), np.full(3, value), torch.rand(4, 6).t()],
        "empty": torch.empty(0, 3),
        "name": "rows",
    }


ENDS: dict[str, Callable[[Any], Any]] = {
    "get": lambda handle: handle.get(),
    "wait": lambda handle: handle.wait(),
    "sent, then wait": lambda handle: (
        (handle.wait_staged(), handle._send_if_staged()) and handle.wait()
    ),
    "polled": lambda handle: becomes(handle.ready) and handle.get(),
}


@sizes
@sendings
@pytest.mark.parametrize("end", ENDS.values(), ids=list(ENDS))
def test_values_are_those_of_to(device, elements, sending, end):
    source = tree(elements)
    with held(sending):
        handle = tdcopier.start_copy(source, device)
    assert_same(end(handle), oracle(source, device))
    assert handle.stats.transfer_bytes >= 4 * elements


@sizes
@sendings
def test_nothing_is_sent_before_somebody_uses_it(device, elements, sending):
    with held(sending):
        handle = tdcopier.start_copy(tree(elements), device)
    handle.wait_staged()
    assert handle.stats.transfers == 0
    assert handle._send_if_staged()
    assert handle.stats.transfers == handle.stats.chunks
    assert handle._send_if_staged()
    handle.get()
    assert handle.stats.transfers == handle.stats.chunks  # sent once


OTHER_STARTS: dict[str, Callable[[Any, str], Any]] = {
    "gather": lambda source, device: tdcopier.start_gather(source, slice(None), device),
    "prepared": lambda source, device: tdcopier.prepare(source, device).start_copy(source),
}


@pytest.mark.parametrize("start", OTHER_STARTS.values(), ids=list(OTHER_STARTS))
def test_gathers_and_prepared_copies_are_deferred_too(device, start):
    with held():
        handle = start([torch.ones(10)], device)
    handle.wait_staged()
    assert handle.stats.transfers == 0
    assert (handle.get()[0] == 1).all()
    assert handle.stats.transfers == 1


@pytest.mark.sim
def test_a_batch_that_workers_still_stage_is_not_sent(sim, device):
    """A thread that tries to send it early does not wait."""
    outcomes = set()
    for seed in range(20):
        with sim.schedule(seed), held(_C.Sending.DEFERRED_STAGED):
            handle = tdcopier.start_copy(torch.full((100,), seed), device)
            is_sent = handle._send_if_staged()
            outcomes.add((is_sent, handle.stats.transfers))
            assert (handle.get() == seed).all()
    assert outcomes == {(False, 0), (True, 1)}


@sizes
def test_the_calling_thread_stages_alone(device, elements):
    """No worker takes part, so all is staged when the call returns."""
    source = tree(elements)
    expected = oracle(source, device)
    with held(_C.Sending.DEFERRED_ALONE):
        for _ in range(20):
            handle = tdcopier.start_copy(source, device)
            assert handle.stats.transfers == 0
            assert handle._send_if_staged()
            assert handle.stats.transfers == handle.stats.chunks
            assert_same(handle.get(), expected)


@pytest.mark.sim
def test_workers_do_not_stage_what_a_thread_stages_alone(sim, device):
    """A schedule decides when workers run, so for a copy of theirs both outcomes are seen."""
    outcomes: dict[Any, set[bool]] = {sending: set() for sending in DEFERRED[:2]}
    for seed in range(20):
        for sending, seen in outcomes.items():
            with sim.schedule(seed), held(sending):
                handle = tdcopier.start_copy(torch.full((LARGE,), seed), device)
                seen.add(handle._send_if_staged())
                assert (handle.get() == seed).all()
    assert outcomes[_C.Sending.DEFERRED] == {True, False}
    assert outcomes[_C.Sending.DEFERRED_ALONE] == {True}


@sizes
@sendings
def test_sources_may_be_overwritten_when_they_are_staged(device, elements, sending):
    source = tree(elements)
    expected = oracle(source, device)
    with held(sending):
        handle = tdcopier.start_copy(source, device)
    handle.wait_staged()
    source["large"].fill_(-1)
    source["small"][0].fill_(-1)
    assert_same(handle.get(), expected)


@sizes
@sendings
def test_sources_are_given_back_when_they_are_staged(device, elements, sending):
    source = torch.ones(elements)
    made = [weakref.ref(source)]
    with held(sending):
        handle = tdcopier.start_copy([source], device)
    del source
    handle.wait_staged()
    assert are_released(made)
    assert (handle.get()[0] == 1).all()


NOT_HELD: dict[str, tuple[Callable[[str], Any], dict[str, Any]]] = {
    "a pinned leaf": (lambda device: [torch.ones(LARGE).pin_memory(), torch.ones(LARGE)], {}),
    "no staging": (lambda device: [torch.ones(LARGE)], {"use_pinned_staging": False}),
    "no workers": (lambda device: [torch.ones(LARGE)], {"use_background_thread": False}),
}


@pytest.mark.parametrize(("make", "options"), NOT_HELD.values(), ids=list(NOT_HELD))
def test_what_cannot_be_held_goes_at_once(device, make, options):
    with held():
        handle = tdcopier.start_copy(make(device), device, **options)
    handle.wait_staged()
    assert handle.stats.transfers > 0
    assert (handle.get()[-1] == 1).all()


def test_without_bytes_there_is_nothing_to_hold(device):
    with held():
        handle = tdcopier.start_copy([torch.empty(0, 3), torch.ones(2, device=device)], device)
    assert handle._send_if_staged()
    assert handle.get()[0].shape == (0, 3)


def test_to_the_host_it_is_a_copy_like_any_other(device):
    with held():
        handle = tdcopier.start_copy(torch.ones(LARGE, device=device), "cpu")
    assert becomes(handle.ready)
    assert (handle.get() == 1).all()


class Recorder(TorchDispatchMode):
    """Records the functions that it intercepts."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("end", ENDS.values(), ids=list(ENDS))
def test_a_mode_of_whoever_sends_is_not_the_copys_business(device, end):
    source = torch.ones(LARGE)
    with held():
        handle = tdcopier.start_copy(source, device)
    with Recorder() as recorder:
        got = end(handle)
    assert recorder.seen == []
    assert (got == 1).all()


@pytest.mark.sim
def test_a_forked_child_sends_nothing():
    program = """
        import os, torch, tdcopier
        from tdcopier import _C, sim
        from tdcopier._options import SENDING

        sim.enable()
        SENDING.now = _C.Sending.DEFERRED
        handle = tdcopier.start_copy(torch.ones(5), "sim")
        handle.wait_staged()
        child = os.fork()
        if child == 0:
            told = [handle.ready(), handle._send_if_staged()]
            try:
                handle.get()
            except RuntimeError as error:
                told.append("before the process was forked" in str(error))
            os._exit(told != [False, False, True])
        print(os.waitpid(child, 0)[1], handle.get().tolist())
        """
    assert run_python(program) == "0 [1.0, 1.0, 1.0, 1.0, 1.0]\n"


# ---- memory --------------------------------------------------------------------------------------


def deferred_bytes(device: str) -> int:
    """Returns the bytes pinned for deferred batches, present and future."""
    _C.testing.settle()
    return _C.testing.deferred_bytes(device)


def test_memory_of_batches_is_used_again(device):
    with held():
        tdcopier.start_copy(torch.ones(LARGE), device).get()
        before = deferred_bytes(device)
        for _ in range(5):
            handle = tdcopier.start_copy(torch.ones(LARGE), device)
            handle.wait_staged()
            del handle  # without sending it
            # A worker may hold the memory a moment longer: the next copy would then pin more.
            assert deferred_bytes(device) == before
            tdcopier.start_copy(torch.ones(LARGE), device).get()
            assert deferred_bytes(device) == before


def test_batches_beyond_the_bound_go_at_once(device):
    tdcopier.limits.set_staging_bytes(4 * LARGE)  # room for four such batches
    sent = []
    handles = []
    with held():
        for value in range(6):
            handle = tdcopier.start_copy(torch.full((LARGE,), float(value)), device)
            handle.wait_staged()
            sent.append(handle.stats.transfers > 0)
            handles.append(handle)
    assert sent == [False] * 4 + [True] * 2
    assert [handle.get().unique().tolist() for handle in handles] == [[v] for v in range(6)]
    assert deferred_bytes(device) <= 16 * LARGE


def test_a_batch_of_another_size_takes_the_place_of_free_memory(device):
    tdcopier.limits.set_staging_bytes(4 * LARGE)
    for elements in (LARGE, 4 * LARGE, 10, 2 * LARGE, 4 * LARGE):
        with held():
            handle = tdcopier.start_copy(torch.ones(elements), device)
        handle.wait_staged()
        assert handle.stats.transfers == 0  # it fits within the limit
        assert (handle.get() == 1).all()
    assert deferred_bytes(device) <= 16 * LARGE


def test_a_lower_limit_is_reached_as_batches_come_back(device):
    with held():
        handles = [tdcopier.start_copy(torch.ones(LARGE), device) for _ in range(8)]
        tdcopier.limits.set_staging_bytes(4 * LARGE)
        for handle in handles:
            handle.get()
        handles = [tdcopier.start_copy(torch.ones(LARGE), device) for _ in range(8)]
        for handle in handles:
            handle.wait_staged()
    assert sum(handle.stats.transfers == 0 for handle in handles) <= 4
    assert all((handle.get() == 1).all() for handle in handles)


def test_no_limit_is_too_large(device):
    tdcopier.limits.set_staging_bytes(sys.maxsize)
    with held():
        handle = tdcopier.start_copy(torch.ones(LARGE), device)
    handle.wait_staged()
    assert handle.stats.transfers == 0
    assert (handle.get() == 1).all()


FAULTS: dict[str, tuple[Callable[[Any, int], Any], type[Exception]]] = {
    "device memory": (lambda sim, n: sim.fail_device_allocation(n), torch.OutOfMemoryError),
    "pinned memory": (lambda sim, n: sim.fail_pinned_allocation(n), torch.AcceleratorError),
    "enqueue": (lambda sim, n: sim.fail_transfer(n), torch.AcceleratorError),
    "execution": (lambda sim, n: sim.fail_transfer(n, when="execution"), torch.AcceleratorError),
}


@pytest.mark.sim
@sizes
@pytest.mark.parametrize(("arm", "error"), FAULTS.values(), ids=list(FAULTS))
def test_failures_are_told_each_time_and_nothing_is_lost(sim, device, elements, arm, error):
    before = sim.memory_stats(0).allocated_bytes
    for n in (1, 2, 3):
        source = {"alone": torch.ones(LARGE), **tree(elements)}
        with arm(sim, n) as fault, held():
            handle = tdcopier.start_copy(source, device)
            told = []
            for end in (handle.wait_staged, handle._send_if_staged, handle.get, handle.get):
                with suppress(error):
                    end()
                    continue
                told.append(end)
        assert told in ([], [handle.get] * 2)
        is_done_without = arm is FAULTS["pinned memory"][0]
        assert bool(told) == (fault.fired and not is_done_without)
        handle = end = fault = None
        told.clear()
        gc.collect()
        assert becomes(lambda: sim.memory_stats(0).allocated_bytes == before)
        assert_same(tdcopier.copy(source, device), oracle(source, device))
