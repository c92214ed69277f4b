"""Threads that wait for a copy work on it: busy or sleeping workers do not delay it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sim_support import becomes
from torch.utils._python_dispatch import TorchDispatchMode

import tdcopier
from tdcopier import _C

pytestmark = pytest.mark.sim
ELEMENTS = 1 << 20
"""4 MiB: more than is staged in the call, and several windows."""


@pytest.fixture
def busy_workers(sim: Any) -> Iterator[Any]:
    """Keeps every worker waiting for the first device's one staging buffer until the hold ends."""
    tdcopier.limits.set_staging_bytes(_C.STAGING_BUFFER_BYTES)
    torch.sim.synchronize(0)
    hold = sim.hold(_C.copy_stream("sim:0"))
    large = torch.ones(2 * ELEMENTS)
    # One for each worker, all queued before any other copy.
    stuck = [tdcopier.start_copy(large, "sim:0") for _ in range(_C.default_worker_count())]
    # Their only transfer is on its way, so it is not the next one, which a test lets fail.
    assert becomes(lambda: sum(handle.stats.transfers for handle in stuck) == 1)
    try:
        yield hold
    finally:
        hold.release()
        assert all(handle.get().sum().item() == 2 * ELEMENTS for handle in stuck)


@pytest.fixture
def source() -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.int32)


def test_a_caller_that_fails_hands_its_failure_on(sim, busy_workers, source):
    handle = tdcopier.start_copy(source, "sim:1")
    sim.fail_transfer(1)
    for _ in range(2):
        with pytest.raises(torch.AcceleratorError):
            handle.get()
    assert torch.equal(tdcopier.copy(source, "sim:1").cpu(), source)


def test_a_caller_under_a_mode_leaves_the_copy_to_the_workers(busy_workers, source):
    """A mode must not see the engine's operations."""
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    handle = tdcopier.start_copy(source, "sim:1")
    moved = []

    def wait_for_it() -> None:
        with Watching():
            moved.append(handle.wait())

    thread = threading.Thread(target=wait_for_it)
    thread.start()
    thread.join(timeout=0.1)
    assert thread.is_alive()  # no thread works on it
    busy_workers.release()
    thread.join()
    assert seen == []
    assert torch.equal(moved[0].cpu(), source)


def test_workers_make_the_outputs_of_a_caller_who_does_other_things(sim):
    leaves = [torch.full((40_000,), float(value)) for value in range(60)]  # 9.6 MB
    with tdcopier.stats.time_steps():
        handle = tdcopier.start_copy({"leaves": leaves}, "sim:0")
        assert becomes(lambda: handle.stats.steps.outputs_us > 0)  # before any call for them
    moved = handle.get()
    assert [leaf[-1].item() for leaf in moved["leaves"]] == list(range(60))


def test_a_caller_who_comes_early_takes_what_there_is_and_makes_the_rest(sim):
    leaves = [torch.full((20,), float(value)) for value in range(30_000)]  # 2.4 MB
    for _ in range(4):
        moved = tdcopier.start_copy(leaves, "sim:0").get()
        assert torch.equal(torch.stack(moved).cpu(), torch.stack(leaves))


@pytest.mark.parametrize("inference", [True, False])
def test_what_a_worker_makes_is_of_the_mode_of_the_call(sim, inference):
    leaves = [torch.ones(400_000) for _ in range(3)]
    with torch.inference_mode(inference), tdcopier.stats.time_steps():
        handle = tdcopier.start_copy(leaves, "sim:0")
        assert becomes(lambda: handle.stats.steps.outputs_us > 0)
    assert [leaf.is_inference() for leaf in handle.get()] == [inference] * 3


def test_results_that_are_dropped_keep_no_memory_while_their_workers_are_busy(busy_workers, source):
    torch.sim.empty_cache()
    before = torch.sim.memory_allocated(1)
    for _ in range(5):
        tdcopier.start_copy(source, "sim:1").get()
    torch.sim.synchronize(1)
    assert torch.sim.memory_allocated(1) - before < 2 * source.nbytes


def test_reads_that_are_enqueued_are_not_waited_for_by_helping_to_deliver(sim):
    source = torch.full((1 << 18,), 3.0, device="sim:0")  # one window
    destination = torch.zeros(1 << 18)
    torch.sim.synchronize(0)
    with sim.hold(_C.copy_stream("sim:0")):
        handle = tdcopier.start_copy_into(source, destination)
        handle.wait_staged()  # hangs if the caller does not help
    handle.get()
    assert destination.eq(3).all()


def test_a_caller_builds_the_tree_while_workers_wait_to_stage(sim, busy_workers, source):
    got: list[Any] = []
    with tdcopier.stats.time_steps():
        handle = tdcopier.start_copy([source], "sim:0")  # there is no buffer for it
        caller = threading.Thread(target=lambda: got.append(handle.get()))
        caller.start()
        assert becomes(lambda: handle.stats.steps.unflatten_us > 0)
    assert not handle.ready()
    busy_workers.release()
    caller.join()
    assert torch.equal(got[0][0].cpu(), source)


def test_a_tree_that_was_built_too_early_is_dropped_if_the_copy_fails(sim, busy_workers, source):
    torch.sim.synchronize(1)
    before = torch.sim.memory_allocated(1)
    handle = tdcopier.start_copy([source], "sim:1")
    sim.fail_transfer(1)
    for name in ("get", "wait", "get"):
        with pytest.raises(torch.AcceleratorError):
            getattr(handle, name)()
    torch.sim.synchronize(1)
    assert not [each for each in gc.get_referents(handle) if isinstance(each, list)]
    del handle
    assert torch.sim.memory_allocated(1) == before
