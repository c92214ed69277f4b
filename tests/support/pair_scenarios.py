"""Short programs that combine two features, for `scenario_table.py`: order and lifetime.

Sources and destinations are overwritten at the earliest moment that the documentation allows.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from scenario_world import READ_IN_PLACE, ScenarioWorld, Tree, small_limits

import tdcopier

Start = Callable[[Any], tdcopier.AsyncCopyHandle]


# ---- host sources that are refilled after wait() -------------------------------------------------


def _refill(world: ScenarioWorld, buffers: Tree, start: Start) -> None:
    """Fills the same memory for each of three copies, as soon as `wait()` of the last returned."""
    for _ in range(3):
        batch = world.batch(tuple(buffer.numel() for buffer in buffers))
        for buffer, values in zip(buffers, batch, strict=True):
            buffer.copy_(values)
        handle = start(buffers)
        world.read_late(handle.wait(), batch)
        del handle


def _pinned(*sizes: int) -> Tree:
    return [torch.empty(size, dtype=torch.int32, pin_memory=True) for size in sizes]


def a_large_pinned_source_is_refilled_after_wait(world: ScenarioWorld) -> None:
    """H2D: the device reads a large pinned leaf in place."""
    _refill(world, _pinned(READ_IN_PLACE, 7), lambda tree: tdcopier.start_copy(tree, "sim:0"))


def a_pinned_run_is_refilled_after_wait(world: ScenarioWorld) -> None:
    """H2D: the device reads a run of small leaves in pinned memory in place."""
    rows = list(_pinned(READ_IN_PLACE // 4 * 4)[0].view(4, -1).unbind())
    _refill(world, rows, lambda tree: tdcopier.start_copy(tree, "sim:0"))


def a_pinned_source_of_a_plan_is_refilled_after_wait(world: ScenarioWorld) -> None:
    """H2D of a prepared copy from a pinned source."""
    buffers = _pinned(READ_IN_PLACE, 7)
    plan = tdcopier.prepare(buffers, "sim:0", reuse_outputs=True)
    _refill(world, buffers, plan.start_copy)


def small_pinned_and_pageable_sources_are_refilled_after_wait(world: ScenarioWorld) -> None:
    """H2D: sources that are staged, by workers and in several windows."""
    with small_limits():
        buffers = [*_pinned(33, 2), torch.empty(61, dtype=torch.int32)]
        _refill(world, buffers, lambda tree: tdcopier.start_copy(tree, "sim:0"))


def sources_of_copy_into_are_refilled_after_wait(world: ScenarioWorld) -> None:
    """H2D into existing memory, from large pinned, small pinned and pageable sources."""
    buffers = [*_pinned(READ_IN_PLACE, 20), torch.empty(61, dtype=torch.int32)]
    static = [torch.empty(buffer.numel(), dtype=torch.int32, device="sim:0") for buffer in buffers]
    torch.sim.synchronize()
    _refill(world, buffers, lambda tree: tdcopier.start_copy_into(tree, static))


def pinned_sources_are_dropped_at_once(world: ScenarioWorld) -> None:
    """H2D in place: the copy keeps pinned memory alive until the device has read it."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        for _ in range(2):
            batch = world.batch((READ_IN_PLACE, 7))
            # Slices of a larger tensor: the allocator cannot look up their addresses.
            tree = [buffer[4:] for buffer in _pinned(READ_IN_PLACE + 4, 11)]
            for leaf, values in zip(tree, batch, strict=True):
                leaf.copy_(values)
            handle = tdcopier.start_copy(tree, device)
            del tree, leaf
            for buffer in _pinned(READ_IN_PLACE + 4, READ_IN_PLACE + 4, 11):
                buffer.fill_(-1)
            world.read_late(handle.wait(), batch)
            del handle


def a_mapped_file_is_written_after_wait_staged(world: ScenarioWorld) -> None:
    """H2D from a memory-mapped file and from a large pinned leaf in one tree."""
    device = world.devices[0]
    with tempfile.NamedTemporaryFile() as file, small_limits():
        file.truncate(800)
        mapped = torch.from_file(file.name, shared=True, size=200, dtype=torch.int32)
        tree = [mapped[:150], mapped[150:], *_pinned(READ_IN_PLACE)]
        for _ in range(2):
            batch = world.batch((150, 50, READ_IN_PLACE))
            for leaf, values in zip(tree, batch, strict=True):
                leaf.copy_(values)
            handle = tdcopier.start_copy(tree, device)
            handle.wait_staged()
            for leaf in tree:
                leaf.fill_(-1)
            world.read_late(handle.wait(), batch)


# ---- device sources that are overwritten after wait() --------------------------------------------


def _overwrite_after_wait(
    world: ScenarioWorld, start: Callable[[Tree, Tree], tdcopier.AsyncCopyHandle]
) -> None:
    near, far = world.devices
    producer, consumer = world.stream(near), world.stream(far)
    with world.on(consumer), world.on(producer):
        static = world.write(far, world.batch((33, 60)))
        for batch in (world.batch((33, 60)), world.batch((33, 60))):
            source = world.write(near, batch)
            result = start(source, static).wait()
            world.overwrite(source)
            world.read_late(result, batch)
            del result, source


