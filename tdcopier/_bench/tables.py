"""Numbers, sizes and plain tables, as the short benchmark prints them."""

from __future__ import annotations

from collections.abc import Sequence


def number(value: float) -> str:
    """Three significant digits or all whole ones: 0.0123, 12.3, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(count: int) -> str:
    """Bytes in units of 1000, as data sheets do."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{number(count / scale)} {unit}"
    return f"{count} B"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of as many cells each, as lines: the first column to the left, the others to the right.

    Args:
        rows: The heading first.

    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
