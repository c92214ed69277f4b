"""Shows when each thread worked on a copy: the phases of a call of median length.

``python benchmarks/timeline.py --batch "64 agents, 2 MB, TensorDict" --picture timeline.svg``
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from copies.cold_caches import MANY_AGENTS, batches_here
from copies.directions import HOST, synchroniser, with_host
from copies.timed import cold_settle

import tdcopier
from tdcopier import _C

WARM_UP = 5
SPANS = 100_000
COLORS = {"stage": "tab:blue", "enqueue": "tab:red", "wait": "lightgrey"}


class Call(NamedTuple):
    """Times in microseconds after the call began."""

    call_us: float
    get_us: float
    synchronised_us: float
    spans: list[tuple[str, str, float, float]]
    """Thread, phase, begin and end, by beginning."""


def timed_call(start: Callable[[], Any], synchronise: Callable[[], None]) -> Call:
    _C.testing.keep_spans(SPANS)
    begin = time.monotonic_ns()
    handle = start()
    called = time.monotonic_ns()
    handle.get()
    got = time.monotonic_ns()
    synchronise()
    end = time.monotonic_ns()
    _C.testing.settle()
    spans = [
        (thread, phase.removeprefix("tdcopier: "), (first - begin) / 1e3, (last - begin) / 1e3)
        for thread, phase, first, last in _C.testing.take_spans()
    ]
    times = [(each - begin) / 1e3 for each in (called, got, end)]
    return Call(*times, sorted(spans, key=lambda span: span[2]))


def median_call(options: argparse.Namespace) -> Call:
    """Return the call of median length among `options.repeats`."""
    make, kind, _ = batches_here()[options.batch]
    direction = with_host(torch.device(options.device))[options.direction]
    batch = kind.sources(make, 1, direction)[0]
    synchronise = synchroniser(direction.devices)
    settle = cold_settle(pinned=direction.source == HOST and "cuda" in options.device)
    calls = []
    gc.disable()
    with tdcopier.stats.time_steps():
        for index in range(WARM_UP + options.repeats):
            if options.cold:
                settle()
            found = timed_call(lambda: kind.start(batch, direction.target), synchronise)
            if index >= WARM_UP:
                calls.append(found)
    _C.testing.keep_spans(0)
    gc.enable()
    return sorted(calls, key=lambda call: call.synchronised_us)[len(calls) // 2]


def as_text(call: Call) -> str:
    lines = [
        f"the call ends after {call.call_us:.0f} us, get() after {call.get_us:.0f}, "
        f"and the device after {call.synchronised_us:.0f}"
    ]
    for thread, phase, begin, end in call.spans:
        lines.append(f"{thread:15} {phase:9} {begin:8.1f} {end:8.1f} ({end - begin:.1f})")
    return "\n".join(lines)


def draw(call: Call, title: str, path: Path) -> None:
    import matplotlib.pyplot as plt

    threads = list(dict.fromkeys(thread for thread, *_ in call.spans))
    figure, axes = plt.subplots(figsize=(10, 0.35 * len(threads) + 1.5))
    for thread, phase, begin, end in call.spans:
        color = COLORS.get(phase, "tab:green")
        axes.barh(threads.index(thread), end - begin, left=begin, color=color, height=0.7)
    axes.set_yticks(range(len(threads)), threads)
    axes.invert_yaxis()
    for at in (call.call_us, call.get_us, call.synchronised_us):
        axes.axvline(at, color="black", linewidth=0.5)
    axes.set_xlabel("us after the call (blue: staging, red: driver calls, grey: waits)")
    axes.set_title(title)
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--direction", choices=["h2d", "d2h"], default="h2d")
    parser.add_argument("--batch", choices=list(batches_here()), default=MANY_AGENTS)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--cold", action="store_true", help="write other memory before each call")
    parser.add_argument("--picture", type=Path, help="draw it, too, into this file")
    options = parser.parse_args(arguments)
    call = median_call(options)
    print(as_text(call))
    if options.picture:
        draw(call, f"{options.batch}, {options.direction}", options.picture)


if __name__ == "__main__":
    main()
