"""Small programs with overlapping copies, which are run in many orders of events.

Each takes a :class:`ScenarioWorld`, checks all values itself, and is deterministic.
"""

from __future__ import annotations

import weakref

import pytest
import torch
from scenario_world import ScenarioWorld, small_limits

import tdcopier
from tdcopier import _C


def two_batches_for_two_streams(world: ScenarioWorld) -> None:
    """H2D: each batch is read by a stream of its own, and dropped before that read has run."""
    device = world.devices[0]
    batches = [world.batch(), world.batch()]
    streams = [world.stream(device) for _ in batches]
    handles = [tdcopier.start_copy(batch, device) for batch in batches]
    for handle, batch, stream in zip(handles, batches, streams, strict=True):
        with world.on(stream):
            world.read_late(handle.wait(), batch)
    del handles, handle
    third = world.batch()
    world.expect(tdcopier.start_copy(third, device).get(), third)


def sources_are_overwritten_at_once(world: ScenarioWorld) -> None:
    """H2D: the caller may overwrite host sources once they are staged."""
    device = world.devices[0]
    batches = [world.batch(), world.batch((33, 2, 61))]
    expected = [[leaf.clone() for leaf in batch] for batch in batches]
    handles = [tdcopier.start_copy(batch, device) for batch in batches]
    for handle, batch in zip(handles, batches, strict=True):
        handle.wait_staged()
        for leaf in batch:
            leaf.fill_(-1)
    for handle, wanted in zip(handles, expected, strict=True):
        world.read_late(handle.wait(), wanted)


def workers_share_two_buffers(world: ScenarioWorld) -> None:
    """H2D: windows of three batches compete for two staging buffers."""
    with small_limits():
        sources_are_overwritten_at_once(world)
        device = world.devices[1]
        batch = world.batch((100, 3))
        expected = [leaf.clone() for leaf in batch]
        handle = tdcopier.start_copy(batch, device)
        del batch
        world.expect(handle.get(), expected)


def sources_are_dropped_at_once(world: ScenarioWorld) -> None:
    """H2D: only the copy keeps the host memory that workers read, until they have read it."""
    device = world.devices[0]
    with small_limits():
        pairs = []
        sources = []
        for _ in range(2):
            batch = world.batch((100, 30))
            expected = [leaf.clone() for leaf in batch]
            pairs.append((tdcopier.start_copy(batch, device), expected))
            sizes = [leaf.numel() for leaf in batch]
            sources.append([weakref.ref(leaf) for leaf in batch])
            del batch
            for _ in range(3):
                world.schedule.point()
                junk = [torch.full((size,), -1, dtype=torch.int32) for size in sizes]
        for (handle, expected), kept in zip(pairs, sources, strict=True):
            handle.wait_staged()
            assert [source() for source in kept] == [None] * len(kept)
            world.expect(handle.get(), expected)
        del junk


def polled_while_workers_stage(world: ScenarioWorld) -> None:
    """Polls with `ready()`, which keeps the GIL: workers must not need it."""
    device = world.devices[0]
    with small_limits():
        batches = [world.batch(), world.batch((90,))]
        handles = [tdcopier.start_copy(batch, device) for batch in batches]
        for handle, batch in zip(handles, batches, strict=True):
            while not handle.ready():
                pass
            world.expect(handle.get(), batch)


def transfers_fail_when_they_are_enqueued(world: ScenarioWorld) -> None:
    """A failed copy returns everything it allocated, including staging buffers."""
    device = world.devices[0]
    for buffers, n in ((1, 1), (1, 3), (5, 4)):
        with small_limits(staging_buffers=buffers):
            batch = world.batch()
            with world.sim.fail_transfer(n, direction="h2d"):
                handle = tdcopier.start_copy(batch, device)
                with pytest.raises(torch.AcceleratorError, match="was made to fail"):
                    handle.get()
            world.expect(tdcopier.start_copy(batch, device).get(), batch)


