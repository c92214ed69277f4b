"""Makes tables and plots of result files; all figures in README and docs come from here.

``python benchmarks/report.py`` prints the tables of ``benchmarks/results`` and draws its plots;
with ``--readme`` it also writes the part of README.md between the two benchmark marks, and the
figures in sentences of the docs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainers import ways

from tool.machine import BENCHMARKS, ROOT
from tool.plots import as_svg, plot_of
from tool.sections import DIRECTIONS, TABLES, title
from tool.sentences import SENTENCES, rewritten
from tool.tables import LIMIT_PREFIX, OURS, RESIDENT, leaves_and_bytes, table

RESULTS = BENCHMARKS / "results"
SCHEMA = 1
BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
NO_RESULTS = "No result files yet: `make bench` on a machine with a GPU writes them."
HEADLINE_WORKLOAD = "detection_batch"
HEADLINE_TRAINER = "maskrcnn"
PER_LEAF = ".to() per leaf"
BUSY = "8 DataLoader workers"  # the load of `cold` that the README shows


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
    parts.append(f"tdcopier {machine['tdcopier']}{_at_commit(result)}")
    return ", ".join(parts) + f"; {result['taken']}."


def _at_commit(result: dict[str, Any]) -> str:
    """Return " at" and the commit; nothing if it is not known, or had other changes."""
    machine = result["machine"]
    commit = None if machine.get("git_dirty") else machine.get("git_commit")
    return f" at {commit[:10]}" if commit else ""


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


def ways_of_loaders(results: Sequence[dict[str, Any]]) -> str:
    """Return tables of what it takes to train from a loader, and to read one alone, by way.

    The result is empty without results.
    """
    parts = []
    for result in results:
        if result["name"] in ("trainers", "frameworks"):
            rows = []
            for found in result["trainers"].values():
                shown = LOADERS if result["name"] == "trainers" else _over_resident(found)
                rows += [_trained(way, found) for way in shown if way in _over_resident(found)]
            parts.append(table([heading(result).partition(":")[0], *_TRAINED], rows))
        elif result["name"] == "reading":
            rows = []
            for name, found in result["cases"].items():
                rows += [_read(name, way, found) for way in found["wall_us"]]
            parts.append(table(["reading alone", *_READ], rows))
    return "\n\n".join(parts) + "\n"


def ways_of_learners(results: Sequence[dict[str, Any]]) -> str:
    """Return a table of the updates a second of off-policy learners, by how a batch gets to them.

    The result is empty without results.
    """
    parts = []
    for result in results:
        if result["name"] == "learners":
            learners = result["learners"]
            rates = [found["updates_per_s"] for found in learners.values()]
            rows = [[way, *(f"{rate[way]:,.0f}" for rate in rates)] for way in rates[0]]
            parts.append(table(["updates a second", *learners], rows))
    return "\n\n".join(parts) + "\n"


LOADERS = (ways.RESIDENT, ways.FLOOR, ways.PINNED, ways.OURS)
_TRAINED = ["way", "step, ms", "over resident", "processor, ms", "page faults"]
_READ = ["way", "a batch, ms", "processor, ms", "page faults"]


def _over_resident(found: Mapping[str, Any]) -> Mapping[str, Any]:
    over: Mapping[str, Any] = found["over"].get(ways.RESIDENT, {})
    return over


def _trained(way: str, found: Mapping[str, Any]) -> list[str]:
    over, used = _over_resident(found)[way], found["per_step"][way]
    return [
        found["what"] if way == ways.RESIDENT else "",
        f"`{way}`",
        f"{found['step'][way]['mean_us'] / 1e3:.1f}",
        f"{over['ratio']:.2f} ({over['low']:.2f} - {over['high']:.2f})",
        f"{used['process_cpu_us'] / 1e3:.1f}",
        f"{used['minor_faults']:.0f}",
    ]


def _read(name: str, way: str, found: Mapping[str, Any]) -> list[str]:
    return [
        name if way == next(iter(found["wall_us"])) else "",
        f"`{way}`",
        f"{found['wall_us'][way]['median_us'] / 1e3:.1f}",
        f"{found['process_cpu_us'][way]['median_us'] / 1e3:.1f}",
        f"{found['faults'][way]:.0f}",
    ]


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
    text = _multiple_of(ratio)
    return f"**{text}**" if ratio < 0.95 else text


def readme_part(results: Sequence[dict[str, Any]]) -> str:
    """Return the text between the marks in README.md: sentences, a table and the machine.

    Raises:
        KeyError: There is no result of the copies, or of cold caches, the training loop or the
            trainers on the same machine.

    """
    h2d = {result["name"]: result for result in reversed(results)}["h2d"]  # the first one
    slug = h2d["machine"]["slug"]  # the table compares figures of one machine
    named = {result["name"]: result for result in results if result["machine"]["slug"] == slug}
    cold, loop, trainers = named["cold"], named["loop"], named["trainers"]
    batch = "detection batch"
    colds = [cold["copies"]["h2d"][batch], *(each[batch] for each in cold["beside"].values())]
    us = [each["contenders"][OURS]["median_us"] for each in colds]
    over = [each["ratios"][PER_LEAF] for each in colds]
    steps = {w: t["median_us"] for w, t in loop["loops"][HEADLINE_WORKLOAD]["step"].items()}
    all_steps = [each["ratios"][OURS] for each in loop["loops"].values()]
    text = (
        f"{_trainer_sentences(trainers['trainers'])}\n\n"
        f"A batch of {leaves_and_bytes(colds[0])}, as a detection dataset has them, reaches an "
        f"{h2d['machine']['gpu']} in **{_ms(min(us))} to {_ms(max(us))} ms** with cold caches "
        f"(alone, beside {', and beside '.join(cold['beside'])}); with `.to()` per leaf it takes "
        f"{min(over):.0f} to {max(over):.0f} times as long.\n"
        f"A training step on it takes {steps[OURS] / steps[RESIDENT]:.2f} times as long as one "
        f"on a batch that is on the GPU already ({min(all_steps):.2f} to {max(all_steps):.2f} in "
        f"all {len(all_steps)} loops of the benchmark); with `.to()` per leaf, "
        f"{steps[PER_LEAF] / steps[RESIDENT]:.1f} times."
    )
    others = {"cold and busy": cold, "training steps": loop, "the trainer": trainers}
    source = f"Busy: beside {BUSY}. Medians; `benchmarks/results` has quartiles and all ways."
    lines = f"{machine_line(h2d)} {_other_runs(h2d, others)}{source}"
    return f"{text}\n\n{_readme_table(cold, h2d, loop)}\n\n{lines}"


def _trainer_sentences(trainers: Mapping[str, Any]) -> str:
    """Return what a step costs over one on the device already, in one trainer and the others."""
    found = trainers[HEADLINE_TRAINER]
    others = {
        name: each
        for name, each in trainers.items()
        if name != HEADLINE_TRAINER and not name.startswith("loop_")
    }

    def of(way: str) -> str:
        over = _over_resident(found)[way]
        return f"{over['ratio']:.2f} ({over['low']:.2f} to {over['high']:.2f})"

    def of_others(way: str) -> str:
        ratios = [_over_resident(each)[way]["ratio"] for each in others.values()]
        return f"{min(ratios):.2f} to {max(ratios):.2f}"

    return (
        f"In a real trainer ({found['what']}, {found['bytes'] / 1e6:.0f} MB a batch, a "
        f"`DataLoader` with {found['workers']} workers), a step with `tdcopier.prefetch(loader, "
        f'"cuda")` takes **{of(ways.OURS)}** times as long as on batches that are on the GPU '
        f"already, and with `pin_memory=True` {of(ways.PINNED)} times (medians and intervals of "
        f"{found['rounds']} rounds). In the other {len(others)} trainers these are "
        f"{of_others(ways.OURS)} and {of_others(ways.PINNED)}."
    )


def _other_runs(first: dict[str, Any], others: Mapping[str, dict[str, Any]]) -> str:
    """Return a sentence on the results of another commit than the first one's, or machine."""

    def differs(result: dict[str, Any]) -> str:
        cpus = result["machine"]["logical_cpus"]
        is_like = cpus == first["machine"]["logical_cpus"]
        return _at_commit(result) + ("" if is_like else f" with {cpus} logical CPUs")

    parts = [
        f"{what}{differs(result)}, {result['taken'][:10]}"
        for what, result in others.items()
        if not _at_commit(result) or differs(result) != _at_commit(first)
    ]
    return f"Of other runs: {'; '.join(parts)}. " if parts else ""


