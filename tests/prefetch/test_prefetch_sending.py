"""How the reader of a pass has its batches staged and sent, and when their sources are freed."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from prefetch_support import Asked, Counted, batch, value_of, values_of
from sim_support import becomes

import tdcopier
from tdcopier import _C
from tdcopier._prefetch.source import Source

AT_ONCE, DEFERRED, ALONE = _C.Sending.AT_ONCE, _C.Sending.DEFERRED, _C.Sending.DEFERRED_ALONE


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[_C.Sending]:
    """Records how each batch is to be sent, also of a read that finds the end of the source."""
    recorded: list[_C.Sending] = []
    begin = Source.begin

    def recording(self: Source, is_wanted: Callable[[], bool], sending: _C.Sending) -> Any:
        recorded.append(sending)
        return begin(self, is_wanted, sending)

    monkeypatch.setattr(Source, "begin", recording)
    return recorded


class Room:
    """Wraps the wake-up that the reader waits for; tells whether the reader is waiting."""

    def __init__(self, room: Any) -> None:
        self._room = room
        self.is_awaited = False

    def set(self) -> None:
        self._room.set()

    def wait(self, within_s: float | None = None) -> None:
        self.is_awaited = True
        self._room.wait(within_s)
        self.is_awaited = False


@pytest.mark.parametrize("depth", [2, 3])
def test_a_reader_that_waits_for_the_loop_stages_alone(device, sent, depth):
    begun = threading.Event()

    def source() -> Iterator[Any]:
        begun.wait()
        for i in range(depth + 4):
            yield batch(i)

    prefetcher = tdcopier.prefetch(source(), device, depth=depth)
    passing = iter(prefetcher)
    queue = prefetcher._queue
    room = queue._room = Room(queue._room)
    begun.set()
    for value in range(4):
        assert becomes(lambda: room.is_awaited and len(queue._items) == depth)
        assert sent == [AT_ONCE] + [DEFERRED] * (depth - 1) + [ALONE] * value
        assert value_of(next(passing)) == value
    prefetcher.close()


@pytest.mark.parametrize("depth", [1, 3])
def test_for_a_loop_that_waits_all_threads_stage(device, sent, depth):
    begun = threading.Event()

    def slow() -> Iterator[Any]:
        begun.wait()
        for i in range(5):
            asked.found_none.wait()
            asked.found_none.clear()
            yield batch(i)

    prefetcher = tdcopier.prefetch(slow(), device, depth=depth)
    passing = iter(prefetcher)
    asked = prefetcher._queue._arrival = Asked(prefetcher._queue._arrival)
    begun.set()
    assert values_of(passing) == [0, 1, 2, 3, 4]
    assert len(sent) == 6
    if depth == 1:  # there is room only once the loop has no other batch
        assert set(sent) == {AT_ONCE}
    else:  # the loop may not yet have taken the batch before
        assert set(sent) <= {AT_ONCE, DEFERRED}


def test_a_loop_that_reads_has_no_reader_to_stage_alone(device, sent):
    assert values_of(tdcopier.prefetch(Counted(6), device, threaded=False)) == list(range(6))
    assert ALONE not in sent


@pytest.mark.parametrize("elements", [10, 1 << 20], ids=["inline", "background"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_source_is_freed_before_the_next_batch_is_read(device, sent, depth, elements):
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def read() -> Any:
        alive.append(sum(each() is not None for each in made))
        if len(made) == 8:
            raise StopIteration
        leaf = torch.full((elements,), float(len(made)))
        made.append(weakref.ref(leaf))
        return {"x": leaf, "same": [leaf, torch.ones(3)]}

    got = []
    for moved in tdcopier.prefetch(read, device, depth=depth):
        assert torch.equal(moved["x"], moved["same"][0])
        got.append(int(moved["x"][-1]))
    assert got == list(range(8))
    assert alive == [0] * 9


def test_a_task_that_the_source_creates_starts_its_copies_at_once_later(device):
    """Its context is a copy of that in which the source was read."""
    copies: list[tdcopier.AsyncCopyHandle[Any]] = []
    loop = asyncio.new_event_loop()

    async def copy_later() -> None:
        copies.append(tdcopier.start_copy(torch.ones(1000), device))

    def source() -> Iterator[Any]:
        for i in range(4):
            tasks.append(loop.create_task(copy_later()))
            yield batch(i)

    tasks: list[asyncio.Task[None]] = []
    try:
        assert values_of(tdcopier.prefetch(source(), device, depth=2, threaded=False)) == [
            *range(4)
        ]
        loop.run_until_complete(asyncio.gather(*tasks))
    finally:
        loop.close()
    for copy in copies:
        copy.wait_staged()
        assert copy.stats.transfers == 1  # so it does not wait until it is used
