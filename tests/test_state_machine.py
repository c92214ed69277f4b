"""Random programs of copies, each in one random order of events, against a model of the host's."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from copy_model import (
    DEVICES,
    Copy,
    CopyPlan,
    Tables,
    World,
    staging_bytes,
)
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from random_programs import FAULTS, Step, devices, lanes, plans, programs, sizes
from stage import small_limits

import tdcopier
from tdcopier import _C

pytestmark = pytest.mark.sim

# A longer run: TDCOPIER_TEST_EXAMPLES=5000 make test-py. Its programs are new ones each time.
EXAMPLES = os.environ.get("TDCOPIER_TEST_EXAMPLES")
TIMEOUT_S = float(os.environ.get("TDCOPIER_PLAY_TIMEOUT_S", "30"))
BUFFER_BYTES = _C.STAGING_BUFFER_BYTES
MOST_POLLS = 50  # whoever else there is may be picked as seldom as the seed likes


class Copies(RuleBasedStateMachine):
    """Rules are what a program may do next. A failure leaves the schedule as it is reported."""

    copies = Bundle("copies")
    sim: ModuleType
    tables: Tables

    def __init__(self) -> None:
        super().__init__()
        self.stack: contextlib.ExitStack | None = None

    @initialize(seed=st.integers(0, 2**64 - 1), buffers=st.integers(1, 2))
    def begin(self, seed: int, buffers: int) -> None:
        for device in DEVICES:
            torch.sim.synchronize(device)
        # What an earlier program has left would be found by this one.
        torch.sim.empty_cache()
        self.sim.empty_pinned_cache()
        self.allocated_before = self.allocated()
        self.live: list[Copy] = []
        self.threads: list[Any] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.sim.poison())
            stack.enter_context(self.sim.detect(leaks=True))
            stack.enter_context(small_limits(staging_buffers=buffers))
            stack.callback(tdcopier.set_run_ahead_limit, 4)
            self.staging_ceiling = buffers * BUFFER_BYTES
            staging_bytes()  # what is beyond the limit is given up now
            schedule = stack.enter_context(self.sim.schedule(seed, timeout_s=TIMEOUT_S))
            self.world = World(self.sim, self.tables, schedule)
            self.stack = stack.pop_all()

    def allocated(self) -> list[int]:
        return [self.sim.memory_stats(device).allocated_bytes for device in DEVICES]

    # ---- copies and what is asked of them --------------------------------------------------------

    @rule(target=copies, plan=plans, lane=lanes, then=st.sampled_from(["go on", "write", "drop"]))
    def start(self, plan: CopyPlan, lane: int, then: str) -> Copy:
        with self.world.on(lane):
            copy = self.world.prepare(plan)
            self.world.launch(copy)
            if then == "write":
                self.world.wait_staged(copy)
                self.world.overwrite(copy)
        if then == "drop":
            self.reuse_memory_of_sources(copy)
            self.staging_is_within_its_limit()
        self.live.append(copy)
        return copy

    @rule(copy=copies)
    def poll(self, copy: Copy) -> None:
        if copy.handle.ready() and not copy.fallible:
            self.world.note_done(copy)

    @rule(copy=copies, lane=lanes)
    def poll_for_a_while(self, copy: Copy, lane: int) -> None:
        self.poll_often(copy)
        with self.world.on(lane):
            succeeded, result = self.world.get(copy)
            if succeeded:
                self.world.read_now(copy, result)

    def poll_often(self, copy: Copy) -> None:
        for _ in range(MOST_POLLS):
            if copy.handle.ready():
                return
            self.world.schedule.point()  # `ready()` keeps the GIL, which other threads need

    @rule(copy=copies, lane=lanes)
    def get(self, copy: Copy, lane: int) -> None:
        with self.world.on(lane):
            succeeded, result = self.world.get(copy)
            if succeeded:
                self.world.read_now(copy, result)

    @rule(copy=copies, lane=lanes, named=st.booleans(), late=st.booleans())
    def wait(self, copy: Copy, lane: int, named: bool, late: bool) -> None:
        """For the current stream, or for one that is named."""
        stream = self.world.lanes[lane].get(copy.plan.target)
        with self.world.on(lane) if not named else contextlib.nullcontext():
            call = partial(copy.handle.wait, stream) if named else copy.handle.wait
            succeeded, result = self.world.ask(copy, call)
        if succeeded:
            with self.world.on(lane):
                (self.world.read_late if late else self.world.read_now)(copy, result)

    @rule(copy=copies, lane=lanes)
    def wait_staged_and_overwrite(self, copy: Copy, lane: int) -> None:
        with self.world.on(lane):
            self.world.wait_staged(copy)
            self.world.overwrite(copy)

    @rule(copy=copies, lane=lanes)
    def overwrite_host_sources_after_wait(self, copy: Copy, lane: int) -> None:
        if copy.plan.target == "cpu" or copy.places != {"cpu"}:
            return
        with self.world.on(lane):
            succeeded, result = self.world.ask(copy, copy.handle.wait)
            if succeeded:
                self.world.overwrite(copy)
                self.world.read_late(copy, result)

    @rule(copy=copies, lane=lanes, other=lanes)
    def overwrite_sources_when_done(self, copy: Copy, lane: int, other: int) -> None:
        """On any stream: no order is needed any more."""
        with self.world.on(lane):
            succeeded, result = self.world.get(copy)
        if not succeeded:
            return
        with self.world.on(other):
            self.world.overwrite(copy)
        with self.world.on(lane):
            self.world.read_late(copy, result)

    @rule(copy=copies)
    def drop_sources(self, copy: Copy) -> None:
        """Their memory is used again at once."""
        self.reuse_memory_of_sources(copy)

    def reuse_memory_of_sources(self, copy: Copy) -> None:
        on_host = [source.base.nbytes for source in copy.sources if source.place == "cpu"]
        copy.sources = []
        self.world.churn_host(on_host)

    @rule(copy=consumes(copies))
    def drop_handle(self, copy: Copy) -> None:
        self.forget(copy)

    @rule(copy=consumes(copies), lane=lanes, other=lanes)
    def drop_all_but_the_result(self, copy: Copy, lane: int, other: int) -> None:
        """It is read when the handle is gone, and dropped when it has not been read yet."""
        with self.world.on(lane):
            succeeded, result = self.world.ask(copy, copy.handle.wait)
            copy.handle = copy.handle if copy.is_done else None
            if succeeded:
                self.world.read_late(copy, result)
        del result
        self.forget(copy)
        if copy.plan.target != "cpu":
            self.world.churn(other, copy.plan.target, 512)

    def forget(self, copy: Copy) -> None:
        self.world.drop(copy)
        self.live.remove(copy)

    # ---- the rest of the program -----------------------------------------------------------------

    @rule(lane=lanes, device=devices, size=sizes)
    def churn(self, lane: int, device: str, size: int) -> None:
        self.world.churn(lane, device, size)

    @rule(size=sizes)
    def pin_memory(self, size: int) -> None:
        self.world.pin(size)

    @rule(limit=st.integers(1, 4))
    def change_run_ahead_limit(self, limit: int) -> None:
        tdcopier.set_run_ahead_limit(limit)

    @rule(buffers=st.integers(1, 3))
    def change_staging_limit(self, buffers: int) -> None:
        tdcopier.set_staging_limit_bytes(buffers * BUFFER_BYTES)
        # What is in use stays in use: a lower limit holds once that has come back.
        self.staging_ceiling = max(self.staging_ceiling, buffers * BUFFER_BYTES)

    @rule()
    def staging_is_within_its_limit(self) -> None:
        assert staging_bytes() <= self.staging_ceiling

    @rule()
    def drain(self) -> None:
        self.join_threads()
        for copy in self.live:
            self.world.wait_staged(copy)
        self.world.drain()

    # ---- threads ---------------------------------------------------------------------------------

    @rule(program=programs)
    def run_in_a_thread(self, program: list[Step]) -> None:
        def run() -> None:
            for step in program:
                self.run_step(step)

        self.threads.append(self.world.schedule.thread(run))

    def run_step(self, step: Step) -> None:
        world = self.world
        with world.on(step.lane):
            copy = world.prepare(step.plan)
            world.launch(copy)
            if step.how == "drop":
                world.drop(copy)
                return
            if step.how == "wait":
                result = copy.handle.wait()
                world.read_late(copy, result)
            if step.how == "poll":
                self.poll_often(copy)
            _, result = world.get(copy)
            world.read_now(copy, result)

    @rule(copy=copies, lane=lanes)
    def share_with_a_thread(self, copy: Copy, lane: int) -> None:
        """Whatever the program does to it meanwhile."""
        handle, shared = copy.handle, Copy(copy.plan, expected=copy.expected)
        shared.fallible = copy.fallible

        def run() -> None:
            with self.world.on(lane):
                succeeded, result = self.world.ask(shared, handle.wait)
                if succeeded:
                    self.world.read_late(shared, result)

        self.threads.append(self.world.schedule.thread(run))

    @rule(target=copies, plan=plans, lane=lanes, device=devices)
    def get_what_a_thread_lets_go(self, plan: CopyPlan, lane: int, device: str) -> Copy:
        """Whoever waits must leave the GIL to the thread that it waits for."""
        with self.sim.hold(_C.copy_stream(device)) as hold, self.world.on(lane):
            thread = self.world.schedule.thread(hold.release)
            copy = self.world.prepare(plan)
            self.world.launch(copy)
            self.live.append(copy)
            _, result = self.world.get(copy)
            self.world.read_now(copy, result)
            thread.join()
        return copy

    @precondition(lambda self: self.threads)
    @rule()
    def join_a_thread(self) -> None:
        self.threads.pop(0).join()

    def join_threads(self) -> None:
        while self.threads:
            self.threads.pop(0).join()

    # ---- failures --------------------------------------------------------------------------------

    @rule(
        target=copies, plan=plans, lane=lanes, kind=st.sampled_from(list(FAULTS)),
        n=st.integers(1, 5), first=st.sampled_from(["get", "wait", "wait_staged", "poll"]),
    )  # fmt: skip
    def start_one_that_fails(
        self, plan: CopyPlan, lane: int, kind: str, n: int, first: str
    ) -> Copy:
        """It may be another one that fails, if workers are still at it."""
        arm, error, lasts = FAULTS[kind]
        world = self.world
        self.join_threads()
        if lasts:  # streams go down, and what they had been given before must be done
            self.drain()
        world.counts_are_known = False
        with world.on(lane):
            copy = world.prepare(plan)
            if lasts:
                world.synchronize()
            for other in (copy, *self.live):
                if not other.is_enqueued:
                    other.fallible |= {error}
            with arm(self.sim, n) as fault:
                world.launch(copy)
                if first == "poll":
                    self.poll_often(copy)
                elif first == "wait_staged":
                    world.wait_staged(copy)
                elif first == "wait":
                    world.ask(copy, copy.handle.wait)
                if lasts or first == "get":
                    world.get(copy)
            if lasts:  # a transfer that was chosen and has not run yet fails nevertheless
                for device in DEVICES:
                    with contextlib.suppress(RuntimeError):
                        torch.sim.synchronize(device)
                world.synchronize()
            for ask in (copy.handle.get, copy.handle.wait, copy.handle.get):
                succeeded, result = world.ask(copy, ask)
                if succeeded:
                    world.read_now(copy, result)
            if not fault.fired:
                assert copy.failed is None
            world.wait_staged(copy)
            world.synchronize()
            assert copy.handle.ready()  # at once
            again = world.prepare(plan)
            world.launch(again)
            world.read_now(again, again.handle.get())
        self.staging_is_within_its_limit()
        self.live.append(copy)
        return copy

    # ---- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        self.drain()
        for copy in self.live:
            succeeded, result = self.world.get(copy)
            if succeeded:
                self.world.read_now(copy, result)
        self.world.drain()
        self.world.check_counts()

    def let_go(self) -> None:
        for copy in self.live:
            copy.let_go()
        self.live.clear()
        self.threads.clear()
        self.world.clear()

    def teardown(self) -> None:
        if self.stack is None:
            return
        failure = sys.exc_info()[1]
        stack, self.stack = self.stack, None
        if failure is None:
            with stack:
                try:
                    self.finish()
                finally:
                    self.let_go()
            del stack, self.world  # the schedule has its threads, and these what they refer to
            self.check_that_memory_is_given_back()
            return
        # The failure is what is reported; what its frames refer to would be freed at any time.
        traceback.clear_frames(failure.__traceback__)
        self.let_go()
        del self.world
        stack.__exit__(type(failure), failure, failure.__traceback__)
        gc.collect()

    def check_that_memory_is_given_back(self) -> None:
        for device in DEVICES:
            torch.sim.synchronize(device)
        if self.allocated() != self.allocated_before:
            gc.collect()
        assert self.allocated() == self.allocated_before


@pytest.mark.timeout(900)  # a failure is shrunk before it is told
def test_random_programs_of_copies_behave_as_to_does_in_any_order_of_events(sim):
    Copies.sim, Copies.tables = sim, Tables()
    run_state_machine_as_test(
        Copies,
        settings=settings(
            max_examples=int(EXAMPLES or 400),
            stateful_step_count=30,
            derandomize=EXAMPLES is None,
            database=None,
            deadline=None,
            print_blob=True,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        ),
    )