def _readme_table(cold: dict[str, Any], h2d: dict[str, Any], loop: dict[str, Any]) -> str:
    """Return the README's table: copies as they are between other work first."""
    beside, alone = cold["beside"][BUSY], cold["copies"]["h2d"]
    steps = loop["loops"]
    rows = [
        _readme_row(f"{name}: {leaves_and_bytes(found)}{how}", found["contenders"])
        for name, found, how in (
            ("labels", beside["detection batch"], "; cold, busy"),
            ("labels and images", beside["detection batch with images"], "; cold, busy"),
            ("TensorDict", beside["flat TensorDict"], "; cold, busy"),
            ("control TensorDict", alone["control TensorDict"], "; cold"),
            ("labels", h2d["workloads"][HEADLINE_WORKLOAD], "; warm"),
        )
    ]
    rows += [
        _readme_row(f"training step, {name}: {leaves_and_bytes(found)}", found["step"])
        for name, found in (
            ("labels", steps[HEADLINE_WORKLOAD]),
            ("Atari replay", steps["atari_replay"]),
        )
    ]
    return table(["ms", OURS, "`.to()`", "fastest other way"], rows)


def _readme_row(what: str, times: dict[str, Any]) -> list[str]:
    """Return the medians of ours, of `.to()`, and of the best other way if it is faster."""
    us = {way: found["median_us"] for way, found in times.items()}
    ours_us = us[OURS]
    to = PER_LEAF if PER_LEAF in us else "td.to()"

    def cell(way: str) -> str:
        return f"{_ms(us[way])} ({_multiple_of(us[way] / ours_us)})".replace(" x", "x")

    others = [way for way in us if not way.startswith((OURS, LIMIT_PREFIX, RESIDENT))]
    best = min(others, key=us.__getitem__)
    named = "" if best == to else f"{cell(best)}, {best.partition(',')[0]}"
    return [what, f"**{_ms(ours_us)}**", cell(to), named]


