"""How the benchmarks process times and results, small made-up ones; nothing here is timed."""

import itertools
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from benchmark_support import Clock, load, measure

from tdcopier import workloads

directions, machine, quiet = load("directions"), load("machine"), load("quiet")
run, streams = load("run"), load("streams")


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([5.0], (5.0, 5.0, 5.0, 5.0, 5.0, 1)),
        ([3.0, 1.0], (2.0, 1.5, 2.5, 1.0, 3.0, 2)),
        ([5.0, 1.0, 4.0, 2.0, 3.0], (3.0, 2.0, 4.0, 1.0, 5.0, 5)),
        ([1.0, 1.0, 1.0, 1000.0], (1.0, 1.0, 250.75, 1.0, 1000.0, 4)),
    ],
)
def test_summary_is_median_and_inclusive_quartiles(times, expected) -> None:
    assert tuple(measure.summarise(times)) == expected


def test_no_times_have_no_summary() -> None:
    with pytest.raises(ValueError, match="no times"):
        measure.summarise([])


def test_ratio_says_how_many_times_longer_the_other_takes() -> None:
    ours, other = measure.summarise([2.0]), measure.summarise([70.0])
    assert measure.ratio_of_medians(other, ours) == 35.0


def test_interleaving_times_every_contender_once_per_round_in_changing_order() -> None:
    clock, order = Clock(), []

    def contender(name: str, us: int):
        def run(source):
            order.append((name, source))
            clock.take_us(us)

        return measure.Contender(name, run)

    times = measure.interleave(
        [contender("fast", 10), contender("slow", 500), contender("other", 20)],
        ["x", "y"],
        lambda: None,
        rounds=19,
        warm_up=1,
        clock_ns=clock,
    )
    assert times == {"fast": [11.0] * 19, "slow": [501.0] * 19, "other": [21.0] * 19}
    rounds = [order[begin : begin + 3] for begin in range(0, 60, 3)]
    for index, calls in enumerate(rounds):
        assert {name for name, _ in calls} == {"fast", "slow", "other"}
        assert {source for _, source in calls} == {"xy"[index % 2]}
    assert len({tuple(name for name, _ in calls) for calls in rounds}) > 3


def test_a_burst_is_one_contender_with_one_source_several_times_in_a_row() -> None:
    order: list[tuple[str, str]] = []

    def contender(name: str):
        return measure.Contender(name, lambda source: order.append((name, source)))

    rounds_begun: list[int] = []
    times = measure.interleave(
        [contender("a"), contender("b")],
        ["x", "y"],
        lambda: None,
        rounds=4,
        warm_up=0,
        burst=3,
        before_round=lambda: rounds_begun.append(len(order)),
    )
    assert {name: len(taken) for name, taken in times.items()} == {"a": 12, "b": 12}
    bursts = [order[begin : begin + 3] for begin in range(0, 24, 3)]
    assert all(len(set(burst)) == 1 for burst in bursts)
    assert rounds_begun == [0, 6, 12, 18]


def test_what_a_contender_needs_around_it_is_there_for_its_bursts_and_not_timed() -> None:
    clock, seen = Clock(), []

    @contextmanager
    def around():
        clock.take_us(1000)
        seen.append("in")
        yield
        seen.append("out")
        clock.take_us(1000)

    needy = measure.Contender("needy", lambda source: seen.append("call"), around=around)
    other = measure.Contender("other", lambda source: seen.append("other"))
    times = measure.interleave(
        [needy, other], ["x"], lambda: None, rounds=2, warm_up=0, clock_ns=clock, burst=2
    )
    assert times == {"needy": [1.0] * 4, "other": [1.0] * 4}
    assert [what for what in seen if what != "other"] == ["in", "call", "call", "out"] * 2
    assert "in call call out" in " ".join(seen)


def test_contenders_are_compared_by_all_calls_and_by_first_calls() -> None:
    found = measure.compared({"ours": [4.0, 1.0, 1.0], "other": [8.0, 5.0, 5.0]}, "ours", 3)
    assert found["contenders"]["other"]["median_us"] == 5.0
    assert found["ratios"] == {"other": 5.0}
    assert found["first_calls"]["other"]["median_us"] == 8.0
    assert found["ratios_of_first_calls"] == {"other": 2.0}


