"""Comparing two builds: whose package is timed, in which order, and how ratios are reported."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmark_support import BENCHMARKS, load

import tdcopier
from tdcopier import _C

Way = load("tool.way").Way

compare, compare_rows, turns = (
    load("tool.compare"),
    load("tool.compare_rows"),
    load("tool.alternate"),
)


def a_site(folder: Path, version: str) -> Path:
    """Makes a folder with its own package: this build under another version."""
    package = folder / "tdcopier"
    shutil.copytree(Path(tdcopier.__file__).parent, package)
    for module in Path(_C.__file__).parent.glob("*.so"):
        if not (package / module.name).exists():
            shutil.copy(module, package)
    text = (package / "__init__.py").read_text("utf-8")
    (package / "__init__.py").write_text(text + f"\n__version__ = {version!r}\n")
    return folder


def found(**rows_us: float) -> dict:
    """Returns made-up findings of one process."""
    return {"machine": {}, "site": "", "version": "", "failed": {}, "rows": rows_us}


class MadeUpChild:
    """Stands for the process of one build."""

    def __init__(self, build: str, *_, leads: bool) -> None:
        self.build = build

    def __enter__(self) -> MadeUpChild:
        return self

    def __exit__(self, *_) -> None:
        pass

    def has_ended(self) -> bool:
        return True


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    for build in (compare.OLD, compare.NEW):
        (tmp_path / build / "tdcopier").mkdir(parents=True)
    sites = ["--old", str(tmp_path / compare.OLD), "--new", str(tmp_path / compare.NEW)]
    return [*sites, "--json", str(tmp_path / "found.json")]


@pytest.mark.sim
@pytest.mark.timeout(240)  # two processes import torch and time two suites each
def test_each_build_times_its_own_package_with_the_batches_of_this_checkout(tmp_path: Path) -> None:
    old, new = (a_site(tmp_path / version, version) for version in ("1.old", "2.new"))
    (old / "tdcopier/workloads.py").write_text("raise RuntimeError('of the build')")
    path = tmp_path / "found.json"
    command = [sys.executable, str(BENCHMARKS / "compare.py"), "--device", "sim", "--rounds", "1"]
    command += ["--old", str(old), "--new", str(new), "--json", str(path), "--repeats", "4"]
    command += ["--suites", "h2d", "d2h", "--workloads", "flat_dict"]
    environment = {k: v for k, v in os.environ.items() if k != "FAIL_WITHOUT_CUDA"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(path.read_text("utf-8"))
    assert [result[build]["version"] for build in (compare.OLD, compare.NEW)] == ["1.old", "2.new"]
    assert [result[build]["site"] for build in (compare.OLD, compare.NEW)] == ["1.old", "2.new"]
    assert [result[build]["failed"] for build in (compare.OLD, compare.NEW)] == [{}, {}]
    assert result["machine"]["device"] == "sim:0"
    rows = {row["row"] for row in result["rows"]}
    assert {
        "h2d: flat_dict, tdcopier",
        "h2d: flat_dict, tdcopier, prepared",
        "d2h: flat_dict, tdcopier",
    } <= rows
    assert all(", tdcopier" in row for row in rows)
    assert "h2d: detection_batch, tdcopier" not in rows
    assert all(row in done.stdout for row in rows)


def test_the_build_that_goes_first_alternates_and_ratios_are_of_the_same_round(
    monkeypatch, options: list[str], tmp_path: Path
) -> None:
    leaders: list[str] = []
    times = {compare.OLD: iter([100.0, 200.0, 400.0]), compare.NEW: iter([50.0, 400.0, 600.0])}

    class Child(MadeUpChild):
        def __init__(self, build: str, *_, leads: bool) -> None:
            self.build = build
            leaders.extend([build] * leads)

        def measured(self) -> dict:
            return found(copy=next(times[self.build]))

    monkeypatch.setattr(compare, "Child", Child)
    assert compare.main([*options, "--rounds", "3"]) == 0
    assert leaders == ["old", "new", "old"]
    (row,) = json.loads((tmp_path / "found.json").read_text("utf-8"))["rows"]
    assert row == {
        "row": "copy",
        "old_us": 200.0,
        "new_us": 400.0,
        "ratio": 1.5,
        "least": 0.5,
        "most": 2.0,
    }


def test_a_round_in_which_a_build_fails_is_left_out(
    monkeypatch, options: list[str], tmp_path: Path
) -> None:
    answers = iter([found(copy=1.0), None, found(copy=1.0), found(copy=3.0), None])

    class Child(MadeUpChild):
        def measured(self) -> dict | None:
            return next(answers)

    monkeypatch.setattr(compare, "Child", Child)
    assert compare.main([*options, "--rounds", "2"]) == 0
    result = json.loads((tmp_path / "found.json").read_text("utf-8"))
    assert result["rounds"] == 1
    assert [row["ratio"] for row in result["rows"]] == [1 / 3]  # the new build led in this round
    assert compare.main([*options, "--rounds", "1"]) == 1


def test_no_round_begins_that_would_end_after_the_minutes(monkeypatch, options, capsys) -> None:
    now_s = [0.0]

    class Child(MadeUpChild):
        def measured(self) -> dict:
            now_s[0] += 50.0
            return found(copy=1.0)

    monkeypatch.setattr(compare, "Child", Child)
    monkeypatch.setattr(compare.time, "monotonic", lambda: now_s[0])
    assert compare.main([*options, "--rounds", "9", "--minutes", "5.5"]) == 0
    assert "stopped after 3 rounds: 5.5 minutes" in capsys.readouterr().out


def test_rows_that_one_build_lacks_are_left_out_and_slower_ones_come_first() -> None:
    old, new = found(a=1.0, b=10.0, c=1.0), found(a=2.0, b=30.0, d=1.0)
    rows = compare.compared_rows([{compare.OLD: old, compare.NEW: new}])
    assert [(row["row"], row["ratio"]) for row in rows] == [("b", 3.0), ("a", 2.0)]


def test_a_suite_that_fails_leaves_the_others_rows() -> None:
    bench = load("tool.measure").Bench(torch.device("cpu"), 4, lambda label: iter)

    def run(suite: str, bench: Any) -> dict[str, Any]:
        assert bench.ours_only
        if suite == "b":
            raise AttributeError("no such call")
        times = {"tdcopier": {"median_us": 2.0}, ".to() per leaf": {"median_us": 9.0}}
        if suite == "c":
            return {"loops": {"one": {"step": times, "copy_calls": times}}}
        return {"what": "", "workloads": {"one": {"contenders": times, "ratios": {"x": 4.5}}}}

    rows, failed = compare_rows.measured(bench, ["a", "b", "c"], run, turns.Turns())
    in_loop = {f"c: one, {part}, tdcopier": 2.0 for part in ("step", "copy_calls")}
    assert rows == {"a: one, tdcopier": 2.0, **in_loop}
    assert failed == {"b": "AttributeError: no such call"}


def test_only_our_ways_and_the_reference_are_timed_for_a_comparison() -> None:
    bench = load("tool.measure").Bench(torch.device("cpu"), 4, lambda label: iter)
    ways = [Way("resident"), Way("tdcopier, prepared"), Way("other")]
    assert bench.timed(ways, "resident") == ways
    assert bench._replace(ours_only=True).timed(ways, "resident") == ways[:2]


def test_a_build_that_cannot_be_imported_ends_the_other_one_too(tmp_path: Path) -> None:
    old, new = (a_site(tmp_path / version, version) for version in ("1.old", "2.new"))
    (old / "tdcopier/__init__.py").write_text("raise RuntimeError('of the build')")
    command = [sys.executable, str(BENCHMARKS / "compare.py"), "--device", "sim", "--rounds", "1"]
    command += ["--old", str(old), "--new", str(new), "--json", str(tmp_path / "found.json")]
    command += ["--suites", "h2d", "--repeats", "1000000"]
    environment = {k: v for k, v in os.environ.items() if k != "FAIL_WITHOUT_CUDA"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env=environment
    )
    assert done.returncode == 1
    assert "RuntimeError: of the build" in done.stderr
    assert "No round was completed." in done.stderr


def test_a_terminated_comparison_ends_both_processes(tmp_path: Path) -> None:
    for build in ("1.old", "2.new"):
        package = tmp_path / build / "tdcopier"
        package.mkdir(parents=True)
        begin = f"open(f'{tmp_path}/begun.{{os.getpid()}}', 'w').close()"
        (package / "__init__.py").write_text(f"import os, time\n{begin}\ntime.sleep(3600)\n")
    command = [sys.executable, str(BENCHMARKS / "compare.py"), "--json", str(tmp_path / "x.json")]
    command += ["--old", str(tmp_path / "1.old"), "--new", str(tmp_path / "2.new")]
    with subprocess.Popen(command) as process:
        while len(begun := list(tmp_path.glob("begun.*"))) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    for file in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(int(file.suffix[1:]), 0)


def both(play: Callable[[turns.Turns, bool], None]) -> None:
    """Runs a function on both ends of a connection, each in a thread."""
    ends = socket.socketpair()
    plays = [
        (turns.Turns(end, leads=leads), leads)
        for end, leads in zip(ends, (True, False), strict=True)
    ]
    threads = [threading.Thread(target=play, args=each, daemon=True) for each in plays]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_two_processes_take_turns_on_one_processor_until_one_of_them_ends() -> None:
    seen: list[tuple[str, int]] = []
    wanted = sorted(os.sched_getaffinity(0))
    chosen = iter([wanted[0], wanted[-1], wanted[0]])

    def play(here: turns.Turns, leads: bool) -> None:
        for _ in range(3 if leads else 5):
            here.begin_round(lambda: os.sched_setaffinity(0, {next(chosen, wanted[0])}))
            (processor,) = os.sched_getaffinity(0)
            seen.extend([("leads" if leads else "follows", processor)])
        if leads:
            here._end.close()

    both(play)
    rounds = [("leads", wanted[0]), ("follows", wanted[0]), ("leads", wanted[-1])]
    rounds += [("follows", wanted[-1]), ("leads", wanted[0]), ("follows", wanted[0])]
    assert seen == rounds + [("follows", wanted[0])] * 2


def test_both_processes_time_a_suite_at_the_same_time() -> None:
    seen: list[tuple[bool, int]] = []

    def play(here: turns.Turns, leads: bool) -> None:
        for number in (0, 1, 2, 4) if leads else (0, 1, 3, 4):  # each lacks a suite
            here.begin_suite(number)
            for index in range(6):
                here.begin_round(lambda: None)
                if leads and number == 1 and index == 2:
                    break  # as when the suite fails
                seen.append((leads, number))
        here.end()

    both(play)
    for number in (0, 4):
        turn = [leads for leads, suite in seen if suite == number]
        assert turn == [turn[0], not turn[0]] * 6
    assert [number for _, number in seen] == sorted(number for _, number in seen)
