"""Short programs that gather rows and scatter them, for `scenario_table.py`."""

from __future__ import annotations

import torch
from scenario_world import ScenarioWorld, small_limits

import tdcopier


def rows_are_overwritten_when_they_are_gathered(world: ScenarioWorld) -> None:
    """H2D: the caller may overwrite a storage once its rows were read, and the index at once."""
    device = world.devices[0]
    with small_limits():
        tables = [leaf.view(20, -1) for leaf in world.batch((400, 60))]
        index = torch.tensor([3, 19, 3, 0, 7])
        expected = [table[index] for table in tables]
        handle = tdcopier.start_gather(tables, index, device)
        index.fill_(10**6)
        handle.wait_gathered()
        for table in tables:
            table.fill_(-1)
        world.read_late(handle.wait(), expected)


def the_device_reads_pinned_rows(world: ScenarioWorld) -> None:
    """H2D: two gathers in turn; rows are overwritten when they have been read, and unpinned."""
    device = world.devices[0]
    table = world.batch((400,))[0].view(20, 20)
    with small_limits(), tdcopier.pin_memory_([table], device):
        indices = [torch.tensor([1, 2, 3, 18]), torch.tensor([5, 5, 0])]
        expected = [[table[index]] for index in indices]
        handles = [tdcopier.start_gather([table], index, device) for index in indices]
        for handle in handles:
            handle.wait_gathered()
        table.fill_(-1)
        for handle, rows in zip(handles, expected, strict=True):
            world.read_late(handle.wait(), rows)


def the_device_numbers_the_rows_that_it_reads(world: ScenarioWorld) -> None:
    """H2D: an index on the device is overwritten, and each batch is dropped, at once."""
    device = world.devices[0]
    table = world.batch((400,))[0].view(20, 20)
    numbers = [torch.tensor([1, 2, 3, 18]), torch.tensor([5, 5, 0, -1])]
    expected = [[table[index]] for index in numbers]
    with world.on(world.stream(device)), tdcopier.pin_memory_([table], device):
        index = torch.empty(4, dtype=torch.int64, device=device)
        for each, rows in zip(numbers, expected, strict=True):
            index.copy_(each.pin_memory(), non_blocking=True)
            handle = tdcopier.start_gather([table], index, device)
            index.copy_(torch.full((4,), 10**6).pin_memory(), non_blocking=True)
            world.churn(device, [torch.empty(4)])
            world.read_late(handle.wait(), rows)
            handle.wait_gathered()


def rows_are_read_into_a_batch_that_is_in_use(world: ScenarioWorld) -> None:
    """H2D: one batch is filled again and again, after the work that reads it."""
    device = world.devices[0]
    table = world.batch((400,))[0].view(20, 20)
    with world.on(world.stream(device)), tdcopier.pin_memory_([table], device):
        out = [torch.zeros(3, 20, dtype=torch.int32, device=device)]
        for index in ([1, 2, 3], [7, 7, 0], [19, 1, 5]):
            numbers = torch.tensor(index)
            handle = tdcopier.start_gather([table], numbers, out=out)
            world.read_late(handle.wait(), [table[numbers]])


def the_device_writes_rows(world: ScenarioWorld) -> None:
    """D2H: a stream overwrites the batch after `wait_staged()`; then the rows are read back."""
    device = world.devices[0]
    table = torch.full((90,), -5, dtype=torch.int32)
    index = torch.arange(80, 20, -2)
    with world.on(world.stream(device)), tdcopier.pin_memory_(table, device):
        batch = world.batch((len(index),))
        written = world.write(device, batch)
        handle = tdcopier.start_scatter(written, [table], index)
        handle.wait_staged()
        world.overwrite(written)
        del written
        world.expect(handle.get(), [table])
        assert torch.equal(table[index], batch[0])
        world.read_late(tdcopier.start_gather([table], index, device).wait(), batch)


def rows_are_read_while_another_thread_unpins_them(world: ScenarioWorld) -> None:
    """H2D: each gather reads in place, or by host threads, and is right."""
    device = world.devices[0]
    table = world.batch((400,))[0].view(20, 20)
    index = torch.tensor([1, 2, 3, 18])
    expected = [table[index]]
    with small_limits():
        pinned = tdcopier.pin_memory_([table], device)
        thread = world.schedule.thread(pinned.close)
        for _ in range(2):
            world.read_late(tdcopier.start_gather([table], index, device).wait(), expected)
        thread.join()


def rows_for_the_host_and_a_device(world: ScenarioWorld) -> None:
    """H2H, then H2D: gathered rows are sent on from the host, and dropped at once."""
    with small_limits():
        table = world.batch((400,))[0].view(20, 20)
        index = torch.tensor([1, 2, 3, 18])
        gathered = tdcopier.start_gather([table], index, "cpu").get()
        expected = [table[index]]
        table.fill_(-1)
        handle = tdcopier.start_copy(gathered, world.devices[1])
        del gathered
        world.read_late(handle.wait(), expected)


def rows_are_scattered_while_the_batch_is_overwritten(world: ScenarioWorld) -> None:
    """D2H: after `wait_staged()` a stream may overwrite the batch, though no row is written yet."""
    device = world.devices[0]
    table = torch.full((90,), -5, dtype=torch.int32)
    index = torch.arange(80, 20, -2)
    with small_limits(), world.on(world.stream(device)):
        batch = world.batch((len(index),))
        written = world.write(device, batch)
        handle = tdcopier.start_scatter(written, [table], index)
        handle.wait_staged()
        world.overwrite(written)
        del written
        expected = table.clone()
        expected.fill_(-5)
        expected[index] = batch[0]
        world.expect(handle.get(), [expected])


ROWS = (
    rows_are_overwritten_when_they_are_gathered,
    rows_for_the_host_and_a_device,
    the_device_reads_pinned_rows,
    the_device_numbers_the_rows_that_it_reads,
    rows_are_read_into_a_batch_that_is_in_use,
    the_device_writes_rows,
    rows_are_read_while_another_thread_unpins_them,
    rows_are_scattered_while_the_batch_is_overwritten,
)
