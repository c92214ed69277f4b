"""Short programs in which one copy fails beside others that must not, for `scenario_table.py`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from scenario_world import READ_IN_PLACE, ScenarioWorld, Tree, held, small_limits

import tdcopier
from tdcopier import _C
from tdcopier.sim import Fault

MADE_TO_FAIL = "was made to fail"

# ---- interrupts ----------------------------------------------------------------------------------


class Interrupting(torch.Tensor):
    """A delegated leaf whose `copy_` raises KeyboardInterrupt."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_:
            raise KeyboardInterrupt
        return super().__torch_function__(func, types, args, kwargs or {})


class Pressed(BaseException):
    """The exception that a signal handler raises, in place of KeyboardInterrupt."""


def _interrupted(source: Tree, destination: Tree) -> None:
    """Interrupts a `copy_into`: without a handle, the caller may write the destinations again."""
    beyond = torch.zeros(3, dtype=torch.int32)
    leaf = beyond.as_subclass(Interrupting)
    with small_limits(), pytest.raises(KeyboardInterrupt):
        tdcopier.start_copy_into([*source, leaf], [*destination, beyond.clone()])


def filling_a_device_is_interrupted(world: ScenarioWorld) -> None:
    """An interrupted H2D into existing memory writes nothing after the call."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        static = world.write(device, world.batch((100, 30)))
        _interrupted(world.batch((100, 30)), static)
        mine = world.batch((100, 30))
        world.fill(static, mine)
        world.read_late(static, mine)


def filling_another_device_is_interrupted(world: ScenarioWorld) -> None:
    """An interrupted D2D into existing memory writes nothing after the call."""
    near, far = world.devices
    with world.on(world.stream(far)), world.on(world.stream(near)):
        static = world.write(far, world.batch((100, 30)))
        _interrupted(world.write(near, world.batch((100, 30))), static)
        mine = world.batch((100, 30))
        world.fill(static, mine)
        world.read_late(static, mine)


def filling_the_host_is_interrupted(world: ScenarioWorld) -> None:
    """An interrupted D2H into existing memory writes nothing after the call."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        static = [torch.zeros(100, dtype=torch.int32), torch.zeros(30, dtype=torch.int32)]
        _interrupted(world.write(device, world.batch((100, 30))), static)
        mine = world.batch((100, 30))
        for target, leaf in zip(static, mine, strict=True):
            target.copy_(leaf)
        other = world.batch((64,))
        world.expect(tdcopier.start_copy(world.write(device, other), "cpu").get(), other)
        torch.sim.synchronize(device)
        world.schedule.point()
        world.expect(static, mine)


def a_signal_arrives_while_the_host_waits(world: ScenarioWorld) -> None:
    """`get()` ends at once when a handler raises, and returns the result when called again."""
    device = world.devices[0]
    busy, batch = world.stream(device), world.batch()

    def interrupt(number: int, frame: Any) -> None:
        raise Pressed

    previous = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with world.sim.hold(busy):
            with world.on(busy):
                handle = tdcopier.start_copy(world.write(device, batch), "cpu")
            thread = world.schedule.thread(signal.raise_signal, signal.SIGUSR1)
            with pytest.raises(Pressed) as caught:
                handle.get()
            # No signal when a wait ends because of a deadlock.
            assert caught.value.__context__ is None
            thread.join()
    finally:
        signal.signal(signal.SIGUSR1, previous)
    world.expect(handle.get(), batch)


# ---- event queries that fail although nothing is broken ------------------------------------------


def _queries_fail(world: ScenarioWorld) -> Iterator[Fault]:
    """Makes queries fail at different times, for a while; no copy may fail because of it."""
    for n, times in ((1, 1), (2, 3), (5, 10)):
        with world.sim.fail_event_query(n, times=times) as fault:
            yield fault


def queries_fail_while_staging_buffers_turn(world: ScenarioWorld) -> None:
    """H2D: a buffer is not refilled before the device is known to have read it."""
    device = world.devices[0]
    consumer = world.stream(device)
    with small_limits():
        for _ in _queries_fail(world):
            batches = [world.batch((100, 30)), world.batch((90,))]
            handles = [tdcopier.start_copy(batch, device) for batch in batches]
            with world.on(consumer):
                for handle, batch in zip(handles, batches, strict=True):
                    world.read_late(handle.wait(), batch)


