"""What the tables of each benchmark's section of the page show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainers import page

from tdcopier._commands.tables import number, size
from tool.tables import (
    LIMIT_PREFIX,
    OURS,
    RESIDENT,
    Column,
    Found,
    at,
    leaves_and_bytes,
    percent,
    ratio,
    ratio3,
    times,
    write,
)

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
BOTH_WAYS = ("to the device", "to the host", "both at once")
CALLS = at("calls", "contenders/*/repeats", str)
OVER_OURS = at("over tdcopier", "ratios/*", ratio)
ALONE = [*times(), OVER_OURS, CALLS]
COPIED = [
    *times(),
    OVER_OURS,
    at("first call of a burst, us", "first_calls/*/median_us"),
    at("over tdcopier", "ratios_of_first_calls/*", ratio),
    CALLS,
]
HOST = at("host for a batch, us", "host/*/median_us")
STEPS = Column(
    "steps", lambda found, way: str(found["step"][way[0]]["repeats"] * found["steps_per_block"])
)


def over_resident(show: Callable[[float], str]) -> Column:
    return at("over one on the device", "ratios/*", show, but=RESIDENT)


def title(name: str, found: Found) -> str:
    return f"{WORKLOAD_NAMES.get(name, name)}: {leaves_and_bytes(found)}"


def titled(parts: Found) -> dict[str, Found]:
    return {title(name, found): found for name, found in parts.items()}


def by_direction(copies: Found) -> dict[str, Found]:
    """Return batches by their title, which names the direction."""
    return {
        title(f"{name} {ENDS[direction]}", found): found
        for direction, batches in copies.items()
        for name, found in batches.items()
    }


# ---- copies --------------------------------------------------------------------------------------

LIMITS = [
    at("median, us", "limits/*/median_us"),
    at("GB/s", "limits/*/gb_per_s"),
    at("tdcopier over it", "limits/*/ours_over", ratio),
]
REQUESTED = [
    at("first tensor, ms", "times/*/*/first_ms"),
    at("all, ms", "times/*/*/all_ms"),
    at("slowest, ms", "times/*/*/slowest_ms"),
    at("memory held", "held_bytes/*", size),
]
FILLED = [
    *times(),
    at("over start_copy().get()", "ratios/*", ratio),
    at("transfers", "counts/*/stats/transfers", str),
    at("memcpys counted from outside", "counts/*/memcpys", str),
    CALLS,
]


def copies(result: Found) -> list[str]:
    workloads, outside = titled(result["workloads"]), f"{result['name'].upper()} "
    limits = {
        name: {"limits": {each["way"].removeprefix(LIMIT_PREFIX): each for each in by.values()}}
        for name, found in workloads.items()
        for by in [found["limits"]]
    }
    return [
        write("workload | way", workloads, "contenders", *COPIED),
        _steps("workload", "start_copy, us", outside, workloads),
        write("workload | limit", limits, "limits", *LIMITS),
    ]


def _steps(what: str, start: str, direction: str, batches: Mapping[str, Found]) -> str:
    """Return a table of our own copies: the time of each step, and the transfers."""

    def leaves(found: Found, _: Any) -> str:
        kinds = ("packed", "alone", "delegated")
        return " / ".join(str(found["stats"][f"{kind}_leaves"]) for kind in kinds)

    return write(
        what,
        batches,
        "",
        at(start, "steps/start_copy/median_us"),
        at("get, us", "steps/get/median_us"),
        at("drop, us", "steps/drop/median_us"),
        Column("packed / alone / delegated", leaves),
        at("transfers", "stats/transfers", str),
        at(f"{direction}memcpys counted from outside", "memcpys", str),
    )


def cold(result: Found) -> list[str]:
    groups = by_direction(result["copies"])
    for load, batches in result["beside"].items():
        there = by_direction({"h2d": batches})
        groups |= {f"{name}, beside {load}": found for name, found in there.items()}
    return [write("batch | way", groups, "contenders", *ALONE)]


def pinning(result: Found) -> list[str]:
    return [write("request | way", result["requests"], "times/*", *REQUESTED)]


def sizes(result: Found) -> list[str]:
    groups = {leaves_and_bytes(found): found for found in result["sizes"].values()}
    per_leaf = at("a leaf, us", "us_per_leaf/*")
    return [write("batch | way", groups, "contenders", *times(), per_leaf, CALLS)]


def containers(result: Found) -> list[str]:
    """Return tables of trees without tensors, and of the time that a container adds."""
    groups = {
        f"{found['opaque_values']:,} {case}" if found["opaque_values"] else case: found
        for case, found in result["cases"].items()
        if len(found["contenders"]) > 1  # containers have a table of their own
    }
    us = result["us_per_opaque_value"]
    groups["per opaque value"] = {
        "contenders": {way: {"median_us": each} for way, each in us.items()},
        "ratios": {way: each / us[OURS] for way, each in us.items() if way != OURS},
    }

    def adds(found: Found, kind: Any) -> str:
        added_us = found["us_per_container"][kind[0]]
        return "passed through whole" if added_us is None else number(added_us)

    of_two = ("container of two integers", {"": result}, "us_per_container")
    return [
        write("tree | way", groups, "contenders", *ALONE),
        write(*of_two, Column("adds, us", adds)),
    ]


def tensordict(result: Found) -> list[str]:
    nodes, batches = result["nodes"], by_direction(result["copies"])
    trees = {}
    for tree, taken in nodes["times"].items():
        added = nodes["us_per_node"].get(tree, {})
        name = f"{nodes['nodes']} nodes, {tree}" if added else tree
        trees[f"{nodes['leaves']} leaves, {name}"] = {"times": taken, "added": added}
    into = {way: {"detection batch": each} for way, each in result["into"].items()}
    per_node = at("a node adds, us", "added/*")
    return [
        f"Taken with tensordict {result['settings']['tensordict']}.",
        write("batch | way", batches, "contenders", *COPIED),
        _steps("batch", "async_to, us", "", batches),
        write("tree | way", trees, "times", *times("times/*"), per_node),
        write("batch | way", by_direction(into), "contenders", *FILLED),
    ]


# ---- loops ---------------------------------------------------------------------------------------

METERED = [
    *times("step/*/without metrics", "step, us"),
    *times("step/*/with metrics", "step with metrics, us"),
    at("without metrics over one on the device", "over_resident/*", ratio3),
    at("with over without", "with_over_without/*", ratio3),
]
WAITING = [
    at("share of one processor, median", "cases/*/median_share", percent),
    at("most", "cases/*/max_share", percent),
    at("the call held its thread, ms", "cases/*/median_held_ms"),
    at("rounds", "cases/*/repeats", str),
]


def loop(result: Found) -> list[str]:
    beside = result["beside_host_work"]
    names = {"start_copy": "start_copy", "get": "get", "together": f"**{OURS}, together**"}
    what = f"detection batch, {number(beside['host_work_us'])} us of other work between"
    own = {name: {"own": beside[key]} for key, name in names.items()}
    in_calls = times("copy_calls/*", "host in copy calls, us")
    stepped = [*times("step/*", "step, us"), over_resident(ratio), *in_calls, STEPS]
    return [
        write("batch | feed", titled(result["loops"]), "step", *stepped),
        write(what, own, "", *times("own"), at("calls", "own/repeats", str)),
    ]


def replay(result: Found) -> list[str]:
    groups = {
        f"{storage['title']} ({leaves_and_bytes(storage)}), {learner}": found
        for storage in result["replays"].values()
        for learner, found in storage["learners"].items()
    }
    stepped = [*times("step/*", "step, us"), over_resident(ratio3), HOST, STEPS]
    return [write("storage and learner | feed", groups, "step", *stepped)]


def concurrent(result: Found) -> list[str]:
    """Return tables of copies beside kernels and beside other copies."""
    loop, kernels, waiting = result["loop"], result["kernels"], result["waiting"]
    both, refill = result["both_ways"], result["refill"]
    metrics = f"{leaves_and_bytes(loop)} to the device, {size(loop['metrics_bytes'])} to the host"
    memories = {
        f"{memory} source": {"times": taken, "wrong": both["wrong"][memory]}
        for memory, taken in both["times"].items()
    }
    earlier = {
        name: {"times": taken, "after": kernels["after_kernels"][name], "wrong": kernels["wrong"]}
        for name, taken in kernels["times"].items()
    }
    buffers: dict[str, Any] = {}
    for row in refill["rows"]:
        kind = buffers.setdefault(f"{row['kind']}, {size(row['bytes'])}", {"rows": {}})
        kind["rows"][row["way"]] = row

    def late(found: Found, way: Any) -> str:
        return f"{found['after'][way[0]]} of {found['times'][way[0]]['repeats']}"

    def fewest(found: Found, way: Any) -> str:
        return str(min(each["repeats"] for each in found["times"][way[0]].values()))

    beside = f"{kernels['queued_ms']:g} ms of kernels"
    return [
        write(metrics, {"": loop}, "step", *METERED),
        write(
            f"{kernels['floats']:,} floats beside {beside}, after | way",
            earlier,
            "times",
            *times("times/*"),
            at("longest, us", "times/*/max_us"),
            Column("arrived after the kernels", late),
        ),
        write(
            f"{size(both['bytes'])} each way | way",
            memories,
            "times",
            *(at(f"{what}, us", f"times/*/{what}/median_us") for what in BOTH_WAYS),
            Column("calls", fewest),
        ),
        write(
            f"waiting beside {waiting['queued_ms']:g} ms of kernels",
            {"": waiting},
            "cases",
            *WAITING,
        ),
        write(
            "buffer that is refilled | way",
            buffers,
            "rows",
            at(f"wrong batches of {refill['rounds']:,}", "rows/*/wrong", str),
            *times("rows/*/round", "a round, us"),
        ),
    ]


def event_loop(result: Found) -> list[str]:
    """Return a table of ways: lateness of the loop's heartbeat, and the copies meanwhile."""

    def rate(found: Found, way: Any) -> str:
        taken = found["times"][way[0]]
        return number(taken["copies_per_s"]) if taken["copy"] else ""

    return [
        write(
            leaves_and_bytes(result),
            {"": result},
            "times",
            at("heartbeat late, median, us", "times/*/late/p50_us"),
            at("99th percentile", "times/*/late/p99_us"),
            at("most", "times/*/late/max_us"),
            Column("copies/s", rate),
            at("a copy, median, us", "times/*/copy/p50_us"),
            at("99th percentile", "times/*/copy/p99_us"),
            at("beats", "times/*/late/repeats", str),
        )
    ]


