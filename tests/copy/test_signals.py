"""Ctrl-C while a call waits: it is raised at once, and no memory is left without an owner."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tdcopier
from tdcopier import _C

pytestmark = pytest.mark.sim
LIMIT_S = 2.0  # on a loaded host; what they interrupt does not end by itself


class Pressed(Exception):
    """The exception that the signal handler of the tests raises."""


@pytest.fixture
def press() -> Iterator[Callable[[], float]]:
    """Returns a function that signals this process after a moment, and returns that time."""

    def raise_it(*arguments: Any) -> None:
        raise Pressed

    before = signal.signal(signal.SIGUSR1, raise_it)
    timers = []

    def send() -> float:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))
        timers.append(timer)
        timer.start()
        return time.monotonic() + 0.1

    yield send
    for timer in timers:
        timer.join()
    signal.signal(signal.SIGUSR1, before)


FILLS = {
    "copy_into": lambda source, table: tdcopier.copy_into(source, table),
    "scatter": lambda source, table: tdcopier.scatter(source, table, torch.arange(4)),
}


@pytest.mark.parametrize("fill", FILLS)
def test_a_signal_ends_a_blocking_fill_after_its_last_write(sim, device, press, fill):
    source, destination = torch.ones(4, 10, device=device), torch.zeros(4, 10)
    stream = torch.sim.Stream(device=device)
    torch.sim.synchronize()
    held = sim.hold(stream)
    held.__enter__()
    release = threading.Timer(0.4, held.__exit__, (None, None, None))
    release.start()
    press()
    with torch.sim.stream(stream), pytest.raises(Pressed):
        FILLS[fill](source, destination)
    assert destination.eq(1).all()
    destination.fill_(3)
    release.join()
    torch.sim.synchronize()
    assert destination.eq(3).all()


def test_a_signal_ends_the_wait_for_consumers(sim, device, press):
    stream = torch.sim.Stream(device=device)
    torch.sim.synchronize()
    with sim.hold(stream):
        with torch.sim.stream(stream):
            for _ in range(4):
                tdcopier.start_copy([torch.ones(3)], device).wait()
        at = press()
        with pytest.raises(Pressed):
            tdcopier.start_copy([torch.ones(3)], device)
        assert time.monotonic() - at < LIMIT_S
    assert tdcopier.copy([torch.ones(3)], device)[0].eq(1).all()


def test_a_handler_that_raises_nothing_runs_on_the_callers_streams(sim, device):
    seen = []

    def look(*arguments: Any) -> None:
        seen.append(torch.sim.current_stream(device))

    source, destination = torch.ones(20_000_000), torch.zeros(20_000_000, device=device)
    before = signal.signal(signal.SIGUSR1, look)
    stream = torch.sim.Stream(device=device)
    torch.sim.synchronize()
    current = torch.sim.current_stream(device)
    hold = sim.hold(stream)
    try:
        with torch.sim.stream(stream):
            handle = tdcopier.start_copy_into([source], [destination])
        for delay, act in (
            (0.05, lambda: os.kill(os.getpid(), signal.SIGUSR1)),
            (0.2, hold.release),
        ):
            threading.Timer(delay, act).start()
        handle.get()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [current]


@pytest.mark.parametrize("route", [("cpu", "sim:0"), ("sim:0", "cpu"), ("cpu", "cpu")])
@pytest.mark.parametrize("after_ms", [0.2, 1])
def test_a_fill_that_a_signal_ends_between_its_waits_writes_no_more(sim, route, after_ms):
    source_device, target = route
    leaves = [torch.ones(4 << 20), *(torch.ones(8) for _ in range(10_000))]
    source = [leaf.to(source_device) for leaf in leaves]
    destination = [torch.zeros_like(leaf, device=target) for leaf in leaves]
    torch.sim.synchronize("sim:0")
    kind = "from_device" if target == "cpu" else "ordered"
    armed = True

    def raise_it(*arguments: Any) -> None:
        if armed:
            raise Pressed

    before = signal.signal(signal.SIGALRM, raise_it)
    held = sim.hold(_C.copy_stream("sim:0", kind))
    held.__enter__()
    release = threading.Timer(0.2, held.__exit__, (None, None, None))
    release.start()
    handle = None
    try:
        signal.setitimer(signal.ITIMER_REAL, after_ms / 1000)
        handle = tdcopier.start_copy_into(source, destination)
    except Pressed:
        destination[0].fill_(3)
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        release.join()
        signal.signal(signal.SIGALRM, before)
    if handle is None:
        torch.sim.synchronize("sim:0")
        assert destination[0].eq(3).all()
    else:
        assert handle.get()[0].eq(1).all()


def test_a_second_signal_ends_the_wait_for_a_fill_that_the_first_has_ended(sim, press):
    source, destination = torch.ones(20_000_000), torch.zeros(20_000_000, device="sim:0")
    torch.sim.synchronize("sim:0")
    with sim.hold(_C.copy_stream("sim:0", "ordered")):
        press()
        second = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGUSR1))
        second.start()
        with pytest.raises(Pressed):
            tdcopier.start_copy_into([source], [destination], use_background_thread=False)
        second.join()
    torch.sim.synchronize("sim:0")
