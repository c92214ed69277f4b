"""`prefetch(threaded=False)`: what it promises because the loop's own thread reads the source."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from prefetch_support import Stops, batch, in_loop, values_of
from sim_support import BRIEFLY, becomes
from thread_support import Call

import tdcopier
from tdcopier import _C
from tdcopier._options import SENDING

LARGE = 1 << 20
"""4 MiB of floats, which workers stage."""


def test_the_source_sees_the_state_of_the_loop(device):
    seen = []

    def source() -> Iterator[Any]:
        for i in range(4):
            seen.append(torch.is_grad_enabled())
            yield batch(i)

    passing = iter(in_loop(source(), device, depth=1))
    next(passing)
    with torch.no_grad():
        next(passing)
    assert seen == [True, True, False]


def test_an_interrupt_comes_out_at_once_and_no_batch_is_lost(device):
    interrupts = iter([KeyboardInterrupt("by hand")])
    values = iter(range(5))

    def source() -> Any:
        value = next(values)
        if value == 2:
            for interrupt in interrupts:
                raise interrupt
        return batch(value)

    prefetcher = in_loop(source, device, depth=2)
    with pytest.raises(KeyboardInterrupt, match="by hand"):
        next(prefetcher)
    assert values_of(prefetcher) == [0, 1, 3, 4]


def test_an_interrupt_leaves_later_copies_as_they_are(device, monkeypatch):
    """The interrupt comes right after copies were set to be deferred."""

    class Interrupting:
        def __setattr__(self, name: str, sending: _C.Sending | None) -> None:
            setattr(SENDING, name, sending)
            if name == "now" and sending not in (None, _C.Sending.AT_ONCE):
                raise KeyboardInterrupt

        def end(self) -> None:
            SENDING.end()

    monkeypatch.setattr("tdcopier._prefetch.source.SENDING", Interrupting())
    with pytest.raises(KeyboardInterrupt):
        next(in_loop([batch(i) for i in range(9)], device, depth=4))
    assert (SENDING.now, SENDING.in_callers_order) == (None, False)
    handle = tdcopier.start_copy(torch.ones(LARGE), device)
    handle.wait_staged()
    assert handle.stats.transfers > 0


def test_a_batch_is_ordered_on_the_stream_that_is_current_when_it_is_taken(
    device, accelerator, stall, copy_stream
):
    batches = [torch.full((1000,), float(i)) for i in range(4)]
    accelerator.synchronize(device)  # a held stream keeps every staging buffer
    passing = iter(in_loop(batches, device, depth=2))
    reads = []
    for _ in range(4):
        stream = accelerator.Stream(device=device)
        with stall(copy_stream), accelerator.stream(stream):
            reads.append(next(passing).clone())
    accelerator.synchronize(device)
    assert [read.unique().tolist() for read in reads] == [[i] for i in range(4)]


# ---- when batches are sent -----------------------------------------------------------------------


def test_what_workers_have_staged_is_sent_when_the_loop_asks_for_more(device):
    handles = []

    def source() -> Any:
        handles.append(tdcopier.start_gather(storage, rows, device))
        return handles[-1]

    storage, rows = {"x": torch.arange(64.0).view(16, 4)}, torch.tensor([3, 3, 15])
    with in_loop(source, device, depth=2) as batches:
        next(batches)
        handles[2].wait_staged()
        sent = [handle.stats.transfers for handle in handles]
        assert sent in ([1, 1, 0], [1, 1, 1])  # staged after or before the last poll
        for taken in range(3, 6):
            moved = next(batches)
            assert handles[taken - 1].stats.transfers == 1
            handles[taken].wait_staged()
        assert torch.equal(moved["x"].cpu(), storage["x"][rows])


def test_a_reader_leaves_the_sending_to_the_loop_too(device):
    handles: list[Any] = []

    def source() -> Any:
        handles.append(tdcopier.start_gather(storage, rows, device))
        return handles[-1]

    storage, rows = {"x": torch.arange(64.0).view(16, 4)}, torch.tensor([3, 3, 15])
    with tdcopier.prefetch(source, device, depth=3) as batches:
        iter(batches)
        assert becomes(lambda: len(handles) == 3)
        handles[2].wait_staged()
        assert handles[2].stats.transfers == 0
        next(batches)
        assert handles[2].stats.transfers == 1


def test_copies_outside_of_the_source_are_not_held(device):
    def source() -> Any:
        return batch(0)

    with in_loop(source, device) as batches:
        next(batches)
        handle = tdcopier.start_copy(torch.ones(LARGE), device)
        handle.wait_staged()
        assert handle.stats.transfers > 0


# ---- closed --------------------------------------------------------------------------------------


def test_to_close_it_waits_for_the_thread_that_reads(device):
    source = Stops(at=1)
    prefetcher = in_loop(source(), device, depth=1)

    def take() -> None:
        with pytest.raises(RuntimeError, match="closed"):
            next(prefetcher)

    taking = Call(take)
    source.is_there.wait()
    closing = Call(prefetcher.close)
    assert not becomes(lambda: not closing.is_running(), within=BRIEFLY)
    source.gate.set()
    closing.join()
    taking.join()
    assert source.ended == ["ended"]


@pytest.mark.sim
@pytest.mark.parametrize("when", ["between batches", "in the source"])
def test_a_generator_is_closed_when_the_memory_of_its_batches_was_read(sim, device, when):
    """The generator may release the memory, for example a mapping."""
    was_read = []

    def mapping() -> Iterator[Any]:
        handles = []
        try:
            while True:
                handles.append(tdcopier.start_copy(torch.ones(100), device))
                if when == "in the source" and len(handles) == 3:
                    prefetcher.close()
                yield handles[-1]
        finally:
            was_read.append(handles[-1]._send_if_staged())

    for seed in range(20):
        with sim.schedule(seed):
            _C.testing.set_max_inline_bytes(0)
            try:
                prefetcher = in_loop(mapping(), device, depth=3)
                with suppress(RuntimeError):
                    next(prefetcher)
                prefetcher.close()
            finally:
                _C.testing.set_max_inline_bytes(_C.MAX_INLINE_BYTES)
    assert was_read == [True] * 20


def test_a_closed_pass_keeps_no_batch(device):
    class Watched(list):
        pass

    handles: list[Any] = []

    def source() -> Any:
        handles.append(tdcopier.start_copy(Watched([torch.ones(3)]), device))
        return handles[-1]

    prefetcher = in_loop(source, device, depth=2)
    next(prefetcher)
    alive = [weakref.ref(handle.get()) for handle in handles]
    handles.clear()
    prefetcher.close()
    gc.collect()
    assert [each() for each in alive] == [None] * 3
