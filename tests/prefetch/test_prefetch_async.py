"""`async for` over a prefetcher: the event loop runs while batches are read and copied."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from async_prefetch_support import (
    COUNT,
    LARGE,
    SOURCES,
    Broken,
    all_values,
    briefly,
    happens,
    next_of,
    run,
)
from prefetch_support import Stops, batch, value_of, values_of
from support import same_bytes
from thread_support import Call

import tdcopier


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("source", SOURCES)
def test_all_batches_come_in_order_and_then_the_end_each_time(device, source, depth):
    async def scene() -> None:
        prefetcher = tdcopier.prefetch(SOURCES[source](), device, depth=depth)
        assert await all_values(prefetcher) == list(range(COUNT))
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(prefetcher)
        assert prefetcher.stats.batches == COUNT

    run(scene())


def test_anext_on_the_prefetcher_itself_starts_and_continues_a_pass(device):
    async def scene() -> None:
        async with tdcopier.prefetch(SOURCES["list"](), device) as prefetcher:
            assert [value_of(await anext(prefetcher)) for _ in range(2)] == [0, 1]
            assert [value_of(await anext(prefetcher)) for _ in range(2)] == [2, 3]

    run(scene())


# ---- the event loop ------------------------------------------------------------------------------


def test_other_tasks_run_while_the_source_is_read(device):
    source = Stops(at=1)

    async def scene() -> list[int]:
        async with tdcopier.prefetch(source(), device) as batches:
            assert value_of(await anext(batches)) == 0
            waiting = asyncio.create_task(next_of(batches))
            await happens(source.is_there.is_set)
            await briefly()
            assert not waiting.done()
            source.gate.set()
            return [value_of(await waiting), *await all_values(batches)]

    assert run(scene()) == [1, 2, 3, 4]


@pytest.mark.parametrize("elements", [10, LARGE], ids=["small", "large"])
def test_other_tasks_run_until_a_batch_has_arrived_on_the_host(
    device, stall, reading_stream, elements
):
    source = [torch.full((elements,), float(i), device=device) for i in range(3)]

    async def scene() -> list[Any]:
        async with tdcopier.prefetch(source, "cpu") as batches:
            with stall(reading_stream):
                waiting = asyncio.create_task(next_of(batches))
                await happens(lambda: batches._queue is not None and bool(batches._queue._items))
                await briefly()
                assert not waiting.done()
            moved = [await waiting, await anext(batches), await anext(batches)]
        return [leaf.unique().tolist() for leaf in moved]

    assert run(scene()) == [[0], [1], [2]]


def test_other_tasks_run_until_a_copy_that_the_source_has_started_is_on_the_host(
    device, stall, reading_stream
):
    """Whatever the device of the prefetcher."""
    on_device, filled = torch.full((10,), 7.0, device=device), torch.zeros(10)

    async def scene() -> torch.Tensor:
        with stall(reading_stream):
            source = [tdcopier.start_copy_into(on_device, filled)]
            batches = tdcopier.prefetch(source, device)
            waiting = asyncio.create_task(next_of(batches))
            await happens(lambda: batches._queue is not None and bool(batches._queue._items))
            await briefly()
            assert not waiting.done()
        result = await waiting
        await batches.aclose()
        return result

    result = run(scene())
    assert result is filled
    assert result.tolist() == [7] * 10


def test_a_batch_is_handed_over_before_it_has_arrived_on_the_device(device, stall, copy_stream):
    async def scene() -> list[int]:
        async with tdcopier.prefetch(SOURCES["list"](), device, depth=1) as batches:
            with stall(copy_stream):
                moved = await anext(batches)
                assert not copy_stream.query()
            return [value_of(moved), *await all_values(aiter(batches))]

    assert run(scene()) == [0, 0, 1, 2, 3, 4]


def test_other_tasks_run_between_batches_that_are_there_already(device):
    async def scene() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        async with tdcopier.prefetch(SOURCES["list"](), device, depth=COUNT + 1) as batches:
            begun = aiter(batches)
            first = value_of(await anext(begun))
            assert batches._queue is not None
            await happens(lambda: len(batches._queue._items) == COUNT)  # with the end
            ticking = asyncio.create_task(tick())
            for expected in range(first + 1, COUNT):
                before = ticks
                assert value_of(await anext(begun)) == expected
                assert ticks > before
            ticking.cancel()

    run(scene())


def test_a_new_pass_lets_other_tasks_run_until_the_earlier_reader_has_ended(device):
    gate, is_there = threading.Event(), threading.Event()

    class Slow:
        """Its first pass stops before the second batch."""

        passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            return self.read(self.passes)

        def read(self, number: int) -> Iterator[Any]:
            for i in range(3):
                if number == i == 1:
                    is_there.set()
                    gate.wait()
                yield batch(10 * number + i)

    async def scene() -> list[int]:
        async with tdcopier.prefetch(Slow(), device) as prefetcher:
            assert value_of(await anext(aiter(prefetcher))) == 10
            await happens(is_there.is_set)
            again = asyncio.create_task(all_values(prefetcher))
            await briefly()
            assert not again.done()
            gate.set()
            return await again

    assert run(scene()) == [20, 21, 22]


def test_several_tasks_share_an_iterator_and_each_batch_goes_to_one(device):
    count = 60

    async def scene() -> list[list[int]]:
        shared = aiter(tdcopier.prefetch([batch(i) for i in range(count)], device, depth=3))
        return await asyncio.gather(*[all_values(shared) for _ in range(4)])

    shares = run(scene())
    assert sorted(value for share in shares for value in share) == list(range(count))
    assert all(share == sorted(share) for share in shares)


def test_the_loop_runs_while_a_thread_waits_for_a_batch_of_the_same_pass(device):
    source = Stops(at=0, count=2)

    async def scene() -> list[int]:
        async with tdcopier.prefetch(source(), device) as prefetcher:
            call = Call(lambda: value_of(next(prefetcher)))
            await happens(source.is_there.is_set)
            waiting = asyncio.create_task(next_of(prefetcher))
            await briefly()
            assert call.is_running()
            assert not waiting.done()
            source.gate.set()
            return sorted([value_of(await waiting), call.join()])

    assert run(scene()) == [0, 1]


def test_a_cancelled_task_loses_no_batch(device):
    source = Stops(at=0)

    async def scene() -> list[int]:
        prefetcher = tdcopier.prefetch(source(), device)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(next_of(prefetcher), 0.001)
        source.gate.set()
        return await all_values(prefetcher)

    assert run(scene()) == list(range(COUNT))


# ---- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [10, LARGE], ids=["inline", "background"])
def test_a_source_may_fill_one_buffer_again_and_again(device, accelerator, elements):
    """Values are read on the stream that is current where the loop asks, and on no other."""
    buffer = np.zeros(elements, np.float32)
    consumer = accelerator.Stream(device=device)

    def overwriting() -> Iterator[Any]:
        for i in range(10):
            buffer.fill(i)
            yield {"x": buffer, "first": buffer[:5]}

    async def scene() -> list[Any]:
        seen = []
        with accelerator.stream(consumer):
            async for moved in tdcopier.prefetch(overwriting(), device, depth=3):
                seen.append((moved["x"].min(), moved["x"].max(), moved["first"].sum()))
                del moved
        consumer.synchronize()
        return [tuple(float(value) for value in values) for values in seen]

    assert run(scene()) == [(i, i, 5 * i) for i in range(10)]


def test_a_batch_is_ordered_on_the_stream_that_is_current_at_anext(
    device, accelerator, stall, copy_stream
):
    consumer = accelerator.Stream(device=device)
    source = torch.arange(1000.0)

    async def scene() -> torch.Tensor:
        async with tdcopier.prefetch([source], device) as batches:
            with accelerator.stream(consumer):
                with stall(copy_stream):
                    moved = await anext(batches)
                    late = torch.empty(1000, device=device)
                    late.copy_(moved, non_blocking=True)
                    assert not consumer.query()
                consumer.synchronize()
        return late

    assert same_bytes(run(scene()), source)


# ---- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Broken, StopAsyncIteration])
def test_what_the_source_raises_comes_out_after_all_batches_before_it(device, kind):
    error = kind("lost")

    def breaking() -> Iterator[Any]:
        yield batch(0)
        raise error

    async def scene() -> None:
        batches = tdcopier.prefetch(breaking(), device, depth=3)
        assert value_of(await anext(batches)) == 0
        expected = Broken if kind is Broken else RuntimeError
        with pytest.raises(expected) as caught:
            await anext(batches)
        assert (caught.value if kind is Broken else caught.value.__cause__) is error
        with pytest.raises(StopAsyncIteration):
            await anext(batches)

    run(scene())


def test_a_copy_that_fails_raises_in_place_of_its_batch(device):
    class Failing:
        def to(self, device: Any) -> Any:
            raise Broken("lost")

    async def scene() -> None:
        batches = tdcopier.prefetch([batch(0), [Failing()], batch(2)], device)
        assert value_of(await anext(batches)) == 0
        with pytest.raises(Broken, match="lost"):
            await anext(batches)
        assert value_of(await anext(batches)) == 2

    run(scene())


def test_without_a_reader_thread_it_is_refused(device):
    async def scene() -> None:
        batches = tdcopier.prefetch(SOURCES["list"](), device, threaded=False)
        with pytest.raises(TypeError, match=r"needs a reader thread.*threaded=True"):
            aiter(batches)
        with pytest.raises(TypeError, match=r"needs a reader thread.*threaded=True"):
            await anext(batches)
        assert values_of(batches) == list(range(COUNT))
        async with batches:
            pass
        with pytest.raises(RuntimeError, match="this prefetcher is closed"):
            next(batches)

    run(scene())


def test_without_an_event_loop_the_error_says_what_to_use(device):
    with tdcopier.prefetch(SOURCES["list"](), device) as batches:
        with pytest.raises(RuntimeError, match=r"no asyncio event loop .*: use `for`, or"):
            next_of(batches).send(None)
        assert values_of(batches) == list(range(COUNT))
