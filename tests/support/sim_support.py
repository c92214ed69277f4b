"""Shared by the tests of the simulated device: idle devices for each test, and ways to wait.

They share a process with all other tests, whose memory may stay in use, so tests measure only what
they change themselves. ``sim`` is a fixture: ``tdcopier.sim`` with two devices. The fixtures here
are imported as ``fresh as fresh``, which tells the linter that they are used.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from tdcopier import _C
from tdcopier.sim import Gate, Hazard, HazardError

LONGEST_TEST_S = float(os.environ.get("TDCOPIER_TEST_LONGEST_S", "110"))

BRIEFLY = 0.03
"""Within this, a thread that must wait would have gone on, also on a busy machine."""


@pytest.fixture(autouse=True)
def fresh(sim: ModuleType) -> Iterator[None]:
    """Starts and ends each test with idle devices, no limits, empty caches and zero counts.

    Memory of other tests stays in use: no garbage is collected during the test.
    """

    def tidy() -> None:
        for index in reversed(range(torch.sim.device_count())):
            torch.sim.set_stream(torch.sim.default_stream(index))  # device 0 is current at the end
            sim.set_memory_limit_bytes(index, None)
            sim.synchronize(index)
        _C.testing.settle()
        _C.reclaim()
        torch.sim.empty_cache()
        _C.testing.drop_deferred_memory()
        sim.empty_pinned_cache()
        sim.reset_counts()
        for index in range(torch.sim.device_count()):
            torch.sim.reset_peak_memory_stats(index)
        sim.reset_peak_pinned_bytes()

    # A thread that waits for a stream it holds itself hangs: end the process with a traceback.
    faulthandler.dump_traceback_later(LONGEST_TEST_S, exit=True)
    collecting = gc.isenabled()
    gc.disable()
    try:
        tidy()
        yield
        tidy()
    finally:
        if collecting:
            gc.enable()
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def gate(sim: ModuleType, fresh: None) -> Iterator[Gate]:
    """Makes a gate that opens when the test ends, so that a failure leaves no stream waiting."""
    gate = sim.Gate()
    yield gate
    gate.open()


def marker(stream: torch.Stream) -> torch.Event:
    """Records an event that is done when the stream's present work is done."""
    event = torch.sim.Event(stream.device)
    event.record(stream)
    return event


def becomes(condition: Callable[[], bool], within: float = 10.0) -> bool:
    """Whether the condition becomes true in time. A short time shows that a call waits."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0002)  # so that it takes no processor from the threads that it waits for
    return True


def is_reused(address: int) -> bool:
    """Whether a tensor of 1000 floats on the current device is eventually given this address.

    Tensors at other addresses are kept, so that each attempt gets another block.
    """
    kept = []

    def found() -> bool:
        kept.append(torch.empty(1000, device="sim"))
        return kept[-1].data_ptr() == address

    return becomes(found, within=2.0)


def differences(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(new - old for new, old in zip(now, before, strict=True))


def pinned(*values: float) -> torch.Tensor:
    return torch.tensor(values).pin_memory()


def hazards_of(
    sim: ModuleType, program: Callable[[], object], *, leaks: bool = False
) -> tuple[Hazard, ...]:
    try:
        with sim.detect(leaks=leaks):
            program()
    except HazardError as error:
        return error.hazards
    return ()
