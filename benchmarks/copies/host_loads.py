"""Other work on the host's processors, in a process of its own, beside which copies are timed.

``python benchmarks/copies/host_loads.py team`` and ``... workers`` are these processes. They print
a line when the load is there, and end when their standard input does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

WORKERS = 8
SAMPLE_BYTES, SAMPLES = 1 << 20, 1 << 30
KINDS = {
    "a spinning OpenMP team on all processors": "team",
    f"{WORKERS} DataLoader workers": "workers",
}
"""The arguments of the processes, by what they do."""


@contextmanager
def running(kind: str) -> Iterator[subprocess.Popen[bytes]]:
    """Keep a load running, and give its process.

    It may use all processors that this thread may use at the call.
    """
    command = [sys.executable, __file__, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise RuntimeError(f"the load {kind!r} ended, with code {process.wait()}")
            yield process
        finally:
            process.stdin.close()
            process.wait()


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    """Samples of a megabyte that take a few milliseconds of work, as an augmentation does."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> torch.Tensor:
        values = torch.full((SAMPLE_BYTES // 4,), float(number))
        for _ in range(10):
            values = values.flip(0) + 1.0
        return values


def team() -> Iterator[Any]:
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    values = torch.zeros(1 << 22)
    while True:
        yield values.add_(1.0)


def workers() -> Iterator[Any]:
    yield from torch.utils.data.DataLoader(Samples(), batch_size=4, num_workers=WORKERS)


def end_with_input() -> None:
    os.read(0, 1)  # not by sys.stdin, whose lock would be held while workers are forked
    os.killpg(0, 9)


def main(work: Callable[[], Iterator[Any]]) -> None:
    os.setpgrp()  # the workers end with this process
    threading.Thread(target=end_with_input, daemon=True).start()
    steps = work()
    for _ in range(3):
        next(steps)
    print("running", flush=True)
    for _ in steps:
        pass


if __name__ == "__main__":
    main({"team": team, "workers": workers}[sys.argv[1]])
