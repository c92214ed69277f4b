"""How times become rounds, medians and ratios, from known times."""

from __future__ import annotations

import contextlib
import weakref
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from benchmark_support import Clock, load

from tdcopier._commands.interleave import Contender, interleave, summarise

measure, way = load("tool.measure"), load("tool.way")
steps, loop = load("loops.steps"), load("loops.training_loop")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([5.0], (5.0, 5.0, 5.0, 5.0, 5.0, 1)),
        ([3.0, 1.0], (2.0, 1.5, 2.5, 1.0, 3.0, 2)),
        ([1.0, 1.0, 1.0, 1000.0], (1.0, 1.0, 250.75, 1.0, 1000.0, 4)),
    ],
)
def test_a_summary_is_median_and_inclusive_quartiles(times: Any, expected: Any) -> None:
    assert tuple(summarise(times)) == expected


def test_a_round_is_a_burst_of_every_contender_with_one_source_in_changing_order() -> None:
    clock, order, rounds_begun = Clock(), [], []

    def contender(name: str, us: int) -> Any:
        def run(source: str) -> None:
            order.append((name, source))
            clock.take_us(us)

        return Contender(name, run)

    times = interleave(
        [contender("fast", 10), contender("slow", 500), contender("other", 20)],
        ["x", "y"],
        lambda: None,
        rounds=19,
        warm_up=1,
        clock_ns=clock,
        burst=2,
        before_round=lambda: rounds_begun.append(len(order)),
    )
    assert times == {"fast": [11.0] * 38, "slow": [501.0] * 38, "other": [21.0] * 38}
    bursts = [order[begin : begin + 2] for begin in range(0, 120, 2)]
    assert all(first == second for first, second in bursts)
    rounds = [[first for first, _ in bursts[begin : begin + 3]] for begin in range(0, 60, 3)]
    for index, calls in enumerate(rounds):
        assert {name for name, _ in calls} == {"fast", "slow", "other"}
        assert {source for _, source in calls} == {"xy"[index % 2]}
    assert len({tuple(name for name, _ in calls) for calls in rounds}) > 3
    assert rounds_begun == list(range(0, 120, 6))


def test_only_the_call_and_the_device_after_it_are_timed() -> None:
    clock = Clock()
    pending_us = iter([1000, 7] * 2)  # work from before the call; then its own

    class Slow:
        def __del__(self) -> None:
            clock.take_us(10_000)

    @contextmanager
    def around() -> Any:
        clock.take_us(1000)
        yield
        clock.take_us(1000)

    slow = Contender("it", lambda _: Slow(), lambda _: clock.take_us(9), around=around)
    times = interleave(
        [slow], ["x"], lambda: clock.take_us(next(pending_us)), rounds=2, warm_up=0, clock_ns=clock
    )
    assert times == {"it": [8.0, 8.0]}


def test_items_are_shuffled_within_their_round_and_warm_up_rounds_are_negative() -> None:
    begun: list[int] = []
    found = list(
        measure.shuffled(
            "abc", iter, rounds=20, warm_up=2, before_round=lambda: begun.append(len(begun))
        )
    )
    assert [index for index, _ in found] == [index for index in range(-2, 20) for _ in "abc"]
    orders = ["".join(item for _, item in found[at : at + 3]) for at in range(0, 66, 3)]
    assert {"".join(sorted(order)) for order in orders} == {"abc"}
    assert len(set(orders)) > 3
    assert len(begun) == 22


