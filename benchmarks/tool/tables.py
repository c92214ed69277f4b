"""The writer of all tables, driven by columns, and the formats of their cells."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tdcopier._commands.tables import number, size

OURS = "tdcopier"
RESIDENT = "on the device already"
LIMIT_PREFIX = "limit: "  # marks contenders that are limits of the machine, not ways to copy

Found = Mapping[str, Any]
"""A result, or the part of one that a table shows."""
Names = Sequence[str]
"""The names of a row: of a way, and of what it is divided into."""


class Column(NamedTuple):
    header: str
    cell: Callable[[Found, Names], str]
    """Takes the part of the result that the group of rows shows, and the names of the row."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(heads: str, groups: Mapping[str, Found], rows: str, *columns: Column) -> str:
    """Return a table of groups of rows.

    Args:
        heads: Headers of the columns before the others, with ``|`` between: of the title of a group
            and of the way. A table without titles, or with one row per group, has one head.
        groups: The parts of the result, by title.
        rows: Where a part has its rows by name, ``contenders`` or ``times/*`` for rows of two
            names; empty for one row per group.
        columns: What a row shows.

    """
    lines, first = [], heads.split(" | ")
    for title, found in groups.items():
        cells = [
            [*([way_cell(names, found)] if rows else []), *(c.cell(found, names) for c in columns)]
            for names in (_names(found, rows) if rows else [()])
        ]
        for way, error in found.get("failed", {}).items() if rows else ():
            cells.append([way, f"fails: {error}", *[""] * (len(columns) - 1)])
        for index, line in enumerate(cells):
            head = [] if rows and len(first) == 1 else ["" if index else title]
            lines.append([*head, *line])
    return table([*first, *(column.header for column in columns)], lines)


def _names(found: Found, rows: str) -> list[tuple[str, ...]]:
    part, *deeper = rows.split("/")
    if not deeper:
        return [(name,) for name in found[part]]
    return [(name, inner) for name, below in found[part].items() for inner in below]


def at(
    header: str, path: str, show: Callable[[Any], str] = number, *, but: str | None = None
) -> Column:
    """Return a column of the values at a path, in which ``*`` stands for the names of the row.

    A cell without a value is empty, as is that of the row ``but``: a reference has no ratio.
    """

    def cell(found: Found, names: Names) -> str:
        value: Any = found
        left = iter(names)
        for key in path.split("/"):
            value = value.get(next(left) if key == "*" else key)
            if value is None or but in names:
                return ""
        return show(value)

    return Column(header, cell)


def times(part: str = "contenders/*", header: str = "median, us") -> list[Column]:
    """Return the columns of median and quartiles."""
    return [at(header, f"{part}/median_us"), at("quartiles, us", part, quartiles)]


def quartiles(taken: Found) -> str:
    return f"{number(taken['q1_us'])} - {number(taken['q3_us'])}" if "q1_us" in taken else ""


def ratio(value: float) -> str:
    return f"{number(value)} x"


def ratio3(value: float) -> str:
    return f"{value:.3f} x"


def way_cell(names: Names, found: Found) -> str:
    """Return the name of a way of copying, with the number of wrong results; ours is bold."""
    way, *parts = names
    wrong = found.get("wrong", {}).get(way, 0)
    name = f"**{way}**" if way.startswith(OURS) else way
    return ", ".join([f"{name} (wrong: {int(wrong)})" if wrong else name, *parts])


def leaves_and_bytes(found: Found) -> str:
    leaves = "1 leaf" if found["leaves"] == 1 else f"{found['leaves']:,} leaves"
    return f"{leaves}, {size(found['bytes'])}"
