"""Formats numbers, sizes and tables for the pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tdcopier._commands.tables import number, size

__all__ = [
    "LIMIT_PREFIX",
    "OURS",
    "leaves_and_bytes",
    "number",
    "ratio_cell",
    "size",
    "table",
    "times_cells",
    "way_cell",
]

OURS = "tdcopier"
LIMIT_PREFIX = "limit: "  # marks contenders that are limits of the machine, not ways to copy


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def way_cell(way: str) -> str:
    """Return the name of a way of copying; ours is bold."""
    return f"**{way}**" if way.startswith(OURS) else way


def times_cells(times: dict[str, Any]) -> list[str]:
    """Return median and quartiles in microseconds."""
    return [number(times["median_us"]), f"{number(times['q1_us'])} - {number(times['q3_us'])}"]


def ratio_cell(ratio: float | None) -> str:
    """Return a ratio as text; empty for the reference itself."""
    return "" if ratio is None else f"{number(ratio)} x"


def leaves_and_bytes(found: dict[str, Any]) -> str:
    leaves = "1 leaf" if found["leaves"] == 1 else f"{found['leaves']:,} leaves"
    return f"{leaves}, {size(found['bytes'])}"