def handles_are_dropped_at_once(world: ScenarioWorld) -> None:
    """H2D: results that are never read must not be written into memory that was reused."""
    device = world.devices[0]
    stream = world.stream(device)
    with world.on(stream):
        for _ in range(3):
            tdcopier.start_copy(world.batch((64, 64)), device)
            batch = world.batch((64, 64, 128))
            world.read_late(world.write(device, batch), batch)


def results_are_dropped_and_their_memory_used_again(world: ScenarioWorld) -> None:
    """H2D: memory that a late consumer still reads must not be reused."""
    device = world.devices[0]
    consumer = world.stream(device)
    for _ in range(3):
        batch = world.batch((64, 64))
        handle = tdcopier.start_copy(batch, device)
        with world.on(consumer):
            world.read_late(handle.wait(), batch)
        del handle


def device_sources_are_overwritten_behind_wait_staged(world: ScenarioWorld) -> None:
    """D2H: reads come after work enqueued before the call, and before work enqueued after it."""
    device = world.devices[0]
    producer = world.stream(device)
    handles = []
    with world.on(producer):
        for batch in (world.batch(), world.batch((50,))):
            source = world.write(device, batch)
            handle = tdcopier.start_copy(source, "cpu")
            handle.wait_staged()
            world.overwrite(source)
            handles.append((handle, batch))
        for handle, batch in handles:
            world.expect(handle.get(), batch)


def device_sources_are_freed_at_once(world: ScenarioWorld) -> None:
    """D2H: the copy keeps its sources alive until the device has read them."""
    device = world.devices[0]
    producer = world.stream(device)
    with world.on(producer):
        handles = []
        for batch in (world.batch(), world.batch((50,))):
            source = world.write(device, batch)
            handles.append((tdcopier.start_copy(source, "cpu"), batch))
            del source
            world.churn(device, batch)
    for handle, batch in handles:
        world.expect(handle.get(), batch)


def host_results_are_dropped_before_they_arrive(world: ScenarioWorld) -> None:
    """D2H: pinned memory is not reused while the device may still write to it."""
    device = world.devices[0]
    batch, other = world.batch((64, 64)), world.batch((64, 64))
    handles = [tdcopier.start_copy(world.write(device, batch), "cpu") for _ in range(2)]
    del handles
    pinned = [torch.empty(128, dtype=torch.int32, pin_memory=True) for _ in range(3)]
    for leaf in pinned:
        leaf.fill_(7)
    world.read_late(world.write(device, other), other)
    torch.sim.synchronize(device)
    world.expect(pinned, [torch.full((128,), 7, dtype=torch.int32)] * 3)


def between_devices(world: ScenarioWorld) -> None:
    """D2D: after the producer on one device, before the consumer on the other."""
    near, far = world.devices
    producer, consumer = world.stream(near), world.stream(far)
    for batch in (world.batch(), world.batch((80,))):
        with world.on(producer):
            source = world.write(near, batch)
            handle = tdcopier.start_copy(source, far)
            handle.wait_staged()
            world.overwrite(source)
        with world.on(consumer):
            world.read_late(handle.wait(), batch)
        del handle, source


def there_and_back(world: ScenarioWorld) -> None:
    """H2D, then D2H of the result, on one stream that waits for nothing else."""
    device = world.devices[0]
    stream = world.stream(device)
    pairs = []
    with world.on(stream):
        for batch in (world.batch(), world.batch((90, 1))):
            moved = tdcopier.start_copy(batch, device).wait()
            pairs.append((tdcopier.start_copy(moved, "cpu"), batch))
            del moved
        for handle, batch in pairs:
            world.expect(handle.get(), batch)


def the_host_runs_ahead(world: ScenarioWorld) -> None:
    """H2D: more batches than the run-ahead limit."""
    device = world.devices[0]
    tdcopier.limits.set_run_ahead(2)
    try:
        consumer = world.stream(device)
        for _ in range(4):
            batch = world.batch((30,))
            handle = tdcopier.start_copy(batch, device)
            with world.on(consumer):
                world.read_late(handle.wait(), batch)
    finally:
        tdcopier.limits.set_run_ahead(4)


