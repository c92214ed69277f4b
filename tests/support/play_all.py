"""Plays all random programs in turn, for as long as you like, and keeps what each has played.

    python tests/support/play_all.py --hours 2 --jobs 2

A turn is one process of a program of this folder, with seeds that no turn before had. Its line in
the record has these, its time, and the last line that it printed. The first turn that finds
something ends the run; what it printed is shown, and `--seed` of its program repeats it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = ROOT / "docs/design/played.jsonl"
OLDEST = ROOT / "build/oldest"  # where `make test-oldest` has torchrl
MOST_S = 1800.0  # of a turn; after that it hangs


class Turn(NamedTuple):
    """A minute or some of a program, on one processor."""

    program: str
    arguments: tuple[str, ...]
    seed: str | None = "--first-seed"
    """The option for a seed; None: what is played is the same each time, but not when."""
    needs: str | None = None
    """A package without which it is left out."""


TURNS = (
    Turn("schedules", ("--schedules", "6000")),
    Turn("rows", ("--cases", "50000")),
    Turn("learners", ("--cases", "4000"), needs="torchrl"),
    Turn("parcels", ("--mutations", "100000")),
    Turn("later_uses", ("--minutes", "3")),
    Turn("slabs", ("--batches", "3000"), seed="--seed"),
    Turn("slabs", ("--kills", "10"), seed="--seed"),
    Turn("peers", ("--times", "3"), seed=None),
    Turn("replay", ("--times", "3"), seed=None),
    Turn("replay", ("--seconds", "60"), seed=None),
)


RUNNING: set[subprocess.Popen[str]] = set()


def end(process: subprocess.Popen[str]) -> None:
    """Ends a program, and what it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def is_here(package: str | None) -> bool:
    return package is None or bool(importlib.util.find_spec(package)) or OLDEST.exists()


def play(turn: Turn, seed: int) -> tuple[dict[str, object], str]:
    """Plays a turn. Returns its line, and what it printed if that is wrong, else nothing."""
    environment = {"TDCOPIER_TEST_DEVICE": "sim", **os.environ}
    if turn.needs and not importlib.util.find_spec(turn.needs):
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(OLDEST), *filter(None, [environment.get("PYTHONPATH")])]
        )
    arguments = [*turn.arguments, *((turn.seed, str(seed)) if turn.seed else ())]
    command = [sys.executable, str(HERE / f"play_{turn.program}.py"), *arguments]
    began = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # what it starts ends with it
    )
    RUNNING.add(process)
    try:
        printed, errors = process.communicate(timeout=MOST_S)
        code = process.returncode
    except subprocess.TimeoutExpired:
        end(process)
        printed, _ = process.communicate()
        code, errors = -1, f"hangs for {MOST_S:.0f} s"
    finally:
        RUNNING.discard(process)
    told = {
        "program": turn.program,
        "arguments": arguments,
        "seconds": round(time.monotonic() - began, 1),
        "processes": 1,
        "is_right": code == 0,
        "date": time.strftime("%Y-%m-%d"),
        "printed": _outcome_in(printed),
    }
    return told, "" if code == 0 else f"{' '.join(command)}\n{printed}\n{errors}"


def _outcome_in(printed: str) -> str:
    """Returns the last line; or some numbers of the dictionary that was printed."""
    if not printed.startswith("{"):
        return printed.strip().rpartition("\n")[2]
    found = json.loads(printed)
    kept = ("scenarios", "schedules", "programs", "uses")
    return ", ".join(f"{found[each]:,} {each}" for each in kept if each in found)


def turns_until(end_s: float, first_seed: int) -> Iterator[tuple[Turn, int]]:
    """Yields turns and their seeds, which are a million apart."""
    here = [turn for turn in TURNS if is_here(turn.needs)]
    for number, turn in enumerate(itertools.cycle(here)):
        if time.monotonic() > end_s:
            return
        yield turn, first_seed + 1_000_000 * number


def hours_table(record: Path = RECORD) -> str:
    """Returns a table of the record: turns and hours by program."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    rows = ["| program | turns | hours | wrong |", "| --- | --- | --- | --- |"]
    for program in (*dict.fromkeys(line["program"] for line in lines), "all"):
        of_it = [line for line in lines if program in (line["program"], "all")]
        hours = sum(line["seconds"] * line["processes"] for line in of_it) / 3600
        wrong = sum(not line["is_right"] for line in of_it)
        rows.append(f"| {program} | {len(of_it):,} | {hours:.2f} | {wrong} |")
    return "\n".join(rows) + "\n"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=1.0, help="no turn begins after that")
    parser.add_argument("--jobs", type=int, default=1, help="turns at a time")
    parser.add_argument("--record", type=Path, default=RECORD)
    options = parser.parse_args(arguments)
    for turn in TURNS:
        if not is_here(turn.needs):
            print(f"{turn.program} is left out: {turn.needs} is not installed")
    first_seed = int(time.time()) * 1_000_000_000
    turns = turns_until(time.monotonic() + 3600 * options.hours, first_seed)
    lock, wrong, is_interrupted = threading.Lock(), [], threading.Event()

    def play_on() -> None:
        while not wrong and not is_interrupted.is_set():
            with lock:
                turn, seed = next(turns, (None, 0))
            if turn is None:
                return
            told, found = play(turn, seed)
            if is_interrupted.is_set():
                return
            with lock, options.record.open("a") as record:
                record.write(json.dumps(told) + "\n")
                print(f"{turn.program}, {told['seconds']} s: {told['printed']}", flush=True)
                wrong.extend([found] if found else [])

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        players = [pool.submit(play_on) for _ in range(options.jobs)]
        try:
            for player in players:
                player.result()
        except KeyboardInterrupt:
            is_interrupted.set()
            while not all(player.done() for player in players):  # one may just have begun a turn
                for process in [*RUNNING]:
                    end(process)
                time.sleep(0.1)
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
