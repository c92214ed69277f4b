"""Times two builds of tdcopier in turn, and prints how much each row has changed.

``python benchmarks/compare.py --old build/old_site --new build/site --json compare.json``

In each round, one process per build imports tdcopier from the given folder and runs the suites with
our own ways only. They take turns of a round of the suite, on the same processor, so that a
disturbance of the machine affects both (alternate.py); which of them leads alternates. A ratio is
that of the two medians of one round. Both builds use the scripts and batches of this checkout.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tool.alternate import Turns

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "compare.py"
SCHEMA = 1
SUITES = ("h2d", "d2h", "tensordict", "gather", "loop")
OLD, NEW = "old", "new"
SHARED = {
    "tdcopier.workloads": "workloads.py",
    "tdcopier._commands": "_commands/__init__.py",
    "tdcopier._progress": "_progress.py",
}
"""Parts of the package that benchmarks use: always this checkout's, whichever build is timed."""

Measured = dict[str, Any]
"""The result of one process, as read from its file."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    if options.child is not None:
        return time_rows(options)
    begin = time.monotonic()
    rounds: list[dict[str, Measured]] = []
    longest_s = 0.0
    for index in range(options.rounds):
        round_begin = time.monotonic()
        if index and round_begin - begin + longest_s > 60 * options.minutes:
            print(f"stopped after {index} rounds: {options.minutes:g} minutes", flush=True)
            break
        found = one_round(index, options)
        longest_s = max(longest_s, time.monotonic() - round_begin)
        if found is not None:
            rounds.append(found)
            options.json.write_text(json.dumps(result_of(rounds, options), indent=1) + "\n")
        print(f"round {index + 1}: {time.monotonic() - round_begin:.0f} s", flush=True)
    if not rounds:
        print("No round was completed.", file=sys.stderr)
        return 1
    print(as_text(result_of(rounds, options)))
    return 0


def one_round(index: int, options: argparse.Namespace) -> dict[str, Measured] | None:
    """Time both builds in turns; return None, and say why, if one of them failed."""
    order = [OLD, NEW] if index % 2 == 0 else [NEW, OLD]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ends = socket.socketpair()
        children = []
        for build, end in zip(order, ends, strict=True):
            with end:
                child = Child(build, Path(folder), end, options, leads=build == order[0])
            children.append(stack.enter_context(child))
        while not any(child.has_ended() for child in children):
            time.sleep(0.05)
        found = {}
        for child in sorted(children, key=lambda child: not child.has_ended()):
            measured = child.measured()
            if measured is None:
                return None
            found[child.build] = measured
        return found


class Child:
    """A process that times the tdcopier of one folder. It is killed at the end of the context."""

    def __init__(
        self,
        build: str,
        folder: Path,
        end: socket.socket,
        options: argparse.Namespace,
        *,
        leads: bool,
    ) -> None:
        self.build = build
        self._site: Path = options.old if build == OLD else options.new
        self._found, self._errors = folder / f"{build}.json", folder / f"{build}.log"
        command = [sys.executable, str(SCRIPT), "--child", str(self._site)]
        command += ["--json", str(self._found), "--repeats", str(options.repeats)]
        command += ["--device", options.device, "--suites", *options.suites]
        command += ["--workloads", *options.workloads]
        command += ["--turns", str(end.fileno()), *(["--leads"] if leads else [])]
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=[end.fileno()]
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # nothing, if it has ended
        self._process.wait()

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def measured(self) -> Measured | None:
        """Wait for the end of the process; if it failed, say why and return None."""
        code = self._process.wait()
        if code != 0:
            errors = self._errors.read_text()[-3000:]
            print(f"{self._site} failed with {code}:\n{errors}", file=sys.stderr)
            return None
        measured: Measured = json.loads(self._found.read_text())
        return measured


def time_rows(options: argparse.Namespace) -> int:
    """Time the rows and write the result; this runs in the child process."""
    package = take_package_from(options.child)
    from tdcopier.workloads import WORKLOADS
    from tool import (
        compare_rows,  # imports tdcopier, so only after the build is chosen
        machine,
    )
    from tool.measure import Bench
    from tool.run import choose_device, figures_of

    device = choose_device(options.device)
    if device is None:
        return 1
    turns = Turns(socket.socket(fileno=options.turns), leads=options.leads)
    rows, failed = compare_rows.measured(
        Bench(device, options.repeats, lambda label: iter),
        options.suites,
        lambda suite, bench: figures_of(suite, bench, options.workloads or list(WORKLOADS)),
        turns,
    )
    turns.end()
    found = {
        "machine": machine.describe(device),
        "site": options.child.resolve().name,  # not where: that is of the machine
        "version": package.__version__,
        "rows": rows,
        "failed": failed,
    }
    options.json.write_text(json.dumps(found))
    return 0


def take_package_from(site: Path) -> Any:
    """Import tdcopier from a folder, even where an editable installation would be found first."""
    sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in type(f).__module__]
    sys.path.insert(0, str(site.resolve()))
    package = importlib.import_module("tdcopier")
    found = Path(package.__file__ or "").resolve().parent
    if found != (site / "tdcopier").resolve():
        raise ImportError(f"tdcopier was imported from {found}, not from {site}")
    for name, file in SHARED.items():
        spec = importlib.util.spec_from_file_location(name, ROOT / "tdcopier" / file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        setattr(package, name.rpartition(".")[2], module)
    return package


def result_of(rounds: Sequence[dict[str, Measured]], options: argparse.Namespace) -> dict[str, Any]:
    """Return the result of all rounds; the rows that slowed down most come first."""
    builds = {
        build: {key: rounds[-1][build][key] for key in ("site", "version", "failed")}
        for build in (OLD, NEW)
    }
    return {
        "schema": SCHEMA,
        "name": "compare",
        "machine": rounds[0][NEW]["machine"],
        "suites": options.suites,
        "repeats": options.repeats,
        "rounds": len(rounds),
        **builds,
        "rows": compared_rows(rounds),
    }


def compared_rows(rounds: Sequence[dict[str, Measured]]) -> list[dict[str, Any]]:
    """Return the medians over rounds of both times and of their ratio, and the ratio's range.

    Rows that are missing in some round of either build are left out.
    """
    times = [found[build]["rows"] for found in rounds for build in (OLD, NEW)]
    found = []
    for row in times[0]:
        if not all(row in taken for taken in times):
            continue
        old, new = times[0::2], times[1::2]
        ratios = [b[row] / a[row] for a, b in zip(old, new, strict=True)]
        found.append(
            {
                "row": row,
                "old_us": statistics.median(taken[row] for taken in old),
                "new_us": statistics.median(taken[row] for taken in new),
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    return sorted(found, key=lambda each: -each["ratio"])


def as_text(result: dict[str, Any]) -> str:
    """Return the table as text, followed by the failures."""
    header = f"{'new/old':>8}  {'least':>6}  {'most':>6}  {'old us':>10}  {'new us':>10}  row"
    lines = [
        f"{row['ratio']:8.3f}  {row['least']:6.3f}  {row['most']:6.3f}  "
        f"{row['old_us']:10.1f}  {row['new_us']:10.1f}  {row['row']}"
        for row in result["rows"]
    ]
    failures = [
        f"{build} failed in {suite}: {error}"
        for build in (OLD, NEW)
        for suite, error in result[build]["failed"].items()
    ]
    what = f"{result['rounds']} rounds, new over old by row, medians over rounds"
    return "\n".join([what, header, *lines, *failures])


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", type=Path, help="folder with the old build's package")
    parser.add_argument("--new", type=Path, help="folder with the new build's package")
    parser.add_argument("--suites", nargs="+", default=list(SUITES), choices=[*SUITES, "d2d"])
    parser.add_argument("--workloads", nargs="*", default=[], help="of copies; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="processes of each build")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="no round begins that ends later"
    )
    parser.add_argument("--repeats", type=int, default=50, help="as in run.py, in each round")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, required=True, help="file for the result")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--turns", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--leads", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child is None:
        for site in (options.old, options.new):
            if site is None or not (site / "tdcopier").is_dir():
                parser.error(f"--old and --new: there is no package tdcopier in {site}")
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


def script() -> None:
    # As an exception, the signal leaves the contexts that kill the child processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