def queries_fail_while_batches_are_sent_by_their_consumer(world: ScenarioWorld) -> None:
    """H2D of prefetched batches: the same for the memory that they are staged in."""
    device = world.devices[0]
    with small_limits(), held():
        for _ in _queries_fail(world):
            for _ in range(2):
                batch = world.batch((100, 30))
                handle = tdcopier.start_copy(batch, device)
                handle.wait_staged()
                handle._send_if_staged()
                world.read_late(handle.wait(), batch)
                del handle


def queries_fail_while_a_copy_is_polled(world: ScenarioWorld) -> None:
    """D2H: `ready()` is True only when the sources may be written on any stream."""
    device = world.devices[0]
    for _ in _queries_fail(world):
        with world.on(world.stream(device)):
            batch = world.batch()
            source = world.write(device, batch)
            handle = tdcopier.start_copy(source, "cpu")
        while not handle.ready():
            pass
        world.overwrite(source)
        world.expect(handle.get(), batch)


def queries_fail_while_a_pinned_source_is_polled(world: ScenarioWorld) -> None:
    """H2D that reads a large pinned leaf in place: the same on the host."""
    device = world.devices[0]
    source = torch.empty(READ_IN_PLACE, dtype=torch.int32, pin_memory=True)
    for _ in _queries_fail(world):
        (values,) = world.batch((READ_IN_PLACE,))
        source.copy_(values)
        handle = tdcopier.start_copy([source], device)
        while not handle.ready():
            pass
        source.fill_(-1)
        world.read_late(handle.wait(), [values])


def queries_fail_when_filled_memory_is_dropped(world: ScenarioWorld) -> None:
    """H2D: a dropped destination is not reused while the copy may still write to it."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        for _ in _queries_fail(world):
            static = world.write(device, world.batch((64, 64)))
            tdcopier.start_copy_into(world.batch((64, 64)), static)
            del static
            batch = world.batch((64, 64))
            world.read_late(world.write(device, batch), batch)


# ---- event recordings that fail ------------------------------------------------------------------


@contextmanager
def _may_fail(fault: Fault) -> Iterator[None]:
    """Allows only errors that the fault causes."""
    with fault:
        try:
            yield
        except torch.AcceleratorError as error:
            if MADE_TO_FAIL not in str(error):
                raise


def _recordings_fail(world: ScenarioWorld, copy: Callable[[], Any]) -> None:
    """Makes each of the first recordings fail: the copy may fail, and the next one must work."""
    device = world.devices[0]
    for n in range(1, 5):
        with _may_fail(world.sim.fail_event_record(n)):
            copy()
        batch = world.batch((100, 30))
        world.read_late(tdcopier.start_copy(batch, device).wait(), batch)


def recordings_fail_while_staging_buffers_turn(world: ScenarioWorld) -> None:
    """H2D: a buffer that the device reads is not refilled, although no event protects it."""
    with small_limits(), world.on(world.stream(world.devices[0])):
        _recordings_fail(
            world, lambda: tdcopier.start_copy(world.batch((100, 30)), world.devices[0]).get()
        )


def recordings_fail_while_the_device_reads_its_own(world: ScenarioWorld) -> None:
    """D2H: dropped sources and the results' memory are not reused too early."""
    device = world.devices[0]

    def copy() -> None:
        source = world.write(device, world.batch((64, 64)))
        try:
            tdcopier.start_copy(source, "cpu").get()
        finally:
            del source
            world.churn(device, world.batch((64, 64)))

    with world.on(world.stream(device)):
        _recordings_fail(world, copy)


def recordings_fail_while_a_device_is_filled(world: ScenarioWorld) -> None:
    """H2D: once the error is reported, the caller may write the destinations again."""
    device = world.devices[0]
    with small_limits(), world.on(world.stream(device)):
        static = world.write(device, world.batch((100, 30)))
        for n in range(1, 5):
            with _may_fail(world.sim.fail_event_record(n)):
                tdcopier.start_copy_into(world.batch((100, 30)), static).get()
            mine = world.batch((100, 30))
            world.fill(static, mine)
            world.read_late(static, mine)


# ---- allocations that fail -----------------------------------------------------------------------


