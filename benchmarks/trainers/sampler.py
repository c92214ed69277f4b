"""Samples the threads of another process: ``python sampler.py PID INTERVAL_MS``.

It prints a line when it begins. When its standard input ends, it prints JSON: the times of the
samples, the names of the threads, and for each thread the part of each interval in which it ran.
It opens each file once: a sample of fifty threads takes a tenth of a millisecond.

The kernel adds to a thread's run time at its ticks, so a thread that is running counts as having
run for the whole interval. Where there are no run times, only the state counts.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path

LOOK_FOR_NEW = 10  # samples between two looks for new threads


class Watched:
    """The open files of one thread, and its parts of the intervals so far."""

    def __init__(self, folder: Path, before: int) -> None:
        self.name = (folder / "comm").read_text().strip()
        self._stat = os.open(folder / "stat", os.O_RDONLY)
        self._schedule = os.open(folder / "schedstat", os.O_RDONLY)
        self._ran_ns = self._read_ran_ns()
        self.parts: list[float] = [0.0] * before

    def _read_ran_ns(self) -> int:
        return int(os.pread(self._schedule, 100, 0).split()[0])

    def sample(self, interval_ns: int) -> None:
        """Add the part of the interval that has just ended; a thread that is gone ran for none."""
        try:
            state = os.pread(self._stat, 400, 0).rpartition(b")")[2].split()[0]
            ran_ns = self._read_ran_ns()
        except (OSError, IndexError):  # the thread has ended
            self.parts.append(0.0)
            return
        part = min(1.0, (ran_ns - self._ran_ns) / interval_ns)
        self._ran_ns = ran_ns
        self.parts.append(1.0 if state == b"R" else round(part, 3))


def main(pid: int, interval_ms: float) -> None:
    tasks = Path(f"/proc/{pid}/task")
    watched: dict[str, Watched] = {}
    times_ns = [time.perf_counter_ns()]
    print("begins", flush=True)
    while not select.select([sys.stdin], [], [], interval_ms / 1e3)[0]:
        if (len(times_ns) - 1) % LOOK_FOR_NEW == 0:
            for thread in os.listdir(tasks):
                if thread not in watched:
                    try:
                        watched[thread] = Watched(tasks / thread, len(times_ns) - 1)
                    except OSError:  # it has ended since the folder was listed
                        continue
        times_ns.append(time.perf_counter_ns())
        for each in watched.values():
            each.sample(times_ns[-1] - times_ns[-2])
    print(
        json.dumps(
            {
                "times_ns": times_ns,
                "names": {thread: each.name for thread, each in watched.items()},
                "parts": {thread: each.parts for thread, each in watched.items()},
            }
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
