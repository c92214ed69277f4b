"""Short programs that hold kernels while other copies must proceed, for `scenario_table.py`.

No host call and no copy may wait for kernels that its result does not depend on. A held stream
stands for the kernels: a copy that waits for them by mistake deadlocks, and the schedule names it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import torch
from scenario_world import READ_IN_PLACE, ScenarioWorld, Tree, small_limits

import tdcopier
from tdcopier import _C

Check = Callable[[], None]

# ---- copies that rightly wait for the kernels of `busy` ------------------------------------------
#
# Each starts a copy that depends on them and returns the check to run after they end. The current
# stream of the near device is the busy one.


def a_copy_to_the_host(world: ScenarioWorld) -> Check:
    batch = world.batch()
    handle = tdcopier.start_copy(world.write(world.devices[0], batch), "cpu")
    return lambda: world.expect(handle.get(), batch)


def a_copy_to_another_device(world: ScenarioWorld) -> Check:
    near, far = world.devices
    batch = world.batch()
    handle = tdcopier.start_copy(world.write(near, batch), far)
    return lambda: world.expect(handle.get(), batch)


def filling_a_device(world: ScenarioWorld) -> Check:
    batch = world.batch()
    static = world.write(world.devices[0], world.batch())
    handle = tdcopier.start_copy_into(batch, static)
    return lambda: world.expect(handle.get(), batch)


def filling_the_host(world: ScenarioWorld) -> Check:
    batch = world.batch()
    static = [torch.zeros_like(leaf) for leaf in batch]
    handle = tdcopier.start_copy_into(world.write(world.devices[0], batch), static)
    return lambda: world.expect(handle.get(), batch)


def filling_another_device(world: ScenarioWorld) -> Check:
    near, far = world.devices
    batch = world.batch()
    static = world.write(far, world.batch())
    handle = tdcopier.start_copy_into(world.write(near, batch), static)
    return lambda: world.expect(handle.get(), batch)


def filling_the_same_device(world: ScenarioWorld) -> Check:
    device = world.devices[0]
    batch = world.batch()
    static = world.write(device, world.batch())
    handle = tdcopier.start_copy_into(world.write(device, batch), static)
    return lambda: world.expect(handle.get(), batch)


def a_scatter(world: ScenarioWorld) -> Check:
    values, table = world.batch((30,)), torch.zeros(50, dtype=torch.int32)
    index = torch.arange(10, 40)
    handle = tdcopier.start_scatter(world.write(world.devices[0], values), [table], index)
    return lambda: world.expect([handle.get()[0][index]], values)


DEPENDING = (
    a_copy_to_the_host,
    a_copy_to_another_device,
    filling_a_device,
    filling_the_host,
    filling_another_device,
    filling_the_same_device,
    a_scatter,
)

# ---- copies that must not wait for them ----------------------------------------------------------


def to_the_device(world: ScenarioWorld) -> None:
    """H2D, twice, of more windows than staging buffers: ends with `get()`, then with `wait()`."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        for take in ("get", "wait"):
            batch = world.batch((40, 60, 17))
            world.expect(getattr(tdcopier.start_copy(batch, device), take)(), batch)


def to_the_host(world: ScenarioWorld) -> None:
    """D2H from a stream without kernels."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        batch = world.batch()
        world.expect(tdcopier.start_copy(world.write(device, batch), "cpu").get(), batch)


def within_the_device(world: ScenarioWorld) -> None:
    """Copies into existing memory, from and to a stream without kernels."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        batch = world.batch()
        static = world.write(device, world.batch())
        world.expect(tdcopier.start_copy_into(world.write(device, batch), static).get(), batch)


def beside(
    depending: Callable[[ScenarioWorld], Check], goes_on: Callable[[ScenarioWorld], None]
) -> Callable[[ScenarioWorld], None]:
    def run(world: ScenarioWorld) -> None:
        busy = world.stream(world.devices[0])
        with small_limits(), world.sim.hold(busy):
            with world.on(busy):
                check = depending(world)
            goes_on(world)
        check()

    run.__name__ = f"{goes_on.__name__}_beside_{depending.__name__}"
    run.__doc__ = f"{goes_on.__name__} arrives while {depending.__name__} waits for kernels."
    return run


def new_memory_waits_for_no_stream(world: ScenarioWorld) -> None:
    """H2D that starts on the very stream whose kernels another copy waits for."""
    device = world.devices[0]
    busy = world.stream(device)
    with small_limits(), world.sim.hold(busy), world.on(busy):
        check = filling_a_device(world)
        batch = world.batch((40, 60, 17))
        arrived = tdcopier.start_copy(batch, device).get()
        with world.on(world.stream(device)):
            world.expect(arrived, batch)
    with world.on(busy):
        check()


def to_the_other_device_beside_a_copy_from_this_one(world: ScenarioWorld) -> None:
    """H2D to the target of a D2D that waits for kernels of its source device."""
    near, far = world.devices
    busy = world.stream(near)
    with world.sim.hold(busy):
        with world.on(busy):
            check = a_copy_to_another_device(world)
        with world.on(world.stream(far)):
            batch = world.batch()
            world.expect(tdcopier.start_copy(batch, far).get(), batch)
            world.expect(tdcopier.start_copy(world.write(far, batch), "cpu").get(), batch)
    check()


