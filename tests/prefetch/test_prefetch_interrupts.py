"""Ctrl-C at any point of a consumer's call: later batches come, in order, and close() returns."""

from __future__ import annotations

import _thread
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from interrupts import KINDS, Interrupter, in_time, interrupted_everywhere
from prefetch_support import Asked, Counted, Stops, all_is_over, batch, value_of
from sim_support import becomes

import tdcopier

COUNT = 5
LARGE = 1 << 18
"""1 MiB of floats, which workers stage."""

SOURCES: dict[str, Callable[[], Any]] = {
    "list": lambda: [batch(i) for i in range(COUNT)],
    "generator": lambda: (batch(i) for i in range(COUNT)),
    "callable": lambda: Counted(COUNT).sample,
}


@pytest.fixture
def begin(prefetch: Callable[..., Any]) -> Callable[..., Any]:
    return partial(prefetch, depth=1)


@pytest.fixture(autouse=True)
def no_reader_is_left() -> Iterator[None]:
    yield
    gc.collect()  # an interrupted call may leave a cycle
    assert becomes(all_is_over)


def rest_of(prefetcher: Any) -> list[int]:
    """Returns the values of all remaining batches of the current pass."""

    def take_all() -> list[int]:
        values = []
        with suppress(StopIteration):
            while True:
                values.append(value_of(next(prefetcher)))
        return values

    return in_time(take_all)


def is_all_but_one_at_most(values: list[int], first: int) -> bool:
    return values == sorted(values) and len(set(range(first, COUNT)) - set(values)) <= 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("depth", "taken"), [(1, 2), (2, 0)])
@pytest.mark.parametrize("source", SOURCES)
def test_an_interrupted_next_loses_its_own_batch_at_most(begin, source, taken, depth, kind):
    def scene(interrupter: Interrupter) -> None:
        with begin(SOURCES[source](), depth=depth) as prefetcher:
            assert [value_of(next(prefetcher)) for _ in range(taken)] == list(range(taken))
            got = []
            with interrupter:
                got.append(next(prefetcher))
            values = [*map(value_of, got), *rest_of(prefetcher)]
            assert is_all_but_one_at_most(values, taken), values

    assert interrupted_everywhere(kind, scene) > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("taken", [None, 0, 2, COUNT])
@pytest.mark.parametrize("source", SOURCES)
def test_after_an_interrupted_iter_a_loop_gets_all_that_it_would_have_got(
    begin, source, taken, kind
):
    def scene(interrupter: Interrupter) -> None:
        with begin(SOURCES[source]()) as prefetcher:
            if taken is not None:
                iter(prefetcher)
                for value in range(taken):
                    assert value_of(next(prefetcher)) == value
            with interrupter:
                iter(prefetcher)
            values = in_time(lambda: [value_of(moved) for moved in prefetcher])
            assert values == list(range(0 if source == "list" else taken or 0, COUNT))

    assert interrupted_everywhere(kind, scene) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_interrupted_iter_next_goes_on_with_the_pass_that_was_to_begin(begin, kind):
    def scene(interrupter: Interrupter) -> None:
        with begin(SOURCES["list"]()) as prefetcher:
            assert value_of(next(prefetcher)) == 0
            with interrupter:
                iter(prefetcher)
            assert rest_of(prefetcher) in ([0, 1, 2, 3, 4], [1, 2, 3, 4])

    assert interrupted_everywhere(kind, scene) > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", SOURCES)
def test_an_interrupted_close_may_be_repeated(begin, source, kind):
    def scene(interrupter: Interrupter) -> None:
        prefetcher = begin(SOURCES[source](), depth=2)
        next(prefetcher)
        with interrupter:
            prefetcher.close()
        in_time(prefetcher.close)
        assert all_is_over()
        if interrupter.has_interrupted:
            with pytest.raises(RuntimeError, match="this prefetcher is closed"):
                next(prefetcher)

    assert interrupted_everywhere(kind, scene) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_is_closed_by_the_second_close_if_the_first_was_interrupted(begin, kind):
    def scene(interrupter: Interrupter) -> None:
        source = Stops(at=-1)
        prefetcher = begin(source())
        next(prefetcher)
        with interrupter:
            prefetcher.close()
        in_time(prefetcher.close)
        assert source.ended == ["ended"]

    assert interrupted_everywhere(kind, scene) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_comes_after_an_interrupt_too(begin, kind):
    def scene(interrupter: Interrupter) -> None:
        with begin([batch(0)]) as prefetcher:
            next(prefetcher)
            with interrupter, suppress(StopIteration):
                next(prefetcher)
            assert rest_of(prefetcher) == []

    assert interrupted_everywhere(kind, scene) > 5


class Broken(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("failing", ["copy", "source"])
def test_a_failure_is_told_once_unless_an_interrupt_took_its_place(begin, failing, kind):
    error = TypeError if failing == "copy" else Broken

    def source() -> Iterator[Any]:
        if failing == "source":
            raise Broken
        yield {"x": np.zeros(3, np.longdouble)}
        yield batch(0)

    def scene(interrupter: Interrupter) -> None:
        told = 0
        with begin(source()) as prefetcher:
            iter(prefetcher)
            with interrupter:
                try:
                    next(prefetcher)
                except error:
                    told = 1
            while True:
                try:
                    in_time(lambda: next(prefetcher))
                except error:
                    told += 1
                except StopIteration:
                    break
        assert told == 1 or (told == 0 and interrupter.has_interrupted)

    assert interrupted_everywhere(kind, scene) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_next_leaves_later_copies_as_they_are(begin, device, kind):
    """They are not deferred for a consumer to send."""

    def scene(interrupter: Interrupter) -> None:
        with begin(SOURCES["list"](), depth=2) as prefetcher:
            with interrupter:
                next(prefetcher)
            handle = tdcopier.start_copy(torch.ones(LARGE), device)
            handle.wait_staged()
            assert handle.stats.transfers > 0

    interrupted_everywhere(kind, scene)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefetcher_that_is_dropped_after_an_interrupt_leaves_no_reader(begin, kind):
    def scene(interrupter: Interrupter) -> None:
        prefetcher = begin(SOURCES["callable"]())
        with interrupter:
            next(prefetcher)
        del prefetcher
        assert becomes(lambda: all_is_over() or gc.collect() < 0)

    interrupted_everywhere(kind, scene)


@pytest.mark.parametrize("ends_system_calls", [True, False])
def test_ctrl_c_ends_a_next_that_waits_and_the_batch_comes_later(device, ends_system_calls):
    """A signal that comes between the check for signals and the wait ends no system call."""
    source = Stops(at=1, count=2)
    here = threading.main_thread().ident

    def interrupt() -> None:
        asked.found_none.wait()
        if ends_system_calls:
            signal.pthread_kill(here, signal.SIGINT)
        else:
            _thread.interrupt_main()

    with tdcopier.prefetch(source(), device) as prefetcher:
        assert value_of(next(prefetcher)) == 0
        source.is_there.wait()
        asked = prefetcher._queue._arrival = Asked(prefetcher._queue._arrival)
        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            next(prefetcher)
        interrupting.join()
        source.gate.set()
        assert rest_of(prefetcher) == [1]
