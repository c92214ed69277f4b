"""Numbers, sizes and tables as the pages show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tdcopier._bench.tables import number, size

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
LIMIT_PREFIX = "limit: "  # of what is no way to copy a tree, but the best that the machine can do


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def way_cell(way: str) -> str:
    """The name of a way of copying; ours stands out."""
    return f"**{way}**" if way.startswith(OURS) else way


def times_cells(times: dict[str, Any]) -> list[str]:
    """Median and quartiles in microseconds."""
    return [number(times["median_us"]), f"{number(times['q1_us'])} - {number(times['q3_us'])}"]


def ratio_cell(ratio: float | None) -> str:
    """How many times longer; empty for what ratios are over."""
    return "" if ratio is None else f"{number(ratio)} x"


def leaves_and_bytes(found: dict[str, Any]) -> str:
    leaves = "1 leaf" if found["leaves"] == 1 else f"{found['leaves']:,} leaves"
    return f"{leaves}, {size(found['bytes'])}"
