"""What each thread of the process does in the steps of a block: a table, and a picture."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainers.rounds import Block, Runner
from trainers.ways import Way

if TYPE_CHECKING:
    from trainers.benchmark import Options

TASKS = Path("/proc/self/task")
SAMPLER = Path(__file__).with_name("sampler.py")
INTERVAL_MS = 1.0
PICTURED_STEPS = 3
SHOWN = 0.002  # a thread that ran for less of the time has no row in the picture


class Used(NamedTuple):
    """What a thread has used so far."""

    run_us: float
    wait_us: float
    """Time in which it could have run, and no processor was free. 0 if the system does not tell."""
    voluntary: int
    involuntary: int
    minor_faults: int


def _clock_of(thread: int) -> int:
    """Return Linux's clock of the processor time of a thread of this process."""
    return (~thread << 3) | 6


def snapshot() -> dict[int, tuple[str, Used]]:
    """Return name and use of each thread of this process."""
    found = {}
    for folder in TASKS.iterdir():
        try:
            found[int(folder.name)] = (folder / "comm").read_text().strip(), _used(folder)
        except OSError:  # the thread has ended since the folder was listed
            continue
    return found


def _used(folder: Path) -> Used:
    status = (folder / "status").read_text()
    voluntary, involuntary = map(int, re.findall(r"voluntary_ctxt_switches:\s+(\d+)", status))
    stat = (folder / "stat").read_text().rpartition(")")[2].split()
    return Used(
        time.clock_gettime_ns(_clock_of(int(folder.name))) / 1e3,
        int((folder / "schedstat").read_text().split()[1]) / 1e3,
        voluntary,
        involuntary,
        int(stat[7]),
    )


def differences(
    before: Mapping[int, tuple[str, Used]], after: Mapping[int, tuple[str, Used]], steps: int
) -> list[dict[str, Any]]:
    """Return a row per thread, per step, by run time; a thread that has begun meanwhile counts from
    its beginning.
    """
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    rows = []
    for thread, (name, used) in after.items():
        earlier = before[thread][1] if thread in before else Used(0.0, 0.0, 0, 0, 0)
        spent = {
            key: (end - begin) / steps
            for key, begin, end in zip(Used._fields, earlier, used, strict=True)
        }
        rows.append({"thread": thread, "name": name, "python": named.get(thread, ""), **spent})
    return sorted(rows, key=lambda row: -row["run_us"])


def watched(
    trainer: str,
    name: str,
    runner: Runner,
    way: Way,
    batches: Iterator[Any],
    options: Options,
) -> dict[str, Any]:
    """Run a block whose threads are counted, and one whose threads are sampled over a few steps."""
    seen: list[dict[int, tuple[str, Used]]] = []
    counted = runner.block(way, batches, lambda: seen.append(snapshot()))
    rows = differences(seen[0], seen[1], runner.steps.timed)
    print_table(f"{trainer}, {name}", rows)
    sampled, timeline = _sampled(runner, way, batches)
    assert options.pictures is not None
    picture = draw(timeline, f"{trainer}, {name}", Path(options.pictures) / f"{trainer}-{name}.png")
    wrong = counted.wrong + sampled.wrong
    return {"per_step": rows, "timeline": timeline, "picture": picture, "wrong_batches": wrong}


def print_table(title: str, rows: list[dict[str, Any]]) -> None:
    """Print what has run, or was switched, per step."""
    print(f"\n{title}: threads, per step; not those that did nothing")
    print(f"{'run us':>10}{'wait us':>10}{'vol.':>8}{'invol.':>8}{'faults':>9}  thread")
    for row in rows:
        if row["run_us"] >= 1.0 or row["voluntary"]:
            label = row["name"] + (f" ({row['python']})" if row["python"] else "")
            print(
                f"{row['run_us']:>10.0f}{row['wait_us']:>10.0f}{row['voluntary']:>8.1f}"
                f"{row['involuntary']:>8.1f}{row['minor_faults']:>9.1f}  {label}"
            )
    sys.stdout.flush()


def _sampled(runner: Runner, way: Way, batches: Iterator[Any]) -> tuple[Block, dict[str, Any]]:
    command = [sys.executable, "-I", str(SAMPLER), str(os.getpid()), str(INTERVAL_MS)]
    began: list[int] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdout.readline():
            raise RuntimeError(f"the sampler ended, with code {process.wait()}")
        steps = min(PICTURED_STEPS, runner.steps.timed)
        block = runner.block(
            way, batches, lambda: began.append(time.perf_counter_ns()), timed=steps
        )
        process.stdin.close()
        found: dict[str, Any] = json.loads(process.stdout.read())
    python = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    for thread, name in found["names"].items():
        found["names"][thread] = f"{name} ({python[thread]})" if thread in python else name
    step_ends_ms, end_us = [0.0], 0.0
    for step_us in block.step_us:
        end_us += step_us
        step_ends_ms.append(end_us / 1e3)
    times_ms = [(at - began[0]) / 1e6 for at in found.pop("times_ns")]
    return block, {"times_ms": times_ms, "steps_ms": step_ends_ms, **found}


def draw(timeline: Mapping[str, Any], title: str, path: Path) -> str | None:
    """Draw a row per thread, dark where it ran; return the path, or None without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture: it needs matplotlib", file=sys.stderr)
        return None
    from matplotlib.figure import Figure

    times, steps = timeline["times_ms"], timeline["steps_ms"]
    inside = [i for i, at in enumerate(times[1:]) if 0.0 <= at <= steps[-1]]
    ran = {
        thread: sum(parts[i] for i in inside if i < len(parts)) / max(1, len(inside))
        for thread, parts in timeline["parts"].items()
    }
    rows = sorted((t for t in ran if ran[t] >= SHOWN), key=lambda t: ran[t])
    figure = Figure(figsize=(12.0, 1.2 + 0.25 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    if rows:
        axes.pcolormesh(
            times,
            range(len(rows) + 1),
            [timeline["parts"][thread] for thread in rows],
            cmap="Greys",
            vmin=0.0,
            vmax=1.0,
        )
    for at in steps:
        axes.axvline(at, color="#d29922", linewidth=1.0)
    axes.set_xlim(0.0, steps[-1])
    axes.set_yticks([row + 0.5 for row in range(len(rows))])
    axes.set_yticklabels([timeline["names"][thread] for thread in rows], fontsize=7)
    axes.set_xlabel("ms; a line where a step begins")
    axes.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return str(path)
