"""Tables and the plot of the results of TensorDicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tables import leaves_and_bytes, number, ratio_cell, table, times_cells, way_cell

DIRECTIONS = {"h2d": "to the device", "d2h": "to the host"}
PLOTTED = "flat"


def tables(result: dict[str, Any]) -> list[str]:
    """Return the parts of the page: copies, steps, nodes, and copies into existing tensors."""
    return [
        f"Taken with tensordict {result['settings']['tensordict']}.",
        copies_table(result),
        steps_table(result),
        nodes_table(result),
        into_table(result),
    ]


def plotted(result: dict[str, Any]) -> tuple[str, Sequence[tuple[str, float]]]:
    """Return heading and bars of the plot: one batch, host to device."""
    batch = result["copies"]["h2d"][PLOTTED]
    above = f"TensorDict to device, {leaves_and_bytes(batch)} ({result['machine']['gpu']})"
    return above, [(way, times["median_us"]) for way, times in batch["contenders"].items()]


def copies_table(result: dict[str, Any]) -> str:
    """Return a table of batches and ways: times and ratios, or the error of a way that fails."""
    rows = []
    for direction, batches in result["copies"].items():
        for name, found in batches.items():
            title = f"{name} {DIRECTIONS[direction]}: {leaves_and_bytes(found)}"
            ways = []
            for way, times in found["contenders"].items():
                wrong = found["wrong"][way]
                ways.append(
                    [
                        way_cell(way) + (f" (wrong in {wrong} places)" if wrong else ""),
                        *times_cells(times),
                        ratio_cell(found["ratios"].get(way)),
                        number(found["first_calls"][way]["median_us"]),
                        ratio_cell(found["ratios_of_first_calls"].get(way)),
                        str(times["repeats"]),
                    ]
                )
            ways += [
                [way, f"fails: {error}", "", "", "", "", ""]
                for way, error in found["failed"].items()
            ]
            rows += [[title if index == 0 else "", *cells] for index, cells in enumerate(ways)]
    header = ["batch", "way", "median, us", "quartiles, us", "over tdcopier"]
    return table([*header, "first call of a burst, us", "over tdcopier", "calls"], rows)


def steps_table(result: dict[str, Any]) -> str:
    """Return a table of the steps and the transfers of our own copies."""
    rows = []
    for direction, batches in result["copies"].items():
        for name, found in batches.items():
            stats = found["stats"]
            counts = (stats[f"{kind}_leaves"] for kind in ("packed", "alone", "delegated"))
            steps = (found["steps"][step] for step in ("start_copy", "get", "drop"))
            rows.append(
                [
                    f"{name} {DIRECTIONS[direction]}",
                    *(number(step["median_us"]) for step in steps),
                    " / ".join(map(str, counts)),
                    str(stats["transfers"]),
                    str(found["memcpys"]),
                ]
            )
    header = ["batch", "async_to, us", "get, us", "drop, us", "packed / alone / delegated"]
    return table([*header, "transfers", "memcpys counted from outside"], rows)


def nodes_table(result: dict[str, Any]) -> str:
    """Return a table of the same leaves in nodes of each kind: whole times, and time per node."""
    nodes = result["nodes"]
    rows = []
    for tree, ways in nodes["times"].items():
        added_us = nodes["us_per_node"].get(tree, {})
        where = f"{nodes['nodes']} nodes, {tree}" if added_us else tree
        for index, (way, times) in enumerate(ways.items()):
            rows.append(
                [
                    f"{nodes['leaves']} leaves, {where}" if index == 0 else "",
                    way_cell(way),
                    *times_cells(times),
                    number(added_us[way]) if added_us else "",
                ]
            )
    return table(["tree", "way", "median, us", "quartiles, us", "a node adds, us"], rows)


def into_table(result: dict[str, Any]) -> str:
    """Return a table of copies into existing tensors, with ratios to a copy that allocates."""
    rows = []
    for direction, found in result["into"].items():
        title = f"detection batch {DIRECTIONS[direction]}: {leaves_and_bytes(found)}"
        for index, (way, times) in enumerate(found["contenders"].items()):
            counts = found["counts"].get(way)
            rows.append(
                [
                    title if index == 0 else "",
                    way_cell(way) + (" (wrong)" if found["wrong"][way] else ""),
                    *times_cells(times),
                    ratio_cell(found["ratios"].get(way)),
                    str(counts["stats"]["transfers"]) if counts else "",
                    str(counts["memcpys"]) if counts else "",
                    str(times["repeats"]),
                ]
            )
    header = ["batch", "way", "median, us", "quartiles, us", "over start_copy().get()"]
    return table([*header, "transfers", "memcpys counted from outside", "calls"], rows)
