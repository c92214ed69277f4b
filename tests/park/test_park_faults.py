"""Errors and Ctrl-C at every point: the state is wholly resident or wholly parked, and usable."""

from __future__ import annotations

import gc
import itertools
import warnings
from typing import Any

import pytest
import torch
from interrupts import KINDS, Interrupter, in_time, interrupted_everywhere
from park_support import LARGE, assert_values, is_resident, step, trained, values_of
from sim_support import fresh as fresh
from torch import nn

import tdcopier
from tdcopier import _C
from tdcopier.sim import Fault

pytestmark = pytest.mark.sim

FAULTS = {
    "device memory": torch.OutOfMemoryError,
    "pinned memory": torch.AcceleratorError,
    "transfer": torch.AcceleratorError,
    "event": torch.AcceleratorError,
}


def armed(sim: Any, name: str, n: int) -> Fault:
    return {
        "device memory": lambda: sim.fail_device_allocation(n),
        "pinned memory": lambda: sim.fail_pinned_allocation(n),
        "transfer": lambda: sim.fail_transfer(n),
        "event": lambda: sim.fail_event_record(n),
    }[name]()


@pytest.fixture(autouse=True)
def cold(fresh: None) -> None:
    """Drops the staging buffers, so that they count as allocations."""
    _C.testing.drop_staging()


@pytest.mark.parametrize("fault", FAULTS)
def test_when_parking_fails_the_state_is_resident(sim, fault):
    for n in itertools.count(1):
        model, optimizer = trained("sim")
        expected = values_of(model, optimizer)
        with armed(sim, fault, n) as arming:
            try:
                parked = tdcopier.park([model, optimizer])
            except FAULTS[fault]:
                parked = None
        if parked is None:
            assert is_resident(model, optimizer)
            assert_values(expected, model, optimizer)
            parked = tdcopier.park([model, optimizer])
        assert not is_resident(model, optimizer)
        parked.resume()
        assert_values(expected, model, optimizer)
        step(model, optimizer, 3)
        if not arming.fired:
            break
    assert n > 1 or fault == "device memory"


@pytest.mark.parametrize("fault", FAULTS)
def test_when_resuming_fails_the_state_is_parked_and_can_be_resumed(sim, fault):
    for n in itertools.count(1):
        model, optimizer = trained("sim")
        expected = values_of(model, optimizer)
        parked = tdcopier.park([model, optimizer])
        parked.wait_parked()
        _C.testing.drop_staging()
        with armed(sim, fault, n) as arming:
            try:
                parked.resume()
            except FAULTS[fault]:
                assert parked.is_parked
                assert not is_resident(model, optimizer)
                parked.resume()
        assert not parked.is_parked
        assert_values(expected, model, optimizer)
        step(model, optimizer, 3)
        if not arming.fired:
            break
    assert n > 1


def test_resuming_without_memory_can_be_repeated_when_there_is_some(sim):
    state = [torch.full((LARGE,), float(n), device="sim") for n in range(4)]
    parked = tdcopier.park(state)
    parked.wait_parked()
    torch.sim.empty_cache()
    used = sim.memory_stats().allocated_bytes
    sim.set_memory_limit_bytes(0, used + 3 * 4 * LARGE)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            parked.resume()
        assert not is_resident(state)
    assert sim.memory_stats().allocated_bytes == used
    sim.set_memory_limit_bytes(0, None)
    parked.resume()
    assert [t.mean().item() for t in state] == [0, 1, 2, 3]


def test_an_error_of_the_device_while_it_reads_is_raised_by_every_wait(sim):
    state = [torch.full((LARGE,), float(n), device="sim") for n in range(2)]
    torch.sim.synchronize()
    with sim.fail_transfer(2, when="execution"):
        parked = tdcopier.park(state)
        for ask in (parked.wait_parked, parked.resume, parked.wait_parked, parked.resume):
            with pytest.raises(torch.AcceleratorError):
                ask()
            assert parked.is_parked
        assert parked.ready()
        assert not is_resident(state)
    del state, ask
    gc.collect()
    _C.testing.settle()


