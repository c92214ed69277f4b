"""Runs the tutorials of `make demo`, and ends with what was shown and where the pictures are.

    python tools/demo.py [--complete]

With ``--complete``, a part that is skipped for another reason than a device that this machine lacks
is an error: a package is missing that `make demo` installs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SHOWN = ("01_first_copy", "02_tensordict", "06_replay_pipeline")
OF_DEVICES = ("GPU", "CUDA", "simulated device")


class Run(NamedTuple):
    """One tutorial that has ended well."""

    title: str
    seconds: float
    skipped: list[str]
    pictures: list[str]


def run(name: str) -> Run:
    """Runs a tutorial, and prints its lines as they come.

    Raises:
        SystemExit: it failed.
    """
    path = ROOT / "tutorials" / f"{name}.py"
    docstring = ast.get_docstring(ast.parse(path.read_text())) or name
    title = docstring.splitlines()[0]
    print(f"\n== {title} (tutorials/{name}.py)", flush=True)
    begin = time.monotonic()
    found: dict[str, list[str]] = {"skipped": [], "picture": []}
    with subprocess.Popen(
        [sys.executable, "-u", str(path)], stdout=subprocess.PIPE, text=True
    ) as tutorial:
        assert tutorial.stdout is not None
        for line in tutorial.stdout:
            print(line, end="", flush=True)
            kind, _, rest = line.partition(": ")
            if kind in found:
                found[kind].append(rest.strip())
    if tutorial.returncode:
        raise SystemExit(f"{path.relative_to(ROOT)} failed with exit code {tutorial.returncode}")
    return Run(title, time.monotonic() - begin, found["skipped"], found["picture"])


def summary(runs: Sequence[Run]) -> str:
    lines = ["", "Shown:"]
    lines += [f"  {it.title} ({it.seconds:.0f} s)" for it in runs]
    if pictures := [picture for it in runs for picture in it.pictures]:
        lines += ["Pictures:", *(f"  {ROOT / picture}" for picture in pictures)]
    if skipped := [part for it in runs for part in it.skipped]:
        lines += ["Not shown here:", *(f"  {part}" for part in skipped)]
    lines.append("Next: docs/guide/getting_started.md, and the other tutorials in tutorials/")
    return "\n".join(lines)


def avoidable(runs: Sequence[Run]) -> list[str]:
    """Returns the parts that were skipped though a package can provide what they need."""
    return [
        part
        for it in runs
        for part in it.skipped
        if not any(device in part for device in OF_DEVICES)
    ]


def main(arguments: Sequence[str]) -> int:
    if unknown := [argument for argument in arguments if argument != "--complete"]:
        raise SystemExit(f"unknown arguments: {' '.join(unknown)}; known is --complete")
    runs = [run(name) for name in SHOWN]
    print(summary(runs))
    if "--complete" in arguments and (missed := avoidable(runs)):
        print(f"error: skipped, though no device is lacking: {'; '.join(missed)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
