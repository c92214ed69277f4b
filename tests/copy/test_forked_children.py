"""A forked child ends as with `.to()`'s results, whatever it frees of its parent's."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from support import run_program, run_python

PROGRAM = Path(__file__).parents[1] / "support" / "forked_children.py"
TIMES = 1


def test_no_child_dies_of_what_it_frees():
    done = run_program(str(PROGRAM), str(TIMES), timeout_s=300)
    assert done.returncode == 0, done.stderr[-3000:]
    endings = json.loads(done.stdout.splitlines()[-1])
    assert len(endings) == 29
    died = {name: ends for name, ends in endings.items() if ends != [0] * TIMES}
    assert not died, done.stderr[-3000:]


@pytest.mark.sim
def test_the_simulated_device_ends_children_as_cuda_does():
    """Else no test without a GPU would see the cases above."""
    out = run_python(
        """
    import os, signal, torch
    from tdcopier import sim
    sim.enable()
    stream = torch.Stream("sim")

    def end_of_child(memory):
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            memory.pop()
            os._exit(0)
        return os.waitpid(child, 0)[1]

    def recorded():
        made = torch.ones(100).to("sim")
        made.record_stream(stream)
        return made

    def sent():
        made = torch.ones(100).pin_memory()
        made.to("sim", non_blocking=True)
        return made

    print(end_of_child([torch.ones(100).to("sim")]), end_of_child([torch.ones(100).pin_memory()]))
    print(end_of_child([recorded()]), end_of_child([sent()]))
        """
    )
    assert [int(status) for status in out.split()] == [0, 0, signal.SIGABRT, signal.SIGABRT]


def test_a_child_can_ask_for_pinned_memory_whatever_threads_were_doing():
    run_python(
        """
    import os, signal, threading, warnings
    import torch, tdcopier
    device = os.environ.get("TDCOPIER_TEST_DEVICE", "sim")
    if device == "sim":
        from tdcopier import sim
        sim.enable()
    warnings.simplefilter("ignore")
    stop = threading.Event()

    def copies():
        while not stop.is_set():
            tdcopier.copy([torch.ones(50_000), torch.ones(7)], device)

    def asks():
        while not stop.is_set():
            tdcopier.pinned.usage()

    tdcopier.pinned.usage()
    threads = [threading.Thread(target=work) for work in (copies, asks, asks)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            child = os.fork()
            if child == 0:
                signal.alarm(10)
                used = tdcopier.pinned.usage()
                os._exit(0 if used.staging_bytes == used.leased_bytes == 0 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        """
    )