def threads_copy_at_once(world: ScenarioWorld) -> None:
    """H2D and D2H from the caller's thread and two others."""
    near, far = world.devices

    def there() -> None:
        for _ in range(2):
            batch = world.batch()
            world.expect(tdcopier.start_copy(batch, near).get(), batch)

    def back() -> None:
        stream = world.stream(far)
        with world.on(stream):
            batch = world.batch((44, 3))
            world.expect(tdcopier.start_copy(world.write(far, batch), "cpu").get(), batch)

    threads = [world.schedule.thread(there), world.schedule.thread(back)]
    with small_limits(staging_buffers=1):
        there()
        for thread in threads:
            thread.join()


def one_handle_for_two_threads(world: ScenarioWorld) -> None:
    """Two threads wait for the same result, each on its own stream."""
    device = world.devices[0]
    batch = world.batch((70, 9))
    with small_limits():
        handle = tdcopier.start_copy(batch, device)
        results = []

        def take() -> None:
            with world.on(world.stream(device)):
                result = handle.wait()
                world.read_late(result, batch)
                results.append(result)

        thread = world.schedule.thread(take)
        take()
        thread.join()
    assert results[0] is results[1]


def let_go_by_another_thread(world: ScenarioWorld) -> None:
    """`get()` gives up the GIL, which the thread that releases the copy needs."""
    device = world.devices[0]
    hold = world.sim.hold(_C.copy_stream(device))
    batch = world.batch()
    handle = tdcopier.start_copy(batch, device)
    thread = world.schedule.thread(hold.release)
    world.expect(handle.get(), batch)
    thread.join()


def failures_are_told_each_time(world: ScenarioWorld) -> None:
    """A transfer fails when it runs: `get()` raises twice, and the next copy works."""
    device = world.devices[0]
    batch = world.batch()
    for direction, leaves, target in (
        ("h2d", batch, device),
        ("d2h", world.write(device, batch), "cpu"),
    ):
        with world.sim.fail_transfer(direction=direction, when="execution"):
            handle = tdcopier.start_copy(leaves, target)
            with pytest.raises(torch.AcceleratorError, match="was made to fail"):
                handle.get()
            assert handle.ready()
        with pytest.raises(torch.AcceleratorError, match="was made to fail"):
            handle.get()  # although the device works again
    with world.sim.fail_device_allocation():
        handle = tdcopier.start_copy(batch, device)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                handle.wait()
    world.expect(tdcopier.start_copy(batch, device).get(), batch)


def counted_as_the_device_counts(world: ScenarioWorld) -> None:
    """Compares `stats` with the device's own count, and staging with its limit."""
    device = world.devices[0]
    with small_limits(staging_buffers=1):
        before = world.sim.counts().h2d
        batches = [world.batch(), world.batch((100, 3))]
        handles = [tdcopier.start_copy(batch, device) for batch in batches]
        for handle, batch in zip(handles, batches, strict=True):
            world.read_late(handle.wait(), batch)
        after = world.sim.counts().h2d
        told = [handle.stats for handle in handles]
        assert sum(stats.transfers for stats in told) == after.transfers - before.transfers > 2
        assert sum(stats.transfer_bytes for stats in told) == after.nbytes - before.nbytes
        assert _C.staging_bytes(device) <= _C.STAGING_BUFFER_BYTES


def polled_until_ready(world: ScenarioWorld) -> None:
    """`ready()` returns True only once the host may read the result."""
    device = world.devices[0]
    batch = world.batch((60,))
    handles = [
        tdcopier.start_copy(world.write(device, batch), "cpu"),
        tdcopier.start_copy(world.write(device, batch), "cpu"),
    ]
    for handle in handles:
        while not handle.ready():
            pass
        world.expect(handle.get(), batch)


def filled_behind_the_reads_before(world: ScenarioWorld) -> None:
    """H2D into existing memory, with late readers of the old and of the new values."""
    device = world.devices[0]
    reader = world.stream(device)
    batches = [world.batch() for _ in range(3)]
    with world.on(reader):
        static = world.write(device, batches[0])
        world.read_late(static, batches[0])
        for batch in batches[1:]:
            handle = tdcopier.start_copy_into(batch, static)
            handle.wait()
            world.read_late(static, batch)


