"""The tables of rows of pinned storages, for the section of gathers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tables import RESIDENT, TIMES, feed_rows, grouped, ratio_cell, times_cells, way_cell, ways

from tdcopier._commands.tables import number

Found = dict[str, Any]
PINNED = "rows of a pinned storage, to the device"


def pinned_tables(pinned: dict[str, Found]) -> list[str]:
    """Return all tables. Older results have only the figures of the first one."""
    header = [PINNED, "way", *TIMES, "over tdcopier", "calls"]
    arrivals = grouped(header, ((name, ways(found)) for name, found in pinned.items()))
    if not all("host" in found for found in pinned.values()):
        return [arrivals]
    compared = sum(sum(found["checks"].values()) for found in pinned.values())
    return [
        arrivals,
        host_table(pinned),
        processors_table(pinned),
        steps_table(pinned),
        f"Of the rows of pinned storages, {compared:,} batches were compared after bursts, and "
        "each step of the learners.",
    ]


def host_table(pinned: dict[str, Found]) -> str:
    """Return a table of batches and ways: time of the host in the call, and with wait()."""

    def rows(found: Found) -> Iterator[list[str]]:
        for way, times in found["host"].items():
            in_call = times_cells(found["host_in_call"][way])
            yield [way_cell(way), *in_call, *times_cells(times), str(times["repeats"])]

    header = [PINNED, "way", "host in the call, us", TIMES[1]]
    header += ["host until wait() has returned too, us", TIMES[1], "calls"]
    return grouped(header, ((name, rows(found)) for name, found in pinned.items()))


def processors_table(pinned: dict[str, Found]) -> str:
    """Return a table of batches and ways: processor time for a batch, by thread."""

    def rows(found: Found) -> Iterator[list[str]]:
        for way, times in found["processor_time"].items():
            spent = (number(times[whose]["median_us"]) for whose in ("caller", "others", "idle"))
            yield [way_cell(way), *spent, str(times["others"]["repeats"])]

    header = [PINNED, "way", "processor time of the caller, us", "of other threads, us"]
    header += ["of other threads for as long without batches, us", "rounds"]
    return grouped(header, ((name, rows(found)) for name, found in pinned.items()))


def steps_table(pinned: dict[str, Found]) -> str:
    """Return a table of batches, learners and feeds: the step, its kernels, and the host."""

    def rows(found: Found) -> Iterator[list[str]]:
        for feed, row in zip(found["step"], feed_rows(found, 3), strict=True):
            kernels = found.get("kernels_over_resident", {}).get(feed)
            over = ratio_cell(None if feed == RESIDENT else kernels, 3)
            yield [*row[:-1], over, number(found["host"][feed]["median_us"]), row[-1]]

    groups = (
        (f"{name}, {learner}", rows(found))
        for name, each in pinned.items()
        for learner, found in each.get("learners", {}).items()
    )
    header = [f"{PINNED}, and learner", "feed", "step, us", "quartiles, us"]
    header += ["over one on the device", "its kernels alone over those", "host for a batch, us"]
    return grouped([*header, "steps"], groups)
