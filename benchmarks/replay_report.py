"""Tables and plots of the results of replay storages."""

from __future__ import annotations

from typing import Any

from plots import bars
from tables import leaves_and_bytes, number, ratio_cell, table, times_cells, way_cell

PLOTTED = "atari_256"


def loop_table(result: dict[str, Any]) -> str:
    """Return a table of storages, learners and feeds: time of a step, and of getting a batch."""
    rows = []
    for replay in result["replays"].values():
        for learner, found in replay["learners"].items():
            title = f"{replay['title']} ({leaves_and_bytes(replay)}), {learner}"
            for index, (feed, step) in enumerate(found["step"].items()):
                wrong = found["wrong"][feed]
                rows.append(
                    [
                        title if index == 0 else "",
                        way_cell(feed) + (f" (wrong {wrong} times)" if wrong else ""),
                        *times_cells(step),
                        f"{found['ratios'][feed]:.3f} x" if index else "",
                        number(found["host"][feed]["median_us"]),
                        str(step["repeats"] * found["steps_per_block"]),
                    ]
                )
    header = ["storage and learner", "feed", "step, us", "quartiles, us"]
    return table([*header, "over one on the device", "host for a batch, us", "steps"], rows)


def gather_table(result: dict[str, Any]) -> str:
    """Return a table of storages and ways: times of a gather."""
    rows = []
    for gather in result["gathers"].values():
        for index, (way, times) in enumerate(gather["contenders"].items()):
            rows.append(
                [
                    f"{gather['title']}: {leaves_and_bytes(gather)}" if index == 0 else "",
                    way_cell(way) + (" (wrong)" if gather["wrong"][way] else ""),
                    *times_cells(times),
                    ratio_cell(gather["ratios"].get(way)),
                    str(times["repeats"]),
                ]
            )
    header = ["rows", "way", "median, us", "quartiles, us", "over tdcopier", "calls"]
    return table(header, rows)


def loop_plot(result: dict[str, Any]) -> str:
    replay = result["replays"][PLOTTED]
    learner, found = next(iter(replay["learners"].items()))
    above = f"A learner's step, {replay['title']}, {learner} ({result['machine']['gpu']})"
    return bars(above, [(feed, step["median_us"]) for feed, step in found["step"].items()], "us")
