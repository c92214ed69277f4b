"""Makes tables and plots of result files; all figures in README and docs come from here.

``python benchmarks/report.py`` prints the tables of ``benchmarks/results`` and draws its plots;
with ``--readme`` it also writes the part of README.md between the two benchmark marks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from plots import as_svg, plot_of
from sections import DIRECTIONS, TABLES, title
from tables import LIMIT_PREFIX, OURS, leaves_and_bytes, table

from tdcopier._commands.tables import number

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = 1
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
NO_RESULTS = "No result files yet: `make bench` on a machine with a GPU writes them."
HEADLINE_WORKLOAD = "detection_batch"
PER_LEAF = ".to() per leaf"


def load(folder: Path) -> list[dict[str, Any]]:
    """Load the results of a folder in the page's order, without those of the simulated device.

    Raises:
        ValueError: A file has another schema, so its figures may mean something else.

    """
    found = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        if result.get("schema") != SCHEMA:
            raise ValueError(f"{path.name} has schema {result.get('schema')}, not {SCHEMA}")
        found.append(result)
    order = list(TABLES)
    found.sort(key=lambda result: order.index(result["name"]))
    return [result for result in found if not result["machine"]["device"].startswith("sim")]


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


def targets_table(result: dict[str, Any]) -> str:
    rows = (
        [t["what"], str(t["wanted"]), str(t["found"]), "hit" if t["hit"] else "**missed**"]
        for t in result["targets"]
    )
    return table(["figure", "wanted", "found", ""], rows)


def plot_name(result: dict[str, Any]) -> str:
    return f"{result['name']}-{result['machine']['slug']}.svg"


def page(results: Sequence[dict[str, Any]], plots: str) -> str:
    """Return all results as Markdown for the docs; ``plots`` is the plots' folder from there."""
    if not results:
        return NO_RESULTS + "\n"
    parts = []
    for result in results:
        parts += [f"## {heading(result)}", machine_line(result)]
        if plot_of(result):
            parts.append(f"![{heading(result)}]({plots}/{plot_name(result)})")
        parts += TABLES[result["name"]](result)
        parts.append(targets_table(result))
    return "\n\n".join(parts) + "\n"


def ways_of_torch(results: Sequence[dict[str, Any]]) -> str:
    """Return tables of how long torch's own ways take, as multiples of tdcopier's time.

    Where torch's way is the faster one, its cell is bold. The result is empty without results.
    """
    parts = []
    for result in results:
        if result["name"] in DIRECTIONS and result["name"] != "d2d":
            parts.append(_against(heading(result).partition(":")[0], result["workloads"]))
        elif result["name"] == "tensordict":
            for direction, batches in result["copies"].items():
                parts.append(_against(f"TensorDicts, {DIRECTIONS[direction].lower()}", batches))
    return "\n\n".join(parts) + "\n"


def _against(header: str, batches: Mapping[str, dict[str, Any]]) -> str:
    skipped = (OURS, LIMIT_PREFIX)
    columns = [way for way in _first(batches)["ratios"] if not way.startswith(skipped)]
    rows = [
        [title(name, found), *(_multiple(found["ratios"].get(way)) for way in columns)]
        for name, found in batches.items()
    ]
    return table([header, *(f"`{way}`" for way in columns)], rows)


def _first(batches: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return next(iter(batches.values()))


def _multiple(ratio: float | None) -> str:
    if ratio is None:
        return ""
    text = f"{ratio:.0f} x" if ratio >= 10 else f"{ratio:.2g} x"
    return f"**{text}**" if ratio < 0.95 else text


def readme_part(results: Sequence[dict[str, Any]]) -> str:
    """Return the text between the marks in README.md: the sentences, the plot and the machine.

    Raises:
        KeyError: There is no result of the copies, or of cold caches or the training loop on the
            same machine.

    """
    h2d = {result["name"]: result for result in reversed(results)}["h2d"]  # the first one
    slug = h2d["machine"]["slug"]  # the sentences compare figures of one machine
    named = {result["name"]: result for result in results if result["machine"]["slug"] == slug}
    loop = named["loop"]
    plot = f"![copy times, host to device](benchmarks/results/{plot_name(h2d)})"
    source = "Medians; drawn from the files in `benchmarks/results`."
    text = headline(h2d, named["cold"], loop)
    return f"{text}\n\n{plot}\n\n{machine_line(h2d)} {source}"


def headline(h2d: dict[str, Any], cold: dict[str, Any], loop: dict[str, Any]) -> str:
    """Return the README's sentences on how much faster than `.to()` tdcopier is."""
    found = h2d["workloads"][HEADLINE_WORKLOAD]
    ours_us, theirs_us = (found["contenders"][way]["median_us"] for way in (OURS, PER_LEAF))
    in_cold = cold["copies"]["h2d"]["detection batch"]
    cold_us, cold_ratio = in_cold["contenders"][OURS]["median_us"], in_cold["ratios"][PER_LEAF]
    ratios = loop["loops"][HEADLINE_WORKLOAD]["ratios"]
    return (
        f"{leaves_and_bytes(found)} reach an {h2d['machine']['gpu']} in "
        f"**{number(ours_us / 1000)} ms**; with "
        f"`.to()` per leaf they take {number(theirs_us / 1000)} ms, "
        f"**{theirs_us / ours_us:.0f} times** as long.\n"
        f"With cold caches, as between other work, the copy takes {number(cold_us / 1000)} ms, and "
        f"`.to()` {cold_ratio:.0f} times as long.\n"
        f"A training step with them takes {ratios[OURS]:.2f} times as long as one whose "
        f"batch is already on the GPU; with `.to()` per leaf, {ratios[PER_LEAF]:.1f} times."
    )


def with_part(readme: str, part: str) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    return f"{before}{begin}\n{part}\n{end}{after}"


def write_plots(results: Sequence[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        plot = plot_of(result)
        if plot:
            (folder / plot_name(result)).write_text(as_svg(plot))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--readme", action="store_true", help="also write README.md's part")
    options = parser.parse_args(arguments)
    results = load(options.results)
    if not results:
        print(NO_RESULTS, file=sys.stderr)
        return 1
    print(page(results, "."))
    write_plots(results, options.results)
    if options.readme:
        path = ROOT / "README.md"
        path.write_text(with_part(path.read_text(), readme_part(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
