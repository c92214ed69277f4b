"""Processes, for every call: they fork and end with copies under way, and may have no threads."""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from calls import CALLS, calls_for, each_call_that_goes_on, work_of, works_at_once
from fault_support import BUFFER_BYTES
from filled_leaves import BEYOND_STAGING, LARGE, MANY, PACKED, values_of
from support import run_python

import tdcopier
from tdcopier import sim

forks = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")


# ---- forks ---------------------------------------------------------------------------------------


def ends_well(act: Callable[[], None]) -> bool:
    """Returns whether a forked child that does this ends without an error or a signal, and without
    a question about the device's work: a thread of its parent may have held a lock of the driver.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            asked = questions()
            act()
            assert questions() == asked
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def questions() -> Sequence[int]:
    """Returns the numbers of calls about events, which only the simulated device counts."""
    return sim.event_counts() if sim.is_enabled() else []


def copy_on_the_host(device: str) -> None:
    for name in calls_for(2):
        if not CALLS[name].uses_a_device:
            work = work_of(name, device, 5, LARGE)
            assert values_of(work.arrived(work.start().get())) == {5}
    assert tdcopier.copy([torch.ones(3), "text"], "cpu")[0].tolist() == [1, 1, 1]


class Cycle:
    """Something that only the collector drops."""

    def __init__(self, held: Any) -> None:
        self.held, self.itself = held, self


@forks
@each_call_that_goes_on()
def test_a_forked_child_drops_what_it_inherits_and_copies_on_the_host(make, device, accelerator):
    """At the fork copies are under way: workers may hold any lock, and none is in the child."""
    work, many = make(1, PACKED), make(4, MANY)
    larges = works_at_once(lambda: make(2, LARGE), 5)

    def begun() -> list[Any]:
        handle = work.start()
        result = handle.wait()
        if work.call.is_to_device:
            handle.wait(accelerator.Stream(device=work.target))
        done = work.start()
        done.get()
        leaf = many.start().get()
        return [handle, result, done, larges.pop().start(), work.arrived(leaf)[1][1:]]

    held = begun()
    Cycle(begun())
    running = [large.start() for large in larges]

    def drop() -> None:
        held.clear()
        running.clear()
        gc.collect()
        copy_on_the_host(device)

    assert ends_well(drop)
    for large, handle in zip(larges, running, strict=True):
        assert values_of(large.arrived(handle.get())) == {2}
    gc.collect()


def assert_is_told(wait: Callable[[], Any]) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="before the process was forked"):
            wait()


@forks
@each_call_that_goes_on(lambda call: call.uses_a_device, "held")
def test_a_forked_child_is_told_that_a_copy_was_not_done_at_the_fork(make, stall):
    """It would wait for a device that only the parent can ask, or for a thread of the parent."""
    tdcopier.limits.set_staging_bytes(BUFFER_BYTES)
    early, packed, beyond = make(1, PACKED), make(2, PACKED), make(3, BEYOND_STAGING)
    done = early.start()
    done.get()

    def ask() -> None:
        assert done.ready()
        done.get()
        for handle in pending:
            assert not handle.ready()
            assert_is_told(handle.get)
        if not beyond.call.is_from_device:
            assert_is_told(pending[1].wait_staged)

    with stall(beyond.writing):
        pending = [packed.start(), beyond.start()]
        assert ends_well(ask)
    for value, (work, handle) in enumerate(zip((packed, beyond), pending, strict=True), 2):
        assert values_of(work.arrived(handle.get())) == {value}


@forks
def test_a_forked_child_is_told_so_of_a_delegated_leaf(device, other_device, accelerator, stall):
    leaf = torch.ones(8, device=device).requires_grad_()
    accelerator.synchronize(device)
    with stall(accelerator.current_stream(device)):
        pending = tdcopier.start_copy(leaf, other_device)
        assert ends_well(lambda: assert_is_told(pending.get))
    assert pending.get().tolist() == [1] * 8


@forks
@each_call_that_goes_on(lambda call: not call.is_to_device and not call.fills)
def test_a_child_shares_the_memory_that_its_parent_shared(make):
    """The storage of a result may have been given other memory, with a deleter of its own."""
    works = [make(1, elements) for elements in (PACKED, LARGE)]
    results = [work.arrived(work.start().get())[0].share_memory_() for work in works]

    def write() -> None:
        for shared in results:
            assert shared.is_shared()
            shared.share_memory_().fill_(5)

    assert ends_well(write)
    assert values_of(results) == {5}


# ---- programs ------------------------------------------------------------------------------------

PROGRAM = """
import sys
sys.path[:0] = {path}
import torch
from calls import CALLS, calls_for, work_of
from filled_leaves import BEYOND_STAGING, LARGE, MANY, PACKED, values_of
import tdcopier
from tdcopier import _C

if {device!r}.startswith("sim"):
    from tdcopier import sim
    sim.enable(devices=2)
tdcopier.limits.set_run_ahead(1000)
names = calls_for({devices})
"""


@pytest.fixture
def program(device: str, accelerator: ModuleType) -> str:
    """Returns the beginning of a program that makes calls of the table."""
    return PROGRAM.format(path=sys.path, device=device, devices=accelerator.device_count())


@pytest.mark.sim
def test_every_call_works_where_no_thread_can_be_made(program):
    told = run_python(
        program
        + """
_C.set_most_workers(3)
faults = [sim.fail_thread(n) for n in range(1, 100)]  # each attempt of the process
for name in names:
    for value, elements in enumerate([[100, 50], [1 << 19]]):
        work = work_of(name, "sim:0", value, elements)
        assert values_of(work.arrived(work.start().get())) == {value}, name
        work.start()
for index in range(2):
    torch.sim.synchronize(index)
print(faults[0].struck)
"""
    )
    assert told == "the creation of a thread\n"


@pytest.mark.parametrize("held", [True, False])
def test_the_interpreter_exits_cleanly_with_every_call_in_flight(program, device, held):
    run_python(
        program
        + f"""
names = [name for name in names for _ in range(2) if "held" not in CALLS[name].never]
works = [work_of(name, {device!r}, 1, size) for size in ([9], [1 << 20]) for name in names]
holds = [sim.hold(work.writing) for work in works] if {held and device == "sim:0"} else []
handles = [work.start() for work in works][1::2]  # half of them are dropped
print(len(handles))
"""
    )
