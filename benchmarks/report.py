"""Makes tables and plots of result files; all figures in README and docs come from here.

``python benchmarks/report.py`` prints the tables of ``benchmarks/results`` and draws its plots;
with ``--readme`` it also writes the part of README.md between the two benchmark marks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import company_report
import feed_report
import replay_report
import td_report
from plots import bars
from tables import LIMIT_PREFIX, OURS, leaves_and_bytes, number, ratio_cell, table, times_cells

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
NO_RESULTS = "No result files yet: `make bench` on a machine with a GPU writes them."
DIRECTIONS = {"h2d": "Host to device", "d2h": "Device to host", "d2d": "Device to device"}
PLOTTED = {name: words.lower() for name, words in DIRECTIONS.items()}
PLOTTED["tensordict"] = "TensorDict, host to device"
PLOTTED["loop"] = "in a training loop"
PLOTTED["sizes"] = "against the number of leaves"
PLOTTED["replay"] = "in a learner that samples from a replay storage"
README_PLOTS = ("h2d",)
HEADLINE_WORKLOAD = "detection_batch"
PER_LEAF = ".to() per leaf"
ORDER = [
    *DIRECTIONS,
    "loop",
    "replay",
    "gather",
    "sizes",
    "structure",
    "tensordict",
    "company",
    "wait",
    "memory",
]  # order of the sections of the page
WORKLOAD_NAMES = {
    "detection_batch": "detection batch",
    "detection_batch_with_images": "detection batch + images",
    "atari_replay": "Atari replay batch",
    "flat_dict": "flat dict",
    "many_large": "many large tensors",
    "one_large": "one large tensor",
}


def load(folder: Path) -> list[dict[str, Any]]:
    """Load the results of a folder in the page's order, without those of the simulated device."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    found.sort(key=lambda result: ORDER.index(result["name"]))
    return [result for result in found if not result["machine"]["device"].startswith("sim")]


def title(result: dict[str, Any], workload: str) -> str:
    found = result["workloads"][workload]
    name = WORKLOAD_NAMES.get(workload, workload)
    return f"{name}: {leaves_and_bytes(found)}"


def heading(result: dict[str, Any]) -> str:
    """Return what the benchmark measures; for copies, with the direction."""
    what = result["what"]
    direction = DIRECTIONS.get(result["name"])
    return f"{direction}: {what[:1].lower()}{what[1:]}" if direction else what


def machine_line(result: dict[str, Any]) -> str:
    """Return one sentence on the machine and versions of a result."""
    machine = result["machine"]
    gpus = machine.get("gpus") or 1
    name = machine["gpu"] or machine["device"]
    parts = [f"{gpus} x {name}" if gpus > 1 else name]
    if machine.get("driver"):
        parts.append(f"driver {machine['driver']}")
    parts.append(f"{machine['logical_cpus']} logical CPUs ({machine['cpu'] or 'unknown'})")
    parts.append(f"torch {machine['torch']}, Python {machine['python']}")
    # Omits the commit if the working tree had other changes.
    commit = None if machine.get("git_dirty") else machine.get("git_commit")
    parts.append(f"tdcopier {machine['tdcopier']}" + (f" at {commit[:10]}" if commit else ""))
    return ", ".join(parts) + f"; {result['taken']}."


def copies_table(result: dict[str, Any]) -> str:
    """Return a table of workloads and contenders: times and ratios, also with cold caches."""
    rows = []
    for workload, found in result["workloads"].items():
        for index, (name, times) in enumerate(found["contenders"].items()):
            rows.append(
                [
                    title(result, workload) if index == 0 else "",
                    f"**{name}**" if name == OURS else name,
                    *times_cells(times),
                    ratio_cell(found["ratios"].get(name)),
                    number(found["first_calls"][name]["median_us"]),
                    ratio_cell(found["ratios_of_first_calls"].get(name)),
                    str(times["repeats"]),
                ]
            )
    header = ["workload", "way", "median, us", "quartiles, us", "over tdcopier"]
    header += ["first call of a burst, us", "over tdcopier", "calls"]
    return table(header, rows)


