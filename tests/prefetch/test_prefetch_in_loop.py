"""`prefetch(threaded=False)`: the loop's own thread reads the source and sends staged batches."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from prefetch_support import Call, Counted, Stops, batch, in_loop, readers, value_of, values_of
from sim_support import BRIEFLY, becomes
from support import are_released, assert_same, oracle

import tdcopier

LARGE = 1 << 20
"""4 MiB of floats, which workers stage."""


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
    "items alone": Rows,
    "callable": lambda: Counted(5).sample,
}
CAN_BEGIN_ANEW = {"list", "items alone"}


@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("make", SOURCES.values(), ids=list(SOURCES))
def test_every_batch_comes_once_and_in_order(device, make, depth):
    prefetcher = in_loop(make(), device, depth=depth)
    assert values_of(prefetcher) == [0, 1, 2, 3, 4]
    assert not readers()


@pytest.mark.parametrize("depth", [1, 3])
def test_batches_are_what_to_makes_of_every_leaf(device, depth):
    batches = [
        {"a": [torch.arange(n), np.full(n, 2.0)], "large": torch.rand(n << 18), "s": "text"}
        for n in range(1, 5)
    ]
    for got, source in zip(in_loop(batches, device, depth=depth), batches, strict=True):
        assert_same(got, oracle(source, device))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_as_many_batches_are_on_their_way_as_depth(device, depth):
    source = Counted()
    with in_loop(source, device, depth=depth) as prefetcher:
        iter(prefetcher)
        assert source.reads == 0
        for taken in range(1, 4):
            next(prefetcher)
            assert source.reads == taken + depth


def test_the_loops_own_thread_reads_the_source(device):
    source = Counted(5)
    values_of(in_loop(source, device))
    assert source.threads == {threading.current_thread()}


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


@pytest.mark.parametrize("name", SOURCES)
def test_a_second_loop_begins_anew_or_goes_on_with_what_was_read(device, name):
    prefetcher = in_loop(SOURCES[name](), device, depth=3)
    for moved in prefetcher:
        if value_of(moved) == 1:
            break
    assert values_of(prefetcher) == ([0, 1, 2, 3, 4] if name in CAN_BEGIN_ANEW else [2, 3, 4])
    assert values_of(prefetcher) == ([0, 1, 2, 3, 4] if name in CAN_BEGIN_ANEW else [])


def test_a_pass_that_another_one_has_replaced_says_so(device):
    prefetcher = in_loop([batch(i) for i in range(9)], device)
    first = iter(prefetcher)
    next(first)
    second = iter(prefetcher)
    with pytest.raises(RuntimeError, match="closed: another one over the source has begun"):
        next(first)
    assert values_of(second) == list(range(9))


def test_threads_that_share_an_iterator_get_different_batches(device):
    count = 300
    iterator = iter(in_loop(Counted(count), device, depth=4))
    together = threading.Barrier(4)

    def take() -> list[int]:
        together.wait()
        return values_of(iterator)

    takers = [Call(take) for _ in range(4)]
    taken = [taker.join() for taker in takers]
    assert sorted(value for values in taken for value in values) == list(range(count))


def test_stats_tell_of_every_batch(device):
    prefetcher = in_loop([batch(i) for i in range(6)], device)
    values_of(prefetcher)
    stats = prefetcher.stats
    assert (stats.batches, stats.late_batches) == (6, 1)  # the first
    assert stats.idle_us == 0
    assert 0 < stats.read_us < stats.waited_us
    assert 0 < stats.copy_us < stats.waited_us


# ---- errors --------------------------------------------------------------------------------------


class Broken(Exception):
    pass


def breaking(error: BaseException, at: int = 2) -> Iterator[Any]:
    for i in range(at):
        yield batch(i)
    raise error


def test_what_the_source_raises_comes_out_behind_all_batches_before_it(device):
    prefetcher = in_loop(breaking(Broken("lost")), device, depth=5)
    assert [value_of(next(prefetcher)) for _ in range(2)] == [0, 1]
    with pytest.raises(Broken, match="lost"):
        next(prefetcher)
    with pytest.raises(StopIteration):
        next(prefetcher)


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


def test_what_cannot_be_copied_fails_in_its_place_and_later_batches_come(device):
    batches = [batch(0), {"x": np.zeros(3, np.longdouble)}, batch(2), batch(3)]
    passing = iter(in_loop(batches, device))
    assert value_of(next(passing)) == 0
    with pytest.raises(TypeError):
        next(passing)
    assert values_of(passing) == [2, 3]


def test_an_error_that_was_told_is_the_consumers_alone(device):
    def failing() -> Any:
        raise Broken

    prefetcher = in_loop(failing, device)
    collecting = gc.isenabled()
    gc.disable()  # it is in no cycle
    try:
        try:
            next(prefetcher)
        except Broken as error:
            alive = weakref.ref(error)
        assert alive() is None
    finally:
        if collecting:
            gc.enable()


def test_threaded_is_a_bool(device):
    with pytest.raises(TypeError, match="threaded must be a bool; got 0"):
        tdcopier.prefetch([], device, threaded=0)


# ---- the end ------------------------------------------------------------------------------------


def end_by_close(prefetcher: Any) -> None:
    next(prefetcher)
    prefetcher.close()


def end_by_with(prefetcher: Any) -> None:
    with prefetcher:
        next(prefetcher)


def end_by_dropping(prefetcher: Any) -> None:
    next(prefetcher)


@pytest.mark.parametrize("end", [end_by_close, end_by_with, end_by_dropping])
def test_however_it_ends_early_nothing_is_left(device, end):
    made: list[weakref.ref[Any]] = []
    ended = []

    def endless() -> Iterator[Any]:
        try:
            while True:
                leaf = torch.ones(3, device=device)  # passed through: the very object
                made.append(weakref.ref(leaf))
                yield [leaf, torch.zeros(5)]
                del leaf
        finally:
            ended.append(threading.current_thread())

    source = endless()  # kept: it must be closed, not just dropped
    end(in_loop(source, device, depth=3))
    assert becomes(lambda: gc.collect() >= 0 and ended == [threading.current_thread()])
    assert are_released(made)
    with pytest.raises(StopIteration):
        next(source)


def test_a_finished_pass_lets_its_iterator_go(device):
    class Source:
        def __iter__(self) -> Iterator[Any]:
            iterator = iter(Counted(0))
            made.append(weakref.ref(iterator))
            return iterator

    made: list[weakref.ref[Any]] = []
    prefetcher = in_loop(Source(), device)
    assert list(prefetcher) == []
    assert are_released(made)


def test_a_source_may_close_its_own_prefetcher(device):
    ended = []

    def closing() -> Iterator[Any]:
        try:
            yield batch(0)
            prefetcher.close()
            yield batch(1)
        finally:
            ended.append("ended")

    prefetcher = in_loop(closing(), device, depth=1)
    with pytest.raises(RuntimeError, match="closed"):
        next(prefetcher)
    assert ended == ["ended"]


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


def test_what_a_generator_raises_when_it_is_closed_comes_out_of_close(device):
    def unwilling() -> Iterator[Any]:
        try:
            while True:
                yield batch(0)
        finally:
            raise Broken("cannot close")

    prefetcher = in_loop(unwilling(), device)
    next(prefetcher)
    with pytest.raises(Broken, match="cannot close"):
        prefetcher.close()
    prefetcher.close()


def test_a_closed_prefetcher_says_so(device):
    prefetcher = in_loop([batch(i) for i in range(5)], device)
    passing = iter(prefetcher)
    next(passing)
    prefetcher.close()
    with pytest.raises(RuntimeError, match="closed"):
        next(passing)
    with pytest.raises(RuntimeError, match="this prefetcher is closed"):
        next(prefetcher)