def _ms(us: float) -> str:
    return f"{us / 1000:.2f}" if us < 10_000 else f"{us / 1000:.1f}"


def _multiple_of(ratio: float) -> str:
    return f"{ratio:.0f} x" if ratio >= 10 else f"{ratio:.2g} x"


def with_part(readme: str, part: str) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no {BEGIN} ... {END}")
    return f"{before}{begin}\n{part}\n{end}{after}"


def written_anew(results: Sequence[dict[str, Any]]) -> dict[Path, str]:
    """Return the texts of README.md and of the pages of the docs with these results.

    Raises:
        KeyError: A benchmark whose figures they have is missing.

    """
    readme = ROOT / "README.md"
    texts = {readme: with_part(readme.read_text(), readme_part(results))}
    named = {result["name"]: result for result in results}
    for sentence in SENTENCES:
        path = ROOT / sentence.page
        texts[path] = rewritten(sentence, texts.get(path) or path.read_text(), named)
    return texts


def write_plots(results: Sequence[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        plot = plot_of(result)
        if plot:
            (folder / plot_name(result)).write_text(as_svg(plot))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", nargs="?", type=Path, default=RESULTS)
    parser.add_argument("--readme", action="store_true", help="also write README.md and docs")
    options = parser.parse_args(arguments)
    results = load(options.results)
    if not results:
        print(NO_RESULTS, file=sys.stderr)
        return 1
    print(page(results, "."))
    write_plots(results, options.results)
    if options.readme:
        for path, text in written_anew(results).items():
            path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
