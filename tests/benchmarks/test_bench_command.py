"""Tests `python -m tdcopier bench` on the simulated device: comparisons, output and refusals."""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path

import pytest
import torch
from support import run_module

import tdcopier
from tdcopier import workloads
from tdcopier._commands import bench, copies, tables
from tdcopier._progress import show_rounds

pytestmark = pytest.mark.sim

QUICK = ("--device", "sim", "--quick", "--megabytes", "1")
TIMED_AND_BEFORE = 4 + (3 + 3) * 5
"""Calls with the small batch in one direction: one with each tree, warm-up and rounds in bursts."""


def test_the_command_runs_on_the_simulated_device_and_says_that_it_says_nothing_on_speed(
    tmp_path: Path,
):
    file = tmp_path / "figures.json"
    arguments = ["bench", *QUICK, "--json", str(file)]
    done = run_module("tdcopier", *arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{bench.SIMULATED}\n")
    assert (
        "detection batch, cpu to sim:0: 528 leaves, 153 KB; tdcopier: 3 transfers\n" in done.stdout
    )
    assert "one large tensor, sim:0 to cpu: 1 leaf, 1 MB; tdcopier: 1 transfer\n" in done.stdout
    assert "detection batch, H2D ...\n" in done.stderr

    result = json.loads(file.read_text("utf-8"))
    assert [(case["batch"], case["source"], case["target"]) for case in result["cases"]] == [
        ("detection batch", "cpu", "sim:0"),
        ("detection batch", "sim:0", "cpu"),
        ("one large tensor", "cpu", "sim:0"),
        ("one large tensor", "sim:0", "cpu"),
    ]
    for case in result["cases"]:
        assert case["contenders"].keys() == {copies.OURS, *case["ratios"]}
        assert len(case["ratios"]) == (3 if case["source"] == "cpu" else 2)
        assert case["stats"]["delegated_leaves"] == 0
    assert result["info"]["versions"]["tdcopier"] == tdcopier.__version__


@pytest.mark.parametrize(
    ("wrong", "good_calls"),
    [
        *((wrong, 0) for wrong in ("values", "dtype", "strides", "structure", "device")),
        ("values", TIMED_AND_BEFORE),
        ("structure", TIMED_AND_BEFORE),
    ],
)
def test_a_wrong_copy_gives_no_figures_and_exit_status_1(
    sim, monkeypatch, capsys, wrong, good_calls
):
    own = tdcopier.copy
    calls = 0

    def spoilt(tree, target):
        nonlocal calls
        calls += 1
        result = own(tree, target)
        if calls <= good_calls or target.type == "cpu":
            return result
        last = result[-1]
        leaf = last["boxes_3d"]
        if wrong == "values":
            leaf[-1, -1] += 1
        elif wrong == "dtype":
            last["boxes_3d"] = leaf.double()
        elif wrong == "strides":
            last["boxes_3d"] = leaf.t().contiguous().t()
        elif wrong == "structure":
            del last["boxes_3d"]
        else:
            last["boxes_3d"] = leaf.cpu()
        return result

    monkeypatch.setattr(tdcopier, "copy", spoilt)
    assert bench.main([*QUICK]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert ("H2D" in printed.err) is (good_calls > 0)
    place = "the structure" if wrong == "structure" else "[15]['boxes_3d']"
    assert printed.err.splitlines()[-1] == (
        f"WRONG: {copies.OURS} differs from .to() in 1 place, such as "
        f"{place!r}. No figures are given."
    )


def test_without_cuda_it_says_so_and_what_else_there_is(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("There is no CUDA device here")
    assert "`--device sim`" in printed.err


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("sim:2", "'sim:2' cannot be used: device sim:2 does not exist"),
        ("sim:x", "'sim:x' cannot be used: Invalid device string"),
        ("nonsense", "'nonsense' cannot be used: Expected one of"),
        ("cpu", "The engine does not copy between the host and 'cpu'."),
        ("meta", "The engine does not copy between the host and 'meta'."),
    ],
)
def test_a_device_that_cannot_be_used_is_refused_in_a_sentence(sim, capsys, device, said):
    assert bench.main(["--device", device]) == 2
    assert capsys.readouterr().err.startswith(said)


def test_another_device_than_the_first_can_be_asked_for(sim, accelerator):
    assert bench.chosen_device("sim:1") == torch.device("sim:1")
    assert accelerator.current_device() == 1
    assert bench.chosen_device("sim") == torch.device("sim:1")
    accelerator.set_device(0)


def test_too_little_memory_names_the_option_that_needs_less(sim, monkeypatch, capsys):
    with sim.fail_device_allocation(1):
        assert bench.main([*QUICK]) == 2
    assert capsys.readouterr().err.startswith(
        "Too little memory for 1 MB: give less with --megabytes."
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--megabytes", "0"], "--megabytes must be at least 1"),
        (["--json", "no/such/folder/file"], "there is no folder no/such/folder"),
    ],
)
def test_mistakes_in_the_arguments_are_found_before_anything_runs(capsys, arguments, said):
    with pytest.raises(SystemExit) as caught:
        bench.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_the_large_tensor_has_the_megabytes_that_were_asked_for():
    for quick in (True, False):
        small, large = copies.batches(3_000_000, quick=quick)
        assert workloads.total_bytes(large.trees[0]) == 3_000_000
        assert {len(workloads.leaves(tree)) for tree in small.trees} == {528}


