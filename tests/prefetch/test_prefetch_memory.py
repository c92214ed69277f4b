"""Batches of workers are copied to memory that the loop's stream has freed, after its work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sim_support import becomes
from torch.utils.data import DataLoader, default_collate

import tdcopier
from tdcopier import _C
from tdcopier._options import SENDING


@pytest.mark.parametrize("in_callers_order", [True, False])
def test_a_copy_may_take_memory_that_the_current_stream_has_freed(
    device, stall, accelerator, monkeypatch, in_callers_order
):
    """It is not written before the work that is enqueued has read it."""
    size = 3_000_000
    accelerator.synchronize(device)
    freed = torch.full((size,), 7.0, device=device)
    place, late = freed.data_ptr(), torch.empty(size, device=device)
    batch = torch.full((size,), 1.0).pin_memory()
    with stall(accelerator.current_stream(device)):
        late.copy_(freed, non_blocking=True)
        del freed
        with monkeypatch.context() as during:
            during.setattr(SENDING, "now", _C.Sending.AT_ONCE)
            during.setattr(SENDING, "in_callers_order", in_callers_order)
            moved = tdcopier.start_copy(batch, device).wait()
        assert (moved.data_ptr() == place) == in_callers_order
    assert late.unique().tolist() == [7.0]
    assert moved.unique().tolist() == [1.0]


BATCHES, SIZE = 6, 3_000_000


def loader(**options: Any) -> DataLoader[Any]:
    """Gives batches of 12 MB, whose values are their numbers, through slabs."""
    values = torch.arange(float(BATCHES))[:, None].expand(BATCHES, SIZE)
    return DataLoader(values, batch_size=1, num_workers=1, persistent_workers=True, **options)


def places_of_current_stream(device: str) -> set[int]:
    """Returns the addresses of blocks that the current stream gets for such a batch."""
    return {each.data_ptr() for each in [torch.empty(SIZE, device=device) for _ in range(16)]}


@pytest.mark.parametrize("depth", [1, 2])
def test_batches_of_workers_are_in_memory_of_the_loops_stream(device, accelerator, depth):
    """Unless only one is ahead: it would wait for the step before it."""
    with tdcopier.prefetch(loader(), device, depth=depth) as batches:
        assert [moved[0, 0].item() for moved in batches] == list(range(BATCHES))
        assert batches.stats.slab_batches == BATCHES
        accelerator.synchronize(device)
        places = places_of_current_stream(device)
        found = [moved.data_ptr() in places for moved in batches]
    assert found == [depth > 1] * BATCHES


@pytest.mark.parametrize("threaded", [True, False], ids=["threaded", "in the loop"])
@pytest.mark.parametrize("options", [{}, {"use_pinned_staging": False}])
def test_batches_in_that_order_hold_up_no_call(device, accelerator, stall, threaded, options):
    with tdcopier.prefetch(loader(), device, depth=2, threaded=threaded, **options) as batches:
        assert len(list(batches)) == BATCHES
        accelerator.synchronize(device)
        with stall(accelerator.current_stream(device)):
            passing = iter(batches)
            taken = [next(passing) for _ in range(3)]
        assert [moved[0, -1].item() for moved in (*taken, *passing)] == list(range(BATCHES))


def test_parcels_that_a_generator_keeps_may_be_written_once_they_are_taken(
    device, accelerator, stall
):
    kept = []

    def source() -> Iterator[Any]:
        for parcel in loader(collate_fn=tdcopier.packed(default_collate)):
            kept.append(parcel)
            yield parcel

    with tdcopier.prefetch(source(), device, depth=2) as batches:
        found = []
        for number, moved in enumerate(batches):
            found.append(moved)
            memory = memoryview(kept[number])
            assert not memory.readonly
            memory[-4:] = bytes(4)
    assert [moved[0, -1].item() for moved in found] == list(range(BATCHES))


def test_batches_ahead_that_are_dropped_write_to_no_other_memory(
    device, accelerator, stall, ordered_stream
):
    with tdcopier.prefetch(loader(), device, depth=2) as batches:
        assert len(list(batches)) == BATCHES
        accelerator.synchronize(device)
        with stall(ordered_stream):
            iter(batches)
            assert becomes(lambda: len(batches._queue._items) == 2)
            batches._queue._send_staged()
            batches.close()
            others = [torch.full((SIZE,), -1.0, device=device) for _ in range(16)]
        accelerator.synchronize(device)
        assert all(each.unique().tolist() == [-1.0] for each in others)
