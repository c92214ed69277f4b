"""The pages and plots of made-up results, and of the committed ones."""

import json
from pathlib import Path

import pytest
from benchmark_support import (
    BENCHMARKS,
    a_result,
    a_structure_result,
    a_tensordict_result,
    load,
)

report, tables = load("report"), load("tables")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (9.876, "9.88"), (12.34, "12.3"), (100.4, "100"), (6123.4, "6,123")],
)
def test_numbers_have_three_digits_or_are_whole(value, text) -> None:
    assert tables.number(value) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (153_152, "153 KB"), (52_057_664, "52.1 MB")],
)
def test_sizes_are_in_units_of_1000(count, text) -> None:
    assert tables.size(count) == text


def test_tables_come_from_the_result_alone() -> None:
    page = report.page([a_result()], "plots")
    ours = "| detection batch: 528 leaves, 153 KB | **tdcopier** | 2 | 1.5 - 2.5 |  | 2 |  | 3 |"
    assert ours in page
    other = "|  | .to() per leaf | 6,100 | 6,050 - 6,150 | 3,050 x | 6,100 | 3,050 x | 3 |"
    assert other in page
    assert "| speed | >= 35 | 3050.0 | hit |" in page
    assert "## Host to device: copies" in page
    assert "![Host to device: copies](plots/h2d-nvidia-h200.svg)" in page
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


@pytest.mark.parametrize(
    ("name", "words"), [("d2h", "Device to host"), ("d2d", "Device to device")]
)
def test_each_direction_has_its_own_plot_heading_and_witness(name: str, words: str) -> None:
    result = a_result(name)
    page = report.page([result], "plots")
    assert f"## {words}: copies" in page
    assert f"(plots/{name}-nvidia-h200.svg)" in page
    assert f"| transfers | {name.upper()} memcpys counted from outside |" in page
    assert f">{words}, detection batch: 528 leaves" in report.plot(result)


def test_a_commit_is_named_only_where_the_working_tree_was_that_commit() -> None:
    result = a_result()
    assert "at 0123456789" in report.machine_line(result)
    result["machine"]["git_dirty"] = True
    assert "0123456789" not in report.machine_line(result)


def test_several_devices_of_a_machine_are_counted_in_its_line() -> None:
    result = a_result()
    result["machine"]["gpus"] = 2
    assert report.machine_line(result).startswith("2 x NVIDIA <H200>, driver 1.2")
    result["machine"]["gpus"] = 1
    assert report.machine_line(result).startswith("NVIDIA <H200>, driver 1.2")


def test_the_page_begins_with_the_copies_whatever_the_file_names(tmp_path: Path) -> None:
    for name in ("d2d", "d2h", "h2d"):
        (tmp_path / f"{name}-nvidia-h200.json").write_text(json.dumps(a_result(name)))
    (tmp_path / "a.json").write_text(json.dumps(a_structure_result()))
    names = [result["name"] for result in report.load(tmp_path)]
    assert names == ["h2d", "d2h", "d2d", "structure"]


def test_structure_is_given_per_tree_and_per_value() -> None:
    page = report.page([a_structure_result()], ".")
    assert "| 1,000 opaque values | **tdcopier** | 51 | 51 - 51 |  | 1 |" in page
    assert "|  | tree_map | 403 | 403 - 403 | 7.9 x | 1 |" in page
    assert "| empty list | **tdcopier** | 1 | 1 - 1 |  | 1 |" in page
    assert "| per opaque value | **tdcopier** | 0.05 |  |  |  |" in page
    assert "|  | tree_map | 0.4 |  | 8 x |  |" in page


def test_containers_are_given_apart_and_those_passed_through_are_named() -> None:
    page = report.page([a_structure_result()], ".")
    assert "| list | 0.015 |" in page
    assert "| dataclass | passed through whole |" in page
    assert "| 400 list |" not in page


def test_tensordicts_have_a_plot_and_a_table_of_every_way() -> None:
    result = a_tensordict_result()
    page = report.page([result], "plots")
    assert "![TensorDicts](plots/tensordict-nvidia-h200.svg)" in page
    assert "Taken with tensordict 1.2.3." in page
    assert "| flat to the device: 1,000 leaves, 1 KB | **tdcopier** | 10 |" in page
    assert "|  | td.to() | 150 | 150 - 150 | 15 x | 150 | 15 x | 1 |" in page
    assert "| control to the device | 3 | 2 | 1 | 13 / 0 / 0 | 1 | 1 |" in page
    assert "TensorDict to device, 1,000 leaves, 1 KB (NVIDIA &lt;H200&gt;)" in report.plot(result)


def test_ways_of_moving_a_tensordict_that_fail_or_err_are_named() -> None:
    result = a_tensordict_result()
    result["copies"]["h2d"]["flat"]["wrong"]["td.to()"] = 3
    page = report.page([result], "plots")
    assert "|  | td.consolidate().to() | fails: TypeError: no |" in page
    assert "|  | td.to() (wrong in 3 places) | 150 |" in page


def test_nodes_are_given_by_kind_with_what_each_adds() -> None:
    page = report.page([a_tensordict_result()], ".")
    assert "| 400 leaves, side by side | **tdcopier** | 200 | 200 - 200 |  |" in page
    assert "| 400 leaves, 200 nodes, TensorDict | **tdcopier** | 500 | 500 - 500 | 1.5 |" in page
    rebuild = "**tdcopier, rebuilding alone**"
    assert f"|  | {rebuild} | 2,100 | 2,100 - 2,100 | 10 |" in page


def test_copies_into_what_is_there_are_held_against_those_that_allocate() -> None:
    page = report.page([a_tensordict_result()], ".")
    chunk = "|  | **tdcopier.copy_into(), one earlier chunk** | 40 | 40 - 40 | 0.4 x | 1 | 1 | 1 |"
    assert chunk in page
    to_host = "| detection batch to the host: 528 leaves, 153 KB | start_copy().get() | 100 |"
    assert to_host in page


def test_readme_shows_tensordicts_below_the_directions() -> None:
    part = report.readme_part([a_result(), a_result("d2h"), a_tensordict_result()])
    assert part.count("![") == 3
    assert "![copy times, TensorDict, host to device]" in part
    assert part.index("d2h-nvidia-h200.svg") < part.index("tensordict-nvidia-h200.svg")


def test_readme_has_one_plot_per_direction_and_one_line_per_machine() -> None:
    h2d, d2h, d2d = (a_result(name) for name in ("h2d", "d2h", "d2d"))
    part = report.readme_part([h2d, d2h, a_structure_result()])
    assert part.count("![") == 2
    assert part.count("driver 1.2") == 1
    assert part.index("h2d-nvidia-h200.svg") < part.index("d2h-nvidia-h200.svg")
    d2d["machine"]["gpus"] = 2
    paragraphs = report.readme_part([h2d, d2h, d2d]).split("\n\n")
    starts = [paragraph.partition("(")[0].partition(",")[0] for paragraph in paragraphs]
    assert starts[2:] == ["NVIDIA <H200>", "![copy times", "2 x NVIDIA <H200>"]
    assert paragraphs[-1].endswith("drawn from the files in `benchmarks/results`.")


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
