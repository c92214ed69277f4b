"""The history of results: what is kept, what replaces what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from benchmark_support import load

history, plots, report, run = (
    load(f"tool.{name}") for name in ("history", "plots", "report", "run")
)
TIMES = {"median_us": 50.0, "q1_us": 40.0, "q3_us": 60.0}


def a_result(**changes: Any) -> dict[str, Any]:
    """Returns a result of copies; changes are of the machine, or of the date as ``taken``."""
    machine = {
        "slug": "a-card",
        "device": "cuda:0",
        "gpu": "A card",
        "torch": "2.13.0",
        "git_commit": "0123456789abcdef",
        "git_dirty": False,
    }
    batch = {
        "contenders": {"tdcopier": TIMES, ".to() per leaf": TIMES, "limit: one DMA": TIMES},
        "ratios": {".to() per leaf": 30.0, "limit: one DMA": 0.5},
    }
    return {
        "name": changes.pop("name", "h2d"),
        "taken": changes.pop("taken", "2026-01-02 03:04 UTC"),
        "workloads": {"detection_batch": batch},
        "targets": [{"what": "fast", "wanted": ">= 40", "found": 30.0, "hit": False}],
        "machine": machine | changes,
    }


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.jsonl"


def test_a_result_gives_a_line_for_each_main_way_and_for_each_target(path: Path) -> None:
    assert history.add([a_result()], path) == 3
    ours, other, target = map(json.loads, path.read_text("utf-8").splitlines())
    about = {
        "commit": "0123456",
        "dirty": False,
        "date": "2026-01-02 03:04 UTC",
        "machine": "a-card",
        "device": "A card",
        "torch": "2.13.0",
        "suite": "h2d",
    }
    figures = {"row": "detection_batch", "median_us": 50.0, "baseline": "tdcopier"}
    assert ours == {**about, **figures, "way": "tdcopier", "ratio": 1.0}
    assert other == {**about, **figures, "way": ".to() per leaf", "ratio": 30.0}
    assert target == {**about, "row": "targets", "way": "fast", "hit": False, "found": 30.0}


def test_a_later_result_of_the_same_commit_and_machine_replaces_the_figures(path: Path) -> None:
    history.add([a_result()], path)
    later = a_result(taken="2026-01-03 00:00 UTC")
    later["workloads"]["detection_batch"]["ratios"][".to() per leaf"] = 31.0
    assert history.add([later], path) == 0
    assert history.add([a_result()], path) == 0  # an earlier one does not
    assert {line.get("ratio") for line in history.load(path)} == {1.0, 31.0, None}


@pytest.mark.parametrize("other", [{"git_commit": "f" * 40}, {"slug": "b"}, {"git_dirty": True}])
def test_another_commit_machine_or_changed_tree_has_lines_of_its_own(
    path: Path, other: dict[str, Any]
) -> None:
    assert history.add([a_result(), a_result(**other)], path) == 6
    assert [line["dirty"] for line in history.load(path)][3:] == [bool(other.get("git_dirty"))] * 3


def test_a_result_of_the_simulated_device_is_refused_and_leaves_the_file(path: Path) -> None:
    history.add([a_result()], path)
    before = path.read_text("utf-8")
    with pytest.raises(ValueError, match="'h2d' is of the simulated device"):
        history.add([a_result(git_commit="a"), a_result(device="sim:0")], path)
    assert path.read_text("utf-8") == before


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"commit": "a"', "it is no JSON object"),
        ("[1]", "it lacks commit, dirty"),
        ("7", "it is no JSON object"),
        ('{"commit": "a"}', "it lacks dirty, machine"),
        ("", "it is no JSON object"),
    ],
)
def test_a_broken_line_is_named_with_what_to_do(path: Path, text: str, why: str) -> None:
    history.add([a_result()], path)
    with path.open("a") as file:
        file.write(f"{text}\n")
    for call in (lambda: history.load(path), lambda: history.add([], path)):
        with pytest.raises(ValueError, match=rf"line 4 is broken: {why}.*earlier commit"):
            call()


def test_the_committed_history_has_the_figures_of_the_committed_results() -> None:
    kept = {tuple(line[part] for part in history.KEY): line for line in history.load()}
    for result in report.load(report.RESULTS):
        for line in history.lines_of(result):
            assert kept[tuple(line[part] for part in history.KEY)] == line


def test_every_committed_result_has_figures_of_ours_or_targets() -> None:
    for result in report.load(report.RESULTS):
        lines = history.lines_of(result)
        assert sum(line["row"] == "targets" for line in lines) == len(result["targets"])
        if result["name"] in ("h2d", "loop", "replay", "gather", "cold", "park"):
            assert any(line["way"] == "tdcopier" for line in lines)


def test_a_line_of_the_picture_has_the_results_of_one_card_in_order_of_time(path: Path) -> None:
    first = a_result(taken="2026-01-01 00:00 UTC", git_commit="a" * 40)
    elsewhere = a_result(gpu="B card", slug="b")
    history.add([a_result(git_dirty=True), elsewhere, first], path)
    (title, cards), *others = history.trends(history.load(path)).panels.items()
    assert title == "labels to the device, .to() per leaf"
    assert cards == {
        "A card": [("aaaaaaa", 30.0), ("0123456+", 30.0)],
        "B card": [("0123456", 30.0)],
    }
    assert others == []
    row = "| A card | 2 | 30 x | aaaaaaa | 30 x | 0123456+ |"
    assert row in history.page(history.load(path), "p")
    assert "make bench" in history.page([], "p")


def test_the_picture_of_the_committed_history_has_a_panel_for_each_ratio() -> None:
    pytest.importorskip("matplotlib")
    shown = history.trends(history.load())
    assert list(shown.panels) == list(history.SHOWN)
    with plots.drawn_figure(shown) as figure:
        for axes, (title, cards) in zip(figure.axes, shown.panels.items(), strict=True):
            assert axes.get_title(loc="left") == title
            drawn = [list(line.get_ydata()) for line in axes.get_lines()]
            assert drawn == [[ratio for _, ratio in points] for points in cards.values()]
    assert plots.as_svg(shown) == plots.as_svg(shown)


def test_only_whole_runs_on_a_real_device_into_the_results_are_kept(
    sim: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(history, "add", lambda results: kept.append(results) or 0)
    monkeypatch.setattr(run, "_written", lambda *_: [])
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.delenv("FAIL_WITHOUT_CUDA", raising=False)
    asked = ["--device", "sim", "--only", "containers", "--out"]
    assert run.main([*asked, str(tmp_path)]) == 0
    monkeypatch.setattr(load("tool.measure").Bench, "is_real", True)
    assert run.main([*asked, str(tmp_path / "other")]) == 0
    assert run.main([*asked, str(tmp_path), "--quick"]) == 0
    assert kept == []
    assert run.main([*asked, str(tmp_path)]) == 0
    assert kept == [[]]
