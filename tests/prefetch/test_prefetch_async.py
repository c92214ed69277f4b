"""`async for` over a prefetcher: the event loop runs while batches are read and copied."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from interrupts import KINDS, Interrupter, in_time, interrupted_everywhere
from prefetch_support import Counted, Stops, all_is_over, batch, value_of, values_of
from sim_support import BRIEFLY, becomes
from support import same_bytes
from thread_support import Call

import tdcopier

COUNT = 5
LARGE = 1 << 20
"""4 MiB of floats, which workers stage."""


@pytest.fixture(autouse=True)
def no_reader_is_left() -> Iterator[None]:
    yield
    gc.collect()  # an interrupted call may leave a cycle
    assert becomes(all_is_over)


async def briefly() -> None:
    """Lets the event loop run until a task that is not held up would have looked several times."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + BRIEFLY
    while loop.time() < deadline:
        await asyncio.sleep(0)


async def happens(condition: Callable[[], bool]) -> None:
    """Lets the event loop run until the condition is true; the test's timeout ends it."""
    while not condition():
        await asyncio.sleep(0)


async def next_of(batches: Any) -> Any:
    return await anext(batches)


async def all_values(batches: Any) -> list[int]:
    return [value_of(moved) async for moved in batches]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: [batch(i) for i in range(COUNT)],
    "generator": lambda: (batch(i) for i in range(COUNT)),
    "callable": lambda: Counted(COUNT).sample,
}


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


class Broken(Exception):
    pass


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


# ---- the end of a pass ---------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["list", "generator"])
def test_after_a_loop_that_was_left_the_next_one_begins_anew_or_continues(device, source):
    async def scene() -> list[int]:
        async with tdcopier.prefetch(SOURCES[source](), device) as batches:
            async for moved in batches:
                assert value_of(moved) == 0
                break
            return await all_values(batches)

    assert run(scene()) == list(range(0 if source == "list" else 1, COUNT))


@pytest.mark.parametrize("end", ["aclose", "async with", "with", "dropped"])
def test_however_it_ends_early_the_generator_is_closed_and_no_reader_is_left(device, end):
    source = Stops(at=-1, count=1000)

    async def scene() -> None:
        batches = tdcopier.prefetch(source(), device)
        if end == "aclose":
            await anext(batches)
            await batches.aclose()
            await batches.aclose()
        elif end == "async with":
            async with batches:
                await anext(batches)
        elif end == "with":
            with batches:
                await anext(batches)
        else:
            async for _ in batches:
                break
            return
        assert source.ended == ["ended"]
        assert all_is_over()
        with pytest.raises(RuntimeError, match="this prefetcher is closed"):
            await anext(batches)

    run(scene())
    assert becomes(lambda: source.ended == ["ended"])


def test_aclose_lets_other_tasks_run_until_the_source_returns(device):
    source = Stops(at=1)

    async def scene() -> None:
        batches = tdcopier.prefetch(source(), device)
        await anext(batches)
        await happens(source.is_there.is_set)
        waiting = asyncio.create_task(next_of(batches))
        await briefly()
        closing = asyncio.create_task(batches.aclose())
        await briefly()
        assert not closing.done()
        source.gate.set()
        await closing
        with pytest.raises(RuntimeError, match="this pass was closed: so was its prefetcher"):
            await waiting

    run(scene())
    assert source.ended == ["ended"]


def test_what_a_generator_raises_when_it_is_closed_comes_out_of_aclose(device):
    def stubborn() -> Iterator[Any]:
        try:
            yield batch(0)
            yield batch(1)
        finally:
            raise Broken("at the end")

    async def scene() -> None:
        batches = tdcopier.prefetch(stubborn(), device, depth=1)
        await anext(batches)
        with pytest.raises(Broken, match="at the end"):
            await batches.aclose()

    run(scene())


# ---- interrupts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taken", [0, 2])
@pytest.mark.parametrize("source", SOURCES)
def test_an_interrupted_anext_loses_its_own_batch_at_most(device, source, taken, kind):
    loop = asyncio.new_event_loop()

    def rest_of(prefetcher: Any) -> list[int]:
        values = []
        while True:
            try:
                values.append(value_of(next(prefetcher)))
            except StopIteration:
                return values

    def scene(interrupter: Interrupter) -> None:
        with tdcopier.prefetch(SOURCES[source](), device) as prefetcher:
            for value in range(taken):
                assert value_of(loop.run_until_complete(next_of(prefetcher))) == value
            got = []
            with interrupter:
                got.append(loop.run_until_complete(next_of(prefetcher)))
            values = [*map(value_of, got), *in_time(lambda: rest_of(prefetcher))]
            assert values == sorted(values)
            assert len(set(range(taken, COUNT)) - set(values)) <= 1, values

    try:
        assert interrupted_everywhere(kind, scene) > 10
    finally:
        loop.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_aclose_may_be_repeated(device, kind):
    loop = asyncio.new_event_loop()

    def scene(interrupter: Interrupter) -> None:
        source = Stops(at=-1, count=1000)
        prefetcher = tdcopier.prefetch(source(), device)
        loop.run_until_complete(next_of(prefetcher))
        with interrupter:
            loop.run_until_complete(prefetcher.aclose())
        loop.run_until_complete(prefetcher.aclose())
        assert all_is_over()
        assert source.ended == ["ended"]

    try:
        assert interrupted_everywhere(kind, scene) > 5
    finally:
        loop.close()
