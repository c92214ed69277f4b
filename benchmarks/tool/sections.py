"""What the tables of each benchmark's section of the page show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainers import page

from tdcopier._commands.tables import number, size
from tool.tables import (
    OURS,
    RESIDENT,
    Column,
    Found,
    at,
    leaves_and_bytes,
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

FILLED = [*times(), at("over start_copy().get()", "ratios/*", ratio), CALLS]


def copies(result: Found) -> list[str]:
    return [write("workload | way", titled(result["workloads"]), "contenders", *ALONE)]


def cold(result: Found) -> list[str]:
    groups = by_direction(result["copies"])
    for load, batches in result["beside"].items():
        there = by_direction({"h2d": batches})
        groups |= {f"{name}, beside {load}": found for name, found in there.items()}
    return [write("batch | way", groups, "contenders", *ALONE)]


def pinning(result: Found) -> list[str]:
    all_ms = at("all, ms", "times/*/*/all_ms")
    return [write("request | way", result["requests"], "times/*", all_ms)]


def containers(result: Found) -> list[str]:
    """Return tables of trees without tensors, of one opaque value, and of one leaf."""
    groups = {
        f"{found['opaque_values']:,} {case}" if found["opaque_values"] else case: found
        for case, found in result["cases"].items()
    }
    us = result["us_per_opaque_value"]
    groups["per opaque value"] = {
        "contenders": {way: {"median_us": each} for way, each in us.items()},
        "ratios": {way: each / us[OURS] for way, each in us.items() if way != OURS},
    }
    ns = dict(zip(result["growth"]["contenders"], result["ns_per_leaf"].values(), strict=True))
    per_leaf = Column("ns a leaf", lambda _, way: f"{ns[way[0]]:.0f}")
    return [
        write("tree | way", groups, "contenders", *ALONE),
        write(
            "growth | way", {"leaves": result["growth"]}, "contenders", *times(), per_leaf, CALLS
        ),
    ]


def parcels(result: Found) -> list[str]:
    groups = {
        title(f"{name}, {caches}", found): found
        for caches, copies in result["copies"].items()
        for name, found in copies.items()
    }
    packing = {
        f"{name}: {its['parcel']:,} bytes": result["packing"][name]
        for name, its in result["bytes"].items()
    }
    return [
        write("batch | way", groups, "contenders", *ALONE),
        write("batch | way", packing, "contenders", *times()),
    ]


def travel(result: Found) -> list[str]:
    sent = {
        f"{name}: {result['bytes'][name]:,} bytes, {transport}": found
        for name, transports in result["sent"].items()
        for transport, found in transports.items()
    }
    return [
        write("batch, by | sent as", sent, "contenders", *times()),
        write("parcel through a queue | as", result["threshold"], "contenders", *times()),
    ]


def _of_two_processes(result: Found, each: str) -> str:
    cases = {f"{name}: {found['bytes']:,} bytes": found for name, found in result["cases"].items()}
    columns = [
        *times("wall_us/*", f"{each}, us"),
        *times("process_us/*", "processor time of both, us"),
        at("blocks", "wall_us/*/repeats", str),
    ]
    return write("batches | way", cases, "wall_us", *columns)


def channels(result: Found) -> list[str]:
    return [_of_two_processes(result, "a batch")]


def remote_replay(result: Found) -> list[str]:
    told = f"Taken with torchrl {result['settings']['torchrl']}."
    return [told, _of_two_processes(result, "a call")]


def served_steps(result: Found) -> list[str]:
    return [_of_two_processes(result, "a step")]


def collectives(result: Found) -> list[str]:
    cases = {f"{name}: {found['bytes']:,} bytes": found for name, found in result["cases"].items()}
    columns = [
        *times("wall_us/*", "a call, us"),
        *times("calls_us/*", "in the source's call, us"),
        at("blocks", "wall_us/*/repeats", str),
    ]
    told = f"By {result['settings']['backend']}."
    return [told, write("trees | way", cases, "wall_us", *columns)]


def reading(result: Found) -> list[str]:
    columns = [
        *times("wall_us/*", "a batch, us"),
        *times("process_cpu_us/*", "processor, us"),
        at("page faults", "faults/*"),
    ]
    open_ = result["descriptors"]
    told = ", ".join(f"{open_[key]} with {key}" for key in open_ if key != "workers")
    return [
        write("batches | way", result["cases"], "wall_us", *columns),
        f"Open descriptors of the process, {open_['workers']} workers: {told}.",
    ]


def tensordict(result: Found) -> list[str]:
    into = {way: {"detection batch": each} for way, each in result["into"].items()}
    return [
        f"Taken with tensordict {result['tensordict']}.",
        write("batch | way", by_direction(result["copies"]), "contenders", *ALONE),
        write("batch | way", by_direction(into), "contenders", *FILLED),
    ]


# ---- loops ---------------------------------------------------------------------------------------

METERED = [
    *times("step/*/without metrics", "step, us"),
    *times("step/*/with metrics", "step with metrics, us"),
    at("without metrics over one on the device", "over_resident/*", ratio3),
    at("with over without", "with_over_without/*", ratio3),
]


def loop(result: Found) -> list[str]:
    in_calls = times("copy_calls/*", "host in copy calls, us")
    stepped = [*times("step/*", "step, us"), over_resident(ratio), *in_calls, STEPS]
    return [write("batch | feed", titled(result["loops"]), "step", *stepped)]


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
    loop, kernels, both = result["loop"], result["kernels"], result["both_ways"]
    metrics = f"{leaves_and_bytes(loop)} to the device, {size(loop['metrics_bytes'])} to the host"
    beside = f"{kernels['floats']:,} floats beside {kernels['queued_ms']:g} ms of kernels"
    earlier = {
        name: {"times": taken, "wrong": kernels["wrong"]}
        for name, taken in kernels["times"].items()
    }
    longest = at("longest, us", "times/*/max_us")
    at_once = [at(f"{what}, us", f"times/*/{what}/median_us") for what in BOTH_WAYS]
    return [
        write(metrics, {"": loop}, "step", *METERED),
        write(f"{beside}, after | way", earlier, "times", *times("times/*"), longest),
        write(f"{size(both['bytes'])} each way", {"": both}, "times", *at_once),
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


def speed_only(result: Found) -> list[str]:
    """Return a table of workloads by feature, and whether the processor has the last feature."""
    stored = result["shared_cache_copies"]
    return [
        write(
            "feature | workload",
            result["features"],
            "cases",
            at("leaves", "cases/*/leaves", "{:,}".format),
            at("bytes", "cases/*/bytes", size),
            at("with it, median, us", "cases/*/with_us"),
            at("without it, median, us", "cases/*/without_us"),
            at("without over with", "cases/*/ratio", ratio3),
            at("95 % interval, from", "cases/*/low", ratio3),
            at("to", "cases/*/high", ratio3),
            at("pairs", "cases/*/repeats", str),
        ),
        f"Copies of pieces that went to the shared cache: {stored:,}.",
    ]


# ---- rows ----------------------------------------------------------------------------------------


def gather(result: Found) -> list[str]:
    gathers = {title(each["title"], each): each for each in result["gathers"].values()}
    pinned, what = result["from_pinned"], "rows of a pinned storage, to the device"
    learners = {
        f"{name}, {learner}": found
        for name, each in pinned.items()
        for learner, found in each.get("learners", {}).items()
    }
    stepped = [*times("step/*", "step, us"), over_resident(ratio3), HOST, STEPS]
    return [
        write("rows | way", gathers, "contenders", *ALONE),
        write(f"{what} | way", pinned, "contenders", *ALONE),
        write(f"{what}, and learner | feed", learners, "step", *stepped),
    ]


def learners(result: Found) -> list[str]:
    """Return one table: the updates a second of each way."""
    found = {f"{name}, {each['rows']:,} rows": each for name, each in result["learners"].items()}
    return [
        write(
            "learner | way",
            found,
            "update",
            at("updates/s", "updates_per_s/*", "{:.0f}".format),
            *times("update/*", "update, us"),
            at("blocks", "update/*/repeats", str),
        )
    ]


# ---- parking -------------------------------------------------------------------------------------


def _ms(us: float) -> str:
    return number(us / 1000)


def park(result: Found) -> list[str]:
    """Return tables of parked states and of snapshots."""
    states, snapshot = result["parked"], result["snapshot"]
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
    "parcels": parcels,
    "travel": travel,
    "channels": channels,
    "collectives": collectives,
    "remote_replay": remote_replay,
    "served_steps": served_steps,
    "containers": containers,
    "tensordict": tensordict,
    "park": park,
    "concurrent": concurrent,
    "asyncio": event_loop,
    "speed_only": speed_only,
    "trainers": page.tables,
    "reading": reading,
    "frameworks": page.tables,
    "learners": learners,
}
"""By benchmark, in the order of the page. Every section also has a table of targets."""
