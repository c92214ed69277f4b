"""Small programs with overlapping copies, which are run in many orders of events.

Each takes a :class:`Play`, checks all values itself, and is deterministic.
"""

from __future__ import annotations

import pytest
import torch
from stage import Play, small_limits

import tdcopier
from tdcopier import _C


def two_batches_for_two_streams(play: Play) -> None:
    """H2D: each batch is read by a stream of its own, and dropped before that read has run."""
    device = play.devices[0]
    batches = [play.batch(), play.batch()]
    streams = [play.stream(device) for _ in batches]
    handles = [tdcopier.start_copy(batch, device) for batch in batches]
    for handle, batch, stream in zip(handles, batches, streams, strict=True):
        with play.on(stream):
            play.read_late(handle.wait(), batch)
    del handles, handle
    third = play.batch()
    play.expect(tdcopier.start_copy(third, device).get(), third)


def sources_are_overwritten_at_once(play: Play) -> None:
    """H2D: the caller may overwrite host sources once they are staged."""
    device = play.devices[0]
    batches = [play.batch(), play.batch((33, 2, 61))]
    expected = [[leaf.clone() for leaf in batch] for batch in batches]
    handles = [tdcopier.start_copy(batch, device) for batch in batches]
    for handle, batch in zip(handles, batches, strict=True):
        handle.wait_staged()
        for leaf in batch:
            leaf.fill_(-1)
    for handle, wanted in zip(handles, expected, strict=True):
        play.read_late(handle.wait(), wanted)


def workers_share_two_buffers(play: Play) -> None:
    """H2D: windows of three batches compete for two staging buffers."""
    with small_limits():
        sources_are_overwritten_at_once(play)
        device = play.devices[1]
        batch = play.batch((100, 3))
        expected = [leaf.clone() for leaf in batch]
        handle = tdcopier.start_copy(batch, device)
        del batch
        play.expect(handle.get(), expected)


def sources_are_dropped_at_once(play: Play) -> None:
    """H2D: only the copy keeps the host memory that workers read, so it must not be reused."""
    device = play.devices[0]
    with small_limits():
        pairs = []
        for _ in range(2):
            batch = play.batch((100, 30))
            expected = [leaf.clone() for leaf in batch]
            pairs.append((tdcopier.start_copy(batch, device), expected))
            sizes = [leaf.numel() for leaf in batch]
            del batch
            for _ in range(3):
                play.schedule.point()
                junk = [torch.full((size,), -1, dtype=torch.int32) for size in sizes]
        for handle, expected in pairs:
            play.expect(handle.get(), expected)
        del junk


def polled_while_workers_stage(play: Play) -> None:
    """Polls with `ready()`, which keeps the GIL: workers must not need it."""
    device = play.devices[0]
    with small_limits():
        batches = [play.batch(), play.batch((90,))]
        handles = [tdcopier.start_copy(batch, device) for batch in batches]
        for handle, batch in zip(handles, batches, strict=True):
            while not handle.ready():
                pass
            play.expect(handle.get(), batch)


def transfers_fail_when_they_are_enqueued(play: Play) -> None:
    """A failed copy returns everything it allocated, including staging buffers."""
    device = play.devices[0]
    with small_limits(staging_buffers=1):
        for n in (1, 3):
            batch = play.batch()
            with play.sim.fail_transfer(n, direction="h2d"):
                handle = tdcopier.start_copy(batch, device)
                with pytest.raises(torch.AcceleratorError, match="was made to fail"):
                    handle.get()
            play.expect(tdcopier.start_copy(batch, device).get(), batch)


def handles_are_dropped_at_once(play: Play) -> None:
    """H2D: results that are never read must not be written into memory that was reused."""
    device = play.devices[0]
    stream = play.stream(device)
    with play.on(stream):
        for _ in range(3):
            tdcopier.start_copy(play.batch((64, 64)), device)
            batch = play.batch((64, 64, 128))
            play.read_late(play.write(device, batch), batch)


def results_are_dropped_and_their_memory_used_again(play: Play) -> None:
    """H2D: memory that a late consumer still reads must not be reused."""
    device = play.devices[0]
    consumer = play.stream(device)
    for _ in range(3):
        batch = play.batch((64, 64))
        handle = tdcopier.start_copy(batch, device)
        with play.on(consumer):
            play.read_late(handle.wait(), batch)
        del handle


def device_sources_are_overwritten_behind_wait_staged(play: Play) -> None:
    """D2H: reads come after work enqueued before the call, and before work enqueued after it."""
    device = play.devices[0]
    producer = play.stream(device)
    handles = []
    with play.on(producer):
        for batch in (play.batch(), play.batch((50,))):
            source = play.write(device, batch)
            handle = tdcopier.start_copy(source, "cpu")
            handle.wait_staged()
            play.overwrite(source)
            handles.append((handle, batch))
        for handle, batch in handles:
            play.expect(handle.get(), batch)


