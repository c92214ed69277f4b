"""Errors in a source, in a copy and in the call of `prefetch`, and where they are raised."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from prefetch_support import Counted, Stops, batch, value_of, values_of
from sim_support import BRIEFLY, becomes
from thread_support import Call

import tdcopier


class Broken(Exception):
    pass


def breaking(error: BaseException, at: int = 2) -> Iterator[Any]:
    for i in range(at):
        yield batch(i)
    raise error


@pytest.mark.parametrize(
    ("threaded", "kind"),
    # Without a reader, an interrupt comes out at once.
    [(True, Broken), (True, KeyboardInterrupt), (False, Broken)],
    ids=["threaded", "threaded, interrupt", "in the loop"],
)
@pytest.mark.parametrize("form", ["generator", "callable"])
def test_what_the_source_raises_comes_out_after_all_batches_before_it(prefetch, form, kind):
    error = kind("lost")
    generator = breaking(error)
    source = generator if form == "generator" else lambda: next(generator)
    prefetcher = prefetch(source, depth=5)
    assert [value_of(next(prefetcher)) for _ in range(2)] == [0, 1]
    with pytest.raises(kind, match="lost") as caught:
        next(prefetcher)
    assert caught.value is error
    assert "breaking" in [frame.name for frame in traceback.extract_tb(caught.tb)]
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_a_callable_may_be_tried_again_after_it_has_failed(prefetch):
    results = iter([batch(0), Broken("once"), batch(2)])

    def sample() -> Any:
        result = next(results)
        if isinstance(result, Broken):
            raise result
        return result

    prefetcher = prefetch(sample)
    seen = []
    with pytest.raises(Broken):
        seen.extend(map(value_of, prefetcher))
    assert values_of(prefetcher) == [2]


def test_a_failure_of_iter_comes_out_of_the_loop(prefetch):
    class Unready:
        def __iter__(self) -> Iterator[Any]:
            raise Broken("no data")

    prefetcher = prefetch(Unready())
    for _ in range(2):
        with pytest.raises(Broken, match="no data"):
            iter(prefetcher)


def outcomes(prefetcher: Any, count: int) -> list[Any]:
    """Returns the batches' values, or the classes of the errors raised instead."""
    seen = []
    for _ in range(count):
        try:
            seen.append(value_of(next(prefetcher)))
        except Exception as error:
            seen.append(type(error))
    return seen


def test_what_cannot_be_copied_fails_in_its_place_and_later_batches_come(prefetch):
    batches = [batch(0), {"x": np.zeros(3, np.longdouble)}, batch(2), batch(3)]
    prefetcher = prefetch(batches)
    assert outcomes(prefetcher, 5) == [0, TypeError, 2, 3, StopIteration]
    assert prefetcher.stats.batches == 3


class Searching:
    """Raises StopIteration where it is moved: a `next()` without a default is a common mistake."""

    def to(self, device: Any) -> Any:
        return next(iter(()))


class Rebuilt:
    """A registered class."""


@pytest.mark.parametrize("where", ["to", "flatten", "unflatten"])
def test_a_copy_that_raises_stop_iteration_does_not_end_the_pass(prefetch, registry, where):
    lost = {"flatten": lambda _: next(iter(())), "unflatten": lambda *_: next(iter(()))}
    tdcopier.containers.register(
        Rebuilt,
        lost["flatten"] if where == "flatten" else lambda _: ([torch.ones(2)], None),
        lost["unflatten"],
    )
    failing = {"x": Searching() if where == "to" else Rebuilt()}
    prefetcher = prefetch([batch(0), failing, batch(2)])
    assert outcomes(prefetcher, 4) == [0, RuntimeError, 2, StopIteration]


@pytest.mark.sim
@pytest.mark.parametrize("elements", [3, 1 << 20], ids=["inline", "background"])
def test_a_copy_that_finds_no_memory_fails_in_its_place_and_later_batches_come(
    sim, prefetch, elements
):
    def failing() -> Iterator[Any]:
        for i in range(4):
            large = torch.zeros(elements)
            if i == 1:
                with sim.fail_device_allocation(1):
                    yield {**batch(i), "large": large}
            else:
                yield {**batch(i), "large": large}

    prefetcher = prefetch(failing(), depth=1)
    assert outcomes(prefetcher, 5) == [0, torch.OutOfMemoryError, 2, 3, StopIteration]