@pytest.mark.hazardous  # the memory of a failed device is used again
def test_an_error_of_the_device_while_it_writes_is_raised_by_its_streams(sim):
    state = [torch.full((LARGE,), float(n), device="sim") for n in range(2)]
    parked = tdcopier.park(state)
    parked.wait_parked()
    with sim.fail_transfer(2, direction="h2d", when="execution"):
        writing = _C.copy_stream("sim:0", "ordered")
        with sim.hold(writing):
            parked.resume()
            assert not writing.query()
        assert is_resident(state)
        assert not parked.is_parked
        with pytest.raises(torch.AcceleratorError):
            torch.sim.synchronize()
    for tensor in state:  # the next use works
        tensor.fill_(5)
    with tdcopier.parked(state):
        pass
    assert all(t.eq(5).all() for t in state)


@pytest.mark.hazardous  # the memory of a failed device is used again
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("fault", ["device memory", "the device"])
def test_a_dropped_handle_that_cannot_resume_keeps_the_values_for_the_next_call(sim, fault):
    state = [torch.full((LARGE,), 4.0, device="sim")]
    parked = tdcopier.park(state)
    parked.wait_parked()
    arming = (
        sim.fail_device_allocation(1)
        if fault == "device memory"
        else sim.fail_transfer(1, direction="h2d", when="execution")
    )
    with (
        arming,
        pytest.warns(RuntimeWarning, match="dropped while its tensors were parked"),
    ):
        del parked
    assert not is_resident(state)
    tdcopier.park([]).resume()
    assert state[0].eq(4).all()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_state_that_cannot_be_resumed_does_not_keep_another_from_being_parked(sim):
    torch.sim.empty_cache()
    sim.set_memory_limit_bytes("sim", torch.sim.memory_reserved() + (8 << 20))
    try:
        lost = torch.full((1 << 20,), 3.0, device="sim")
        handle = tdcopier.park([lost])
        handle.wait_parked()
        large = torch.full((3 << 19,), 4.0, device="sim")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the handle is dropped
            del handle
        with pytest.warns(RuntimeWarning, match="still parked.*out of memory"):
            parked = tdcopier.park([large])
        parked.wait_parked()
        torch.sim.empty_cache()
        tdcopier.park([torch.ones(3, device="sim")]).resume()  # resumes what was lost
        assert lost.eq(3).all()
    finally:
        sim.set_memory_limit_bytes("sim", None)
    parked.resume()
    assert large.eq(4).all()


# ---- Ctrl-C --------------------------------------------------------------------------------------

# An interrupt may strike in `__del__`, which cannot pass it on.
in_del_too = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Few(nn.Module):
    """A large tensor, small ones and a view: each one more has the same lines again."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.randn(LARGE))
        self.bias = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.randn(4, 5))
        self.register_buffer("lower", self.table[2:])


@in_del_too
@pytest.mark.parametrize("kind", KINDS)
def test_after_an_interrupted_call_the_state_is_resident_or_parked(sim, kind):
    model = Few().to("sim")
    model.lower = model.table[2:]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    (model.large.sum() + model.bias.sum()).backward()
    optimizer.step()
    expected = values_of(model, optimizer)

    def scene(interrupter: Interrupter) -> None:
        parked = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a handle is dropped
            with interrupter:
                parked = tdcopier.park([model, optimizer])
                parked.wait_parked()
                parked.ready()
                parked.resume()
            if parked is not None and not is_resident(model, optimizer):
                assert parked.is_parked
                in_time(parked.resume)
            del parked
            tdcopier.park([])  # resumes what an interrupt kept from being resumed
        assert is_resident(model, optimizer)
        assert_values(expected, model, optimizer)

    assert interrupted_everywhere(kind, scene) > 20


@in_del_too
@pytest.mark.parametrize("kind", KINDS)
def test_after_an_interrupted_block_the_state_is_resident(sim, kind):
    tensor = torch.full((LARGE,), 5.0, device="sim")

    def scene(interrupter: Interrupter) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with interrupter, tdcopier.parked(tensor):
                pass
            gc.collect()
            tdcopier.park([])
        assert tensor.eq(5).all()

    assert interrupted_everywhere(kind, scene) > 20
