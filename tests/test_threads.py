"""Threads, forks and the end of the interpreter."""

from __future__ import annotations

import sys
import threading

import pytest
import torch
from support import assert_same, oracle, run_python

import tdcopier


def test_many_threads_copy_at_once(device):
    failures = []

    def work(seed: int) -> None:
        for i in range(40):
            elements = 300_000 if i % 10 == 0 else 50
            tree = [torch.full((elements,), float(seed * 1000 + i)), {"a": torch.arange(i + 1)}]
            handle = tdcopier.start_copy(tree, device)
            result = handle.get() if i % 2 else handle.wait()
            try:
                assert_same(result, oracle(tree, device))
            except AssertionError as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_two_threads_that_get_one_handle_get_one_object(device):
    for _ in range(50):
        handle = tdcopier.start_copy([torch.ones(20) for _ in range(50)], device)
        results = []
        together = threading.Barrier(4)

        def ask(handle=handle, results=results, together=together):
            together.wait()
            results.append(handle.get())

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(result is results[0] for result in results)


@pytest.mark.sim
@pytest.mark.parametrize("elements", [10, 1 << 20], ids=["inline", "background"])
def test_the_gil_is_free_while_get_waits(sim, device, copy_stream, elements):
    """Another thread must run Python code for the copy to be let go."""
    hold = sim.hold(copy_stream)
    handle = tdcopier.start_copy([torch.ones(elements)], device)
    thread = threading.Thread(target=hold.release)
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1000)  # the GIL changes hands only where it is given up
        thread.start()
        assert handle.get()[0].sum().item() == elements
    finally:
        sys.setswitchinterval(interval)
        thread.join()


ENABLE = """
    import os, torch, tdcopier
    device = os.environ.get("TDCOPIER_TEST_DEVICE", "sim")
    if device == "sim":
        from tdcopier import sim
        sim.enable(devices=2)
"""


@pytest.mark.parametrize("elements", [100, 30_000_000], ids=["inline", "background"])
def test_the_interpreter_exits_cleanly_with_copies_in_flight(elements):
    run_python(
        ENABLE
        + f"""
    tree = [torch.ones({elements}), torch.ones(5)]
    handles = [tdcopier.start_copy(tree, device) for _ in range(3)]
    handles.pop()
    print("ends")
    """
    )


@pytest.mark.sim
def test_the_interpreter_exits_cleanly_while_the_copy_stream_is_held():
    run_python(
        ENABLE
        + """
    from tdcopier import _C
    hold = sim.hold(_C.copy_stream("sim:0"))
    handle = tdcopier.start_copy([torch.ones(40_000_000)], device)
    """
    )


def test_a_forked_child_copies_on_the_host():
    run_python(
        ENABLE
        + """
    import warnings
    warnings.simplefilter("ignore")
    tdcopier.copy([torch.ones(1_000_000), torch.ones(3)], device)
    pid = os.fork()
    if pid == 0:
        result = tdcopier.copy([torch.ones(3), "x"], "cpu")
        os._exit(0 if result[0].tolist() == [1, 1, 1] else 1)
    assert os.waitpid(pid, 0)[1] == 0
    """
    )


def test_a_copy_works_at_interpreter_exit():
    out = run_python(
        ENABLE
        + """
    import atexit
    def last():
        print(tdcopier.copy([torch.ones(1_000_000)], device)[0].sum().item())
    tdcopier.copy([torch.ones(1_000_000)], device)
    atexit.register(last)
    """
    )
    assert out.split() == ["1000000.0"]


def test_import_brings_neither_tensordict_nor_the_simulated_device():
    run_python(
        """
    import sys, tdcopier
    assert "tensordict" not in sys.modules
    assert "torchrl" not in sys.modules
    assert "tdcopier._sim" not in sys.modules
    """
    )