def test_a_table_gives_medians_quartiles_rates_and_ratios():
    times = {"median_us": 2000.0, "q1_us": 1999.0, "q3_us": 2500.4}
    case = {
        "batch": "many",
        "source": "cpu",
        "target": "cuda:0",
        "leaves": 2,
        "bytes": 10_000_000,
        "stats": {"transfers": 3},
        "contenders": {copies.OURS: times, "other": {**times, "median_us": 5000.0}},
        "ratios": {"other": 2.5},
    }
    assert bench._case_as_text(case).splitlines() == [
        "many, cpu to cuda:0: 2 leaves, 10 MB; tdcopier: 3 transfers",
        "                   median us   quartiles us  GB/s  over tdcopier",
        "  tdcopier.copy()      2,000  1,999 - 2,500     5",
        "  other                5,000  1,999 - 2,500     2          2.5 x",
    ]


def test_the_heading_names_device_and_versions():
    versions = {"tdcopier": "1", "torch": "2", "python": "3", "driver": "580.1"}
    devices = [{"device": "cuda:1", "name": "NVIDIA Example"}]
    result = {"device": "cuda:1", "info": {"devices": devices, "versions": versions}}
    words = "cuda:1: NVIDIA Example, tdcopier 1, torch 2, python 3"
    assert bench._machine(result) == f"{words}, driver 580.1"
    versions["driver"] = {"unknown": "why"}
    assert bench._machine(result) == words


@pytest.mark.parametrize("quick", [True, False])
def test_only_the_simulated_device_is_said_to_say_nothing_on_speed(quick):
    assert bench.SIMULATED in bench._notes({"device": "sim:0", "quick": quick})
    notes = bench._notes({"device": "cuda:0", "quick": quick})
    assert bench.SIMULATED not in notes
    assert ("--quick" in notes) is quick


def test_rows_are_aligned_by_column():
    assert tables.aligned([("", "us"), ("long name", "1"), ("b", "1,000")]).splitlines() == [
        "              us",
        "long name      1",
        "b          1,000",
    ]


@pytest.mark.parametrize("installed", [True, False])
def test_progress_is_lines_where_nobody_watches_or_tqdm_is_missing(monkeypatch, capsys, installed):
    own = builtins.__import__

    def without_tqdm(name, *arguments, **named):
        if name == "tqdm":
            raise ImportError(name)
        return own(name, *arguments, **named)

    if not installed:
        monkeypatch.setattr(builtins, "__import__", without_tqdm)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(show_rounds("label")(range(3))) == [0, 1, 2]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("label ...\nlabel: ")


def test_progress_is_a_bar_where_somebody_watches(monkeypatch, capsys):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert list(show_rounds("label")(range(3))) == [0, 1, 2]
    assert "label" in capsys.readouterr().err
    assert type(show_rounds("label")(range(3))).__module__.startswith("tqdm")
