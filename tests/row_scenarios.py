"""Short programs that gather rows and scatter them, for `scenario_table.py`."""

from __future__ import annotations

import torch
from stage import Play, small_limits

import tdcopier


def rows_are_overwritten_when_they_are_gathered(play: Play) -> None:
    """H2D: the caller may overwrite a storage once its rows were read, and the index at once."""
    device = play.devices[0]
    with small_limits():
        tables = [leaf.view(20, -1) for leaf in play.batch((400, 60))]
        index = torch.tensor([3, 19, 3, 0, 7])
        expected = [table[index] for table in tables]
        handle = tdcopier.start_gather(tables, index, device)
        index.fill_(10**6)
        handle.wait_gathered()
        for table in tables:
            table.fill_(-1)
        play.read_late(handle.wait(), expected)


def rows_for_the_host_and_a_device(play: Play) -> None:
    """H2H, then H2D: gathered rows are sent on from the host, and dropped at once."""
    with small_limits():
        table = play.batch((400,))[0].view(20, 20)
        index = torch.tensor([1, 2, 3, 18])
        gathered = tdcopier.start_gather([table], index, "cpu").get()
        expected = [table[index]]
        table.fill_(-1)
        handle = tdcopier.start_copy(gathered, play.devices[1])
        del gathered
        play.read_late(handle.wait(), expected)


def rows_are_scattered_while_the_batch_is_overwritten(play: Play) -> None:
    """D2H: after `wait_staged()` a stream may overwrite the batch, though no row is written yet."""
    device = play.devices[0]
    table = torch.full((90,), -5, dtype=torch.int32)
    index = torch.arange(80, 20, -2)
    with small_limits(), play.on(play.stream(device)):
        batch = play.batch((len(index),))
        written = play.write(device, batch)
        handle = tdcopier.start_scatter(written, [table], index)
        handle.wait_staged()
        play.overwrite(written)
        del written
        expected = table.clone()
        expected.fill_(-5)
        expected[index] = batch[0]
        play.expect(handle.get(), [expected])


ROWS = (
    rows_are_overwritten_when_they_are_gathered,
    rows_for_the_host_and_a_device,
    rows_are_scattered_while_the_batch_is_overwritten,
)
