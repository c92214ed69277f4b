"""Company, for every call: it keeps its promises beside whatever else is in flight.

Each test makes a call beside others of the table: on other streams and devices, in several threads,
with one that fails or is interrupted, and during the capture of a graph.
`tests/support/company_scenarios.py` plays orders of events of such pairs.
"""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from calls import CALLS, calls_for, each_call_that_goes_on, work_of, works_at_once
from each_case import together
from fault_support import BUFFER_BYTES, assert_gives_back, in_use
from filled_leaves import BEYOND_STAGING, LARGE, MANY, PACKED, values_of
from interrupts import KINDS, Interrupter, in_time, interrupted_everywhere
from sim_support import becomes
from thread_support import Call as InThread
from thread_support import at_once, let_go_without_the_gil
from work_of_calls import Call

import tdcopier
from tdcopier import _C

OURS = (__file__, str(Path(tdcopier.__file__).parent))
"""Whose functions are interrupted."""


def waits_for_kernels(call: Call) -> bool:
    """Whether its result depends on what a stream of the caller has before the call."""
    return call.is_from_device or (call.fills and call.is_to_device)


def is_pageable(call: Call) -> bool:
    return "held" in call.never and not call.reads_pinned


def can_be_captured(call: Call) -> bool:
    """Whether a device reads or writes rows in place in memory that exists."""
    return bool(call.fills and call.tables and call.pinned)


def is_delivered(call: Call) -> bool:
    """Whether threads write what arrives to host memory: four at most wait for kernels."""
    return call.is_from_device and not call.is_to_device and (call.fills or is_pageable(call))


def engines_streams(place: str) -> set[torch.Stream]:
    """Returns the streams that the engine uses for the current one of this device."""
    return {_C.copy_stream(place, "from_device"), _C.copy_stream(place, "ordered")}


@contextmanager
def other_streams(device: str, accelerator: ModuleType) -> Iterator[None]:
    """Makes streams current that share no stream of the engine with the present ones."""
    with ExitStack() as current:
        for index in reversed(range(min(accelerator.device_count(), 2))):
            place = f"{device[:-1]}{index}"
            before = engines_streams(place)
            while engines_streams(place) & before:
                current.enter_context(accelerator.stream(accelerator.Stream(device=place)))
        yield


# ---- kernels of others ---------------------------------------------------------------------------


@pytest.mark.sim  # a CUDA device's stall ends before all other calls were made
@pytest.mark.parametrize(
    "elements",
    [PACKED, MANY, LARGE, BEYOND_STAGING],
    ids=["packed", "many", "large", "beyond staging"],
)
@each_call_that_goes_on(waits_for_kernels)
def test_no_other_call_waits_for_the_kernels_for_which_this_one_waits(
    make, device, accelerator, stall, elements
):
    """It is made more often than there are workers."""
    lates = works_at_once(lambda: make(1, elements), _C.default_worker_count() + 1)
    late = lates[0]
    names = calls_for(accelerator.device_count())
    if (
        elements is BEYOND_STAGING
    ):  # a copy into a device may keep others waiting for staging memory
        tdcopier.limits.set_staging_bytes(3 * BUFFER_BYTES)
        names = [name for name in names if not CALLS[name].fills or not CALLS[name].is_to_device]
    others = [
        work_of(name, device, 2, LARGE if elements is BEYOND_STAGING else elements)
        for name in names
        if not (is_delivered(late.call) and is_delivered(CALLS[name]))
    ]
    if accelerator.device_count() > 1 and elements is PACKED:
        others += [
            work_of(name, f"{device[:-1]}1", 2, elements)
            for name in names
            if CALLS[name].target != "other"
        ]
    if not device.startswith("sim"):
        for other in others:  # what only a first call does takes longer than a stall
            values_of(other.arrived(other.start().get()))
    for index in range(accelerator.device_count()):
        accelerator.synchronize(index)
    with other_streams(device, accelerator):
        kernels = accelerator.current_stream(
            late.source if late.call.is_from_device else late.target
        )
        with stall(kernels):
            handles = [each.start() for each in lates]
            with other_streams(device, accelerator):
                for other in others:
                    beside = other.start()
                    assert becomes(beside.ready), other.call
                    assert values_of(other.arrived(beside.get())) == {2}, other.call
            assert not any(handle.ready() for handle in handles)
            assert not kernels.query()
    for each, handle in zip(lates, handles, strict=True):
        assert values_of(each.arrived(handle.get())) == {1}


# ---- several threads -----------------------------------------------------------------------------


class Pressed(Exception):
    """The exception that the signal handler of the tests raises."""