def device_sources_are_freed_at_once(play: Play) -> None:
    """D2H: the copy keeps its sources alive until the device has read them."""
    device = play.devices[0]
    producer = play.stream(device)
    with play.on(producer):
        handles = []
        for batch in (play.batch(), play.batch((50,))):
            source = play.write(device, batch)
            handles.append((tdcopier.start_copy(source, "cpu"), batch))
            del source
            play.churn(device, batch)
    for handle, batch in handles:
        play.expect(handle.get(), batch)


def host_results_are_dropped_before_they_arrive(play: Play) -> None:
    """D2H: pinned memory is not reused while the device may still write to it."""
    device = play.devices[0]
    batch, other = play.batch((64, 64)), play.batch((64, 64))
    handles = [tdcopier.start_copy(play.write(device, batch), "cpu") for _ in range(2)]
    del handles
    pinned = [torch.empty(128, dtype=torch.int32, pin_memory=True) for _ in range(3)]
    for leaf in pinned:
        leaf.fill_(7)
    play.read_late(play.write(device, other), other)
    torch.sim.synchronize(device)
    play.expect(pinned, [torch.full((128,), 7, dtype=torch.int32)] * 3)


def between_devices(play: Play) -> None:
    """D2D: after the producer on one device, before the consumer on the other."""
    near, far = play.devices
    producer, consumer = play.stream(near), play.stream(far)
    for batch in (play.batch(), play.batch((80,))):
        with play.on(producer):
            source = play.write(near, batch)
            handle = tdcopier.start_copy(source, far)
            handle.wait_staged()
            play.overwrite(source)
        with play.on(consumer):
            play.read_late(handle.wait(), batch)
        del handle, source


def there_and_back(play: Play) -> None:
    """H2D, then D2H of the result, on one stream that waits for nothing else."""
    device = play.devices[0]
    stream = play.stream(device)
    pairs = []
    with play.on(stream):
        for batch in (play.batch(), play.batch((90, 1))):
            moved = tdcopier.start_copy(batch, device).wait()
            pairs.append((tdcopier.start_copy(moved, "cpu"), batch))
            del moved
        for handle, batch in pairs:
            play.expect(handle.get(), batch)


def the_host_runs_ahead(play: Play) -> None:
    """H2D: more batches than the run-ahead limit."""
    device = play.devices[0]
    tdcopier.set_run_ahead_limit(2)
    try:
        consumer = play.stream(device)
        for _ in range(4):
            batch = play.batch((30,))
            handle = tdcopier.start_copy(batch, device)
            with play.on(consumer):
                play.read_late(handle.wait(), batch)
    finally:
        tdcopier.set_run_ahead_limit(4)


def threads_copy_at_once(play: Play) -> None:
    """H2D and D2H from the caller's thread and two others."""
    near, far = play.devices

    def there() -> None:
        for _ in range(2):
            batch = play.batch()
            play.expect(tdcopier.start_copy(batch, near).get(), batch)

    def back() -> None:
        stream = play.stream(far)
        with play.on(stream):
            batch = play.batch((44, 3))
            play.expect(tdcopier.start_copy(play.write(far, batch), "cpu").get(), batch)

    threads = [play.schedule.thread(there), play.schedule.thread(back)]
    with small_limits(staging_buffers=1):
        there()
        for thread in threads:
            thread.join()


def one_handle_for_two_threads(play: Play) -> None:
    """Two threads wait for the same result, each on its own stream."""
    device = play.devices[0]
    batch = play.batch((70, 9))
    with small_limits():
        handle = tdcopier.start_copy(batch, device)
        results = []

        def take() -> None:
            with play.on(play.stream(device)):
                result = handle.wait()
                play.read_late(result, batch)
                results.append(result)

        thread = play.schedule.thread(take)
        take()
        thread.join()
    assert results[0] is results[1]


def let_go_by_another_thread(play: Play) -> None:
    """`get()` gives up the GIL, which the thread that releases the copy needs."""
    device = play.devices[0]
    hold = play.sim.hold(_C.copy_stream(device))
    batch = play.batch()
    handle = tdcopier.start_copy(batch, device)
    thread = play.schedule.thread(hold.release)
    play.expect(handle.get(), batch)
    thread.join()