def pinning_fails_while_buffers_come_back(world: ScenarioWorld) -> None:
    """H2D: a copy that cannot allocate a second staging buffer continues with the first."""
    device = world.devices[0]
    with small_limits(staging_buffers=1):
        batch = world.batch()
        world.expect(tdcopier.start_copy(batch, device).get(), batch)  # allocates the one buffer
        tdcopier.limits.set_staging_bytes(2 * _C.STAGING_BUFFER_BYTES)
        with world.sim.fail_pinned_allocation():
            batches = [world.batch((100, 30)), world.batch((90,))]
            handles = [tdcopier.start_copy(batch, device) for batch in batches]
            for handle, batch in zip(handles, batches, strict=True):
                world.read_late(handle.wait(), batch)


def memory_runs_out_beside_copies_in_flight(world: ScenarioWorld) -> None:
    """H2D, D2H, D2D: one copy fails, those before and after it are right."""
    near, far = world.devices
    with world.on(world.stream(far)), world.on(world.stream(near)), small_limits():
        for make, target in (
            (lambda: world.batch((60, 9)), near),
            (lambda: world.write(near, world.batch((60, 9))), "cpu"),
            (lambda: world.write(near, world.batch((60, 9))), far),
        ):
            before, after = world.batch((60, 9)), world.batch((60, 9))
            handle = tdcopier.start_copy(before, near)
            source = make()
            handle.wait_staged()
            with world.sim.fail_device_allocation():
                lost = tdcopier.start_copy(source, target)
                with pytest.raises(torch.OutOfMemoryError, match=MADE_TO_FAIL):
                    lost.get()
            del source, lost
            world.read_late(tdcopier.start_copy(after, near).wait(), after)
            world.read_late(handle.wait(), before)


def one_device_fails_beside_another(world: ScenarioWorld) -> None:
    """H2D to both devices, and D2H from the one that works."""
    near, far = world.devices
    batches = [world.batch(), world.batch((50,))]
    with world.sim.fail_transfer(direction="h2d", device=near, when="execution"):
        broken = tdcopier.start_copy(batches[0], near)
        whole = tdcopier.start_copy(batches[1], far)
        with pytest.raises(torch.AcceleratorError, match=MADE_TO_FAIL):
            broken.get()
        back = tdcopier.start_copy(whole.wait(), "cpu")
        world.expect(back.get(), batches[1])
    for device, batch in zip(world.devices, batches, strict=True):
        world.expect(tdcopier.start_copy(batch, device).get(), batch)


def a_transfer_fails_beside_rows_that_are_gathered(world: ScenarioWorld) -> None:
    """`copy_into` fails when it is enqueued; rows gathered at the same time arrive."""
    device = world.devices[0]
    with small_limits(), world.on(world.stream(device)):
        table, index = world.batch((400,))[0].view(20, 20), torch.tensor([3, 19, 0])
        for n in (1, 2):
            gather = tdcopier.start_gather([table], index, device)
            gather.wait_gathered()
            gather.wait()
            static = world.write(device, world.batch((100, 30)))
            with world.sim.fail_transfer(n, direction="h2d"):
                handle = tdcopier.start_copy_into(world.batch((100, 30)), static)
                with pytest.raises(torch.AcceleratorError, match=MADE_TO_FAIL):
                    handle.get()
            mine = world.batch((100, 30))
            world.fill(static, mine)
            world.read_late(static, mine)
            world.read_late(gather.wait(), [table[index]])


FAULTS = (
    filling_a_device_is_interrupted,
    filling_another_device_is_interrupted,
    filling_the_host_is_interrupted,
    a_signal_arrives_while_the_host_waits,
    queries_fail_while_staging_buffers_turn,
    queries_fail_while_batches_are_sent_by_their_consumer,
    queries_fail_while_a_copy_is_polled,
    queries_fail_while_a_pinned_source_is_polled,
    queries_fail_when_filled_memory_is_dropped,
    recordings_fail_while_staging_buffers_turn,
    recordings_fail_while_the_device_reads_its_own,
    recordings_fail_while_a_device_is_filled,
    pinning_fails_while_buffers_come_back,
    memory_runs_out_beside_copies_in_flight,
    one_device_fails_beside_another,
    a_transfer_fails_beside_rows_that_are_gathered,
)
