"""Tables of a result, for the terminal and for the page of results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tool.tables import leaves_and_bytes, table, way_cell


def tables(result: Mapping[str, Any]) -> list[str]:
    """Return a table for each trainer."""
    return [_table(name, found) for name, found in result["trainers"].items()]


def _table(name: str, found: Mapping[str, Any]) -> str:
    over = {name: ratios for name, ratios in found["over"].items() if ratios}
    header = [
        f"{name}: {leaves_and_bytes(found)}, {found['rounds']} rounds",
        "step, ms",
        "median",
        "90th percentile",
        *(f"over {reference}" for reference in over),
        "processor ms",
        "main thread ms",
        "vol. switches",
        "invol.",
        "faults",
        "peak MB",
        "first batch, s",
        "longest of the first steps, over the median",
    ]
    return table(header, [_row(way, found, over) for way in found["step"]])


def _row(way: str, found: Mapping[str, Any], over: Mapping[str, Any]) -> list[str]:
    step, used = found["step"][way], found["per_step"][way]
    first = found["first_batch"].get(way)
    peak = found["memory"][way].get("peak_allocated_bytes")
    return [
        way_cell((way,), found),
        f"{step['mean_us'] / 1e3:.2f}",
        f"{step['median_us'] / 1e3:.2f}",
        f"{step['p90_us'] / 1e3:.2f}",
        *(_ratio(ratios.get(way)) for ratios in over.values()),
        f"{used['process_cpu_us'] / 1e3:.2f}",
        f"{used['main_cpu_us'] / 1e3:.2f}",
        f"{used['voluntary_switches']:.1f}",
        f"{used['involuntary_switches']:.1f}",
        f"{used['minor_faults']:.0f}",
        f"{peak / 1e6:.0f}" if peak else "",
        f"{first['median_s']:.2f}" if first else "",
        f"{first['longest_over_median']:.1f}" if first and "longest_over_median" in first else "",
    ]


def _ratio(found: Mapping[str, Any] | None) -> str:
    if found is None or found["ratio"] is None:
        return ""
    return f"{found['ratio']:.3f} ({found['low']:.3f} - {found['high']:.3f})"
