"""Short programs on who uses results, when and on which stream, for `scenario_table.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from scenario_world import ScenarioWorld, Tree, small_limits
from scheduled_reader import scheduled_reader

import tdcopier
from tdcopier import _C
from tdcopier._pinned_pool import lease

LEAST_LEASED_BYTES = 64 << 20


def one_result_for_three_streams(world: ScenarioWorld) -> None:
    """H2D: each stream that waits is ordered, including later ones and one passed by name."""
    device = world.devices[0]
    streams = [world.stream(device) for _ in range(3)]
    for _ in range(2):
        batch = world.batch((64, 64))
        handle = tdcopier.start_copy(batch, device)
        with world.on(streams[0]):
            world.read_late(handle.wait(), batch)
        with world.on(streams[1]):
            world.read_late(handle.wait(), batch)
        result = handle.wait(streams[2])
        with world.on(streams[2]):
            world.read_late(result, batch)
        del handle, result


def delegated_leaves_for_another_stream(world: ScenarioWorld) -> None:
    """D2D of leaves delegated to `.to`: each stream that waits is ordered after their transfers."""
    near, far = world.devices
    producer, consumer = world.stream(near), world.stream(far)
    with world.on(world.stream(far)), world.on(producer):
        for _ in range(2):
            batch = world.batch((64, 30))
            source = [leaf.float().requires_grad_() for leaf in world.write(near, batch)]
            handle = tdcopier.start_copy([*source, *world.write(near, batch)], far)
            handle.wait_staged()
            world.overwrite([leaf.detach() for leaf in source])
            del source
            with world.on(consumer):
                moved = handle.wait()
                world.read_late([leaf.detach() for leaf in moved[:2]], [b.float() for b in batch])
                world.read_late(moved[2:], batch)
            del handle, moved


def kept_results_of_a_plan_keep_their_values(world: ScenarioWorld) -> None:
    """Prepared H2D with `reuse_outputs`: only tensors without other references are reused."""
    device = world.devices[0]
    plan = tdcopier.prepare(world.batch((64, 30)), device, reuse_outputs=True)
    with world.on(world.stream(device)):
        kept = []
        for _ in range(4):
            batch = world.batch((64, 30))
            _, second = plan.start_copy(batch).wait()  # this drops the first result
            kept.append(([second], batch[1:]))
        for tree, batch in kept:
            world.read_late(tree, batch)


def the_host_is_held_back_when_it_runs_ahead(world: ScenarioWorld) -> None:
    """H2D: a copy starts only once the device is within the run-ahead limit."""
    device = world.devices[0]
    consumer = world.stream(device)
    batches = [world.batch((30,)) for _ in range(3)]
    released: list[bool] = []
    tdcopier.limits.set_run_ahead(2)
    try:
        hold = world.sim.hold(consumer)

        def release() -> None:
            released.append(True)
            hold.release()

        thread: Any = None
        for i, batch in enumerate(batches):
            if i == 2:
                thread = world.schedule.thread(release)
            handle = tdcopier.start_copy(batch, device)
            assert i < 2 or released, "more batches are ahead of the consumer than may be"
            with world.on(consumer):
                world.read_late(handle.wait(), batch)
        thread.join()
    finally:
        tdcopier.limits.set_run_ahead(4)


def a_reader_prefetches_beside_copies_to_the_host(world: ScenarioWorld) -> None:
    """H2D by a reader's thread, ahead of a loop that sends something back in each step."""
    device = world.devices[0]
    batches = [world.batch((50, 20)) for _ in range(4)]

    def source() -> Iterator[Tree]:
        buffers = [torch.empty_like(leaf) for leaf in batches[0]]
        for batch in batches:
            for buffer, leaf in zip(buffers, batch, strict=True):
                buffer.copy_(leaf)
            yield buffers

    sent = []
    with (
        small_limits(),
        world.on(world.stream(device)),
        scheduled_reader(world.schedule),
        tdcopier.prefetch(source(), device, depth=2) as prefetcher,
    ):
        for moved, batch in zip(prefetcher, batches, strict=True):
            world.read_late(moved, batch)
            metrics = world.batch((9,))
            sent.append((tdcopier.start_copy(world.write(device, metrics), "cpu"), metrics))
    for handle, metrics in sent:
        world.expect(handle.get(), metrics)


def a_pass_is_closed_while_its_reader_is_at_work(world: ScenarioWorld) -> None:
    """H2D: batches read ahead are dropped, and memory that the device still reads is not reused."""
    device = world.devices[0]

    def source() -> Iterator[Tree]:
        while True:
            yield world.batch((50, 20))

    with small_limits(), world.on(world.stream(device)), scheduled_reader(world.schedule):
        for _ in range(2):
            with tdcopier.prefetch(source(), device, depth=2) as prefetcher:
                next(prefetcher)
            batch = world.batch((50, 20))
            world.read_late(tdcopier.start_copy(batch, device).wait(), batch)


def an_empty_leaf_of_a_result_is_grown(world: ScenarioWorld) -> None:
    """H2D, then D2H: writes to a leaf that was empty reach only memory of its own."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        pairs = []
        for _ in range(2):
            batch = world.batch((40, 17))
            tree = [batch[0], torch.empty(0, dtype=torch.int32), batch[1]]
            first, empty, second = tdcopier.start_copy(tree, device).wait()
            world.overwrite([empty.resize_(30)])
            pairs.append((tdcopier.start_copy([first, second], "cpu"), batch))
            del first, empty, second
        for handle, batch in pairs:
            world.expect(handle.get(), batch)


def a_leaf_on_the_host_is_grown(world: ScenarioWorld) -> None:
    """D2H: a leaf that grows moves to memory of its own."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        batch = world.batch((40, 17, 5))
        result = tdcopier.start_copy(world.write(device, batch), "cpu").get()
        result[1].resize_(30).fill_(-1)
        world.expect([result[0], result[2]], [batch[0], batch[2]])