def test_a_disturbed_processor_is_left_for_a_quiet_one(monkeypatch: pytest.MonkeyPatch) -> None:
    where, slow = [0], {0}

    def move(pid: int, allowed: set[int]) -> None:
        where[0] = next(iter(allowed))

    monkeypatch.setattr(measure.os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr(measure.os, "sched_setaffinity", move, raising=False)
    monkeypatch.setattr(measure, "probe_us", lambda: 200.0 if where[0] in slow else 100.0)
    with measure.QuietProcessor() as processor:
        where[0] = 0
        processor.seek()
        assert where[0] == 1
        slow.update({1, 2})
        processor.seek()  # ends, though no processor is quiet


# ---- loops ---------------------------------------------------------------------------------------


def test_only_the_copy_calls_are_the_hosts_time_and_all_is_the_steps(sim: Any) -> None:
    clock, device = Clock(), torch.device("sim", 0)
    sources = [{"a": torch.full((4,), number)} for number in range(3)]
    started: list[Any] = []

    def start(tree: Any) -> Any:
        started.append(tree)
        clock.take_us(30)
        return tree

    def finish(tree: Any) -> Any:
        clock.take_us(12)
        return tree

    class Slow:
        def enqueue(self) -> None:
            clock.take_us(1000)

    feed = way.Way("it", start, finish)
    reader = steps.Reader(loop.check(sources, device))
    with feed.feeding([{"a": source["a"].to(device)} for source in sources]) as batches:
        found = steps.block(batches, reader.read, Slow(), device, clock_ns=clock)
    assert found.batch_us == [43.0] * steps.STEPS
    # The clock is read twice in each step, and once at the end.
    assert found.step_us == pytest.approx(1000 + 43 + 1 + 1 / steps.STEPS)
    assert len(started) == steps.STEPS + 1  # one before the loop, and one in each step
    assert [number for number, _ in reader.kept] == [9, 19]
    assert reader.count_wrong() == 0


def test_a_learners_step_includes_the_device_and_excludes_the_warm_up(sim: Any) -> None:
    clock, device = Clock(), torch.device("sim", 0)

    class Slow:
        def enqueue(self) -> None:
            clock.take_us(50)

    batch = torch.zeros(1, device=device)
    reader = steps.Reader(steps.Check(way.same, None, lambda number, batch: True))
    found = steps.block(
        iter(lambda: batch, None), reader.read, Slow(), device, warm_up=4, clock_ns=clock
    )
    assert found == (50 + 2 + 1 / steps.STEPS, [1] * steps.STEPS)
    assert len(reader.parts) == 4 + steps.STEPS
    assert [(number, kept is batch) for number, kept in reader.kept] == [(13, True), (23, True)]


def test_a_way_feeds_a_loop_from_a_number_on_and_starts_a_copy_ahead() -> None:
    started: list[int] = []

    def start(source: int) -> int:
        started.append(source)
        return source

    ahead = way.Way("it", start, lambda coming: 10 * coming)
    with ahead.feeding(range(3), 4) as batches:
        assert started == [1]
        assert [next(batches) for _ in range(4)] == [10, 20, 0, 10]
        assert started == [1, 2, 0, 1, 2]
    itself = way.Way("it", feed=lambda order: contextlib.nullcontext(order))
    with itself.feeding(range(3), 1) as batches:
        assert list(batches) == [1, 2, 0]


def test_a_batch_that_a_loop_drops_is_freed_before_it_gets_the_next() -> None:
    """Else the time to free it counts as time in the calls that copy."""
    with way.Way("it", finish=lambda n: torch.full((1,), n)).feeding(range(3)) as batches:
        batch = next(batches)
        dropped = weakref.ref(batch)
        del batch
        assert dropped() is None
        assert next(batches) == 1


def test_ratios_are_within_a_round_and_relative_to_the_first_way() -> None:
    us = {"on the device already": [1, 2, 4], "slow": [10, 30, 80]}
    blocks = [
        {name: steps.Block(float(taken[index]), [3.0, 5.0]) for name, taken in us.items()}
        for index in range(3)
    ]
    found = steps.figures(blocks, list(us))
    assert found["step"]["slow"]["median_us"] == 30
    assert found["host"]["slow"]["median_us"] == 4
    assert found["ratios"] == {"on the device already": 1.0, "slow": 15.0}