def device_sources_are_overwritten_after_wait(world: ScenarioWorld) -> None:
    """D2D: `wait()` also orders the current stream of the source device."""
    _overwrite_after_wait(world, lambda source, _: tdcopier.start_copy(source, world.devices[1]))


def device_sources_of_copy_into_are_overwritten_after_wait(world: ScenarioWorld) -> None:
    """D2D into existing memory: `wait()` also orders the current stream of the source device."""
    _overwrite_after_wait(world, tdcopier.start_copy_into)


def sources_on_the_same_device_are_overwritten_after_wait(world: ScenarioWorld) -> None:
    """Within a device: `wait()` on a named stream also orders the current one."""
    device = world.devices[0]
    reader = world.stream(device)
    with world.on(world.stream(device)):
        static = world.write(device, world.batch((33, 60)))
        for batch in (world.batch((33, 60)), world.batch((33, 60))):
            source = world.write(device, batch)
            tdcopier.start_copy_into(source, static).wait(reader)
            world.overwrite(source)
            with world.on(reader):
                world.read_late(static, batch)
            torch.sim.current_stream().wait_stream(reader)  # before `static` is overwritten


# ---- a copy's result is the next copy's source ---------------------------------------------------


def a_static_batch_is_sent_back_and_filled_again(world: ScenarioWorld) -> None:
    """D2H of memory that `copy_into` fills next: only the caller's stream orders the two."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        batches = [world.batch((64, 64)) for _ in range(3)]
        static = tdcopier.start_copy(batches[0], device).wait()
        for before, batch in pairwise(batches):
            back = tdcopier.start_copy(static, "cpu")
            back.wait_staged()
            world.read_late(tdcopier.start_copy_into(batch, static).wait(), batch)
            world.expect(back.get(), before)


def what_copy_into_writes_is_sent_on_at_once(world: ScenarioWorld) -> None:
    """`copy_into`, then D2H and D2D of its destination, on one stream that waits for no other."""
    near, far = world.devices
    with world.on(world.stream(far)), world.on(world.stream(near)):
        static = world.write(near, world.batch((33, 60)))
        pairs = []
        for _ in range(2):
            batch = world.batch((33, 60))
            tdcopier.start_copy_into(batch, static).wait()
            back = tdcopier.start_copy(static, "cpu")
            world.read_late(tdcopier.start_copy(static, far).wait(), batch)
            back.wait_staged()
            pairs.append((back, batch))
        # The copy to the other device read the first batch before the second overwrote it.
        for handle, batch in pairs:
            world.expect(handle.get(), batch)


def around_both_devices(world: ScenarioWorld) -> None:
    """H2D, D2D, D2H: each copies the result of the one before, which is dropped at once."""
    near, far = world.devices
    with world.on(world.stream(far)), world.on(world.stream(near)):
        pairs = []
        for _ in range(3):
            batch = world.batch((64, 64))
            moved = tdcopier.start_copy(batch, near).wait()
            moved = tdcopier.start_copy(moved, far).wait()
            pairs.append((tdcopier.start_copy(moved, "cpu"), batch))
            del moved
        for handle, batch in pairs:
            world.expect(handle.get(), batch)


def two_devices_swap_batches(world: ScenarioWorld) -> None:
    """D2D in both directions at once: neither copy waits for the other."""
    near, far = world.devices
    streams = [world.stream(near), world.stream(far)]
    with world.on(streams[1]), world.on(streams[0]):
        for _ in range(2):
            batches = [world.batch((30, 50)), world.batch((30, 50))]
            sources = [
                world.write(device, batch)
                for device, batch in zip(world.devices, batches, strict=True)
            ]
            handles = [
                tdcopier.start_copy(source, target)
                for source, target in zip(sources, (far, near), strict=True)
            ]
            for handle, source in zip(handles, sources, strict=True):
                handle.wait_staged()
                world.overwrite(source)
            del sources, source
            for handle, batch in zip(handles, batches, strict=True):
                world.read_late(handle.wait(), batch)


def outputs_are_reused_while_they_are_sent_back(world: ScenarioWorld) -> None:
    """Prepared H2D with `reuse_outputs`, beside a D2H of each result, which is dropped at once."""
    device = world.devices[0]
    plan = tdcopier.prepare(world.batch((64, 64)), device, reuse_outputs=True)
    with world.on(world.stream(device)):
        pairs = []
        for _ in range(3):
            batch = world.batch((64, 64))
            pairs.append((tdcopier.start_copy(plan.start_copy(batch).wait(), "cpu"), batch))
        for handle, batch in pairs:
            world.expect(handle.get(), batch)
    assert plan.fits == 3


# ---- trees from several places -------------------------------------------------------------------


def one_tree_from_everywhere(world: ScenarioWorld) -> None:
    """H2D and D2D in one copy: pageable, large pinned, and from another device."""
    near, far = world.devices
    with world.on(world.stream(near)), world.on(world.stream(far)), small_limits():
        for _ in range(2):
            batch = world.batch((30, READ_IN_PLACE, 17, 33))  # needs no buffer to be returned
            tree = [batch[0].clone(), batch[1].pin_memory(), *world.write(far, batch[2:])]
            handle = tdcopier.start_copy(tree, near)
            handle.wait_staged()
            for leaf in tree[:2]:
                leaf.fill_(-1)
            world.overwrite(tree[2:])
            del tree, leaf
            world.read_late(handle.wait(), batch)


def one_destination_from_everywhere(world: ScenarioWorld) -> None:
    """`copy_into` of leaves on the host and on both devices, into the near device and the host."""
    near, far = world.devices
    with world.on(world.stream(far)), world.on(world.stream(near)), small_limits():
        static = [*world.write(near, world.batch((40, 17, 33))), torch.zeros(20, dtype=torch.int32)]
        for _ in range(2):
            batch = world.batch((40, 17, 33, 20))
            tree = [
                batch[0].clone(),
                *world.write(near, batch[1:2]),
                *world.write(far, batch[2:3]),
                *world.write(near, batch[3:]),
            ]
            handle = tdcopier.start_copy_into(tree, static)
            handle.wait_staged()
            tree[0].fill_(-1)
            world.overwrite(tree[1:])
            handle.wait()
            world.read_late(static[:3], batch[:3])
            world.expect(static[3:], batch[3:])


# ---- other features side by side -----------------------------------------------------------------


def rows_are_gathered_while_others_are_scattered(world: ScenarioWorld) -> None:
    """H2D and D2H of rows at once; scattered rows are gathered again from the same storage."""
    device = world.devices[0]
    index = torch.tensor([4, 17, 9])
    with small_limits(), world.on(world.stream(device)):
        table, scattered = (
            world.batch((400,))[0].view(20, 20),
            torch.full((20, 20), -5, dtype=torch.int32),
        )
        values = world.batch((60,))
        written = world.write(device, values)
        rows = [values[0].view(3, 20)]
        scatter = tdcopier.start_scatter([written[0].view(3, 20)], [scattered], index)
        gather = tdcopier.start_gather([table], index, device)
        expected = [table[index]]
        gather.wait_gathered()
        table.fill_(-1)
        scatter.wait_staged()
        world.overwrite(written)
        del written
        world.read_late(gather.wait(), expected)
        world.expect([scatter.get()[0][index]], rows)
        world.read_late(tdcopier.start_gather([scattered], index, device).wait(), rows)


def batches_are_prefetched_beside_copies_to_the_host(world: ScenarioWorld) -> None:
    """H2D ahead of a loop that sends something back in each step."""
    device = world.devices[0]
    batches = [world.batch((50, 20)) for _ in range(3)]

    def source() -> Iterator[Tree]:
        buffers = [torch.empty_like(leaf) for leaf in batches[0]]
        for batch in batches:
            for buffer, leaf in zip(buffers, batch, strict=True):
                buffer.copy_(leaf)
            yield buffers

    with small_limits(), world.on(world.stream(device)):
        sent = []
        with tdcopier.prefetch(source(), device, depth=1, threaded=False) as prefetcher:
            for moved, batch in zip(prefetcher, batches, strict=True):
                world.read_late(moved, batch)
                metrics = world.batch((9,))
                sent.append((tdcopier.start_copy(world.write(device, metrics), "cpu"), metrics))
        for handle, metrics in sent:
            world.expect(handle.get(), metrics)


def two_streams_send_to_the_host(world: ScenarioWorld) -> None:
    """D2H from two streams of one device that are not ordered with each other."""
    device = world.devices[0]
    pairs = []
    for _ in range(2):
        for sizes in ((64, 64), (50,)):
            with world.on(world.stream(device)):
                batch = world.batch(sizes)
                source = world.write(device, batch)
                handle = tdcopier.start_copy(source, "cpu")
                handle.wait_staged()
                world.overwrite(source)
                pairs.append((handle, batch))
                del source
    for handle, batch in reversed(pairs):
        world.expect(handle.get(), batch)


PAIRS = (
    a_large_pinned_source_is_refilled_after_wait,
    a_pinned_run_is_refilled_after_wait,
    a_pinned_source_of_a_plan_is_refilled_after_wait,
    small_pinned_and_pageable_sources_are_refilled_after_wait,
    sources_of_copy_into_are_refilled_after_wait,
    pinned_sources_are_dropped_at_once,
    a_mapped_file_is_written_after_wait_staged,
    device_sources_are_overwritten_after_wait,
    device_sources_of_copy_into_are_overwritten_after_wait,
    sources_on_the_same_device_are_overwritten_after_wait,
    a_static_batch_is_sent_back_and_filled_again,
    what_copy_into_writes_is_sent_on_at_once,
    around_both_devices,
    two_devices_swap_batches,
    outputs_are_reused_while_they_are_sent_back,
    one_tree_from_everywhere,
    one_destination_from_everywhere,
    rows_are_gathered_while_others_are_scattered,
    batches_are_prefetched_beside_copies_to_the_host,
    two_streams_send_to_the_host,
)
