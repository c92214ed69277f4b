"""The end of a pass of `async for` over a prefetcher: left, closed, dropped or interrupted."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import pytest
from async_prefetch_support import (
    COUNT,
    SOURCES,
    Broken,
    all_values,
    briefly,
    happens,
    next_of,
    run,
)
from interrupts import KINDS, Interrupter, in_time, interrupted_everywhere
from prefetch_support import Stops, all_is_over, batch, value_of
from sim_support import becomes

import tdcopier


@pytest.fixture(autouse=True)
def no_reader_is_left() -> Iterator[None]:
    yield
    gc.collect()  # an interrupted call may leave a cycle
    assert becomes(all_is_over)


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
