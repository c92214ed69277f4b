"""How times become rounds, medians, ratios and steps, from known times."""

from __future__ import annotations

import contextlib
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from benchmark_support import Clock, load

from tdcopier._commands.interleave import Contender, compared, interleave, summarise

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


def test_contenders_are_compared_by_all_calls_and_by_first_calls() -> None:
    found = compared({"ours": [4.0, 1.0, 1.0], "other": [8.0, 5.0, 5.0]}, "ours", 3)
    assert found["contenders"]["other"]["median_us"] == 5.0
    assert found["ratios"] == {"other": 5.0}
    assert found["first_calls"]["other"]["median_us"] == 8.0
    assert found["ratios_of_first_calls"] == {"other": 2.0}


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


def test_steps_split_a_copy_where_the_caller_sees_it() -> None:
    clock = Clock()

    class Handle:
        def get(self) -> str:
            clock.take_us(20)
            return "tree"

    def start_copy(source: str) -> Handle:
        clock.take_us(100)
        return Handle()

    times = measure.steps(
        start_copy, ["x"], lambda: clock.take_us(3), rounds=2, warm_up=1, clock_ns=clock
    )
    assert times == {
        "start_copy": [101.0] * 2,
        "get": [21.0] * 2,
        "synchronise": [4.0] * 2,
        "drop": [1.0] * 2,
    }


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
        processor.seek()
    found = processor.described()
    assert (found["rounds"], found["moves"], found["disturbed_rounds"]) == (2, 1, 1)


def test_limits_come_from_the_fastest_memcpy_and_say_its_threads() -> None:
    limits, directions = load("copies.limits"), load("copies.directions")
    medians_us = {
        "tdcopier": 30.0,
        "limit: one pinned DMA": 20.0,
        "limit: memcpy into pinned memory, 1 thread": 60.0,
        "limit: memcpy into pinned memory, 8 threads": 25.0,
    }
    times = {way: {"median_us": median_us} for way, median_us in medians_us.items()}
    h2d = directions.h2d(torch.device("cuda", 0))
    found = limits.found_limits(h2d, 1_000_000, times)
    assert (found["dma"]["ours_over"], found["dma"]["gb_per_s"]) == (1.5, 50.0)
    assert (found["memcpy"]["threads"], found["memcpy"]["ours_over"]) == (8, 1.2)


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
    assert found == (50 + 2 + 1 / steps.STEPS, [1] * steps.STEPS, None)
    assert len(reader.parts) == 4 + steps.STEPS
    assert [(number, kept is batch) for number, kept in reader.kept] == [(13, True), (23, True)]


def test_a_way_feeds_a_loop_from_a_number_on_as_far_ahead_as_it_says() -> None:
    started: list[int] = []

    def start(source: int) -> int:
        started.append(source)
        return source

    ahead = way.Way("it", start, lambda coming: 10 * coming, ahead=2)
    with ahead.feeding(range(3), 4) as batches:
        assert started == [1, 2]
        assert [next(batches) for _ in range(4)] == [10, 20, 0, 10]
        assert started == [1, 2, 0, 1, 2, 0]
    itself = way.Way("it", feed=lambda order: contextlib.nullcontext(order))
    with itself.feeding(range(3), 1) as batches:
        assert list(batches) == [1, 2, 0]


def test_slow_ways_take_part_in_some_rounds_and_ratios_are_within_a_round(sim: Any) -> None:
    bench = measure.Bench(torch.device("sim", 0), 1, lambda label: iter)
    us = {"on the device already": iter([9, 1, 2, 4]), "slow": iter([99, 10, 80])}

    def play(name: str, index: int) -> Any:
        return steps.Block(float(next(us[name])), [1.0]), 1

    every = {"on the device already": 1, "slow": 2}
    blocks, wrong, _ = steps.played(bench, "it", every, play, rounds=3)
    assert wrong == {"on the device already": 4, "slow": 3}
    step, ratios = steps.both(blocks, every, lambda found: found.step_us)
    assert step["slow"]["repeats"] == 2
    assert ratios == {"on the device already": 1.0, "slow": 15.0}


def test_the_limits_of_the_waiting_part_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = load("loops.processor_while_waiting")
    limits: list[int] = []
    monkeypatch.setattr(waiting.tdcopier, "set_staging_limit_bytes", limits.append)
    with pytest.raises(KeyError), waiting.low_limits():
        raise KeyError
    assert limits == [waiting.STAGING_LIMIT_BYTES, waiting.DEFAULT_STAGING_LIMIT_BYTES]
