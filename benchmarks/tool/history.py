"""Keeps the main figures of all results over time, and shows how ratios changed.

``make bench`` adds its results to ``benchmarks/history.jsonl``, one JSON object a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tool.machine import BENCHMARKS
from tool.plots import Trends
from tool.tables import OURS, RESIDENT, table

HISTORY = BENCHMARKS / "history.jsonl"
KEY = ("commit", "dirty", "machine", "suite", "row", "way")
"""What a line is known by: a later result replaces the figures of an earlier one."""
FIELDS = (*KEY, "date", "device", "torch")
SHORT = 7  # letters of a commit, as some results name it so
PARTS = ("contenders", "step", "update", "park", "resume")
"""Where a part of a result has times by way."""
FOLDERS = ("workloads", "copies", "loops", "replays", "learners", "gathers", "from_pinned")
FOLDERS += ("cases", "parked")
"""Keys that are left out of the names of rows."""
MAIN = (OURS, ".to() per", "td.to()")
"""How the ways begin whose figures are kept."""
PER_LEAF, TD = ".to() per leaf", "td.to()"
SHOWN = {
    "labels to the device, .to() per leaf": ("h2d", "detection_batch", PER_LEAF),
    "labels to the host, .to() per leaf": ("d2h", "detection_batch", PER_LEAF),
    "labels to the device, cold, .to() per leaf": ("cold", "h2d, detection batch", PER_LEAF),
    "flat TensorDict to the device, td.to()": ("tensordict", "h2d, flat", TD),
    "control TensorDict to the device, td.to()": ("tensordict", "h2d, control", TD),
    "training step with labels": ("loop", "detection_batch", OURS),
    "training step, control TensorDict": ("loop", "control", OURS),
    "learner's step, Atari replay": ("replay", "atari_256, 4 ms of large kernels", OURS),
}
"""The ratios that the page draws. Those of ways are over tdcopier's time, and those of steps are
tdcopier's over a step whose batch is on the device already."""

Line = dict[str, Any]


def lines_of(result: Mapping[str, Any]) -> list[Line]:
    """Return the lines of a result: of its main ways by row, and of its targets.

    Raises:
        ValueError: The result is of the simulated device, whose times mean nothing.

    """
    machine = result["machine"]
    if str(machine["device"]).startswith("sim"):
        raise ValueError(
            f"the result of {result['name']!r} is of the simulated device, whose times mean "
            "nothing: the history has only results of real ones"
        )
    commit = machine.get("git_commit")
    about = {
        "commit": commit and commit[:SHORT],
        "dirty": bool(machine.get("git_dirty")),
        "date": result["taken"],
        "machine": machine["slug"],
        "device": machine["gpu"],
        "torch": machine["torch"],
        "suite": result["name"],
    }
    targets = [
        {"row": "targets", "way": target["what"], "hit": target["hit"], "found": target["found"]}
        for target in result["targets"]
    ]
    return [{**about, **each} for each in (*_figures(result, ()), *targets)]


def _figures(found: Any, path: tuple[str, ...]) -> Iterator[Line]:
    """Yield row, way, median, and the ratio to a baseline where there is one."""
    if not isinstance(found, Mapping):
        return
    for key, part in found.items():
        if key not in PARTS or not isinstance(part, Mapping):
            yield from _figures(part, path if key in FOLDERS else (*path, key))
            continue
        ratios = found.get("ratios", {}) if key in ("contenders", "step") else {}
        others = [way for way in part if way not in ratios]
        baseline = RESIDENT if key == "step" else (others[0] if ratios and others else None)
        row = ", ".join(path if key in ("contenders", "step") else (*path, key))
        for way, times in part.items():
            if way.startswith(MAIN) and isinstance(times, Mapping) and "median_us" in times:
                ratio = 1.0 if way == baseline else ratios.get(way)
                yield {
                    "row": row,
                    "way": way,
                    "median_us": round(times["median_us"], 3),
                    "ratio": ratio and round(ratio, 4),
                    "baseline": baseline if ratio else None,
                }


def load(path: Path = HISTORY) -> list[Line]:
    """Return all lines of a file, which may not exist yet.

    Raises:
        ValueError: A line is broken.

    """
    found = []
    for number, text in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            line = json.loads(text)
            lacking = [field for field in FIELDS if field not in line]
        except (json.JSONDecodeError, TypeError) as error:
            lacking, line = [], error
        if lacking or not isinstance(line, dict):
            why = f"it lacks {', '.join(lacking)}" if lacking else f"it is no JSON object: {line}"
            raise ValueError(
                f"{path}, line {number} is broken: {why}. Take it from an earlier commit, or "
                "delete it."
            )
        found.append(line)
    return found


def add(results: Iterable[Mapping[str, Any]], path: Path = HISTORY) -> int:
    """Add results to a file. Returns how many lines it has more than before."""
    lines = load(path)
    by_key = {tuple(line[part] for part in KEY): line for line in lines}
    for line in [line for result in results for line in lines_of(result)]:
        key = tuple(line[part] for part in KEY)
        if key not in by_key or by_key[key]["date"] <= line["date"]:
            by_key[key] = line
    ordered = sorted(by_key.values(), key=lambda line: line["date"])  # stable within a result
    path.write_text("".join(json.dumps(line) + "\n" for line in ordered))
    return len(by_key) - len(lines)


# ---- the page ------------------------------------------------------------------------------------


def trends(lines: Sequence[Line]) -> Trends:
    """Return the ratios that are shown, by what they are and by card, in the order of time."""
    panels: dict[str, dict[str, list[tuple[str, float]]]] = {}
    for title, shown in SHOWN.items():
        for line in lines:
            if (line["suite"], line["row"], line["way"]) == shown and line["ratio"] is not None:
                cards = panels.setdefault(title, {})
                cards.setdefault(line["device"], []).append((_commit(line), line["ratio"]))
    commits = list(dict.fromkeys(map(_commit, lines)))
    return Trends("Ratios over commits, by card", panels, commits)


def _commit(line: Line) -> str:
    return f"{line['commit'] or 'unknown'}{'+' if line['dirty'] else ''}"


def page(lines: Sequence[Line], picture: str) -> str:
    """Return the section of the docs: the picture, and the first, best and last of each line."""
    rows = []
    for title, cards in trends(lines).panels.items():
        for card, points in cards.items():
            first, last = ([f"{ratio:.3g} x", commit] for commit, ratio in (points[0], points[-1]))
            rows.append([title, card, str(len(points)), *first, *last])
    if not rows:
        return "There is no history yet: `make bench` on a machine with a GPU makes it.\n"
    header = ["ratio", "card", "results", "first", "commit", "last", "commit"]
    return f"![Ratios over commits, by card]({picture})\n\n{table(header, rows)}\n"
