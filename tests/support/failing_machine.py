"""Adds faults and interrupts to the steps of a random program."""

from __future__ import annotations

import contextlib
import signal
from functools import partial
from typing import Any

import pytest
import torch
from call_model import launch, prepare
from copies_machine import Copies
from copy_model import Copy, CopyPlan
from fault_scenarios import Interrupting, Pressed
from hypothesis import strategies as st
from hypothesis.stateful import multiple, precondition, rule
from model_memory import DEVICES
from not_yet import NOT_YET
from random_programs import FAULTS, lanes, plans, plans_of

import tdcopier


class FailingCopies(Copies):
    """The rules of `Copies`, with faults and interrupts."""

    may_interrupt = False

    @rule(
        target=Copies.copies, plan=plans, lane=lanes, kind=st.sampled_from(list(FAULTS)),
        n=st.integers(1, 5), first=st.sampled_from(["get", "wait", "wait_staged", "poll"]),
    )  # fmt: skip
    def start_one_that_fails(self, plan: CopyPlan, lane: int, kind: str, n: int, first: str) -> Any:
        """Starts a copy under a fault, which may strike another copy that workers still stage."""
        fault = FAULTS[kind]
        world = self.world
        self.join_threads()
        self.close_passes()
        if fault.lasts:  # streams break, so earlier work must be done
            self.drain()
        world.counts_are_known = False
        with world.on(lane):
            copy = prepare(world, plan)
            copy.may_recover = fault.may_recover
            if fault.lasts:
                world.synchronize()
            for other in (copy, *self.live):
                if not other.is_enqueued and fault.error is not None:
                    other.fallible |= {fault.error}
            with fault.arm(self.sim, n) as armed:
                world.attempt(copy, partial(launch, world, copy))
                if copy.handle is None:
                    pass
                elif first == "poll":
                    self.poll_often(copy)
                elif first == "wait_staged":
                    world.wait_staged(copy)
                elif first == "wait":
                    world.ask(copy, copy.handle.wait)
                if copy.handle is not None and (fault.lasts or first == "get"):
                    world.get(copy)
            if fault.lasts:  # a transfer that was chosen but has not run still fails
                for device in DEVICES:
                    with contextlib.suppress(RuntimeError):
                        torch.sim.synchronize(device)
                world.synchronize()
            self.check_what_failed(copy)
            assert armed.fired or copy.failed is None
            world.synchronize()
            assert copy.handle is None or copy.handle.ready()  # without polling
            again = prepare(world, plan)
            launch(world, again)
            world.read_now(again, again.handle.get())
        self.staging_is_within_its_limit()
        if copy.handle is None:
            return multiple()
        self.live.append(copy)
        return copy

    def check_what_failed(self, copy: Copy) -> None:
        """Checks that each call reports the failure, and that the caller may write its memory."""
        world = self.world
        for call in ("get", "wait", "get") if copy.handle is not None else ():
            succeeded, result = world.ask(copy, getattr(copy.handle, call))
            if succeeded:
                world.read_now(copy, result)
        if copy.handle is not None:
            world.wait_staged(copy)
        if copy.failed is not None:
            world.take_back(copy)

    @precondition(lambda self: self.passes)
    @rule(
        which=st.integers(0, 3), lane=lanes, n=st.integers(1, 3),
        direction=st.sampled_from(["h2d", "d2h", "d2d"]),
    )  # fmt: skip
    def fail_while_prefetching(self, which: int, lane: int, n: int, direction: Any) -> None:
        """Makes a transfer fail: its batch is reported in its place, and the pass goes on."""
        self.join_threads()
        for copy in self.live:
            if not copy.is_enqueued:
                copy.fallible |= {torch.AcceleratorError}
        for passing in self.passes:
            passing.is_fallible = True
        with self.sim.fail_transfer(n, direction=direction):
            self.take_batch(which, lane, late=True)

    @precondition(lambda self: "filling_a_device_is_interrupted" not in NOT_YET)
    @rule(plan=plans_of(["copy_into"]), lane=lanes)
    def interrupt_a_call(self, plan: CopyPlan, lane: int) -> None:
        """Interrupts a call: nothing may write the destinations after it, as there is no handle."""
        self.world.counts_are_known = False
        with self.world.on(lane):
            copy = prepare(self.world, plan)
            beyond = torch.zeros(3)
            source = [copy.tree, beyond.as_subclass(Interrupting)]
            with pytest.raises(KeyboardInterrupt):
                tdcopier.start_copy_into(source, [copy.destination, beyond.clone()])
            self.world.take_back(copy)

    @rule(copy=Copies.copies, lane=lanes)
    def interrupt_a_wait(self, copy: Copy, lane: int) -> None:
        """Raises in a signal handler while `get()` waits, or after it has returned."""
        before = signal.signal(signal.SIGUSR1, self.on_signal)
        self.may_interrupt = True
        thread = self.world.schedule.thread(signal.raise_signal, signal.SIGUSR1)
        with contextlib.suppress(Pressed):
            with contextlib.suppress(Pressed), self.world.on(lane):
                self.world.get(copy)
            self.may_interrupt = False
        thread.join()
        signal.signal(signal.SIGUSR1, before)

    def on_signal(self, number: int, frame: Any) -> None:
        if self.may_interrupt:
            self.may_interrupt = False
            raise Pressed