@pytest.mark.parametrize("count", [3, 50])
def test_failed_batches_give_their_room_back(prefetch, count):
    batches = [{"x": np.zeros(3, np.longdouble)}] * count + [batch(7)]
    prefetcher = prefetch(batches, depth=2)
    assert outcomes(prefetcher, count + 1) == [TypeError] * count + [7]


MISTAKES: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no source": (3, {}, TypeError, "source must be an iterable of batches, or a callable .* int"),
    "depth 0": (None, {"depth": 0}, ValueError, "depth must be at least 1; got 0"),
    "depth -3": (None, {"depth": -3}, ValueError, "depth must be at least 1; got -3"),
    "depth 1.5": (None, {"depth": 1.5}, TypeError, "depth must be a positive int; got 1.5"),
    "depth True": (None, {"depth": True}, TypeError, "depth must be a positive int; got True"),
    "threaded 0.0": (None, {"threaded": 0.0}, TypeError, "threaded must be a bool; got 0.0"),
    "unknown option": (None, {"pinned": True}, TypeError, "unexpected keyword argument 'pinned'"),
    "option's value": (
        None,
        {"max_packed_chunk_bytes": 0},
        ValueError,
        "max_packed_chunk_bytes must be a positive int",
    ),
    "device index": (None, {"device": 99}, ValueError, "does not exist"),
    "device type": (None, {"device": 1.5}, TypeError, "device must be a str"),
    "device name": (None, {"device": "nowhere"}, ValueError, "unknown device 'nowhere'"),
}


@pytest.mark.parametrize(("source", "more", "error", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_by_the_call_and_nothing_is_read(device, source, more, error, message):
    counted = Counted()
    options = {"device": device, **more}
    if options["device"] == 99:
        options["device"] = f"{torch.device(device).type}:99"
    with pytest.raises(error, match=message):
        tdcopier.prefetch(counted if source is None else source, **options)
    assert counted.reads == 0


# ---- closed --------------------------------------------------------------------------------------


def test_a_closed_prefetcher_says_so(prefetch):
    prefetcher = prefetch([batch(0)] * 5)
    passing = iter(prefetcher)
    next(passing)
    prefetcher.close()
    prefetcher.close()
    for ask in (lambda: next(prefetcher), lambda: iter(prefetcher)):
        with pytest.raises(RuntimeError, match="this prefetcher is closed: make another one"):
            ask()
    with pytest.raises(RuntimeError, match="this pass was closed: so was its prefetcher"):
        next(passing)


def test_a_pass_that_had_ended_before_it_was_closed_is_at_its_end(prefetch):
    with prefetch([batch(0)]) as prefetcher:
        passing = iter(prefetcher)
        assert values_of(passing) == [0]
    with pytest.raises(StopIteration):
        next(passing)


def test_consumers_that_wait_are_told_when_it_is_closed(device):
    source = Stops(at=0)
    prefetcher = tdcopier.prefetch(source(), device)
    passing = iter(prefetcher)
    waiting = [Call(lambda: next(passing)) for _ in range(3)]
    source.is_there.wait()
    closing = Call(prefetcher.close)
    for consumer in waiting:
        with pytest.raises(RuntimeError, match="this pass was closed"):
            consumer.join()
    assert not becomes(lambda: not closing.is_running(), within=BRIEFLY)  # it waits for the source
    source.gate.set()
    closing.join()
    assert source.ended == ["ended"]


def test_all_consumers_that_wait_are_told_of_the_end(prefetch):
    source = Stops(at=1, count=1)

    def gated() -> Iterator[Any]:
        source.gate.wait()
        yield from ()

    passing = iter(prefetch(gated()))
    waiting = [Call(lambda: list(passing)) for _ in range(3)]
    source.gate.set()
    assert [consumer.join() for consumer in waiting] == [[], [], []]


def test_what_a_generator_raises_when_it_is_closed_comes_out_of_close(prefetch):
    def sulking() -> Iterator[Any]:
        try:
            while True:
                yield batch(0)
        finally:
            raise Broken("sulks")

    prefetcher = prefetch(sulking())
    next(prefetcher)
    with pytest.raises(Broken, match="sulks"):
        prefetcher.close()
    prefetcher.close()