@pytest.fixture
def press() -> Iterator[Callable[[float, Callable[[], Any]], Any]]:
    """Returns a function that returns what a call does, or raises `Pressed` after some seconds."""
    is_pressing = False  # a handler may run after the timer was stopped: its signal came before

    def raise_it(number: int, frame: FrameType) -> None:
        if not is_pressing:
            return
        if frame.f_code.co_filename.startswith(OURS):
            raise Pressed
        signal.setitimer(signal.ITIMER_REAL, 0.0001)  # a callback of a weak reference swallows it

    def press(after_s: float, ask: Callable[[], Any]) -> Any:
        nonlocal is_pressing
        is_pressing = True
        signal.setitimer(signal.ITIMER_REAL, after_s)
        try:
            return ask()
        finally:
            is_pressing = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, raise_it)
    yield press
    signal.signal(signal.SIGALRM, before)


def asked(handle: Any, way: str) -> Any:
    """Returns the result, or None if the handle is dropped."""
    if way == "drop":
        return None
    if way in ("ready", "wait_staged"):
        getattr(handle, way)()
        way = "get"
    return getattr(handle, way)()


WAYS = ("get", "wait", "ready", "wait_staged", "drop")
THREADS, CALLS_EACH = 4, 10


@pytest.mark.sim
@each_call_that_goes_on(lambda call: "interrupted" not in call.never)
def test_in_several_threads_with_failures_and_signals_each_call_gets_its_own(
    sim, make, call, device, accelerator, press
):
    """Every second call is this one, the others are any; the main thread is interrupted."""
    pick = random.Random(call)
    names = calls_for(accelerator.device_count())
    names = [name for name in names if "interrupted" not in CALLS[name].never]
    works = [
        work_of(
            call if number % 2 else pick.choice(names),
            device,
            number,
            pick.choice([PACKED, MANY, LARGE]),
        )
        for number in range(THREADS * CALLS_EACH)
    ]
    ways = [pick.choice(WAYS) for _ in works]
    after_s = [pick.uniform(0.00001, 0.002) for _ in works]
    results: dict[int, Any] = {}
    lost: list[BaseException] = []

    def play(thread: int) -> None:
        with other_streams(device, accelerator):
            for number in range(thread, len(works), THREADS):
                ask = lambda number=number: asked(works[number].start(), ways[number])  # noqa: E731
                try:
                    results[number] = press(after_s[number], ask) if thread == 0 else ask()
                except (RuntimeError, Pressed) as error:
                    lost.append(error)

    torch.sim.synchronize(0)
    torch.sim.synchronize(1)
    with ExitStack() as armed:
        faults = [
            armed.enter_context(fail(pick.randrange(1, 20)))
            for fail in (sim.fail_transfer, sim.fail_device_allocation, sim.fail_pinned_allocation)
        ]
        others = [InThread(lambda thread=thread: play(thread)) for thread in range(1, THREADS)]
        play(0)
        for other in others:
            other.join()
    failures = [error for error in lost if not isinstance(error, Pressed)]
    assert all("was made to fail" in str(error) for error in failures), failures
    assert len(failures) <= sum(fault.fired for fault in faults)
    torch.sim.synchronize(0)
    torch.sim.synchronize(1)
    for number, result in results.items():
        if result is not None:
            assert values_of(works[number].arrived(result)) == {number}
    again = make(-1, PACKED)
    assert values_of(again.arrived(again.start().get())) == {-1}


@pytest.mark.sim
@each_call_that_goes_on()
def test_callers_wait_for_no_worker_that_is_busy(sim, make):
    """Every worker waits for the only staging buffer of the other device."""
    works = [make(value, LARGE) for value in range(3)]
    tdcopier.limits.set_staging_bytes(BUFFER_BYTES)
    large = torch.ones(1 << 20)
    with sim.hold(_C.copy_stream("sim:1")):
        stuck = [tdcopier.start_copy(large, "sim:1") for _ in range(_C.default_worker_count())]
        for value, (work, way) in enumerate(zip(works, WAYS[:3], strict=True)):
            handle = work.start()
            result = asked(handle, way)  # hangs if the caller does not help
            assert all(each is result for each in at_once(3, lambda _, get=handle.get: get()))
            assert values_of(work.arrived(result)) == {value}
        assert not any(handle.ready() for handle in stuck)
    for handle in stuck:
        handle.get()


