"""The benchmark of many leaves: its check of copies, the cost of a leaf, and its plot."""

import itertools
import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch
from benchmark_support import a_result, a_sizes_result, load

from tdcopier import workloads

sizes, plots, report, run = load("sizes"), load("plots"), load("report"), load("run")

CUDA = torch.device("cuda", 0)
SVG = "{http://www.w3.org/2000/svg}"


def test_leaves_go_from_10_to_100_000_in_steps_of_about_three() -> None:
    counts = sizes.counts(CUDA)
    assert (counts[0], counts[-1]) == (10, 100_000)
    assert {sizes.SMALL, sizes.LARGE} <= set(counts)
    ratios = [larger / smaller for smaller, larger in itertools.pairwise(counts)]
    assert all(3.0 <= ratio <= 10 / 3 for ratio in ratios)


@pytest.mark.parametrize(("count", "ways"), [(10_000, 3), (30_000, 2)])
def test_more_than_10_000_leaves_are_not_moved_by_to(count: int, ways: int) -> None:
    names = [way.name for way in sizes.contenders(CUDA, count)]
    assert len(names) == ways
    assert names[0] == "tdcopier"
    assert (".to() per leaf" in names) == (ways == 3)


def test_more_leaves_get_fewer_rounds_but_never_none() -> None:
    rounds = [sizes.rounds_of(count, 500) for count in sizes.COUNTS]
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[-1] == sizes.MIN_ROUNDS


def test_all_ways_give_a_right_copy_and_a_wrong_one_is_found(sim: ModuleType) -> None:
    device = torch.device("sim", 0)
    source = workloads.flat_dict(leaves=20)
    for way in sizes.contenders(device, 20):
        assert not sizes._is_wrong(way, source, device), way.name
    right = sizes.contenders(device, 20)[0].run(source)
    other = workloads.flat_dict(leaves=20, seed=1)["leaf_7"].to(device)
    assert not sizes.differs(right, source, device)
    assert sizes.differs(right | {"leaf_7": other}, source, device)
    assert sizes.differs(right | {"leaf_7": source["leaf_7"]}, source, device)
    assert sizes.differs({key: right[key] for key in list(right)[1:]}, source, device)


@pytest.mark.parametrize(("large_us", "hit"), [(0.75, True), (0.76, False)])
def test_the_target_is_the_growth_of_the_cost_of_a_leaf(large_us: float, hit: bool) -> None:
    result = a_sizes_result()
    result["sizes"]["100000"]["us_per_leaf"]["tdcopier"] = large_us
    assert [target["hit"] for target in sizes.targets(result)] == [True, hit]


def test_a_wrong_copy_by_any_way_misses_a_target_and_a_missing_one_is_an_error() -> None:
    result = a_sizes_result()
    result["sizes"]["1000"]["wrong"][".to() per leaf"] = 1
    assert [target["hit"] for target in sizes.targets(result)] == [False, True]
    del result["sizes"]["100000"]["us_per_leaf"]["tdcopier"]
    with pytest.raises(KeyError, match="tdcopier"):
        sizes.targets(result)


def test_on_the_simulated_device_sizes_run_and_only_values_are_a_target(
    sim: ModuleType, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("FAIL_WITHOUT_CUDA", raising=False)
    monkeypatch.setattr(sizes, "COUNTS", (10, 100))
    asked = ["--device", "sim", "--quick", "--only", "sizes", "--out", str(tmp_path)]
    assert run.main(asked) == 0
    result = json.loads((tmp_path / "sizes-sim.json").read_text())
    assert list(result["sizes"]) == ["10", "100"]
    for found in result["sizes"].values():
        assert len(found["contenders"]) == len(found["us_per_leaf"]) == 3
        assert set(found["wrong"].values()) == {0}
    assert [(target["found"], target["hit"]) for target in result["targets"]] == [(0, True)]
    assert (tmp_path / "sizes-sim.svg").exists()


def test_sizes_have_a_table_with_the_cost_of_a_leaf_and_a_plot_of_every_way() -> None:
    page = report.page([a_sizes_result()], "plots")
    assert "| 1,000 leaves, 256 KB | **tdcopier** | 500 | 500 - 500 | 0.5 | 1 |" in page
    assert "|  | .to() per leaf | 12,000 | 12,000 - 12,000 | 12 | 1 |" in page
    assert "| 100,000 leaves, 25.6 MB | **tdcopier** | 75,000 |" in page
    assert "![Sizes](plots/sizes-nvidia-h200.svg)" in page
    drawn = ElementTree.fromstring(report.plot(a_sizes_result()))
    assert len(drawn.findall(f"{SVG}polyline")) == 2
    assert len(drawn.findall(f"{SVG}circle")) == 3


def test_lines_are_logarithmic_on_both_axes_and_names_are_escaped() -> None:
    curve = [(10.0, 1.0), (100.0, 10.0), (10_000.0, 1000.0)]
    svg = plots.lines("a < b", {"tdcopier": curve, "x & y": [(10.0, 0.2)]}, "leaves", "us")
    drawn = ElementTree.fromstring(svg)
    (line, single) = (curve.attrib["points"] for curve in drawn.findall(f"{SVG}polyline"))
    (a, b, c) = (tuple(map(float, point.split(","))) for point in line.split())
    assert c[0] - a[0] == pytest.approx(3 * (b[0] - a[0]), abs=0.2)
    assert c[1] - a[1] == pytest.approx(3 * (b[1] - a[1]), abs=0.2)
    assert b[1] < a[1]  # larger values are higher up
    assert float(single.split(",")[1]) > a[1]
    words = [text.text for text in drawn.findall(f"{SVG}text")]
    assert {"a < b", "x & y", "10", "10,000", "0.1", "leaves", "us"} <= set(words)


def test_bars_of_limits_have_a_colour_of_their_own() -> None:
    svg = plots.bars("h", [("tdcopier", 2.0), ("limit: x", 1.0), (".to()", 9.0)], "us")
    colours = [bar.attrib["fill"] for bar in ElementTree.fromstring(svg).findall(f"{SVG}rect")]
    assert len(set(colours)) == 3


def test_readme_shows_the_loop_and_the_sizes_behind_the_copies() -> None:
    sized = a_sizes_result()
    part = report.readme_part([a_result(), sized])
    assert part.index("h2d-nvidia-h200.svg") < part.index("sizes-nvidia-h200.svg")
    assert "![copy times, against the number of leaves]" in part