# ---- rows ----------------------------------------------------------------------------------------

IN_CALLS = [
    *times("host_in_call/*", "host in the call, us"),
    *times("host/*", "host until wait() has returned too, us"),
    at("calls", "host/*/repeats", str),
]
PROCESSED = [
    at("processor time of the caller, us", "processor_time/*/caller/median_us"),
    at("of other threads, us", "processor_time/*/others/median_us"),
    at("of other threads for as long without batches, us", "processor_time/*/idle/median_us"),
    at("rounds", "processor_time/*/others/repeats", str),
]


def gather(result: Found) -> list[str]:
    gathers = {title(each["title"], each): each for each in result["gathers"].values()}
    pinned, what = result["from_pinned"], "rows of a pinned storage, to the device"
    tables = [
        write("rows | way", gathers, "contenders", *ALONE),
        write(f"{what} | way", pinned, "contenders", *ALONE),
    ]
    if not all("host" in found for found in pinned.values()):
        return tables  # an older result
    learners = {
        f"{name}, {learner}": found
        for name, each in pinned.items()
        for learner, found in each.get("learners", {}).items()
    }
    alone = at("its kernels alone over those", "kernels_over_resident/*", ratio3, but=RESIDENT)
    stepped = [*times("step/*", "step, us"), over_resident(ratio3), alone, HOST, STEPS]
    compared = sum(sum(found["checks"].values()) for found in pinned.values())
    plain = {name: {**found, "wrong": {}} for name, found in pinned.items()}  # told above
    return [
        *tables,
        write(f"{what} | way", plain, "host", *IN_CALLS),
        write(f"{what} | way", plain, "processor_time", *PROCESSED),
        write(f"{what}, and learner | feed", learners, "step", *stepped),
        f"Of the rows of pinned storages, {compared:,} batches were compared after bursts, and "
        "each step of the learners.",
    ]


