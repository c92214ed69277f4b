"""What the benchmarks make of times and results, on small made-up ones; nothing here is timed."""

import importlib
import itertools
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tdcopier import workloads

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def load(name: str) -> ModuleType:
    """A module of benchmarks/, which is a folder of scripts and no package."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


measure, report, machine = load("measure"), load("report"), load("machine")
copies, streams, run = load("copies"), load("streams"), load("run")
quiet = load("quiet")


class Clock:
    """Ticks by one microsecond at each look, and when a contender says that it took longer."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        self.now_ns += 1000
        return self.now_ns

    def take_us(self, us: int) -> None:
        self.now_ns += us * 1000


def a_result(**changes) -> dict:
    times = measure.summarise([1.0, 2.0, 3.0])._asdict()
    slow = measure.summarise([6000.0, 6100.0, 6200.0])._asdict()
    stats = {"packed_leaves": 528, "alone_leaves": 0, "delegated_leaves": 0, "transfers": 1}
    batch = {
        "leaves": 528,
        "bytes": 153_152,
        "contenders": {"tdcopier": times, ".to() per leaf": slow},
        "ratios": {".to() per leaf": 3050.0},
        "first_calls": {"tdcopier": times, ".to() per leaf": slow},
        "ratios_of_first_calls": {".to() per leaf": 3050.0},
        "steps": dict.fromkeys(("start_copy", "get", "synchronise", "drop"), times),
        "stats": stats,
        "h2d_memcpys": 1,
        "wrong_leaves": {"tdcopier": 0, ".to() per leaf": 0},
    }
    machine = {
        "slug": "nvidia-h200",
        "device": "cuda:0",
        "gpu": "NVIDIA <H200>",
        "driver": "1.2",
        "logical_cpus": 16,
        "cpu": None,
        "torch": "2.11.0",
        "python": "3.12.1",
        "tdcopier": "0.1.0",
        "git_commit": "0123456789abcdef",
    }
    return {
        "name": "h2d",
        "what": "Copies",
        "taken": "2030-01-01 00:00 UTC",
        "machine": machine,
        "workloads": {"detection_batch": batch},
        "targets": [{"what": "speed", "wanted": ">= 35", "found": 3050.0, "hit": True}],
    } | changes


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
    pending_us = itertools.cycle([1000, 7])  # left over from before the call; then its own work

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


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (9.876, "9.88"), (12.34, "12.3"), (100.4, "100"), (6123.4, "6,123")],
)
def test_numbers_have_three_digits_or_are_whole(value, text) -> None:
    assert report.number(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (153_152, "153 KB"), (52_057_664, "52.1 MB")],
)
def test_sizes_are_in_units_of_1000(count, text) -> None:
    assert report.size(count) == text


def test_tables_come_from_the_result_alone() -> None:
    page = report.page([a_result()], "plots")
    ours = "| detection batch: 528 leaves, 153 KB | **tdcopier** | 2 | 1.5 - 2.5 |  | 2 |  | 3 |"
    assert ours in page
    other = "|  | .to() per leaf | 6,100 | 6,050 - 6,150 | 3,050 x | 6,100 | 3,050 x | 3 |"
    assert other in page
    assert "| speed | >= 35 | 3050.0 | hit |" in page
    assert "![Copies](plots/h2d-nvidia-h200.svg)" in page
    assert "driver 1.2, 16 logical CPUs (unknown)" in page
    assert "at 0123456789;" in page


def test_a_missed_target_stands_out() -> None:
    target = {"what": "speed", "wanted": ">= 35", "found": 30.0, "hit": False}
    assert "| speed | >= 35 | 30.0 | **missed** |" in report.page([a_result(targets=[target])], ".")


def test_bars_are_linear_and_names_are_escaped() -> None:
    svg = report.bars("a < b", [("tdcopier", 1.0), ("x & y", 4.0)], "us")
    widths = [
        float(part.split('"')[0])
        for part in svg.split('<rect x="290"')[1:]
        for part in [part.split('width="')[1]]
    ]
    assert widths[1] == pytest.approx(4 * widths[0])
    assert "a &lt; b" in svg
    assert "x &amp; y" in svg


def test_only_copies_of_the_asked_workload_have_a_plot() -> None:
    assert report.plot(a_result()) is not None
    assert report.plot(a_result(workloads={})) is None
    assert report.plot(a_result(name="memory")) is None


def test_without_results_it_says_how_to_make_them(tmp_path: Path) -> None:
    assert report.load(tmp_path) == []
    assert "make bench" in report.page([], ".")
    assert "make bench" in report.readme_part([])


def test_results_of_the_simulated_device_are_not_published(tmp_path: Path) -> None:
    simulated = a_result(machine=a_result()["machine"] | {"device": "sim:0"})
    (tmp_path / "h2d-sim.json").write_text(json.dumps(simulated))
    (tmp_path / "h2d-nvidia-h200.json").write_text(json.dumps(a_result()))
    assert [result["machine"]["device"] for result in report.load(tmp_path)] == ["cuda:0"]


def test_readme_part_replaces_what_is_between_the_marks_only() -> None:
    readme = f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n"
    once = report.with_part(readme, "new")
    assert once == f"before\n{report.BEGIN}\nnew\n{report.END}\nafter\n"
    assert report.with_part(once, "new") == once


def test_a_readme_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no"):
        report.with_part("text", "new")


def test_committed_results_make_a_page() -> None:
    results = report.load(report.RESULTS)
    assert report.page(results, ".")
    for result in results:
        assert result["machine"]["gpu"], "a committed result is from a real device"
        assert not result["quick"], "a committed result is from a whole run"


def test_readme_has_the_marks() -> None:
    readme = (BENCHMARKS.parent / "README.md").read_text()
    assert report.with_part(readme, "new") != readme


@pytest.mark.parametrize(("speedup", "hit"), [(34.9, False), (35.0, True)])
def test_the_speed_target_is_met_from_35_on(speedup: float, hit: bool) -> None:
    batch = a_result()["workloads"]["detection_batch"] | {"ratios": {".to() per leaf": speedup}}
    targets = copies.targets({"detection_batch": batch})
    assert [target["hit"] for target in targets] == [True, hit, True]


def test_the_transfer_target_needs_the_outside_count_too() -> None:
    batch = a_result()["workloads"]["detection_batch"] | {"h2d_memcpys": 528}
    targets = copies.targets({"detection_batch": batch})
    assert [target["hit"] for target in targets] == [True, True, False]


def test_a_wrong_leaf_of_any_workload_misses_a_target() -> None:
    found = {"flat_dict": {"wrong_leaves": {"tdcopier": 2}}}
    assert [target["hit"] for target in copies.targets(found)] == [False]


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
