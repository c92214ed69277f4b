"""Runs the suites with our own ways only, in turns with another process; used by compare.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tool.alternate import Turns
from tool.history import FOLDERS
from tool.measure import Bench
from tool.tables import OURS

Run = Callable[[str, Bench], Mapping[str, Any]]
"""Returns the figures of a suite."""


def measured(
    bench: Bench, suites: Sequence[str], run: Run, turns: Turns
) -> tuple[dict[str, float], dict[str, str]]:
    """Return medians in microseconds by row, and errors by the suite that they ended."""
    bench = bench._replace(begin_round=turns.begin_round, ours_only=True)
    rows: dict[str, float] = {}
    failed: dict[str, str] = {}
    for number, suite in enumerate(suites):
        turns.begin_suite(number)
        try:
            found = run(suite, bench)
        except Exception as error:  # an older build may lack a function that a suite calls
            failed[suite] = f"{type(error).__name__}: {error}"
        else:
            rows |= {f"{suite}: {row}": median_us for row, median_us in rows_of(found)}
    return rows, failed


def rows_of(found: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, float]]:
    """Yield our own rows of a result by where they are in it, with their medians."""
    if "median_us" in found:
        if any(name.startswith(OURS) for name in path):
            yield ", ".join(path), found["median_us"]
        return
    for key, part in found.items():
        if isinstance(part, dict):
            yield from rows_of(part, path if key in (*FOLDERS, "contenders") else (*path, key))
