"""What the tests of the simulated accelerator share: idle devices for each, and ways to wait.

They run in one process with all others, whose memory is in use for as long as they like: tests
measure what they change themselves. ``sim`` is a fixture, ``tdcopier.sim`` with two devices. The
fixtures here are imported as ``fresh as fresh``, which tells the linter that they are used.
"""

from __future__ import annotations

import faulthandler
import gc
import time
from collections.abc import Callable, Iterator
from types import ModuleType

import pytest
import torch

from tdcopier import _C
from tdcopier.sim import Gate, Hazard, HazardError

BRIEFLY = 0.03


@pytest.fixture(autouse=True)
def fresh(sim: ModuleType) -> Iterator[None]:
    """Each test starts and ends with idle devices, no limits, empty caches and zero counts.

    Memory that others have in use stays in use: no garbage is collected during the test.
    """

    def tidy() -> None:
        for index in reversed(range(torch.sim.device_count())):
            torch.sim.set_stream(torch.sim.default_stream(index))  # and at last device 0 is current
            sim.set_memory_limit_bytes(index, None)
            sim.synchronize(index)
        torch.sim.empty_cache()
        _C.drop_held_memory()
        sim.empty_pinned_cache()
        sim.reset_counts()
        for index in range(torch.sim.device_count()):
            torch.sim.reset_peak_memory_stats(index)
        sim.reset_peak_pinned_bytes()

    # Who waits for a stream that it holds itself waits for ever: the process ends with a traceback.
    faulthandler.dump_traceback_later(60, exit=True)
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
    """A gate that is open at the end of the test, so that a failure leaves no stream waiting."""
    gate = sim.Gate()
    yield gate
    gate.open()


def marker(stream: torch.Stream) -> torch.Event:
    """An event that tells when what the stream has now is done."""
    event = torch.sim.Event(stream.device)
    event.record(stream)
    return event


def becomes(condition: Callable[[], bool], within: float = 10.0) -> bool:
    """Whether the condition becomes true in time. A short time shows that something waits."""
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            return False
    return True


def is_reused(address: int) -> bool:
    """Whether a tensor of 1000 floats on the current device is given this address, sooner or later.

    Those that are given others are kept, so that each attempt sees one block more.
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