def a_view_outlives_its_result(world: ScenarioWorld) -> None:
    """H2D twice: the tensors of the second result count their versions from 0, alone."""
    device = world.devices[0]
    with world.on(world.stream(device)):
        batch = world.batch((40, 17))
        result = tdcopier.start_copy(batch, device).get()
        view = result[0].fill_(-1).fill_(-2).detach()
        del result
        after = tdcopier.start_copy(batch, device).get()
        assert [leaf._version for leaf in after] == [0, 0]
        after[0].add_(1)
        after[1].add_(1)
        assert view._version == 2


def a_leaf_of_a_host_result_is_sent_by_torch(world: ScenarioWorld) -> None:
    """D2H, then torch's own H2D: it keeps the pinned memory of a result that is dropped."""
    device = world.devices[0]
    sent = []
    with world.on(world.stream(device)):
        for _ in range(3):
            batch = world.batch((40, 17))
            result = tdcopier.start_copy(world.write(device, batch), "cpu").get()
            moved = result[1].to(device, non_blocking=True)
            del result
            sent.append((moved, batch[1]))
        for moved, leaf in sent:
            world.expect([moved.cpu()], [leaf])


def leased_memory_is_sent_by_torch(world: ScenarioWorld) -> None:
    """Torch's own H2D from the pool: memory is not leased again before it has been read."""
    device = world.devices[0]
    tdcopier.pinned.trim()
    sent = []
    with world.on(world.stream(device)):
        for _ in range(3):
            batch = world.batch((40,))
            (leased,) = lease([160])
            leased = leased.view(torch.int32).copy_(batch[0])
            sent.append((leased.to(device, non_blocking=True), batch[0]))
            del leased
        for moved, leaf in sent:
            world.expect([moved], [leaf])


def leased_memory_is_sent_by_torch_on_another_stream(world: ScenarioWorld) -> None:
    """Torch's own H2D from the pool, and the memory is dropped while another stream is current."""
    device = world.devices[0]
    tdcopier.pinned.trim()
    side = world.stream(device)
    sent = []
    for _ in range(3):
        batch = world.batch((40,))
        (leased,) = lease([160])
        leased = leased.view(torch.int32).copy_(batch[0])
        with world.on(side):
            sent.append((leased.to(device, non_blocking=True), batch[0]))
        del leased
    with world.on(side):
        for moved, leaf in sent:
            world.expect([moved], [leaf])


def a_large_host_result_is_sent_by_torch(world: ScenarioWorld) -> None:
    """D2H into leased memory, which torch's own H2D on another stream keeps from its next copy."""
    device = world.devices[0]
    tdcopier.pinned.trim()
    side = world.stream(device)
    sent = []
    _C.testing.set_least_leased_bytes(64)
    try:
        with world.on(world.stream(device)):
            for _ in range(3):
                batch = world.batch((40, 17))
                result = tdcopier.start_copy(world.write(device, batch), "cpu").get()
                with world.on(side):
                    moved = result[1].to(device, non_blocking=True)
                del result
                sent.append((moved, batch[1]))
        with world.on(side):
            for moved, leaf in sent:
                world.expect([moved], [leaf])
    finally:
        _C.testing.set_least_leased_bytes(LEAST_LEASED_BYTES)


def leased_memory_is_filled(world: ScenarioWorld) -> None:
    """D2H into the pool: a job keeps leased memory until it has arrived, also if it is dropped."""
    device = world.devices[0]
    tdcopier.pinned.trim()
    with world.on(world.stream(device)):
        for _ in range(2):
            batch = world.batch((40, 70))
            source = world.write(device, batch)
            leased = [each.view(torch.int32) for each in lease([160, 280])]
            tdcopier.start_copy_into(source, leased)
            handle = tdcopier.start_copy_into(source, leased)
            del leased
            others = [each.view(torch.int32).fill_(7) for each in lease([160, 280])]
            handle.get()
            world.expect(others, [torch.full_like(leaf, 7) for leaf in batch])


def a_view_of_a_dropped_source_is_read(world: ScenarioWorld) -> None:
    """H2D: the copy has the last reference to a large source, and a view still sees its memory."""
    device = world.devices[0]
    source = torch.arange(1 << 16, dtype=torch.float32)  # 256 KiB: freed without the GIL
    expected = source.clone()
    view = torch.empty(0).set_(source.untyped_storage(), 1, (len(source) - 1,))
    with small_limits(window_bytes=1 << 17):  # so that workers stage it
        handle = tdcopier.start_copy([source], device)
        del source
        world.expect(handle.get(), [expected])
    del handle
    batch = world.batch()
    world.expect(tdcopier.start_copy(batch, device).get(), batch)  # sources are given back
    assert view.untyped_storage().data_ptr() != 0
    world.expect([view], [expected[1:]])


CONSUMERS = (
    one_result_for_three_streams,
    delegated_leaves_for_another_stream,
    kept_results_of_a_plan_keep_their_values,
    the_host_is_held_back_when_it_runs_ahead,
    a_reader_prefetches_beside_copies_to_the_host,
    a_pass_is_closed_while_its_reader_is_at_work,
    an_empty_leaf_of_a_result_is_grown,
    a_leaf_on_the_host_is_grown,
    a_view_outlives_its_result,
    a_leaf_of_a_host_result_is_sent_by_torch,
    leased_memory_is_sent_by_torch,
    leased_memory_is_sent_by_torch_on_another_stream,
    a_large_host_result_is_sent_by_torch,
    leased_memory_is_filled,
    a_view_of_a_dropped_source_is_read,
)