def a_chunk_is_filled_again(world: ScenarioWorld) -> None:
    """H2D into the chunk of an earlier copy, with one transfer per copy."""
    device = world.devices[0]
    stream = world.stream(device)
    with world.on(stream):
        batches = [world.batch((64, 64)) for _ in range(3)]
        static = tdcopier.start_copy(batches[0], device).wait()
        for batch in batches[1:]:
            handle = tdcopier.start_copy_into(batch, static)
            assert handle.stats.transfers == 1
            world.read_late(handle.wait(), batch)


def destinations_are_dropped_at_once(world: ScenarioWorld) -> None:
    """H2D into memory that only the copy keeps, so it must not be reused."""
    device = world.devices[0]
    stream = world.stream(device)
    with world.on(stream):
        for _ in range(2):
            static = world.write(device, world.batch((64, 64)))
            tdcopier.start_copy_into(world.batch((64, 64)), static)
            del static
            batch = world.batch((64, 64))
            world.read_late(world.write(device, batch), batch)


def host_memory_is_filled_while_sources_are_overwritten(world: ScenarioWorld) -> None:
    """D2H into existing memory, through two staging buffers, by several participants."""
    device = world.devices[0]
    producer = world.stream(device)
    with small_limits():
        pairs = []
        with world.on(producer):
            for batch in (world.batch(), world.batch((90, 7))):
                source = world.write(device, batch)
                static = [torch.zeros_like(leaf) for leaf in batch]
                handle = tdcopier.start_copy_into(source, static)
                handle.wait_staged()
                world.overwrite(source)
                del source
                pairs.append((handle, static, batch))
        for handle, static, batch in pairs:
            assert handle.get() is static
            world.expect(static, batch)


def between_devices_into_memory_that_exists(world: ScenarioWorld) -> None:
    """D2D: after the producer on one device and the readers on the other."""
    near, far = world.devices
    producer, consumer = world.stream(near), world.stream(far)
    old = world.batch((33, 60))
    with world.on(consumer):
        static = world.write(far, old)
        world.read_late(static, old)
        for batch in (world.batch((33, 60)), world.batch((33, 60))):
            with world.on(producer):
                source = world.write(near, batch)
                handle = tdcopier.start_copy_into(source, static)
                handle.wait_staged()
                world.overwrite(source)
            world.read_late(handle.wait(), batch)
            del source


def results_that_python_has_seen_are_dropped(world: ScenarioWorld) -> None:
    """H2D: a worker that has left may be late. It must need no GIL to drop what it holds."""
    device = world.devices[0]
    with small_limits(staging_buffers=1):
        for number in range(24):
            batch = world.batch((30, 3))
            result = tdcopier.start_copy(batch, device).wait()
            for leaf in result:
                leaf.untyped_storage()  # gets a Python object, which is destroyed with the GIL
            if number == 0:
                world.read_late(result, batch)
            del leaf, result
            for _ in range(4):
                world.schedule.point()


ONE_TRANSFER_EACH = (
    two_batches_for_two_streams,
    sources_are_overwritten_at_once,
    handles_are_dropped_at_once,
    results_are_dropped_and_their_memory_used_again,
    device_sources_are_overwritten_behind_wait_staged,
    device_sources_are_freed_at_once,
    host_results_are_dropped_before_they_arrive,
    between_devices,
    there_and_back,
    the_host_runs_ahead,
    let_go_by_another_thread,
    failures_are_told_each_time,
    polled_until_ready,
    a_chunk_is_filled_again,
)
"""Scenarios in which each copy is one transfer."""

SEVERAL_TRANSFERS = (
    workers_share_two_buffers,
    sources_are_dropped_at_once,
    polled_while_workers_stage,
    threads_copy_at_once,
    one_handle_for_two_threads,
    transfers_fail_when_they_are_enqueued,
    counted_as_the_device_counts,
    filled_behind_the_reads_before,
    destinations_are_dropped_at_once,
    host_memory_is_filled_while_sources_are_overwritten,
    between_devices_into_memory_that_exists,
    results_that_python_has_seen_are_dropped,
)