def steps_table(result: dict[str, Any]) -> str:
    """Return a table of the steps and the transfers of our own copies."""
    rows = []
    name = result["name"]
    for workload, found in result["workloads"].items():
        stats = found["stats"]
        rows.append(
            [
                title(result, workload),
                *(number(found["steps"][s]["median_us"]) for s in ("start_copy", "get", "drop")),
                f"{stats['packed_leaves']} / {stats['alone_leaves']} / {stats['delegated_leaves']}",
                str(stats["transfers"]),
                str(found[f"{name}_memcpys"]),
            ]
        )
    header = ["workload", "start_copy, us", "get, us", "drop, us"]
    counted = ["packed / alone / delegated", "transfers"]
    return table([*header, *counted, f"{name.upper()} memcpys counted from outside"], rows)


def limits_table(result: dict[str, Any]) -> str:
    """Return a table of workloads and the machine's limits for their bytes."""
    rows = []
    for workload, found in result["workloads"].items():
        for index, limit in enumerate(found["limits"].values()):
            rows.append(
                [
                    title(result, workload) if index == 0 else "",
                    limit["way"].removeprefix(LIMIT_PREFIX),
                    number(limit["median_us"]),
                    number(limit["gb_per_s"]),
                    ratio_cell(limit["ours_over"]),
                ]
            )
    return table(["workload", "limit", "median, us", "GB/s", "tdcopier over it"], rows)


def opaque_table(result: dict[str, Any]) -> str:
    """Return a table of trees without tensors and ways: times and ratios, also per opaque value."""
    rows = []
    for case, found in result["cases"].items():
        if len(found["contenders"]) == 1:
            continue  # containers have a table of their own
        values = found["opaque_values"]
        for index, (name, times) in enumerate(found["contenders"].items()):
            rows.append(
                [
                    (f"{values:,} {case}" if values else case) if index == 0 else "",
                    f"**{name}**" if name == OURS else name,
                    *times_cells(times),
                    ratio_cell(found["ratios"].get(name)),
                    str(times["repeats"]),
                ]
            )
    for index, (name, us) in enumerate(result["us_per_opaque_value"].items()):
        ratio = us / result["us_per_opaque_value"][OURS]
        rows.append(
            [
                "per opaque value" if index == 0 else "",
                f"**{name}**" if name == OURS else name,
                number(us),
                "",
                "" if name == OURS else f"{number(ratio)} x",
                "",
            ]
        )
    return table(["tree", "way", "median, us", "quartiles, us", "over tdcopier", "calls"], rows)


def containers_table(result: dict[str, Any]) -> str:
    """Return a table of the time that a container adds to its values, by kind; ours only."""
    rows = [
        [kind, "passed through whole" if us is None else number(us)]
        for kind, us in result["us_per_container"].items()
    ]
    return table(["container of two integers", "adds, us"], rows)


def targets_table(result: dict[str, Any]) -> str:
    """Return a table of targets, and whether they are hit."""
    return table(
        ["figure", "wanted", "found", ""],
        [
            [t["what"], str(t["wanted"]), str(t["found"]), "hit" if t["hit"] else "**missed**"]
            for t in result["targets"]
        ],
    )


def plot(result: dict[str, Any], workload: str = "detection_batch") -> str | None:
    """Return the plot of a result (for copies, of one workload), or None if it has none."""
    if result["name"] == "tensordict":
        return bars(*td_report.plotted(result), "us")
    if result["name"] == "loop":
        return feed_report.loop_plot(result)
    if result["name"] == "replay":
        return replay_report.loop_plot(result)
    if result["name"] == "sizes":
        return feed_report.sizes_plot(result)
    direction = DIRECTIONS.get(result["name"])
    if direction is None or workload not in result["workloads"]:
        return None
    contenders = result["workloads"][workload]["contenders"]
    above = f"{direction}, {title(result, workload)} ({result['machine']['gpu']})"
    return bars(above, [(name, t["median_us"]) for name, t in contenders.items()], "us")


def plot_name(result: dict[str, Any]) -> str:
    return f"{result['name']}-{result['machine']['slug']}.svg"