# ---- parking -------------------------------------------------------------------------------------


def _ms(us: float) -> str:
    return number(us / 1000)


def park(result: Found) -> list[str]:
    """Return tables of parked states, of the first time in a process, and of snapshots."""
    states, snapshot = result["parked"], result["snapshot"]
    first = {way: {"reserve_ms": 0, **found} for way, found in result["first"].items()}
    steps = ("reserve", "first park", "first resume", "second park")
    return [
        write(
            "state | way",
            {f"{name}, {size(found['bytes'])}": found for name, found in states.items()},
            "park",
            at("park, ms", "park/*/median_us", _ms),
            at("GB/s", "gb_per_s/park/*"),
            at("resume, ms", "resume/*/median_us", _ms),
            at("GB/s", "gb_per_s/resume/*"),
            at("times", "park/*/repeats", str),
        ),
        write(
            "device memory",
            states,
            "",
            at("in use while parked", "bytes_while_parked", size),
            at("extra, park", "extra_peak_bytes/park", size),
            at("extra, resume", "extra_peak_bytes/resume", size),
        ),
        write(
            "first time in a process",
            first,
            "",
            *(at(f"{step}, ms", f"{step.replace(' ', '_')}_ms") for step in steps),
        ),
        write(
            f"snapshot of {leaves_and_bytes(snapshot)} beside a loop",
            {"": snapshot},
            "step_us",
            at("host in the call, us", "host_us/*"),
            at("step, us", "step_us/*/median_us"),
            at("longest step, us", "step_us/*/max_us"),
            at("over the median", "longest_over_median/*", ratio),
        ),
    ]


TABLES: dict[str, Callable[[Found], list[str]]] = {
    **dict.fromkeys(DIRECTIONS, copies),
    "cold": cold,
    "pinning": pinning,
    "loop": loop,
    "replay": replay,
    "gather": gather,
    "sizes": sizes,
    "containers": containers,
    "tensordict": tensordict,
    "park": park,
    "concurrent": concurrent,
    "asyncio": event_loop,
    "trainers": page.tables,
    "wait": lambda result: [],
    "memory": lambda result: [],
}
"""By benchmark, in the order of the page. Every section also has a table of targets."""
