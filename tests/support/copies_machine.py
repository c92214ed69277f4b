"""The steps that a random program of copies may take, and the invariants at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import sys
import traceback
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from call_model import launch, prepare
from copy_model import LANES, Copy, CopyPlan, World, staging_bytes
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    multiple,
    precondition,
    rule,
)
from model_memory import DEVICES, Tables
from prefetch_model import Pass, PassPlan
from random_programs import (
    Step,
    devices,
    lanes,
    pairs_of_plans,
    pass_plans,
    plans,
    programs,
    sizes,
)
from scenario_world import one_processor, small_limits
from scheduled_reader import scheduled_reader

import tdcopier
from tdcopier import _C

TIMEOUT_S = float(os.environ.get("TDCOPIER_PLAY_TIMEOUT_S", "30"))
BUFFER_BYTES = _C.STAGING_BUFFER_BYTES
LEAST_BUFFERS = 3  # each use may have one, whatever the limit
MOST_POLLS = 50  # the seed may rarely pick the other threads


def staging_ceiling(buffers: int) -> int:
    """Returns the most staging memory in bytes that a limit of this many buffers allows."""
    return max(buffers, LEAST_BUFFERS) * BUFFER_BYTES


class Copies(RuleBasedStateMachine):
    """The rules of a random program. A failure leaves the schedule as it is reported."""

    copies = Bundle("copies")
    sim: ModuleType
    tables: Tables

    def __init__(self) -> None:
        super().__init__()
        self.stack: contextlib.ExitStack | None = None

    @initialize(
        target=copies, seed=st.integers(0, 2**64 - 1), buffers=st.integers(1, 4),
        pair=pairs_of_plans, lane=lanes, passing=st.none() | pass_plans,
    )  # fmt: skip
    def begin(
        self, seed: int, buffers: int, pair: list[CopyPlan], lane: int, passing: PassPlan | None
    ) -> Any:
        """Starts copies of two features before anything else."""
        assert len({plan.feature for plan in pair}) >= 2
        for device in DEVICES:
            torch.sim.synchronize(device)
        # Otherwise this program would reuse memory that an earlier one freed.
        torch.sim.empty_cache()
        self.sim.empty_pinned_cache()
        self.allocated_before = self.allocated()
        self.live: list[Copy] = []
        self.threads: list[Any] = []
        self.passes: list[Pass] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(one_processor())
            stack.enter_context(self.sim.poison())
            stack.enter_context(self.sim.detect(leaks=True))
            stack.enter_context(small_limits(staging_buffers=buffers))
            stack.callback(tdcopier.limits.set_run_ahead, 4)
            self.staging_ceiling = staging_ceiling(buffers)
            staging_bytes()  # releases buffers over the limit now
            schedule = stack.enter_context(self.sim.schedule(seed, timeout_s=TIMEOUT_S))
            stack.enter_context(scheduled_reader(schedule))
            self.world = World(self.sim, self.tables, schedule)
            self.stack = stack.pop_all()
        if passing is not None:
            self.begin_pass(passing, lane)
        return multiple(
            *(self.start(plan, (lane + i) % LANES, "go on") for i, plan in enumerate(pair))
        )

    def allocated(self) -> list[int]:
        return [self.sim.memory_stats(device).allocated_bytes for device in DEVICES]

    # ---- copies and calls on their handles -------------------------------------------------------

    @rule(
        target=copies, plan=plans, lane=lanes,
        then=st.sampled_from(["go on", "write", "write after wait", "drop"]),
    )  # fmt: skip
    def start(self, plan: CopyPlan, lane: int, then: str) -> Copy:
        with self.world.on(lane):
            copy = prepare(self.world, plan)
            launch(self.world, copy)
            if then == "write":
                self.world.wait_staged(copy)
                self.world.overwrite(copy)
            elif then == "write after wait":
                self.write_after_wait(copy)
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
        """Waits on the current stream, or on one that is passed."""
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
    def overwrite_sources_after_wait(self, copy: Copy, lane: int) -> None:
        with self.world.on(lane):
            self.write_after_wait(copy)

    def write_after_wait(self, copy: Copy) -> None:
        succeeded, result = self.world.ask(copy, copy.handle.wait)
        if succeeded:
            self.world.overwrite_after_wait(copy)
            self.world.read_late(copy, result)

    @rule(target=copies, copy=consumes(copies), lane=lanes)
    def start_again(self, copy: Copy, lane: int) -> Any:
        """Copies the same plan into the same destinations as soon as the last result was read."""
        world = self.world
        if copy.is_shared:
            self.join_threads()
        with world.on(lane):
            succeeded, result = world.ask(copy, copy.handle.wait)
            if succeeded:
                world.read_late(copy, result)
            del result
            for reader in copy.readers:
                torch.sim.current_stream(reader.device).wait_stream(reader)
            again = prepare(world, copy.plan, like=copy if succeeded else None)
            self.forget(copy)
            launch(world, again)
        self.live.append(again)
        return again

    @rule(copy=copies, lane=lanes, other=lanes)
    def overwrite_sources_when_done(self, copy: Copy, lane: int, other: int) -> None:
        """Overwrites the sources on any stream: a copy that is done needs no ordering."""
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
        """Drops the sources, so that their memory is reused at once."""
        self.reuse_memory_of_sources(copy)

    def reuse_memory_of_sources(self, copy: Copy) -> None:
        on_host = [source for source in copy.sources if source.place == "cpu"]
        pageable = [source.base.nbytes for source in on_host if not source.is_pinned]
        pinned = [source.base.nbytes for source in on_host if source.is_pinned]
        copy.sources = []
        del on_host
        self.world.churn_host(pageable)
        for size in pinned:
            self.world.pin(size)

    @rule(copy=consumes(copies))
    def drop_handle(self, copy: Copy) -> None:
        self.forget(copy)

    @rule(copy=consumes(copies), lane=lanes, other=lanes)
    def drop_all_but_the_result(self, copy: Copy, lane: int, other: int) -> None:
        """Drops the handle, enqueues a read of the result, and drops the result at once."""
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
        tdcopier.limits.set_run_ahead(limit)

    @rule(buffers=st.integers(1, 6))
    def change_staging_limit(self, buffers: int) -> None:
        tdcopier.limits.set_staging_bytes(buffers * BUFFER_BYTES)
        # Buffers in use stay in use: a lower limit applies only once they are returned.
        self.staging_ceiling = max(self.staging_ceiling, staging_ceiling(buffers))

    @rule()
    def staging_is_within_its_limit(self) -> None:
        assert staging_bytes() <= self.staging_ceiling

    @rule()
    def drain(self) -> None:
        self.join_threads()
        for copy in self.live:
            self.world.wait_staged(copy)
        self.world.drain()

    # ---- prefetching -----------------------------------------------------------------------------

    @rule(plan=pass_plans, lane=lanes)
    def begin_pass(self, plan: PassPlan, lane: int) -> None:
        with self.world.on(lane):
            self.passes.append(Pass(self.world, plan))

    @precondition(lambda self: self.passes)
    @rule(which=st.integers(0, 3), lane=lanes, late=st.booleans())
    def take_batch(self, which: int, lane: int, late: bool) -> None:
        passing = self.passes[which % len(self.passes)]
        with self.world.on(lane):
            if not passing.is_over:
                passing.take(late)
                return
            with pytest.raises(StopIteration):
                passing.take(late)
        self.passes.remove(passing)
        passing.close()

    @precondition(lambda self: self.passes)
    @rule(which=st.integers(0, 3))
    def close_pass(self, which: int) -> None:
        """Closes a pass, whatever it has read ahead."""
        self.passes.pop(which % len(self.passes)).close()

    def close_passes(self) -> None:
        while self.passes:
            self.passes.pop().close()

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
            copy = prepare(world, step.plan)
            launch(world, copy)
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
        """Waits for the copy in a thread too, while the program goes on using it."""
        handle = copy.handle
        shared = dataclasses.replace(copy, handle=None, sources=[], is_done=False)
        copy.is_shared = True

        def run() -> None:
            with self.world.on(lane):
                succeeded, result = self.world.ask(shared, handle.wait)
                if succeeded:
                    self.world.read_late(shared, result)

        self.threads.append(self.world.schedule.thread(run))

    @rule(
        target=copies, plan=plans, lane=lanes, device=devices,
        which=st.sampled_from(["to_device", "from_device", "ordered"]),
    )  # fmt: skip
    def get_what_a_thread_lets_go(self, plan: CopyPlan, lane: int, device: str, which: Any) -> Copy:
        """Gets a copy that another thread releases: `get()` must give up the GIL meanwhile."""
        with self.sim.hold(_C.copy_stream(device, which)) as hold, self.world.on(lane):
            thread = self.world.schedule.thread(hold.release)
            copy = prepare(self.world, plan)
            launch(self.world, copy)
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

    # ---- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        while self.passes:
            self.take_batch(0, 0, late=True)
        self.drain()
        for copy in self.live:
            succeeded, result = self.world.get(copy)
            if succeeded:
                self.world.read_now(copy, result)
        self.world.drain()
        self.world.check_counts()

    def let_go(self) -> None:
        self.close_passes()
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
            del stack, self.world  # the schedule refers to its threads, which refer to the rest
            self.check_that_memory_is_given_back()
            return
        # Free the objects in the failure's frames now, not at a random later time.
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
