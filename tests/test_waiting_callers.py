"""Who waits for a copy works on it: a copy is not held up by workers that are busy or asleep."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tdcopier
from tdcopier import _C

pytestmark = pytest.mark.sim
ELEMENTS = 1 << 20
"""4 MiB: more than is staged in the call, and several windows."""


@pytest.fixture
def busy_workers(sim: Any) -> Iterator[Any]:
    """Every worker waits for the one staging buffer of the first device, until it is released."""
    tdcopier.set_staging_limit_bytes(_C.STAGING_BUFFER_BYTES)
    torch.sim.synchronize(0)
    hold = sim.hold(_C.copy_stream("sim:0"))
    stuck = tdcopier.start_copy(torch.ones(16 * ELEMENTS), "sim:0")
    try:
        yield hold
    finally:
        hold.release()
        assert stuck.get().sum().item() == 16 * ELEMENTS


@pytest.fixture
def source() -> torch.Tensor:
    return torch.arange(ELEMENTS, dtype=torch.int32)


@pytest.mark.parametrize("call", ["get", "wait"])
def test_a_caller_begins_a_copy_that_no_worker_has_begun(busy_workers, source, call):
    handle = tdcopier.start_copy(source, "sim:1")
    assert handle.stats.background
    assert not handle.ready()
    moved = getattr(handle, call)()  # would hang here
    assert torch.equal(moved.cpu(), source)


def test_sources_are_read_by_the_caller_that_wants_to_write_them(busy_workers, source):
    handle = tdcopier.start_copy(source, "sim:1")
    handle.wait_staged()  # would hang here
    expected = source.clone()
    source.zero_()
    assert torch.equal(handle.get().cpu(), expected)


def test_a_caller_fills_memory_that_exists(busy_workers, source):
    destination = torch.zeros(ELEMENTS, dtype=torch.int32, device="sim:1")
    tdcopier.copy_into(source, destination).get()  # would hang here
    assert torch.equal(destination.cpu(), source)


def test_many_callers_wait_for_one_copy(busy_workers, source):
    handle = tdcopier.start_copy(source, "sim:1")
    together = threading.Barrier(6)
    results = []

    def wait_for_it() -> None:
        together.wait()
        results.append(handle.get())

    threads = [threading.Thread(target=wait_for_it) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert all(result is results[0] for result in results)
    assert torch.equal(results[0].cpu(), source)


def test_a_caller_that_fails_hands_its_failure_on(sim, busy_workers, source):
    handle = tdcopier.start_copy(source, "sim:1")
    sim.fail_device_allocation(1)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            handle.get()
    assert torch.equal(tdcopier.copy(source, "sim:1").cpu(), source)


def test_a_caller_under_a_mode_leaves_the_copy_to_the_workers(busy_workers, source):
    """What the engine does is not the mode's business."""
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
    assert thread.is_alive()  # nobody works on it
    busy_workers.release()
    thread.join()
    assert seen == []
    assert torch.equal(moved[0].cpu(), source)
