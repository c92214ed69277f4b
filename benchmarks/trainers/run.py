"""Trains with each way of getting a loader's batches to one CUDA device, and compares the steps.

``python benchmarks/trainers/run.py --only maskrcnn --minutes 2 --json out.json`` needs a CUDA
device. ``--device sim`` tries the loops on the simulated device at tiny sizes, and ``--device cpu``
the models, without the ways of tdcopier; both have times that mean nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(BENCHMARKS)  # not this folder, whose modules have names of others

import torch  # noqa: E402
from tool import machine, report  # noqa: E402
from tool.run import choose_device, targets_of  # noqa: E402

from tdcopier._progress import show_rounds  # noqa: E402
from trainers import benchmark, ways  # noqa: E402
from trainers.page import tables  # noqa: E402
from trainers.table import TRAINERS, Steps  # noqa: E402

SCHEDULER = Path("/proc/self/schedstat")
ON_CPU = (ways.RESIDENT, ways.FLOOR, ways.LOADER)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    is_cpu = options.device == "cpu"
    device = torch.device("cpu") if is_cpu else choose_device(options.device)
    if device is None:
        return 1
    is_real = device.type == "cuda"
    names = options.ways or (ON_CPU if is_cpu else ways.DEFAULT)
    asked = benchmark.Options(
        tuple(options.only or (TRAINERS if is_real else benchmark.ON_SIM)),
        {name: ways.variation(name) for name in names},
        options.rounds,
        options.minutes,
        options.workers if options.workers is not None or is_real else 1,
        {name: value for name in Steps._fields if (value := getattr(options, name)) is not None},
        options.first,
        small=not is_real,
        pictures=str(options.pictures or Path("build/trainers")) if options.threads else None,
    )
    description = machine.describe(device)
    result: dict[str, Any] = {
        "schema": report.SCHEMA,
        "name": "trainers",
        "taken": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": description,
        "quick": not is_real,
        **benchmark.run_with(device, asked, show_rounds),
    }
    result["targets"] = targets_of(benchmark, result, speed=is_real)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"wrote {options.json}")
    print("\n\n".join(tables(result)))
    for target in result["targets"]:
        said = "hit" if target["hit"] else "MISSED"
        print(f"{said}: {target['what']}: {target['found']} (wanted {target['wanted']})")
    if not is_real:
        print("These times mean nothing: this is no CUDA device.")
    return 0 if result["trainers"] else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", help='such as "cuda:1", "sim" or "cpu"; default: CUDA')
    parser.add_argument("--only", nargs="+", choices=list(TRAINERS), help="default: all")
    parser.add_argument(
        "--ways",
        nargs="+",
        help=f"of {', '.join(ways.WAYS)}; or a variation such as prefetch:depth=4,threaded=False",
    )
    parser.add_argument("--rounds", type=int, default=40, help="at most; 5 at least are not cut")
    parser.add_argument("--minutes", type=float, default=5.0, help="for all trainers together")
    parser.add_argument("--workers", type=int, help="of each loader; default: as the trainer has")
    parser.add_argument("--untimed", type=int, help="steps of a block, before the timed")
    parser.add_argument("--timed", type=int, help="steps of a block; default: as the trainer has")
    parser.add_argument("--pause", dest="pause_s", type=float, help="seconds after a block")
    parser.add_argument("--first", type=int, default=3, help="times that each way starts anew")
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--threads", action="store_true", help="also watch the threads of each way")
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the threads")
    options = parser.parse_args(arguments)
    for name in ("rounds", "untimed", "timed"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} must be at least 1")
    for name in options.ways or ():
        try:
            ways.variation(name)
        except ValueError as error:
            parser.error(str(error))
    if options.device == "cpu" and set(options.ways or ()) - set(ON_CPU):
        parser.error(f"--device cpu has the ways {', '.join(ON_CPU)}")
    if options.threads and not SCHEDULER.exists():
        parser.error(f"--threads needs {SCHEDULER}, which this system lacks")
    if options.json and not options.json.parent.is_dir():
        parser.error(f"there is no folder {options.json.parent}")
    return options


if __name__ == "__main__":
    sys.exit(main())
