"""`prefetch`: its batches, their order, and how far it reads ahead."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from prefetch_support import Asked, Counted, Stops, batch, in_loop, readers, value_of, values_of
from sim_support import BRIEFLY, becomes
from support import assert_same, oracle
from thread_support import Call, at_once

import tdcopier


class Rows:
    """Iterable only by `__getitem__`."""

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise IndexError
        return batch(index)


SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: [batch(i) for i in range(5)],
    "generator": lambda: (batch(i) for i in range(5)),
    "iterator": lambda: Counted(5),
    "map": lambda: map(batch, range(5)),
    "items alone": Rows,
    "callable": lambda: Counted(5).sample,
}
CAN_BEGIN_ANEW = {"list", "items alone"}


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("make", SOURCES.values(), ids=list(SOURCES))
def test_every_batch_comes_once_and_in_order(prefetch, threaded, make, depth):
    prefetcher = prefetch(make(), depth=depth)
    assert values_of(prefetcher) == [0, 1, 2, 3, 4]
    assert threaded or not readers()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_batches_are_what_to_makes_of_every_leaf(prefetch, device, depth):
    batches = [
        {"a": [torch.arange(n), np.full(n, 2.0)], "large": torch.rand(n << 17), "s": "text"}
        for n in (1, 2, 4, 8)
    ]
    for got, source in zip(prefetch(batches, depth=depth), batches, strict=True):
        assert_same(got, oracle(source, device))


@pytest.mark.parametrize("make", SOURCES.values(), ids=list(SOURCES))
def test_next_works_without_a_loop_and_stays_at_the_end(prefetch, make):
    prefetcher = prefetch(make())
    assert [value_of(next(prefetcher)) for _ in range(5)] == [0, 1, 2, 3, 4]
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(prefetcher)


@pytest.mark.parametrize("options", [{}, {"pack_cpu_tensors": False}])
def test_options_are_those_of_the_copy(prefetch, options):
    (moved,) = prefetch([[torch.ones(4), torch.ones(4)]], **options)
    one, other = (leaf.untyped_storage().data_ptr() for leaf in moved)
    assert (one == other) == (options == {})  # in one chunk


# ---- how far it reads ahead ----------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_as_many_batches_are_in_flight_as_depth(prefetch, depth):
    source = Counted()
    with prefetch(source, depth=depth) as prefetcher:
        for taken in range(1, 4):
            next(prefetcher)
            assert becomes(lambda taken=taken: source.reads == taken + depth)
            assert not becomes(lambda taken=taken: source.reads > taken + depth, within=BRIEFLY)


def test_nothing_is_read_before_the_first_batch_is_asked_for(prefetch, threaded):
    source = Counted()
    prefetcher = prefetch(source)
    assert not becomes(lambda: source.reads > 0, within=BRIEFLY)
    iter(prefetcher)
    assert becomes(lambda: source.reads == (2 if threaded else 0))


def test_the_source_is_read_by_one_thread(prefetch, threaded):
    source = Counted(5)
    values_of(prefetch(source))
    assert len(source.threads) == 1
    assert (threading.current_thread() in source.threads) == (not threaded)


# ---- passes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SOURCES)
def test_a_second_loop_begins_anew_or_goes_on_with_what_was_read(prefetch, name):
    prefetcher = prefetch(SOURCES[name](), depth=3)
    for moved in prefetcher:
        if value_of(moved) == 1:
            break
    assert values_of(prefetcher) == ([0, 1, 2, 3, 4] if name in CAN_BEGIN_ANEW else [2, 3, 4])
    assert values_of(prefetcher) == ([0, 1, 2, 3, 4] if name in CAN_BEGIN_ANEW else [])


def test_an_iterator_of_it_goes_on_where_it_is(prefetch):
    iterator = iter(prefetch([batch(i) for i in range(4)]))
    assert value_of(next(iterator)) == 0
    assert values_of(iterator) == [1, 2, 3]


def test_next_goes_on_with_the_pass_of_a_loop(prefetch):
    prefetcher = prefetch([batch(i) for i in range(4)])
    for moved in prefetcher:
        assert value_of(moved) == 0
        break
    assert value_of(next(prefetcher)) == 1


def test_a_pass_that_another_one_has_replaced_says_so(prefetch):
    prefetcher = prefetch([batch(i) for i in range(9)])
    first = iter(prefetcher)
    next(first)
    second = iter(prefetcher)
    with pytest.raises(RuntimeError, match="closed: another one over the source has begun"):
        next(first)
    assert values_of(second) == list(range(9))
    with pytest.raises(StopIteration):
        next(second)


def test_a_source_is_never_read_by_two_passes_at_once(device):
    source = Stops(at=2)

    class Again:
        def __iter__(self) -> Iterator[Any]:
            return source()

    with tdcopier.prefetch(Again(), device) as prefetcher:
        next(prefetcher)
        source.is_there.wait()
        second = Call(lambda: values_of(prefetcher))
        assert not becomes(lambda: not second.is_running(), within=BRIEFLY)
        source.gate.set()
        assert second.join() == [0, 1, 2, 3, 4]


def test_threads_that_share_an_iterator_get_different_batches(prefetch):
    count = 400
    iterator = iter(prefetch(Counted(count), depth=4))
    taken = at_once(4, lambda _: values_of(iterator))
    assert sorted(value for values in taken for value in values) == list(range(count))
    assert all(values == sorted(values) for values in taken)


def test_threads_that_begin_at_once_share_a_pass(prefetch):
    for _ in range(20):
        prefetcher = prefetch([batch(i) for i in range(4)])
        taken = at_once(4, lambda _, prefetcher=prefetcher: value_of(next(prefetcher)))
        assert sorted(taken) == [0, 1, 2, 3]
        prefetcher.close()


# ---- len and stats -------------------------------------------------------------------------------


def test_its_length_is_that_of_its_source(prefetch):
    assert len(prefetch([batch(0)] * 3)) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ((batch(i) for i in range(3)), r"object of type 'generator' has no len\(\)"),
        (Counted().sample, r"a prefetcher of a callable has no len\(\)"),
    ],
    ids=["generator", "callable"],
)
def test_where_the_source_has_no_length_there_is_none(prefetch, source, message):
    prefetcher = prefetch(source)
    with pytest.raises(TypeError, match=message):
        len(prefetcher)


def test_stats_tell_that_the_source_is_slow(device):
    begun = threading.Event()

    def slow() -> Iterator[Any]:
        begun.wait()
        for i in range(3):
            asked.found_none.wait()
            asked.found_none.clear()
            assert not becomes(lambda: False, within=BRIEFLY)
            yield batch(i)

    prefetcher = tdcopier.prefetch(slow(), device, depth=1)
    passing = iter(prefetcher)
    asked = prefetcher._queue._arrival = Asked(prefetcher._queue._arrival)
    begun.set()
    values_of(passing)
    stats = prefetcher.stats
    assert stats.batches == stats.late_batches == 3
    assert stats.waited_us > 0  # a busy host may let this thread begin to wait late
    assert stats.read_us >= 3 * BRIEFLY * 1e6


def test_stats_tell_that_the_consumer_is_slow(device):
    source = Counted(6)
    prefetcher = tdcopier.prefetch(source, device, depth=2)
    next(prefetcher)
    for taken in range(2, 7):
        assert becomes(lambda: len(prefetcher._queue._items) == 2 or source.reads == 7)
        assert not becomes(lambda: False, within=BRIEFLY / 3)
        next(prefetcher)
        assert prefetcher.stats.batches == taken
    assert prefetcher.stats.late_batches <= 1  # the first
    assert prefetcher.stats.idle_us > 0
    assert prefetcher.stats.copy_us > 0


def test_stats_of_a_source_that_the_loop_reads_count_no_idle_time(device):
    prefetcher = in_loop([batch(i) for i in range(6)], device)
    values_of(prefetcher)
    stats = prefetcher.stats
    assert (stats.batches, stats.late_batches) == (6, 1)  # the first
    assert stats.idle_us == 0
    assert 0 < stats.read_us < stats.waited_us
    assert 0 < stats.copy_us < stats.waited_us


def test_stats_go_on_through_all_passes(prefetch):
    prefetcher = prefetch([batch(i) for i in range(4)])
    why = "the source is no DataLoader of torch, but a list"
    assert prefetcher.stats == tdcopier.stats.PrefetchStats(0, 0, 0, 0, 0, 0, 0, 0, why)
    values_of(prefetcher)
    values_of(prefetcher)
    assert prefetcher.stats.batches == 8