def page(results: Sequence[dict[str, Any]], plots: str) -> str:
    """Return all results as Markdown for the docs.

    Args:
        results: From :func:`load`.
        plots: Folder of the plots, relative to the page.

    """
    if not results:
        return NO_RESULTS + "\n"
    parts = []
    for result in results:
        parts += [f"## {heading(result)}", machine_line(result)]
        if plot(result):
            parts.append(f"![{heading(result)}]({plots}/{plot_name(result)})")
        if result["name"] in DIRECTIONS:
            parts += [copies_table(result), steps_table(result)]
            # Older results have no limits.
            if all("limits" in found for found in result["workloads"].values()):
                parts.append(limits_table(result))
        if result["name"] == "loop":
            parts.append(feed_report.loop_table(result, WORKLOAD_NAMES))
            parts.append(feed_report.beside_table(result))
        if result["name"] == "sizes":
            parts.append(feed_report.sizes_table(result))
        if result["name"] == "replay":
            parts.append(replay_report.loop_table(result))
        if result["name"] == "gather":
            parts.append(replay_report.gather_table(result))
        if result["name"] == "structure":
            parts += [opaque_table(result), containers_table(result)]
        if result["name"] == "tensordict":
            parts += td_report.tables(result)
        if result["name"] == "company":
            parts += company_report.tables(result)
        parts.append(targets_table(result))
    return "\n\n".join(parts) + "\n"


def readme_part(results: Sequence[dict[str, Any]]) -> str:
    """Return the text between the marks in README.md: plots of copies, and their machines."""
    first: dict[str, dict[str, Any]] = {}
    for result in results:
        if plot(result):
            first.setdefault(result["name"], result)
    if not first:
        return NO_RESULTS
    parts = []
    drawn = list(first.values())
    for index, result in enumerate(drawn):
        alt = f"copy times, {PLOTTED[result['name']]}"
        parts.append(f"![{alt}](benchmarks/results/{plot_name(result)})")
        last = index + 1 == len(drawn)
        if last or drawn[index + 1]["machine"] != result["machine"]:  # one line for equal machines
            parts.append(machine_line(result))
    parts[-1] += " Medians; drawn from the files in `benchmarks/results`."
    return "\n\n".join(parts)


def headline(results: Sequence[dict[str, Any]]) -> str:
    """Return the README's sentences on how much faster than `.to()` tdcopier is."""
    sentences = []
    for result in results:
        if result["name"] == "h2d":
            found = result["workloads"][HEADLINE_WORKLOAD]
            ours, theirs = (found["contenders"][way]["median_us"] for way in (OURS, PER_LEAF))
            sentences.append(
                f"{leaves_and_bytes(found)} reach an {result['machine']['gpu']} in "
                f"**{number(ours / 1000)} ms**; with "
                f"`.to()` per leaf they take {number(theirs / 1000)} ms, "
                f"**{theirs / ours:.0f} times** as long."
            )
        if result["name"] == "loop":
            ratios = result["loops"][HEADLINE_WORKLOAD]["ratios"]
            sentences.append(
                f"A training step with them takes {ratios[OURS]:.2f} times as long as one whose "
                f"batch is already on the GPU; with `.to()` per leaf, {ratios[PER_LEAF]:.1f} times."
            )
    return "\n".join(sentences)


def with_part(readme: str, part: str) -> str:
    """Return the README with the text between the marks replaced."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    return f"{before}{begin}\n{part}\n{end}{after}"


def write_plots(results: Sequence[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        svg = plot(result)
        if svg:
            (folder / plot_name(result)).write_text(svg)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--readme", action="store_true", help="also write README.md's part")
    options = parser.parse_args(arguments)
    results = load(options.results)
    print(page(results, "."))
    write_plots(results, options.results)
    if options.readme:
        path = ROOT / "README.md"
        plots = readme_part([result for result in results if result["name"] in README_PLOTS])
        part = f"{headline(results)}\n\n{plots}".strip()
        path.write_text(with_part(path.read_text(), part))
    return 0


if __name__ == "__main__":
    sys.exit(main())