@pytest.mark.sim
@together("elements", [PACKED, LARGE], ids=["packed", "large"])
@each_call_that_goes_on(lambda call: call.uses_a_device)
def test_the_gil_is_free_while_a_call_waits(sim, make, elements):
    """Another thread releases the transfer, and must run Python code for it."""
    work = make(3, elements)
    hold = sim.hold(work.writing)
    handle = work.start()
    with let_go_without_the_gil(hold) as order:
        result = handle.get()
        order.append("arrived")
    assert order == ["let go", "arrived"]
    assert values_of(work.arrived(result)) == {3}


# ---- signals -------------------------------------------------------------------------------------


@pytest.mark.sim
@together("elements", [PACKED, BEYOND_STAGING], ids=["packed", "beyond staging"])
@each_call_that_goes_on(lambda call: call.uses_a_device and not is_pageable(call))
def test_a_signal_ends_a_wait_in_which_no_thread_spins_and_the_copy_goes_on(
    sim, make, press, elements
):
    """But not while the driver runs a transfer from or to pageable memory."""
    tdcopier.limits.set_staging_bytes(BUFFER_BYTES)
    work = make(3, elements)
    ended = []
    with sim.hold(work.writing):
        handle = work.start()
        waiting = InThread(handle.get)
        for ask in (handle.wait_staged, handle.wait, handle.get):
            began, used = time.monotonic(), time.process_time()
            try:
                press(0.05, ask)
            except Pressed:
                ended.append(ask.__name__)
            assert time.process_time() - used < (time.monotonic() - began) / 2 + 0.01
        assert not handle.ready()
        assert waiting.is_running()
    waits = ["get"] if work.call.is_to_device else ["wait", "get"]
    if elements is BEYOND_STAGING and not work.call.is_from_device:
        # A stream that waits for a kernel to read in place needs no host.
        by_kernel = work.call.numbers_on_device
        waits = ["wait_staged", "get"] if by_kernel else ["wait_staged", "wait", "get"]
    assert ended[-len(waits) :] == waits
    assert values_of(work.arrived(handle.get())) == {3}
    assert waiting.join() is handle.get()


@pytest.mark.sim
@pytest.mark.parametrize("kind", KINDS)
@each_call_that_goes_on(lambda _: True, "interrupted")
def test_an_interrupt_at_any_point_leaves_nothing_behind_and_the_next_call_works(
    sim, make, call, device, kind
):
    beside = "copy to device" if CALLS[call].is_from_device else "copy to host"
    works = [make(value, PACKED) for value in (1, 2)]
    other = work_of(beside, device, 3, PACKED)
    results = [work.start().get() for work in (*works, other) for _ in range(4)]
    del results  # a plan may have kept four of them
    gc.collect()
    _C.testing.settle()
    before = in_use(sim)

    def scene(interrupter: Interrupter) -> None:
        running = other.start()
        with interrupter:
            works[0].start().get()
        assert values_of(works[1].arrived(in_time(lambda: works[1].start().get()))) == {2}
        assert values_of(other.arrived(running.get())) == {3}

    assert interrupted_everywhere(kind, scene) > 0
    _C.testing.settle()
    assert_gives_back(sim, before)


# ---- graphs --------------------------------------------------------------------------------------


@pytest.mark.cuda
@each_call_that_goes_on(lambda call: call.uses_a_device and not can_be_captured(call))
def test_a_call_during_the_callers_own_capture_is_refused_and_the_capture_goes_on(make, device):
    early, late = make(1, PACKED), make(2, PACKED)
    counter = torch.zeros(1, device=device)
    handle = early.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter += 1
        for ask in (late.start, handle.wait_staged if early.call.is_from_device else handle.wait):
            with pytest.raises(RuntimeError, match="while its stream is capturing a CUDA graph"):
                ask()
    graph.replay()
    assert counter.item() == 1
    assert values_of(early.arrived(handle.get())) == {1}


@pytest.mark.cuda
@each_call_that_goes_on(lambda call: call.uses_a_device and call.packed != "pinned")  # by torch
def test_a_call_on_another_thread_does_not_disturb_a_capture(make, device):
    works = [make(value, size) for value, size in enumerate([PACKED, MANY, LARGE])]
    counter = torch.zeros(1, device=device)
    stop = threading.Event()

    def copy() -> int:
        count = 0
        while not stop.is_set():
            for value, work in enumerate(works):
                arrived = tdcopier.copy(work.arrived(work.start().get()), "cpu")
                assert values_of(arrived) == {value}
                count += 1
        return count

    copying = InThread(copy)
    for _ in range(10):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            for _ in range(50):
                counter += 1
        graph.replay()
    stop.set()
    assert copying.join() > 0
    assert counter.item() == 500