# ---- staging memory ------------------------------------------------------------------------------


def buffers_come_back_beside_one_that_waits_for_kernels(world: ScenarioWorld) -> None:
    """H2D through two buffers, while a copy that waits for kernels has the oldest of three."""
    device = world.devices[0]
    busy = world.stream(device)
    with small_limits(staging_buffers=3), world.sim.hold(busy):
        with world.on(busy):
            static = world.write(device, world.batch((10,)))
            batch = world.batch((10,))
            handle = tdcopier.start_copy_into(batch, static)
        with world.on(world.stream(device)):
            large = world.batch((100, 30))
            world.expect(tdcopier.start_copy(large, device).get(), large)
    world.expect(handle.get(), batch)


def staging_goes_on_when_all_buffers_wait_for_kernels(world: ScenarioWorld) -> None:
    """H2D while copies that wait for kernels have every staging buffer of their share."""
    device = world.devices[0]
    busy = world.stream(device)
    inline = _C.MAX_INLINE_BYTES
    with small_limits(inline_bytes=inline, staging_buffers=4), world.sim.hold(busy):
        waiting = []
        with world.on(busy):
            for _ in range(5):
                static = world.write(device, world.batch((10,)))
                batch = world.batch((10,))
                waiting.append((tdcopier.start_copy_into(batch, static), batch))
        with world.on(world.stream(device)):
            batch = world.batch()
            world.expect(tdcopier.start_copy(batch, device).get(), batch)
    for handle, batch in waiting:
        world.expect(handle.get(), batch)


def staging_is_bounded_beside_copies_that_wait_for_kernels(world: ScenarioWorld) -> None:
    """H2D: buffers that waiting copies use count against the limit of every other copy."""
    device = world.devices[0]
    busy = world.stream(device)
    buffers = 4
    with small_limits(staging_buffers=buffers), world.sim.hold(busy):
        waiting = []
        with world.on(busy):
            for _ in range(2):
                static = world.write(device, world.batch((10,)))
                batch = world.batch((10,))
                handle = tdcopier.start_copy_into(batch, static)
                handle.wait_staged()
                waiting.append((handle, batch))
        with world.on(world.stream(device)):
            large = world.batch((100,))
            handle = tdcopier.start_copy(large, device)
            while not handle.ready():
                assert _C.staging_bytes(device) <= buffers * _C.STAGING_BUFFER_BYTES
            world.expect(handle.get(), large)
    for handle, batch in waiting:
        world.expect(handle.get(), batch)


# ---- loops ---------------------------------------------------------------------------------------


def prefetching_goes_on_beside_a_copy_to_the_host(world: ScenarioWorld) -> None:
    """A loop that asks for its next batch does not wait for the kernels of its last step."""
    device = world.devices[0]
    busy = world.stream(device)
    batches = [world.batch((50, 20)) for _ in range(3)]

    def source() -> Iterator[Tree]:
        yield from batches

    with (
        small_limits(),
        tdcopier.prefetch(source(), device, depth=1, threaded=False) as prefetcher,
        world.on(world.stream(device)),
        world.sim.hold(busy),
    ):
        world.expect(next(prefetcher), batches[0])
        with world.on(busy):
            check = a_copy_to_the_host(world)
        for batch in batches[1:]:
            world.expect(next(prefetcher), batch)
    check()


def sources_of_an_idle_device_are_released_beside_a_busy_one(world: ScenarioWorld) -> None:
    """Pinned sources are released once their device has read them, even if another one is busy."""
    near, far = world.devices
    busy = world.stream(near)
    with world.sim.hold(busy):
        with world.on(busy):
            check = a_copy_to_the_host(world)
        source = torch.zeros(READ_IN_PLACE, dtype=torch.int32, pin_memory=True)
        is_alive = weakref.ref(source)
        tdcopier.start_copy([source], far)
        del source
        torch.sim.synchronize(far)
        for _ in range(2000):  # enough polls for a thread that the schedule rarely picks
            if is_alive() is None:
                break
            world.schedule.point()
            tdcopier.start_copy(None, far)
        assert is_alive() is None
    check()


def windows_are_sent_in_groups(world: ScenarioWorld) -> None:
    """H2D: the device has buffers to read while workers stage more; then they may have only one."""
    with small_limits(staging_buffers=5):
        batch = world.batch((150,))
        handle = tdcopier.start_copy(batch, world.devices[0])
        tdcopier.limits.set_staging_bytes(_C.STAGING_BUFFER_BYTES)
        world.expect(handle.get(), batch)


COMPANY = (
    *(beside(depending, to_the_device) for depending in DEPENDING),
    *(beside(depending, to_the_host) for depending in DEPENDING),
    *(beside(depending, within_the_device) for depending in DEPENDING),
    new_memory_waits_for_no_stream,
    to_the_other_device_beside_a_copy_from_this_one,
    buffers_come_back_beside_one_that_waits_for_kernels,
    staging_goes_on_when_all_buffers_wait_for_kernels,
    staging_is_bounded_beside_copies_that_wait_for_kernels,
    windows_are_sent_in_groups,
    prefetching_goes_on_beside_a_copy_to_the_host,
    sources_of_an_idle_device_are_released_beside_a_busy_one,
)
