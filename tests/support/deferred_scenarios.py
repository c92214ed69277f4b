"""Short programs in which one thread stages copies and another sends them."""

from __future__ import annotations

from scenario_world import ScenarioWorld, held, small_limits

import tdcopier


def batches_are_sent_by_their_consumer(world: ScenarioWorld) -> None:
    """H2D: memory of a sent batch is not reused for the next one before the device has read it."""
    device = world.devices[0]
    with small_limits(), held():
        batches = [world.batch((100, 3)), world.batch((90, 30)), world.batch((70,))]
        expected = [[leaf.clone() for leaf in batch] for batch in batches]
        for batch, wanted in zip(batches, expected, strict=True):
            handle = tdcopier.start_copy(batch, device)
            handle.wait_staged()
            for leaf in batch:
                leaf.fill_(-1)
            handle._send_if_staged()
            world.read_late(handle.wait(), wanted)
            del handle


def batches_are_dropped_before_they_are_sent(world: ScenarioWorld) -> None:
    """H2D: workers may still stage a batch that is dropped, and the next one takes its memory."""
    device = world.devices[0]
    with small_limits(), held():
        for _ in range(2):
            tdcopier.start_copy(world.batch((100, 30)), device)
        batch = world.batch((100, 30))
        handle = tdcopier.start_copy(batch, device)
        while not handle.ready():
            pass
        world.expect(handle.get(), batch)


def a_batch_is_sent_by_two_threads(world: ScenarioWorld) -> None:
    """H2D: the batch is sent once, whichever thread is first."""
    device = world.devices[0]
    with small_limits(), held():
        batch = world.batch((100, 30))
        handle = tdcopier.start_copy(batch, device)
        thread = world.schedule.thread(handle._send_if_staged)
        world.read_late(handle.wait(), batch)
        thread.join()
        assert handle.stats.transfers == 1


def memory_of_the_callers_stream_is_filled_behind_its_reads(world: ScenarioWorld) -> None:
    """H2D: each batch gets the memory of the one before, whose reads are enqueued."""
    device = world.devices[0]
    with world.on(world.stream(device)), held(in_callers_order=True):
        for _ in range(3):
            batch = world.batch((100,))
            handle = tdcopier.start_copy(batch, device)
            world.read_late(handle.wait(), batch)
            del handle


def memory_of_the_callers_stream_is_dropped_while_it_is_filled(world: ScenarioWorld) -> None:
    """H2D: the caller's stream gets no memory back that the copy still writes to."""
    device = world.devices[0]
    with world.on(world.stream(device)), held(in_callers_order=True):
        for _ in range(2):
            handle = tdcopier.start_copy(world.batch((100,)), device)
            handle.wait_staged()
            handle._send_if_staged()
            del handle
            batch = world.batch((100,))
            world.read_late(world.write(device, batch), batch)


def batches_in_the_callers_order_are_for_another_stream(world: ScenarioWorld) -> None:
    """H2D: a stream that reads late keeps memory from the stream that it belongs to."""
    device = world.devices[0]
    owner, reader = world.stream(device), world.stream(device)
    for _ in range(2):
        batch = world.batch((100, 30))
        with world.on(owner), held(in_callers_order=True):
            handle = tdcopier.start_copy(batch, device)
        with world.on(reader):
            world.read_late(handle.wait(), batch)
        del handle
        with world.on(owner):
            other = world.batch((100, 30))
            world.read_late(world.write(device, other), other)


HELD = (
    memory_of_the_callers_stream_is_filled_behind_its_reads,
    memory_of_the_callers_stream_is_dropped_while_it_is_filled,
    batches_in_the_callers_order_are_for_another_stream,
    batches_are_sent_by_their_consumer,
    batches_are_dropped_before_they_are_sent,
    a_batch_is_sent_by_two_threads,
)
