"""Errors, for every call: whatever fails is told each time, nothing is lost, all is given back.

The first allocation or transfer of a call fails, then the second of another call, and so on, until
none is left to fail.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from calls import CALLS, each_call
from each_case import together
from fault_support import (
    BUFFER_BYTES,
    assert_fails_every_time,
    assert_gives_back,
    assert_no_staging_is_lost,
    in_use,
)
from filled_leaves import filled, values_of
from sim_support import BRIEFLY, becomes
from sim_support import fresh as fresh
from support import are_released, memory_reference
from work_of_calls import Call, Work

import tdcopier
from tdcopier import _C
from tdcopier.sim import Fault

pytestmark = pytest.mark.sim

FAULTS: dict[str, tuple[Callable[[Any, int], Fault], type[Exception]]] = {
    "device memory": (lambda sim, n: sim.fail_device_allocation(n), torch.OutOfMemoryError),
    "pinned memory": (lambda sim, n: sim.fail_pinned_allocation(n), torch.AcceleratorError),
    "enqueue": (lambda sim, n: sim.fail_transfer(n), torch.AcceleratorError),
    "execution": (lambda sim, n: sim.fail_transfer(n, when="execution"), torch.AcceleratorError),
    "event": (lambda sim, n: sim.fail_event_record(n), torch.AcceleratorError),
}


def is_done_without(name: str, call: Call) -> bool:
    """Returns whether a call may do without what is refused; then its values are right."""
    return name == "event" or (name == "pinned memory" and not call.requires_pinned)


def needs(name: str, call: Call) -> bool:
    """Returns whether each such call asks for what is refused, so that some of them must fail."""
    if name == "device memory":
        return call.makes_device_memory and call.plan != "reusing"
    return not is_done_without(name, call)


# More than 16 destinations get one chunk, which is scattered. Each of them is a step that fails.
SIZES = {"inline": [100, 50], "many": [*range(3, 20)], "background": [BUFFER_BYTES // 4 + 5, 100]}
STEPS = [
    pytest.param(name, fault, elements, id=f"{name}-{fault}-{size}")
    for name, call in CALLS.items()
    for fault in FAULTS
    for size, elements in SIZES.items()
    if (call.is_from_device or call.is_to_device) and "told" not in call.never
    if size != "many" or call.fills  # which scatters them
    if size != "background" or fault != "event"  # these are in the call itself
]


def fill_plan(call: Call, make: Callable[[float], Work]) -> None:
    """Lets a plan that reuses its results have four, as many as it keeps; a failure drops some."""
    if call.plan == "reusing":
        works = [make(0) for _ in range(4)]
        results = [work.start().get() for work in works]
        del results


def assert_told_at_every_step(sim: Any, name: str, make: Callable[[float], Work]) -> None:
    arm, error = FAULTS[name]
    for _ in range(2):  # a plan may keep two results
        first = make(0)
        first.start().get()
    call = first.call
    del first
    fill_plan(call, make)
    _C.testing.settle()  # a worker that has made outputs may still hold those of the last call
    before = in_use(sim)
    for n in itertools.count(1):
        work = make(n)
        alive: list[Any] = [weakref.ref(leaf) for leaf in work.sources]
        alive += [memory_reference(leaf) for leaf in work.written]
        if name == "pinned memory":
            _C.testing.drop_staging()  # so that the call pins it again
        with arm(sim, n) as fault:
            handle = work.start()
            has_ended = lambda fault=fault, handle=handle: fault.fired or handle.ready()  # noqa: E731
            becomes(has_ended, within=BRIEFLY)
            del has_ended
            result = None
            with suppress(error):
                result = handle.get()  # waits until it is known whether it failed
            if result is None:
                assert_fails_every_time(handle, error, fault.struck)
                assert handle.wait_staged() is None
        if result is None:
            assert_fails_every_time(handle, error, fault.struck)
        else:
            assert not fault.fired or is_done_without(name, call)
            # It is counted; but a worker that finds nothing left to do needs no memory.
            assert handle.stats.fallbacks >= fault.fired or handle.stats.background
            assert values_of(work.arrived(result)) == {n}
        handle = result = None
        work.sources.clear()
        work.written.clear()
        gc.collect()  # an error's traceback refers to the handle
        assert are_released(alive)
        again = make(-n)
        assert values_of(again.arrived(again.start().get())) == {-n}
        del again, work
        fill_plan(call, make)
        assert_gives_back(sim, before)
        if not fault.fired:
            break
    assert_no_staging_is_lost("sim:0")
    assert n > 1 or not needs(name, call)


@together(("call", "fault", "elements"), STEPS, by="call")
def test_whatever_fails_is_told_every_time_and_leaves_nothing_behind(sim, make, elements, fault):
    assert_told_at_every_step(sim, fault, lambda value: make(value, elements))


@pytest.mark.parametrize("call", ["copy to device", "copy to host"])
@together("elements", [SIZES["inline"], SIZES["background"]], ids=["few", "large"])
@pytest.mark.parametrize("fault", FAULTS)
def test_of_several_sources_the_one_that_fails_fails_the_whole(
    sim, make, other_device, elements, fault
):
    def mixed(value: float) -> Work:
        work = make(value, elements)
        work.sources += filled(value, elements, other_device)
        return work

    assert_told_at_every_step(sim, fault, mixed)


@each_call(lambda call: call.is_from_device or call.is_to_device, "told")
@together("elements", [[100, 50], [1 << 20]], ids=["inline", "background"])
def test_without_memory_the_error_keeps_its_type_and_the_next_call_works(sim, make, elements):
    work = make(2, elements)
    _C.testing.settle()  # what earlier copies have kept must not come back later
    torch.sim.empty_cache()
    for place in work.devices:
        sim.set_memory_limit_bytes(place, sim.memory_stats(place).reserved_bytes)
    handle = work.start()
    assert handle.wait_staged() is None
    try:
        result = handle.get()  # it may need none
    except torch.OutOfMemoryError:
        result = None
        for ask in (handle.get, handle.wait, handle.get, handle.wait):
            with pytest.raises(torch.OutOfMemoryError, match="is out of memory"):
                ask()
        assert handle.ready()
    for place in work.devices:
        sim.set_memory_limit_bytes(place, None)
    if result is None:
        result = work.start().get()
    else:
        assert not work.call.makes_device_memory or work.call.plan == "reusing"
    assert values_of(work.arrived(result)) == {2}


# ---- without pinned memory -----------------------------------------------------------------------

each_pinned_result = each_call(
    lambda call: call.makes_host_memory and call.plan != "reusing", "pinned", "told"
)
ILLEGAL_ADDRESS = 700  # an error code of CUDA: an earlier kernel has broken the device


def usual_fallbacks(work: Work) -> int:
    handle = work.start()
    assert all(leaf.is_pinned() for leaf in work.arrived(handle.get()))
    return handle.stats.fallbacks


@each_pinned_result
@together("n", [1, 2])
def test_results_are_pageable_if_no_more_memory_can_be_pinned(sim, make, n):
    work = make(3, [100, 50, 70_000])
    usual = usual_fallbacks(work)
    before = in_use(sim)
    with sim.fail_pinned_allocation(n):
        handle = work.start()
        becomes(handle.ready)
    if work.call.requires_pinned:
        for _ in range(2):
            with pytest.raises(torch.AcceleratorError, match="pinned"):
                handle.get()
    else:
        result = work.arrived(handle.get())
        assert handle.stats.fallbacks == usual + 1
        assert values_of(result) == {3}
        assert not any(leaf.is_pinned() for leaf in result)
        del result
    del handle
    assert_gives_back(sim, before)


@each_pinned_result
@together("code", [ILLEGAL_ADDRESS, 1, 3, 999])
def test_another_error_of_the_device_in_a_pinned_allocation_is_raised(sim, make, code):
    """Pageable memory would hide it: only a lack of memory has that way out."""
    work = make(3, [99, 30])
    usual = usual_fallbacks(work)
    before = in_use(sim)
    with sim.fail_pinned_allocation(code=code) as fault:
        handle = work.start()
        for ask in (handle.get, handle.wait, handle.get):
            with pytest.raises(torch.AcceleratorError) as caught:
                ask()
            assert str(caught.value).startswith(f"{fault.struck} was made to fail")
            assert caught.value.error_code == code
    assert handle.stats.fallbacks == usual
    del handle, caught, ask
    assert usual_fallbacks(work) == usual
    assert_gives_back(sim, before)


def test_a_pageable_result_does_not_hold_the_caller_while_a_kernel_runs(sim, device):
    batch = filled(3, [10, 10], device)
    with sim.hold(), sim.fail_pinned_allocation(1):
        handle = tdcopier.start_copy(batch, "cpu")  # would not return
        assert not handle.ready()
    assert values_of(handle.get()) == {3}


def test_pageable_memory_and_pinned_results_are_a_contradiction():
    with pytest.raises(ValueError, match="needs use_pinned_staging=True"):
        tdcopier.copy(torch.ones(3), "cpu", require_pinned_results=True, use_pinned_staging=False)


def test_internal_errors_are_runtime_errors():
    assert issubclass(tdcopier.InternalError, RuntimeError)
    assert tdcopier.InternalError.__module__ == "tdcopier"