def failures_are_told_each_time(play: Play) -> None:
    """A transfer fails when it runs: `get()` raises twice, and the next copy works."""
    device = play.devices[0]
    batch = play.batch()
    for direction, leaves, target in (
        ("h2d", batch, device),
        ("d2h", play.write(device, batch), "cpu"),
    ):
        with play.sim.fail_transfer(direction=direction, when="execution"):
            handle = tdcopier.start_copy(leaves, target)
            with pytest.raises(torch.AcceleratorError, match="was made to fail"):
                handle.get()
            assert handle.ready()
        with pytest.raises(torch.AcceleratorError, match="was made to fail"):
            handle.get()  # although the device works again
    with play.sim.fail_device_allocation():
        handle = tdcopier.start_copy(batch, device)
        for _ in range(2):
            with pytest.raises(torch.OutOfMemoryError):
                handle.wait()
    play.expect(tdcopier.start_copy(batch, device).get(), batch)


def counted_as_the_device_counts(play: Play) -> None:
    """Compares `stats` with the device's own count, and staging with its limit."""
    device = play.devices[0]
    with small_limits(staging_buffers=1):
        before = play.sim.counts().h2d
        batches = [play.batch(), play.batch((100, 3))]
        handles = [tdcopier.start_copy(batch, device) for batch in batches]
        for handle, batch in zip(handles, batches, strict=True):
            play.read_late(handle.wait(), batch)
        after = play.sim.counts().h2d
        told = [handle.stats for handle in handles]
        assert sum(stats.transfers for stats in told) == after.transfers - before.transfers > 2
        assert sum(stats.transfer_bytes for stats in told) == after.bytes - before.bytes
        assert _C.staging_bytes(device) <= _C.STAGING_BUFFER_BYTES


def polled_until_ready(play: Play) -> None:
    """`ready()` returns True only once the host may read the result."""
    device = play.devices[0]
    batch = play.batch((60,))
    handles = [
        tdcopier.start_copy(play.write(device, batch), "cpu"),
        tdcopier.start_copy(play.write(device, batch), "cpu"),
    ]
    for handle in handles:
        while not handle.ready():
            pass
        play.expect(handle.get(), batch)


def filled_behind_the_reads_before(play: Play) -> None:
    """H2D into existing memory, with late readers of the old and of the new values."""
    device = play.devices[0]
    reader = play.stream(device)
    batches = [play.batch() for _ in range(3)]
    with play.on(reader):
        static = play.write(device, batches[0])
        play.read_late(static, batches[0])
        for batch in batches[1:]:
            handle = tdcopier.copy_into(batch, static)
            handle.wait()
            play.read_late(static, batch)


def a_chunk_is_filled_again(play: Play) -> None:
    """H2D into the chunk of an earlier copy, with one transfer per copy."""
    device = play.devices[0]
    stream = play.stream(device)
    with play.on(stream):
        batches = [play.batch((64, 64)) for _ in range(3)]
        static = tdcopier.start_copy(batches[0], device).wait()
        for batch in batches[1:]:
            handle = tdcopier.copy_into(batch, static)
            assert handle.stats.transfers == 1
            play.read_late(handle.wait(), batch)


def destinations_are_dropped_at_once(play: Play) -> None:
    """H2D into memory that only the copy keeps, so it must not be reused."""
    device = play.devices[0]
    stream = play.stream(device)
    with play.on(stream):
        for _ in range(2):
            static = play.write(device, play.batch((64, 64)))
            tdcopier.copy_into(play.batch((64, 64)), static)
            del static
            batch = play.batch((64, 64))
            play.read_late(play.write(device, batch), batch)


def host_memory_is_filled_while_sources_are_overwritten(play: Play) -> None:
    """D2H into existing memory, through two staging buffers, by several participants."""
    device = play.devices[0]
    producer = play.stream(device)
    with small_limits():
        pairs = []
        with play.on(producer):
            for batch in (play.batch(), play.batch((90, 7))):
                source = play.write(device, batch)
                static = [torch.zeros_like(leaf) for leaf in batch]
                handle = tdcopier.copy_into(source, static)
                handle.wait_staged()
                play.overwrite(source)
                del source
                pairs.append((handle, static, batch))
        for handle, static, batch in pairs:
            assert handle.get() is static
            play.expect(static, batch)


def between_devices_into_memory_that_exists(play: Play) -> None:
    """D2D: after the producer on one device and the readers on the other."""
    near, far = play.devices
    producer, consumer = play.stream(near), play.stream(far)
    old = play.batch((33, 60))
    with play.on(consumer):
        static = play.write(far, old)
        play.read_late(static, old)
        for batch in (play.batch((33, 60)), play.batch((33, 60))):
            with play.on(producer):
                source = play.write(near, batch)
                handle = tdcopier.copy_into(source, static)
                handle.wait_staged()
                play.overwrite(source)
            play.read_late(handle.wait(), batch)
            del source


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
)