def test_a_disturbed_processor_is_left_for_a_quiet_one(monkeypatch) -> None:
    where = [0]
    slow = {0}

    def move(pid: int, allowed) -> None:
        where[0] = next(iter(allowed))

    monkeypatch.setattr(quiet.os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr(quiet.os, "sched_setaffinity", move, raising=False)
    monkeypatch.setattr(quiet, "probe_us", lambda: 200.0 if where[0] in slow else 100.0)
    with quiet.QuietProcessor() as processor:
        where[0] = 0
        processor.seek()
        assert where[0] == 1
        slow.update({1, 2})
        processor.seek()
    assert processor.described() == {
        "best_probe_us": 100.0,
        "tolerance": quiet.TOLERANCE,
        "rounds": 2,
        "moves": 1,
        "disturbed_rounds": 1,
    }


def test_preparing_and_the_device_before_the_call_are_not_timed_but_the_device_after_it_is() -> (
    None
):
    clock = Clock()
    pending_us = itertools.cycle([1000, 7])  # work from before the call; then its own

    times = measure.interleave(
        [measure.Contender("it", lambda source: None, lambda source: clock.take_us(10_000))],
        ["x"],
        lambda: clock.take_us(next(pending_us)),
        rounds=2,
        warm_up=0,
        clock_ns=clock,
    )
    assert times == {"it": [8.0, 8.0]}


def test_outputs_are_dropped_outside_of_the_timed_region() -> None:
    clock = Clock()

    class Slow:
        def __del__(self) -> None:
            clock.take_us(10_000)

    contender = measure.Contender("it", lambda source: Slow())
    times = measure.interleave(
        [contender], ["x"], lambda: None, rounds=2, warm_up=0, clock_ns=clock
    )
    assert times == {"it": [1.0, 1.0]}


def test_steps_split_a_copy_where_the_caller_sees_it() -> None:
    clock = Clock()

    class Handle:
        def get(self) -> str:
            clock.take_us(20)
            return "tree"

    def start_copy(source) -> Handle:
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


def test_a_changing_batch_is_the_same_tree_and_changes_every_value() -> None:
    tree = workloads.detection_batch(samples=2, cameras=2)
    batch = streams.ChangingBatch(tree, torch.device("cpu"))
    before = workloads.leaves_with_paths(workloads.map_tensors(batch.tree, torch.clone))
    for (path, leaf), (original_path, original) in zip(
        before, workloads.leaves_with_paths(tree), strict=True
    ):
        assert path == original_path
        assert torch.equal(leaf, original)
    batch.change()
    for (_, old), new in zip(before, workloads.leaves(batch.tree), strict=True):
        assert bool((old != new).all())


def test_a_changing_batch_finds_right_copies_right_and_stale_ones_wrong() -> None:
    batch = streams.ChangingBatch(workloads.detection_batch(2, 2), torch.device("cpu"))
    wrong = torch.zeros((), dtype=torch.int64)
    for _ in range(3):
        batch.change()
        copied = workloads.map_tensors(batch.tree, torch.clone)
        batch.count_wrong(copied, wrong)
    assert wrong.item() == 0
    batch.change()
    batch.count_wrong(copied, wrong)
    assert wrong.item() == sum(leaf.numel() for leaf in workloads.leaves(copied))


def test_names_become_file_names() -> None:
    assert machine.slug("NVIDIA H200 (80GB)") == "nvidia-h200-80gb"


def test_without_cuda_the_runner_says_what_else_there_is(monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main([]) == 1
    assert "--device sim" in capsys.readouterr().err


def test_fail_without_cuda_does_not_pass_on_the_simulated_device(monkeypatch, capsys) -> None:
    monkeypatch.setenv("FAIL_WITHOUT_CUDA", "1")
    assert run.main(["--device", "sim"]) == 1
    assert "not CUDA" in capsys.readouterr().err


def test_with_one_device_the_runner_says_why_it_leaves_d2d_out(
    sim: ModuleType, monkeypatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.delenv("FAIL_WITHOUT_CUDA", raising=False)
    monkeypatch.setattr(directions, "second_device", lambda device: None)
    assert run.main(["--device", "sim", "--only", "d2d", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "Skipped d2d: it needs two devices.\n" in printed.out
    assert "Nothing that was asked for can run here." in printed.err
    assert list(tmp_path.iterdir()) == []
