"""Tables and plots of the results of training loops and of the number of leaves."""

from __future__ import annotations

from typing import Any

from plots import bars, lines
from tables import OURS, leaves_and_bytes, number, ratio_cell, table, times_cells, way_cell

PLOTTED_LOOP = "detection_batch"


def loop_table(result: dict[str, Any], names: dict[str, str]) -> str:
    """Return a table of batches and feeds: time of a step, and of the host in the copy calls."""
    rows = []
    for name, found in result["loops"].items():
        title = f"{names[name]}: {leaves_and_bytes(found)}"
        for index, (feed, step) in enumerate(found["step"].items()):
            wrong = found["wrong"][feed]
            rows.append(
                [
                    title if index == 0 else "",
                    way_cell(feed) + (f" (wrong {wrong} times)" if wrong else ""),
                    *times_cells(step),
                    ratio_cell(found["ratios"][feed]) if index else "",
                    *times_cells(found["copy_calls"][feed]),
                    str(step["repeats"] * found["steps_per_block"]),
                ]
            )
    header = ["batch", "feed", "step, us", "quartiles, us", "over one on the device"]
    return table([*header, "host in copy calls, us", "quartiles, us", "steps"], rows)


def beside_table(result: dict[str, Any]) -> str:
    """Return a table of the cost of a copy for a caller that does other work meanwhile."""
    found = result["beside_host_work"]
    rows = [
        [name, *times_cells(found[key]), str(found[key]["repeats"])]
        for key, name in (
            ("start_copy", "start_copy"),
            ("get", "get"),
            ("together", f"**{OURS}, together**"),
        )
    ]
    what = f"detection batch, {number(found['host_work_us'])} us of other work between"
    return table([what, "median, us", "quartiles, us", "calls"], rows)


def loop_plot(result: dict[str, Any]) -> str:
    found = result["loops"][PLOTTED_LOOP]
    above = f"A training step fed with {leaves_and_bytes(found)} ({result['machine']['gpu']})"
    return bars(above, [(feed, step["median_us"]) for feed, step in found["step"].items()], "us")


def sizes_table(result: dict[str, Any]) -> str:
    """Return a table of leaf counts and ways: the whole time, and the time per leaf."""
    rows = []
    for found in result["sizes"].values():
        for index, (way, times) in enumerate(found["contenders"].items()):
            rows.append(
                [
                    leaves_and_bytes(found) if index == 0 else "",
                    way_cell(way) + (" (wrong)" if found["wrong"][way] else ""),
                    *times_cells(times),
                    number(found["us_per_leaf"][way]),
                    str(times["repeats"]),
                ]
            )
    return table(["batch", "way", "median, us", "quartiles, us", "a leaf, us", "calls"], rows)


def sizes_plot(result: dict[str, Any]) -> str:
    """Return a plot of the whole time over the number of leaves."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for found in result["sizes"].values():
        for way, times in found["contenders"].items():
            curves.setdefault(way, []).append((found["leaves"], times["median_us"]))
    heading = f"Host to device: time over leaves of 64 floats ({result['machine']['gpu']})"
    return lines(heading, curves, "leaves", "us")
