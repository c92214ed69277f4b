"""Runs the benchmarks, and writes a JSON file for each, including the machine.

``python benchmarks/run.py`` needs a CUDA device. ``--device sim`` tries the machinery on the
simulated device, whose times mean nothing. ``--device cpu`` runs what needs no device.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from copies import directions

from tdcopier._progress import show_rounds
from tdcopier.workloads import WORKLOADS
from tool import history, machine, report
from tool.measure import Bench
from tool.sections import DIRECTIONS
from tool.target_forms import Target

SUITES = {
    "trainers": "trainers.benchmark",
    "frameworks": "trainers.frameworks",
    "reading": "trainers.reading",
    **dict.fromkeys(("h2d", "d2h", "d2d"), "copies.trees"),
    "cold": "copies.cold_caches",
    "pinning": "copies.pinned_memory",
    "loop": "loops.training_loop",
    "replay": "rows.replay",
    "gather": "rows.gathers",
    "parcels": "copies.parcels",
    "travel": "travel.sending",
    "channels": "travel.channels",
    "collectives": "travel.collectives",
    "remote_replay": "travel.replay",
    "served_steps": "travel.served_steps",
    "containers": "copies.containers",
    "tensordict": "copies.tensordicts",
    "park": "park.parking",
    "concurrent": "loops.concurrent",
    "asyncio": "loops.event_loop",
    "speed_only": "loops.speed_only",
    "learners": "rows.graphed_learners",
}
"""Modules by benchmark, in the order of a whole run. Each has a function ``run``, which returns the
figures of the result, and functions that yield the targets on values and on speed from these."""
NEEDED = {
    "tensordict": ("tensordict",),
    "frameworks": ("accelerate", "lightning", "transformers"),
    "learners": ("torchrl",),
    "remote_replay": ("torchrl",),
    "served_steps": ("torchrl",),
}
"""Packages that a benchmark needs beside torch."""
ON_THE_HOST = ("travel", "channels", "collectives", "remote_replay")
"""Benchmarks that use no device, for ``--device cpu``."""

Result = dict[str, Any]


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    device = choose_device(options.device)
    if device is None:
        return 1
    out = options.out or (report.RESULTS if device.type == "cuda" else machine.ROOT / "build/bench")
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(device, 10 if options.quick else options.repeats, show_rounds)
    asked = []
    for name in options.only:
        why = lacking(name, device)
        if why is None:
            asked.append(name)
        else:
            print(f"Skipped {name}: {why}.")
    if not asked:
        print("Nothing that was asked for can run here.", file=sys.stderr)
        return 1
    results = _written(asked, bench, options, out)
    _report(results, out)
    if bench.is_real and not options.quick and out == report.RESULTS:
        print(f"added {history.add(results)} lines to {history.HISTORY}")
    if device.type == "sim":
        print("Figures of a simulated device say nothing on speed; only the counts mean something.")
    missed = [t["what"] for result in results for t in result["targets"] if not t["hit"]]
    print("targets: " + (f"MISSED {len(missed)}: {'; '.join(missed)}" if missed else "all hit"))
    return 0


def _report(results: list[Result], out: Path) -> None:
    if importlib.util.find_spec("matplotlib"):
        report.write_plots(results, out)
    else:
        print("No plots: they need matplotlib. benchmarks/report.py draws them later.")
    print(report.page(results, str(out)))


def _written(
    names: Sequence[str], bench: Bench, options: argparse.Namespace, out: Path
) -> list[Result]:
    """Run benchmarks one after the other, and write the result of each as soon as it is there."""
    results, description = [], machine.describe(bench.device)
    for name in names:
        begin_s = time.monotonic()
        result = {
            "schema": report.SCHEMA,
            "name": name,
            "taken": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "machine": description,
            "quick": options.quick,
            **figures_of(name, bench, options.workloads),
        }
        result["seconds"] = round(time.monotonic() - begin_s, 1)
        module = importlib.import_module(SUITES[name])
        result["targets"] = targets_of(module, result, speed=bench.is_real)
        path = out / f"{name}-{description['slug']}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {path} after {result['seconds']:.0f} s", flush=True)
        results.append(result)
    return results


def figures_of(name: str, bench: Bench, workloads: Sequence[str]) -> Result:
    """Run a benchmark; that of a direction of copies with these workloads."""
    for direction in () if name in ON_THE_HOST else directions.possible(bench.device).values():
        directions.start_workers(direction)
    module = importlib.import_module(SUITES[name])  # now, as tensordict takes seconds to import
    of_copies = (name, workloads) if name in DIRECTIONS else ()
    result: Result = module.run(bench, *of_copies)
    return result


def choose_device(asked: str | None) -> torch.device | None:
    """Return the target, or None, with a message on stderr, if the requested one does not exist."""
    kind, _, number = (asked or "cuda").partition(":")
    index = int(number or 0)
    if kind == "sim":
        if os.environ.get("FAIL_WITHOUT_CUDA") == "1":
            print("FAIL_WITHOUT_CUDA=1, and the simulated device is not CUDA.", file=sys.stderr)
            return None
        from tdcopier import sim

        sim.enable()
    elif kind == "cpu":
        return torch.device(kind)
    elif not torch.cuda.is_available():
        print(
            "There is no CUDA device here. `python benchmarks/run.py --device sim` runs without "
            "one, but its times mean nothing.",
            file=sys.stderr,
        )
        return None
    else:
        torch.cuda.set_device(index)
    return torch.device(kind, index)


def lacking(name: str, device: torch.device) -> str | None:
    """Return why a benchmark cannot run here."""
    if device.type == "cpu" and name not in ON_THE_HOST:
        return "it needs a device"
    if name == "d2d" and name not in directions.possible(device):
        return "it needs two devices"
    missing = [each for each in NEEDED.get(name, ()) if importlib.util.find_spec(each) is None]
    return f"it needs {', '.join(missing)}" if missing else None


def targets_of(module: ModuleType, result: Result, *, speed: bool = True) -> list[Target]:
    """Return each target and whether it is hit; without ``speed``, only those on values."""
    on_speed = module.speed_targets(result) if speed else ()
    return [*module.value_targets(result), *on_speed]


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--device", help='such as "cuda:1", "cpu" or "sim"; default: the CUDA device'
    )
    parser.add_argument("--repeats", type=int, default=300, help="calls with each small workload")
    parser.add_argument("--out", type=Path, help="folder for the JSON files")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SUITES),
        default=list(SUITES),
        help="default: all that can run",
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
