"""The tables of parked states and of snapshots."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tables import grouped, leaves_and_bytes, ratio_cell, table, way_cell

from tdcopier._commands.tables import number, size

Found = dict[str, Any]
FIRST_PARK = {
    "reserve": "reserve",
    "first_park": "first park",
    "first_resume": "first resume",
    "second_park": "second park",
}


def park_tables(result: Found) -> list[str]:
    """Return all: of parked states, of the first time in a process, and of snapshots."""

    def rows(found: Found) -> Iterator[list[str]]:
        for way, wrong in found["wrong"].items():
            cells = [
                cell
                for which in ("park", "resume")
                for cell in (
                    number(found[which][way]["median_us"] / 1000),
                    number(found["gb_per_s"][which][way]),
                )
            ]
            yield [way_cell(way, wrong), *cells, str(found["park"][way]["repeats"])]

    header = ["state", "way", "park, ms", "GB/s", "resume, ms", "GB/s", "times"]
    states = result["parked"].items()
    memory = [
        [name, size(found["bytes_while_parked"]), *map(size, found["extra_peak_bytes"].values())]
        for name, found in states
    ]
    first = [
        [way, *(number(found.get(f"{key}_ms", 0)) for key in FIRST_PARK)]
        for way, found in result["first"].items()
    ]
    found = result["snapshot"]
    snapshots = [
        [
            way_cell(way, found["wrong"][way]),
            number(found["host_us"][way]),
            number(times["median_us"]),
            number(times["max_us"]),
            ratio_cell(found["longest_over_median"][way]),
        ]
        for way, times in found["step_us"].items()
    ]
    return [
        grouped(
            header, ((f"{name}, {size(found['bytes'])}", rows(found)) for name, found in states)
        ),
        table(["device memory", "in use while parked", "extra, park", "extra, resume"], memory),
        table(["first time in a process", *(f"{key}, ms" for key in FIRST_PARK.values())], first),
        table(
            [
                f"snapshot of {leaves_and_bytes(found)} beside a loop",
                "host in the call, us",
                "step, us",
                "longest step, us",
                "over the median",
            ],
            snapshots,
        ),
    ]
