"""Formats numbers, sizes and tables for the pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tdcopier._commands.tables import number, size

OURS = "tdcopier"
RESIDENT = "on the device already"
LIMIT_PREFIX = "limit: "  # marks contenders that are limits of the machine, not ways to copy
TIMES = ["median, us", "quartiles, us"]

Cells = Sequence[str]


def table(header: Cells, rows: Iterable[Cells]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def grouped(header: Cells, groups: Iterable[tuple[str, Iterable[Cells]]]) -> str:
    """Return a table of groups of rows, with the title of a group in its first row only."""
    rows = [
        [title if index == 0 else "", *cells]
        for title, group in groups
        for index, cells in enumerate(group)
    ]
    return table(header, rows)


def way_cell(way: str, wrong: int = 0) -> str:
    """Return the name of a way of copying, with the number of wrong results; ours is bold."""
    name = f"**{way}**" if way.startswith(OURS) else way
    return f"{name} (wrong: {int(wrong)})" if wrong else name


def times_cells(times: Mapping[str, Any]) -> list[str]:
    return [number(times["median_us"]), f"{number(times['q1_us'])} - {number(times['q3_us'])}"]


def ratio_cell(ratio: float | None, digits: int | None = None) -> str:
    """Return a ratio as text; empty for the reference itself."""
    if ratio is None:
        return ""
    return f"{number(ratio) if digits is None else format(ratio, f'.{digits}f')} x"


def ways(found: Mapping[str, Any]) -> Iterable[list[str]]:
    """Return a row per contender: name, median, quartiles, ratio, and the number of calls."""
    wrong = found.get("wrong", found.get("wrong_leaves", {}))
    for way, times in found["contenders"].items():
        ratio = ratio_cell(found["ratios"].get(way))
        yield [way_cell(way, wrong.get(way, 0)), *times_cells(times), ratio, str(times["repeats"])]


def leaves_and_bytes(found: Mapping[str, Any]) -> str:
    leaves = "1 leaf" if found["leaves"] == 1 else f"{found['leaves']:,} leaves"
    return f"{leaves}, {size(found['bytes'])}"


def feed_rows(found: Mapping[str, Any], digits: int | None = None) -> Iterable[list[str]]:
    """Yield a row per feed of a loop: its name, the time of a step, the ratio, and the steps.

    The first feed is the reference of the ratios.
    """
    for index, (feed, step) in enumerate(found["step"].items()):
        ratio = ratio_cell(found["ratios"][feed] if index else None, digits)
        steps = str(step["repeats"] * found["steps_per_block"])
        yield [way_cell(feed, found["wrong"][feed]), *times_cells(step), ratio, steps]
