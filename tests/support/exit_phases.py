"""Ends processes while daemon threads are in calls of tdcopier, at many moments of these calls.

``python exit_phases.py PHASES [WORD]`` plays each kind of call (whose name contains the word)
PHASES times, and prints as JSON how the processes ended: 0, a signal's negative number, "hangs", or
"aborted by torch": before Python 3.14 a thread that wants the GIL back is ended just there, and if
torch's own code asked for it, C++ aborts the process.

Each process is forked from one that has imported torch, and then imports tdcopier itself.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

DEVICE = os.environ.get("TDCOPIER_TEST_DEVICE", "sim")
HANGS_AFTER_S = 40.0

pinned: list[Any] = []
"""Memory that is unpinned when Python empties this module, while threads may be using it."""


class World:
    """What the calls of one thread use. The calls keep what they return."""

    def __init__(self) -> None:
        import tdcopier

        self.lib = tdcopier
        self.other = "sim:1" if DEVICE == "sim" else DEVICE
        self.pageable = torch.ones(300_000)
        self.pinned = torch.ones(100_000).pin_memory()
        self.there = torch.ones(100_000, device=DEVICE)
        self.filled = torch.zeros(300_000, device=DEVICE)
        self.table = self.there.view(100, -1)
        self.storage = [torch.ones(100, 600)]
        pinned.append(tdcopier.pin_memory_(self.storage, DEVICE))
        self.index = torch.arange(4, device=DEVICE)
        self.rows = [torch.ones(2, 600, device=DEVICE)]
        self.model = torch.nn.Linear(300, 300).to(DEVICE)
        self.td = TensorDict({"a": self.pageable, "b": {"c": torch.ones(3)}}, [])
        self.kept: list[Any] = []

    def keep(self, value: Any) -> None:
        self.kept.append(value)


def awaits(world: World) -> None:
    async def copies() -> None:
        world.keep(await world.lib.start_copy([world.pageable], DEVICE))

    asyncio.run(copies())


def prefetches(world: World) -> None:
    for batch in world.lib.prefetch(([world.pageable] for _ in range(20)), DEVICE):
        world.keep(batch)


def parks(world: World) -> None:
    world.lib.park(world.model).resume()


KINDS: dict[str, Callable[[World], Any]] = {
    "wait": lambda w: w.keep(w.lib.start_copy([w.pageable], DEVICE).wait()),
    "wait, pinned": lambda w: w.keep(w.lib.start_copy([w.pinned], DEVICE).wait()),
    "get": lambda w: w.keep(w.lib.start_copy([w.pageable], DEVICE).get()),
    "get, to the host": lambda w: w.keep(w.lib.start_copy([w.there], "cpu").get()),
    "between devices": lambda w: w.keep(w.lib.start_copy([w.there], w.other).wait()),
    "gather": lambda w: w.keep(w.lib.start_gather([w.table], [1, 3], DEVICE).get()),
    "gather, pinned": lambda w: w.keep(w.lib.start_gather(w.storage, [1, 3], DEVICE).wait()),
    "gather, index on the device": lambda w: w.keep(
        w.lib.start_gather(w.storage, w.index, DEVICE).wait()
    ),
    "gather into memory": lambda w: w.lib.start_gather(w.storage, [1, 3], out=w.rows).get(),
    "scatter": lambda w: w.lib.start_scatter(w.rows, w.storage, [1, 3]).get(),
    "copy into": lambda w: w.lib.start_copy_into([w.pinned], [w.there]).wait(),
    "copy into, in windows": lambda w: w.lib.copy_into([w.pageable], [w.filled]),
    "snapshot": lambda w: w.keep(w.lib.snapshot([w.there]).get()),
    "park": parks,
    "prefetch": prefetches,
    "await": awaits,
    "TensorDict": lambda w: w.keep(w.lib.async_to(w.td, DEVICE).wait()),
}


def run(kind: str, after_s: float) -> None:
    """Returns while two threads call; one has pauses that are shorter than our threads stay."""
    if DEVICE == "sim":
        from tdcopier import sim

        sim.enable(devices=2)

    def calls(world: World, pause_s: float) -> None:
        while True:
            KINDS[kind](world)
            if len(world.kept) > 200:
                time.sleep(60)  # before memory is full; no tensor may be dropped
            time.sleep(pause_s)

    for pause_s in (0.001, 0.03):
        threading.Thread(target=calls, args=[World(), pause_s], daemon=True).start()
    time.sleep(after_s)


def is_of_torch(stack: str) -> bool:
    """Returns whether torch's own code asked for the GIL in the thread that was ended."""
    _, _, asking = stack.partition("pthread_exit")
    files = [Path(file) for file in re.findall(r"^(.+)\(.*\[0x", asking, re.MULTILINE)]
    others = [each for each in files if not re.match(r"libc\.|(lib)?python", each.name)]
    return bool(others) and "/torch/lib/" in str(others[0])


def ending(kind: str, after_s: float) -> int | str:
    child = os.fork()
    if child == 0:
        log = tempfile.gettempdir() + f"/exit_phases.{os.getpid()}"
        os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY), 2)
        faulthandler.register(signal.SIGUSR1)
        run(kind, after_s)
        from tdcopier import _sim

        _sim.print_stack_at_terminate()  # now, as torch sets a handler of its own at times
        sys.exit(0)
    end = time.monotonic() + HANGS_AFTER_S
    log = Path(tempfile.gettempdir()) / f"exit_phases.{child}"
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            told, text = os.waitstatus_to_exitcode(status), log.read_text(errors="replace")
            log.unlink()
            if told == -signal.SIGABRT and is_of_torch(text):
                return "aborted by torch"
            if told != 0:
                print(kind, after_s, text, file=sys.stderr)
            return told
        time.sleep(0.01)
    os.kill(child, signal.SIGUSR1)  # prints the Python stacks of all threads
    time.sleep(1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(kind, after_s, log.read_text(errors="replace"), file=sys.stderr)
    log.unlink()
    return "hangs"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()  # so that the ends of processes do not look at what is there
    phases = int(sys.argv[1])
    word = sys.argv[2] if len(sys.argv) > 2 else ""
    endings = {
        kind: [ending(kind, 0.08 + 0.1 * phase / phases) for phase in range(phases)]
        for kind in KINDS
        if word in kind
    }
    print(json.dumps(endings))
