"""The pages, the plots and the README's part, from the committed results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from benchmark_support import BENCHMARKS, load

plots, report, sections = load("tool.plots"), load("tool.report"), load("tool.sections")
sentences = load("tool.sentences")
RESULTS = {result["name"]: result for result in report.load(report.RESULTS)}
SVG = "{http://www.w3.org/2000/svg}"
COMPARISONS = ("contenders", "step", "times", "over_resident")
"""Parts of results whose keys are the names of rows."""


def a_copy(name: str) -> dict[str, Any]:
    return json.loads(json.dumps(RESULTS[name]))


def names_in(found: Any) -> Iterator[str]:
    """Yields the names of all rows in a part of a result."""
    for key, part in found.items() if isinstance(found, dict) else ():
        if key in COMPARISONS:
            yield from part
        yield from names_in(part)


def texts_of(svg: str) -> list[str | None]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


# ---- pages ---------------------------------------------------------------------------------------


def test_there_is_a_committed_result_of_every_benchmark_from_a_whole_run_on_a_gpu() -> None:
    assert list(RESULTS) == list(sections.TABLES)
    for result in RESULTS.values():
        assert result["machine"]["gpu"] or result["name"] in load("tool.run").ON_THE_HOST
        assert not result["quick"]


def test_the_committed_replay_result_has_torchrls_own_ways() -> None:
    """A machine without torchrl leaves them out, and the result says nothing of it."""
    for replay in RESULTS["replay"]["replays"].values():
        for learner in replay["learners"].values():
            assert any("torchrl" in way for way in learner["step"])


@pytest.mark.parametrize("name", list(RESULTS))
def test_a_section_names_every_row_every_target_and_the_commit(name: str) -> None:
    result = RESULTS[name]
    section = report.page([result], "plots")
    for row in names_in(result):
        assert row.removeprefix("limit: ") in section
    for target in result["targets"]:
        verdict = "hit" if target["hit"] else "**missed**"
        found = f"{target['what']} | {target['wanted']} | {target['found']} | {verdict} |"
        assert f"| {found}" in section
    assert f"tdcopier 0.1.0 at {result['machine']['git_commit'][:10]}" in section


def test_a_row_has_median_quartiles_ratios_and_calls() -> None:
    result = a_copy("h2d")
    batch = result["workloads"]["detection_batch"]
    times = {"median_us": 6123.4, "q1_us": 99.96, "q3_us": 1.234, "repeats": 7}
    batch["contenders"][".to() per leaf"] = times
    batch["ratios"][".to() per leaf"] = 35.04
    batch["wrong"][".to() per leaf"] = 2
    row = "|  | .to() per leaf (wrong: 2) | 6,123 | 100 - 1.23 | 35 x | 7 |"
    assert row in report.page([result], ".")


def test_a_way_that_failed_has_a_row_with_its_error() -> None:
    result = a_copy("tensordict")
    result["copies"]["h2d"]["flat"]["failed"] = {"td.other()": "TypeError: no"}
    assert "| td.other() | fails: TypeError: no |" in report.page([result], ".")


def test_learners_of_pinned_rows_have_a_table() -> None:
    result = a_copy("gather")
    times = {"median_us": 20.0, "q1_us": 10.0, "q3_us": 30.0, "repeats": 7}
    slow = times | {"median_us": 4000.0}
    first, found = next(iter(result["from_pinned"].items()))
    found["learners"] = {
        "some kernels": {
            "steps_per_block": 20,
            "step": {"on the device already": times, "tdcopier": slow},
            "ratios": {"on the device already": 1.0, "tdcopier": 1.2345},
            "host": {"on the device already": times, "tdcopier": times},
            "wrong": {"on the device already": 0, "tdcopier": 3},
        }
    }
    page = report.page([result], ".")
    resident = "on the device already"
    assert f"| {first}, some kernels | {resident} | 20 | 10 - 30 |  | 20 | 140 |" in page
    assert "|  | **tdcopier** (wrong: 3) | 4,000 | 10 - 30 | 1.234 x | 20 | 140 |" in page


def test_a_commit_is_named_only_where_the_working_tree_was_that_commit() -> None:
    result = a_copy("h2d")
    result["machine"].update(git_dirty=True, gpus=2)
    line = report.machine_line(result)
    assert line.startswith("2 x NVIDIA H200, driver")
    assert result["machine"]["git_commit"][:10] not in line


# ---- missing and stale results -------------------------------------------------------------------


def test_results_of_the_simulated_device_are_not_published(tmp_path: Path) -> None:
    for device in ("sim:0", "cuda:0"):
        result = a_copy("h2d")
        result["machine"]["device"] = device
        (tmp_path / f"{device}.json").write_text(json.dumps(result))
    assert [result["machine"]["device"] for result in report.load(tmp_path)] == ["cuda:0"]


def test_without_results_the_report_fails_and_says_how_to_make_them(tmp_path, capsys) -> None:
    assert report.main([str(tmp_path)]) == 1
    assert "make bench" in capsys.readouterr().err
    assert "make bench" in report.page([], ".")


def test_a_result_of_another_schema_is_refused(tmp_path: Path) -> None:
    (tmp_path / "h2d.json").write_text(json.dumps(a_copy("h2d") | {"schema": 0}))
    with pytest.raises(ValueError, match=r"h2d\.json has schema 0, not 1"):
        report.load(tmp_path)


@pytest.mark.parametrize("name", ["cold", "h2d", "loop", "trainers"])
def test_the_readme_needs_the_results_that_it_shows(name: str) -> None:
    with pytest.raises(KeyError, match=name):
        report.readme_part([result for result in RESULTS.values() if result["name"] != name])


def test_the_readme_has_the_figures_of_one_machine() -> None:
    elsewhere = a_copy("cold")
    elsewhere["machine"]["slug"] = "another"
    assert elsewhere["copies"]["h2d"]["detection batch"]["contenders"].pop(report.OURS)
    results = list(RESULTS.values())
    part = report.readme_part(results)
    assert report.readme_part([elsewhere, *results]) == part
    assert report.readme_part([*results, elsewhere]) == part


def test_the_readme_names_the_commits_and_machines_of_its_results() -> None:
    results = [a_copy(name) for name in ("h2d", "cold", "loop", "trainers")]
    for result in results:
        result["machine"].update(git_commit="a" * 40, logical_cpus=16)
    assert "Of other runs" not in report.readme_part(results)
    results[2]["machine"]["git_commit"] = "b" * 40
    results[2]["taken"] = "2026-11-26 03:14 UTC"
    part = report.readme_part(results)
    assert "Of other runs: training steps at bbbbbbbbbb, 2026-11-26. Busy" in part
    results[2]["machine"]["git_dirty"] = True
    part = report.readme_part(results)
    assert "Of other runs: training steps, 2026-11-26. Busy" in part
    results[2]["machine"].update(git_commit="a" * 40, git_dirty=False, logical_cpus=32)
    part = report.readme_part(results)
    assert "training steps at aaaaaaaaaa with 32 logical CPUs, 2026-11-26. Busy" in part


def test_the_readme_has_the_figures_of_the_committed_results() -> None:
    readme = (BENCHMARKS.parent / "README.md").read_text("utf-8")
    assert report.with_part(readme, report.readme_part(list(RESULTS.values()))) == readme
    assert report.with_part(readme, "new") != readme
    with pytest.raises(ValueError, match="has no"):
        report.with_part("text", "new")


@pytest.mark.parametrize("sentence", sentences.SENTENCES, ids=lambda each: each.text[:30])
def test_a_sentence_of_the_docs_has_the_figures_of_the_committed_results(sentence: Any) -> None:
    page = (BENCHMARKS.parent / sentence.page).read_text("utf-8")
    assert sentences.rewritten(sentence, page, RESULTS) == page
    assert report.written_anew(list(RESULTS.values()))[BENCHMARKS.parent / sentence.page] == page
    count = sentence.text.count("{}")
    other = sentence._replace(figures=lambda results: [1234.5] * count)
    assert sentences.rewritten(other, page, RESULTS).count("1,234") == count
    with pytest.raises(ValueError, match="does not have this once"):
        sentences.rewritten(sentence, page + page, RESULTS)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0.0513, "0.051"), (0.26, "0.26"), (0.5, "0.5"), (1.0, "1.0"), (9.949, "9.9"), (9.96, "10"),
     (26.8, "27"), (1234.4, "1,234")],
)  # fmt: skip
def test_a_figure_has_two_digits_that_count(number: float, text: str) -> None:
    assert sentences.short(number) == text


@pytest.mark.parametrize("number", [0.0, 0.0009, -2.0])
def test_a_figure_that_would_not_be_found_again_is_refused(number: float) -> None:
    with pytest.raises(ValueError, match="no figure"):
        sentences.short(number)


def test_nothing_is_written_anew_without_a_result_that_a_page_needs() -> None:
    for missing in ("cold", "travel", "pinning"):
        with pytest.raises(KeyError):
            report.written_anew([each for name, each in RESULTS.items() if name != missing])


# ---- plots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(plots.BARS))
def test_the_committed_plot_has_every_bar_of_its_result(name: str) -> None:
    plot = plots.plot_of(RESULTS[name])
    svg = (report.RESULTS / report.plot_name(RESULTS[name])).read_text("utf-8")
    texts = texts_of(svg)
    assert plot.heading in " ".join(texts)
    assert {*plot.us} <= set(texts)
    values = [f"{plots.number(us)} us" for us in plot.us.values()]
    assert [text for text in texts if text in values] == values


NEGATIVE = plots.Bars("added", {"tdcopier, prepared": -23.2, "tdcopier": 3.2, ".to()": 6313.0})


@pytest.mark.parametrize("name", [*plots.BARS, "negative"])
def test_no_text_of_a_plot_is_cut_off_or_covers_another(name: str) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    plot = NEGATIVE if name == "negative" else plots.plot_of(RESULTS[name])
    with plots.drawn_figure(plot) as figure:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        hidden = {
            label
            for axis in (figure.axes[0].xaxis, figure.axes[0].yaxis)
            for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            for label in (tick.label1, tick.label2)
            if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
        }
        shown = [
            (text.get_text(), text.get_window_extent(canvas.get_renderer()))
            for text in figure.findobj(Text)
            if text not in hidden and text.get_visible() and text.get_text().strip()
        ]
    assert {*plot.us} <= {text for text, _ in shown}
    for index, (text, box) in enumerate(shown):
        assert figure.bbox.x0 <= box.x0, text
        assert box.x1 <= figure.bbox.x1, text
        for other, other_box in shown[:index]:
            assert not box.overlaps(other_box), (text, other)


def test_the_lengths_of_bars_are_proportional_to_the_times() -> None:
    pytest.importorskip("matplotlib")
    with plots.drawn_figure(plots.Bars("times", {"a": 1.0, "b": 37.0})) as figure:
        axes = figure.axes[0]
        assert [bar.get_width() for bar in axes.patches] == [1.0, 37.0]
        assert axes.get_xscale() == "linear"
        assert axes.get_xlim()[0] == 0


def test_the_same_plot_is_the_same_text() -> None:
    pytest.importorskip("matplotlib")
    plot = plots.Bars("a", {"b": 1.0})
    assert plots.as_svg(plot) == plots.as_svg(plot)
    assert "<dc:date>" not in plots.as_svg(plot)


def test_the_ways_of_loaders_are_those_of_the_results() -> None:
    text = report.ways_of_loaders(report.load(report.RESULTS))
    assert RESULTS["trainers"]["left_out"] == RESULTS["frameworks"]["left_out"] == {}
    trainers, of_frameworks = (
        len(RESULTS[name]["trainers"]) for name in ("trainers", "frameworks")
    )
    assert text.count("| `resident` |") == trainers + of_frameworks
    assert text.count("`accelerate_packed`") == of_frameworks
    assert text.count("`prefetch`") == trainers + len(RESULTS["reading"]["cases"])
    assert "1.00 (1.00 - 1.00)" in text
    assert report.ways_of_loaders([]).strip() == ""


def test_the_ways_of_learners_are_those_of_the_results() -> None:
    text = report.ways_of_learners(report.load(report.RESULTS))
    found = RESULTS["learners"]["learners"]
    for way, rate in next(iter(found.values()))["updates_per_s"].items():
        assert f"| {way} | {rate:,.0f} |" in text
    assert len(text.splitlines()) == 2 + 8
    assert report.ways_of_learners([]).strip() == ""


def test_the_ways_of_torch_have_a_cell_for_each_ratio_and_the_faster_ones_are_bold() -> None:
    text = report.ways_of_torch(report.load(report.RESULTS))
    h2d = RESULTS["h2d"]["workloads"]
    assert f"{h2d['detection_batch']['ratios']['.to() per leaf']:.0f} x |" in text
    assert (
        f"**{h2d['many_large']['ratios']['pinned beforehand, non_blocking .to()']:.2g} x**" in text
    )
    assert "tdcopier, prepared" not in text
    assert "limit" not in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and " x" in line]
    assert len(rows) >= 2 * len(h2d) + len(RESULTS["tensordict"]["copies"]["h2d"])
    assert report.ways_of_torch([]).strip() == ""
