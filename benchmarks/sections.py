"""The tables of each benchmark's section of the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from park_tables import park_tables
from pinned_tables import pinned_tables
from tables import (
    LIMIT_PREFIX,
    OURS,
    TIMES,
    feed_rows,
    grouped,
    leaves_and_bytes,
    ratio_cell,
    table,
    times_cells,
    way_cell,
    ways,
)
from trainers import page

from tdcopier._commands.tables import number, size

Found = dict[str, Any]
"""A result, or the part of one that a table shows."""

DIRECTIONS = {"h2d": "Host to device", "d2h": "Device to host", "d2d": "Device to device"}
ENDS = {"h2d": "to the device", "d2h": "to the host"}
WORKLOAD_NAMES = {
    "detection_batch": "detection batch",
    "detection_batch_with_images": "detection batch + images",
    "atari_replay": "Atari replay batch",
    "flat_dict": "flat dict",
    "many_large": "many large tensors",
    "one_large": "one large tensor",
}
FIRST_CALLS = ["first call of a burst, us", "over tdcopier"]
COUNTED = ["packed / alone / delegated", "transfers"]


def title(name: str, found: Found) -> str:
    return f"{WORKLOAD_NAMES.get(name, name)}: {leaves_and_bytes(found)}"


# ---- copies --------------------------------------------------------------------------------------


def copies(result: Found) -> list[str]:
    workloads = {title(name, found): found for name, found in result["workloads"].items()}
    memcpys = f"{result['name']}_memcpys"
    outside = f"{result['name'].upper()} memcpys counted from outside"
    tables = [
        copies_table("workload", workloads),
        steps_table("workload", "start_copy, us", outside, workloads, memcpys),
    ]
    if all("limits" in found for found in workloads.values()):  # older results have none
        tables.append(limits_table(workloads))
    return tables


def copies_table(what: str, batches: dict[str, Found]) -> str:
    """Return a table of batches and ways: times and ratios, also with cold caches, or errors."""
    header = [what, "way", *TIMES, "over tdcopier", *FIRST_CALLS, "calls"]
    return grouped(header, ((name, _with_first_calls(found)) for name, found in batches.items()))


def _with_first_calls(found: Found) -> Iterator[list[str]]:
    for way, row in zip(found["contenders"], ways(found), strict=True):
        first = found["first_calls"][way]["median_us"]
        yield [
            *row[:-1],
            number(first),
            ratio_cell(found["ratios_of_first_calls"].get(way)),
            row[-1],
        ]
    for way, error in found.get("failed", {}).items():
        yield [way, f"fails: {error}", "", "", "", "", ""]


def steps_table(
    what: str, start: str, outside: str, batches: dict[str, Found], memcpys: str
) -> str:
    rows = []
    for name, found in batches.items():
        stats = found["stats"]
        counts = (stats[f"{kind}_leaves"] for kind in ("packed", "alone", "delegated"))
        steps = (number(found["steps"][s]["median_us"]) for s in ("start_copy", "get", "drop"))
        transfers = [str(stats["transfers"]), str(found[memcpys])]
        rows.append([name, *steps, " / ".join(map(str, counts)), *transfers])
    return table([what, start, "get, us", "drop, us", *COUNTED, outside], rows)


def limits_table(workloads: dict[str, Found]) -> str:

    def rows(found: Found) -> Iterator[list[str]]:
        for limit in found["limits"].values():
            figures = number(limit["median_us"]), number(limit["gb_per_s"])
            yield [
                limit["way"].removeprefix(LIMIT_PREFIX),
                *figures,
                ratio_cell(limit["ours_over"]),
            ]

    header = ["workload", "limit", "median, us", "GB/s", "tdcopier over it"]
    return grouped(header, ((name, rows(found)) for name, found in workloads.items()))


def cold(result: Found) -> list[str]:
    copies = {
        f"{title(name, found)} {ENDS[direction]}": ways(found)
        for direction, batches in result["copies"].items()
        for name, found in batches.items()
    }
    copies |= {
        f"{title(name, found)} {ENDS['h2d']}, beside {load}": ways(found)
        for load, batches in result["beside"].items()
        for name, found in batches.items()
    }
    header = ["batch", "way", *TIMES, "over tdcopier", "calls"]
    return [grouped(header, copies.items())]


def pinning(result: Found) -> list[str]:
    """Return a table of requests and ways: time to the first and to the last tensor."""

    def rows(found: Found) -> Iterator[list[str]]:
        for way, states in found["times"].items():
            held = size(found["held_bytes"][way])
            for state, times in states.items():
                figures = (number(times[key]) for key in ("first_ms", "all_ms", "slowest_ms"))
                yield [f"{way_cell(way, found['wrong'][way])}, {state}", *figures, held]

    header = ["request", "way", "first tensor, ms", "all, ms", "slowest, ms", "memory held"]
    groups = ((name, rows(found)) for name, found in result["requests"].items())
    return [grouped(header, groups)]


# ---- loops ---------------------------------------------------------------------------------------


def loop(result: Found) -> list[str]:

    def rows(found: Found) -> Iterator[list[str]]:
        for row, calls in zip(feed_rows(found), found["copy_calls"].values(), strict=True):
            yield [*row[:-1], *times_cells(calls), row[-1]]

    header = ["batch", "feed", "step, us", "quartiles, us", "over one on the device"]
    header += ["host in copy calls, us", "quartiles, us", "steps"]
    loops = ((title(name, found), rows(found)) for name, found in result["loops"].items())
    return [grouped(header, loops), beside_table(result["beside_host_work"])]


def beside_table(found: Found) -> str:
    names = {"start_copy": "start_copy", "get": "get", "together": f"**{OURS}, together**"}
    rows = [
        [name, *times_cells(found[key]), str(found[key]["repeats"])] for key, name in names.items()
    ]
    what = f"detection batch, {number(found['host_work_us'])} us of other work between"
    return table([what, *TIMES, "calls"], rows)


def replay(result: Found) -> list[str]:
    """Return a table of storages, learners and feeds: time of a step, and of getting a batch."""

    def rows(found: Found) -> Iterator[list[str]]:
        for row, host in zip(feed_rows(found, 3), found["host"].values(), strict=True):
            yield [*row[:-1], number(host["median_us"]), row[-1]]

    groups = (
        (f"{storage['title']} ({leaves_and_bytes(storage)}), {learner}", rows(found))
        for storage in result["replays"].values()
        for learner, found in storage["learners"].items()
    )
    header = ["storage and learner", "feed", "step, us", "quartiles, us"]
    header += ["over one on the device", "host for a batch, us", "steps"]
    return [grouped(header, groups)]


def gather(result: Found) -> list[str]:
    header = ["rows", "way", *TIMES, "over tdcopier", "calls"]
    gathers = result["gathers"].values()
    on_host = grouped(header, ((title(each["title"], each), ways(each)) for each in gathers))
    return [on_host, *pinned_tables(result["from_pinned"])]


# ---- leaves, containers and opaque values --------------------------------------------------------


def sizes(result: Found) -> list[str]:

    def rows(found: Found) -> Iterator[list[str]]:
        for way, times in found["contenders"].items():
            per_leaf = number(found["us_per_leaf"][way])
            name = way_cell(way, found["wrong"][way])
            yield [name, *times_cells(times), per_leaf, str(times["repeats"])]

    header = ["batch", "way", *TIMES, "a leaf, us", "calls"]
    return [
        grouped(header, ((leaves_and_bytes(each), rows(each)) for each in result["sizes"].values()))
    ]


def structure(result: Found) -> list[str]:
    """Return tables of trees without tensors, and of the time that a container adds."""
    groups = [
        (f"{found['opaque_values']:,} {case}" if found["opaque_values"] else case, ways(found))
        for case, found in result["cases"].items()
        if len(found["contenders"]) > 1  # containers have a table of their own
    ]
    values = result["us_per_opaque_value"]
    per_value = (
        [way_cell(way), number(us), "", "" if way == OURS else ratio_cell(us / values[OURS]), ""]
        for way, us in values.items()
    )
    containers = [
        [kind, "passed through whole" if us is None else number(us)]
        for kind, us in result["us_per_container"].items()
    ]
    header = ["tree", "way", *TIMES, "over tdcopier", "calls"]
    return [
        grouped(header, [*groups, ("per opaque value", per_value)]),
        table(["container of two integers", "adds, us"], containers),
    ]


# ---- TensorDicts ---------------------------------------------------------------------------------


def tensordict(result: Found) -> list[str]:
    batches = {
        f"{name} {ENDS[direction]}": found
        for direction, batches in result["copies"].items()
        for name, found in batches.items()
    }
    return [
        f"Taken with tensordict {result['settings']['tensordict']}.",
        copies_table("batch", {title(name, found): found for name, found in batches.items()}),
        steps_table("batch", "async_to, us", "memcpys counted from outside", batches, "memcpys"),
        nodes_table(result["nodes"]),
        into_table(result["into"]),
    ]


def nodes_table(nodes: Found) -> str:
    """Return a table of the same leaves in nodes of each kind: whole times, and time per node."""

    def group(tree: str, times: dict[str, Found]) -> tuple[str, list[list[str]]]:
        added_us = nodes["us_per_node"].get(tree, {})
        where = f"{nodes['nodes']} nodes, {tree}" if added_us else tree
        added = (number(added_us[way]) if added_us else "" for way in times)
        rows = [[way_cell(way), *times_cells(times[way]), next(added)] for way in times]
        return f"{nodes['leaves']} leaves, {where}", rows

    header = ["tree", "way", *TIMES, "a node adds, us"]
    return grouped(header, (group(tree, times) for tree, times in nodes["times"].items()))


def into_table(directions: dict[str, Found]) -> str:
    """Return a table of copies into existing tensors, with ratios to a copy that allocates."""

    def rows(found: Found) -> Iterator[list[str]]:
        for way, row in zip(found["contenders"], ways(found), strict=True):
            counts = found["counts"].get(way)
            seen = [counts["stats"]["transfers"], counts["memcpys"]] if counts else ["", ""]
            yield [*row[:-1], *map(str, seen), row[-1]]

    header = ["batch", "way", *TIMES, "over start_copy().get()", "transfers"]
    return grouped(
        [*header, "memcpys counted from outside", "calls"],
        (
            (title(f"detection batch {ENDS[name]}", found), rows(found))
            for name, found in directions.items()
        ),
    )


# ---- beside kernels and other copies -------------------------------------------------------------


def company(result: Found) -> list[str]:
    return [
        metrics_table(result["loop"]),
        kernels_table(result["kernels"]),
        both_ways_table(result["both_ways"]),
        waiting_table(result["waiting"]),
        refill_table(result["refill"]),
    ]


def metrics_table(found: Found) -> str:
    rows = [
        [
            way_cell(feed, found["wrong"][feed]),
            *(cell for times in step.values() for cell in times_cells(times)),
            ratio_cell(found["over_resident"][feed], 3),
            ratio_cell(found["with_over_without"][feed], 3),
        ]
        for feed, step in found["step"].items()
    ]
    batch = f"{leaves_and_bytes(found)} to the device, {size(found['metrics_bytes'])} to the host"
    header = [batch, "step, us", "quartiles, us", "step with metrics, us", "quartiles, us"]
    return table([*header, "without metrics over one on the device", "with over without"], rows)


def kernels_table(found: Found) -> str:
    """Return a table of earlier calls and ways: time of a small copy while kernels are queued."""

    def rows(earlier: str, times: dict[str, Found]) -> Iterator[list[str]]:
        for way, taken in times.items():
            late = f"{found['after_kernels'][earlier][way]} of {taken['repeats']}"
            name = way_cell(way, found["wrong"][way])
            yield [name, *times_cells(taken), number(taken["max_us"]), late]

    what = f"{found['floats']:,} floats beside {found['queued_ms']:g} ms of kernels, after"
    header = [what, "way", *TIMES, "longest, us", "arrived after the kernels"]
    return grouped(header, ((name, rows(name, times)) for name, times in found["times"].items()))


def both_ways_table(found: Found) -> str:
    """Return a table of kinds of source and ways: each direction alone, and both at once."""

    def rows(memory: str) -> Iterator[list[str]]:
        for way, times in found["times"][memory].items():
            medians = (number(each["median_us"]) for each in times.values())
            calls = str(min(each["repeats"] for each in times.values()))
            yield [way_cell(way, found["wrong"][memory][way]), *medians, calls]

    columns = next(iter(next(iter(found["times"].values())).values()))
    header = [f"{size(found['bytes'])} each way", "way", *(f"{what}, us" for what in columns)]
    groups = ((f"{memory} source", rows(memory)) for memory in found["times"])
    return grouped([*header, "calls"], groups)


def waiting_table(found: Found) -> str:
    """Return a table of waits: share of one processor, and how long the call blocked its thread."""
    rows = [
        [
            way_cell(case),
            *(f"{100 * taken[share]:.1f} %" for share in ("median_share", "max_share")),
            number(taken["median_held_ms"]),
            str(taken["repeats"]),
        ]
        for case, taken in found["cases"].items()
    ]
    what = f"waiting beside {found['queued_ms']:g} ms of kernels"
    header = [what, "share of one processor, median", "most", "the call held its thread, ms"]
    return table([*header, "rounds"], rows)


def refill_table(found: Found) -> str:
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


# ---- an event loop -------------------------------------------------------------------------------


def event_loop(result: Found) -> list[str]:
    """Return a table of ways: lateness of the loop's heartbeat, and the copies meanwhile."""

    def percentiles(times: Found | None) -> list[str]:
        return [number(times[key]) if times else "" for key in ("p50_us", "p99_us", "max_us")]

    rows = [
        [
            way_cell(way, result["wrong"][way]),
            *percentiles(found["late"]),
            number(found["copies_per_s"]) if found["copy"] else "",
            *percentiles(found["copy"])[:2],
            str(found["late"]["repeats"]),
        ]
        for way, found in result["times"].items()
    ]
    header = [leaves_and_bytes(result), "heartbeat late, median, us", "99th percentile", "most"]
    return [table([*header, "copies/s", "a copy, median, us", "99th percentile", "beats"], rows)]


TABLES: dict[str, Callable[[Found], list[str]]] = {
    **dict.fromkeys(DIRECTIONS, copies),
    "cold": cold,
    "pinning": pinning,
    "loop": loop,
    "replay": replay,
    "gather": gather,
    "sizes": sizes,
    "structure": structure,
    "tensordict": tensordict,
    "park": park_tables,
    "company": company,
    "asyncio": event_loop,
    "trainers": page.tables,
    "wait": lambda result: [],
    "memory": lambda result: [],
}
"""By benchmark, in the order of the page. Every section also has a table of targets."""
