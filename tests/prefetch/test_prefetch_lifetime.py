"""Passes of `prefetch` that end early: which objects are released, and by which thread."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from prefetch_support import Counted, Stops, all_is_over, batch, readers, value_of
from sim_support import becomes
from support import are_released, run_python

import tdcopier


def end_by_close(prefetcher: Any) -> None:
    next(prefetcher)
    prefetcher.close()
    assert not readers()


def end_by_with(prefetcher: Any) -> None:
    with prefetcher:
        next(prefetcher)
    assert not readers()


def end_by_break(prefetcher: Any) -> None:
    for _ in prefetcher:
        break


def end_by_an_error(prefetcher: Any) -> None:
    def fail() -> None:
        for _ in prefetcher:
            raise KeyError("in the loop")

    with pytest.raises(KeyError):
        fail()


def end_by_dropping(prefetcher: Any) -> None:
    next(prefetcher)


ENDS = [end_by_close, end_by_with, end_by_break, end_by_an_error, end_by_dropping]


@pytest.mark.parametrize("end", ENDS)
def test_however_it_ends_early_nothing_is_left(prefetch, threaded, device, end):
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
            ended.append(threading.current_thread().name)

    source = endless()  # kept: it must be closed, not just dropped
    end(prefetch(source, depth=3))
    reading = "tdcopier-prefetch" if threaded else threading.current_thread().name
    assert becomes(lambda: ended == [reading] and all_is_over())
    assert are_released(made)
    with pytest.raises(StopIteration):
        next(source)


def test_a_reader_in_its_source_keeps_nothing_but_the_source(device):
    source = Stops(at=1)
    prefetcher = tdcopier.prefetch(source(), device, depth=4)
    alive = weakref.ref(prefetcher)
    next(prefetcher)
    source.is_there.wait()
    assert len(readers()) == 1
    del prefetcher
    assert alive() is None
    source.gate.set()
    assert becomes(all_is_over)
    assert source.ended == ["ended"]


def test_a_batch_that_was_yielded_is_the_consumers_alone(prefetch, threaded, device):
    class Watched(list):
        pass

    made: list[weakref.ref[Any]] = []
    gate = threading.Event()
    if not threaded:  # the loop reads, and would wait itself
        gate.set()

    def one_and_wait() -> Iterator[Any]:
        for _ in range(9):
            leaf = torch.ones(3, device=device)  # passed through
            made.append(weakref.ref(leaf))
            yield Watched([leaf, torch.ones(3)])
            del leaf
            gate.wait()

    prefetcher = prefetch(one_and_wait())
    for i in range(4):
        moved = next(prefetcher)
        assert made[i]() is moved[0]
        tree = weakref.ref(moved)
        del moved
        assert are_released([made[i], tree])
        gate.set()
    prefetcher.close()


def test_an_error_that_was_told_is_the_consumers_alone(prefetch):
    class Broken(Exception):
        pass

    def failing() -> Any:
        raise Broken

    prefetcher = prefetch(failing)
    collecting = gc.isenabled()
    gc.disable()  # it is in no cycle
    try:
        try:
            next(prefetcher)
        except Broken as error:
            alive = weakref.ref(error)
        assert becomes(all_is_over)
        assert alive() is None
    finally:
        if collecting:
            gc.enable()


def test_its_own_reader_may_collect_it(device):
    class Owner:
        pass

    told, is_there = threading.Event(), threading.Event()
    ended = []

    def collecting() -> Iterator[Any]:
        try:
            yield batch(0)
            is_there.set()
            told.wait()
            gc.collect()
            yield batch(1)
        finally:
            ended.append("ended")

    owner = Owner()
    owner.owner, owner.prefetcher = owner, tdcopier.prefetch(collecting(), device)
    alive = weakref.ref(owner.prefetcher)
    next(owner.prefetcher)
    is_there.wait()
    del owner
    assert alive() is not None
    told.set()
    assert becomes(all_is_over)
    assert ended == ["ended"]
    assert alive() is None


def test_a_source_may_close_its_own_prefetcher(prefetch, threaded):
    ended = []

    def closing() -> Iterator[Any]:
        try:
            yield batch(0)
            prefetcher.close()
            yield batch(1)
        finally:
            ended.append("ended")

    prefetcher = prefetch(closing(), depth=1)
    if threaded:  # the loop reads both before it gets the first
        assert value_of(next(prefetcher)) == 0
        assert becomes(all_is_over)
    with pytest.raises(RuntimeError, match="closed"):
        next(prefetcher)
    assert ended == ["ended"]


def test_a_finished_pass_lets_its_iterator_go(prefetch):
    class Source:
        def __iter__(self) -> Iterator[Any]:
            iterator = iter(Counted(0))
            made.append(weakref.ref(iterator))
            return iterator

    made: list[weakref.ref[Any]] = []
    prefetcher = prefetch(Source())
    assert list(prefetcher) == []
    assert are_released(made)


# ---- the end of the interpreter, and forks -------------------------------------------------------

ENABLE = """
    import os, threading, torch, tdcopier
    device = os.environ.get("TDCOPIER_TEST_DEVICE", "sim")
    if device == "sim":
        from tdcopier import sim
        sim.enable(devices=2)

    def blocked():
        yield torch.ones(3)
        threading.Event().wait()

    def endless():
        while True:
            yield [torch.ones(2_000_000), torch.ones(5)]

    def computing():
        x = torch.ones(600, 600) / 600
        while True:
            x = x @ x
            yield x
"""


@pytest.mark.parametrize("source", ["blocked", "endless", "computing"])
@pytest.mark.parametrize("depth", [1, 1000])
def test_the_interpreter_exits_cleanly_with_a_pass_under_way(source, depth):
    run_python(
        ENABLE
        + f"""
    prefetcher = tdcopier.prefetch({source}(), device, depth={depth})
    next(prefetcher)
    """,
    )


def test_a_forked_child_is_told_that_the_pass_is_the_parents():
    run_python(
        ENABLE
        + """
    import warnings
    warnings.simplefilter("ignore")
    prefetcher = tdcopier.prefetch(endless(), "cpu", depth=2)
    passing = iter(prefetcher)
    next(passing)
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            told = 0
            for ask in (lambda: next(passing), lambda: next(prefetcher), lambda: iter(prefetcher)):
                try:
                    ask()
                except RuntimeError as error:
                    told += "made before the process was forked" in str(error)
            prefetcher.close()
            del passing, prefetcher, ask
            own = tdcopier.prefetch([torch.ones(3)], "cpu")
            told += next(own).tolist() == [1, 1, 1]
            os._exit(0 if told == 4 else 1)
        next(passing)
        assert os.waitpid(pid, 0)[1] == 0
    prefetcher.close()
    """,
    )
