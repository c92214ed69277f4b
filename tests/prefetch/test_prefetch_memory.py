"""Batches of workers are copied to memory that the loop's stream has freed, after its work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import tdcopier
from tdcopier import _C
from tdcopier._options import SENDING
from tdcopier._prefetch import source
from tdcopier._slabs import has_parcel


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


@pytest.mark.parametrize("depth", [1, 2])
def test_batches_of_workers_are_in_memory_of_the_loops_stream(device, monkeypatch, depth):
    """Unless only one is ahead: it would wait for the step before it."""
    orders = []
    start = source.start_copy

    def noting(batch: Any, *arguments: Any, **options: Any) -> Any:
        orders.append((has_parcel(batch), SENDING.in_callers_order))
        return start(batch, *arguments, **options)

    monkeypatch.setattr(source, "start_copy", noting)
    loader = DataLoader(torch.arange(60_000.0).view(6, -1), batch_size=1, num_workers=1)
    for number, moved in enumerate(tdcopier.prefetch(loader, device, depth=depth)):
        assert moved[0, 0].item() == 10_000.0 * number
    assert orders == [(True, depth > 1)] * 6
    orders.clear()
    assert len(list(tdcopier.prefetch([torch.ones(3)], device, depth=depth))) == 1
    assert orders == [(False, False)]


@pytest.mark.parametrize("depth", [1, 2])
def test_batches_ahead_that_are_dropped_write_to_no_other_memory(device, accelerator, depth):
    loader = DataLoader(
        torch.arange(400_000.0).view(8, -1), batch_size=1, num_workers=1, persistent_workers=True
    )
    prefetcher = tdcopier.prefetch(loader, device, depth=depth)
    for _ in range(10):
        passing = iter(prefetcher)
        kept = [next(passing)]
        del passing  # ends the pass with batches in flight
        kept += [torch.full((1, 50_000), -1.0, device=device) for _ in range(4)]
        accelerator.synchronize(device)
        assert torch.equal(kept[0].cpu(), torch.arange(50_000.0).view(1, -1))
        assert all(each.unique().tolist() == [-1.0] for each in kept[1:])
