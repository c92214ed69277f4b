"""Tables of the results of copies beside kernels and beside other copies."""

from __future__ import annotations

from typing import Any

from tables import leaves_and_bytes, number, size, table, times_cells, way_cell


def tables(result: dict[str, Any]) -> list[str]:
    """Return the parts of the page, one table each."""
    return [
        loop_table(result["loop"]),
        kernels_table(result["kernels"]),
        both_ways_table(result["both_ways"]),
        waiting_table(result["waiting"]),
        refill_table(result["refill"]),
    ]


def loop_table(found: dict[str, Any]) -> str:
    """Return a table of feeds: time of a step without metrics and with them."""
    rows = []
    for feed, step in found["step"].items():
        wrong = found["wrong"][feed]
        rows.append(
            [
                way_cell(feed) + (f" (wrong {wrong} times)" if wrong else ""),
                *(cell for times in step.values() for cell in times_cells(times)),
                f"{found['over_resident'][feed]:.3f} x",
                f"{found['with_over_without'][feed]:.3f} x",
            ]
        )
    batch = f"{leaves_and_bytes(found)} to the device, {size(found['metrics_bytes'])} to the host"
    header = [batch, "step, us", "quartiles, us", "step with metrics, us", "quartiles, us"]
    return table([*header, "without metrics over one on the device", "with over without"], rows)


def kernels_table(found: dict[str, Any]) -> str:
    """Return a table of earlier calls and ways: time of a small copy while kernels are queued."""
    rows = []
    for earlier, ways in found["times"].items():
        for index, (way, times) in enumerate(ways.items()):
            rows.append(
                [
                    earlier if index == 0 else "",
                    way_cell(way) + (" (wrong)" if found["wrong"][way] else ""),
                    *times_cells(times),
                    number(times["max_us"]),
                    f"{found['after_kernels'][earlier][way]} of {times['repeats']}",
                ]
            )
    what = f"{found['floats']:,} floats beside {found['queued_ms']:g} ms of kernels, after"
    header = [what, "way", "median, us", "quartiles, us", "longest, us"]
    return table([*header, "arrived after the kernels"], rows)


def both_ways_table(found: dict[str, Any]) -> str:
    """Return a table of kinds of source and ways: each direction alone, and both at once."""
    rows = []
    for memory, ways in found["times"].items():
        for index, (way, times) in enumerate(ways.items()):
            wrong = found["wrong"][memory][way]
            rows.append(
                [
                    f"{memory} source" if index == 0 else "",
                    way_cell(way) + (" (wrong)" if wrong else ""),
                    *(number(each["median_us"]) for each in times.values()),
                    str(min(each["repeats"] for each in times.values())),
                ]
            )
    columns = next(iter(next(iter(found["times"].values())).values()))
    header = [f"{size(found['bytes'])} each way", "way", *(f"{what}, us" for what in columns)]
    return table([*header, "calls"], rows)


def waiting_table(found: dict[str, Any]) -> str:
    """Return a table of waits: share of one processor, and how long the call blocked its thread."""
    rows = [
        [
            way_cell(case),
            f"{100 * taken['median_share']:.1f} %",
            f"{100 * taken['max_share']:.1f} %",
            number(taken["median_held_ms"]),
            str(taken["repeats"]),
        ]
        for case, taken in found["cases"].items()
    ]
    what = f"waiting beside {found['queued_ms']:g} ms of kernels"
    header = [what, "share of one processor, median", "most", "the call held its thread, ms"]
    return table([*header, "rounds"], rows)


def refill_table(found: dict[str, Any]) -> str:
    """Return a table of sizes, kinds of memory and ways: wrong batches, and time of a round."""
    rows = [
        [
            f"{row['kind']}, {size(row['bytes'])}",
            way_cell(row["way"]),
            str(row["wrong"]),
            *times_cells(row["round"]),
        ]
        for row in found["rows"]
    ]
    header = ["buffer that is refilled", "way", f"wrong batches of {found['rounds']:,}"]
    return table([*header, "a round, us", "quartiles, us"], rows)
