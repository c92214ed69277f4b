"""Runs copies in many threads, failing copies, forks, and an exit during a copy, for a sanitizer.

    python stress.py [threads] [copies by each thread]

Fails if a value differs from that of `.to`. The sanitizer reports its findings itself and sets the
exit code.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

# The following modules are in that folder.
from stress_copies import Stress, asked_by_two, dropped, get, ready, sources_dropped
from support import assert_same, oracle

import tdcopier
from tdcopier import _C, sim

DEVICES = ["sim:0", "sim:1"]
FAULTS = [
    sim.fail_device_allocation,
    sim.fail_pinned_allocation,
    sim.fail_transfer,
    partial(sim.fail_transfer, when="execution"),
]


class FailingStress(Stress):
    """Copies that may fail, but only because of the injected faults.

    Results are taken with `get` and compared on the host, because both report a failure every time,
    which a stream does not.
    """

    def __init__(self) -> None:
        super().__init__(DEVICES)
        self.ways = [get, ready, sources_dropped, dropped, asked_by_two]

    def one_copy(self, thread: int, i: int) -> str:
        try:
            return super().one_copy(thread, i)
        except RuntimeError as error:
            if "was made to fail" not in str(error):
                raise
            return "failed"

    def expected(self, tree: Any, target: str) -> Any:
        return oracle(tree, "cpu")

    def compare(self, result: Any, expected: Any) -> None:
        assert_same(oracle(result, "cpu"), expected)


def copies_while_faults_strike(threads: int, copies_each: int) -> FailingStress:
    """Injects one kind of fault at a time, which ends after all results were asked for.

    If a stream were repaired during a copy, it would run the rest of it, which no device does.
    """
    stress = FailingStress()
    for fault in FAULTS:
        with ExitStack() as armed:
            for n in range(10, 20 * copies_each, 30):
                armed.enter_context(fault(n))
            stress.run(threads, copies_each)
    return stress


def get_while_another_thread_runs_python() -> int:
    """Calls `get()` while another thread must run Python code to release the copy."""
    copies = 100
    for i in range(copies):
        hold = sim.hold(_C.copy_stream("sim:0"))
        other = threading.Thread(target=hold.release)
        handle = tdcopier.start_copy([torch.full((50, 50), float(i))], "sim:0")
        other.start()
        assert handle.get()[0].sum().item() == 2500 * i
        other.join()
    return copies


def children_copy_on_the_host(forks: int) -> int:
    """Forks while workers and streams run three copies. Returns how many children got stuck."""
    warnings.simplefilter("ignore", DeprecationWarning)
    tree = [torch.ones(300_000) for _ in range(6)]
    stuck = 0
    for _ in range(forks):
        handles = [tdcopier.start_copy(tree, device) for device in (*DEVICES, "sim:0")]
        pid = os.fork()
        if pid == 0:
            handles.clear()
            result = tdcopier.copy([torch.ones(3), "x"], "cpu")
            os._exit(0 if result[0].tolist() == [1, 1, 1] else 1)
        for handle in handles:
            assert all(leaf.sum().item() == 300_000 for leaf in handle.get())
        stuck += not ends_in_order(pid)
    return stuck


def ends_in_order(pid: int, within_s: float = 60.0) -> bool:
    """Returns False if the child hangs. Fails if it ends with an error."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            assert status == 0
            return True
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def main() -> None:
    threads, copies_each = (int(argument) for argument in (sys.argv[1:] or ["32", "100"]))
    torch.set_num_threads(1)  # OpenMP's waits are invisible to the thread sanitizer
    sim.enable(devices=2)
    began = time.monotonic()

    def tell(what: str, copies: int, detail: object = "") -> None:
        print(f"{what}: {copies} copies, {time.monotonic() - began:.0f} s {detail}", flush=True)

    stress = Stress(DEVICES)
    stress.run(threads, copies_each)
    tell(f"{threads} threads", stress.counts.total(), dict(stress.counts))
    failing = copies_while_faults_strike(8, copies_each // 4)
    assert failing.counts["failed"], "no fault has struck"
    tell("with faults", failing.counts.total(), f"{failing.counts['failed']} failed")
    tell("while the GIL is free", get_while_another_thread_runs_python())
    # The thread sanitizer's own allocator has a lock that another thread may hold at a fork; the
    # same forks without a sanitizer are in tests/copy/test_threads.py, where none may hang.
    forks = 20
    stuck = children_copy_on_the_host(forks)
    assert stuck <= forks // 10, f"{stuck} of {forks} children hang"
    tell("with forks", 4 * forks, f"{stuck} children stuck")

    tree = [torch.ones(3_000_000), torch.ones(5)]
    in_flight = [tdcopier.start_copy(tree, device) for device in DEVICES]
    in_flight += [tdcopier.start_copy([torch.ones(1 << 20, device="sim:0")], "cpu")]
    in_flight.append(tdcopier.start_copy([torch.ones(100)], "sim:1"))
    in_flight.pop(0)
    tell("in flight at the end", 4)


if __name__ == "__main__":
    main()
