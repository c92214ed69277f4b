"""Formats numbers, sizes and plain tables for the short benchmark."""

from __future__ import annotations

from collections.abc import Sequence


def number(value: float) -> str:
    """Format with three significant digits, or all digits before the point: 0.0123, 12.3, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def size(count: int) -> str:
    """Format bytes in decimal units, as data sheets do."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if count >= scale:
            return f"{number(count / scale)} {unit}"
    return f"{count} B"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Format rows with the same number of cells as lines; aligns all columns but the first right.

    Args:
        rows: the rows, starting with the heading.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
