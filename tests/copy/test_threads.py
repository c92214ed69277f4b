"""Threads, forks and the end of the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import assert_same, oracle, run_python
from thread_support import at_once, let_go_without_the_gil, switch_interval

import tdcopier


def test_many_threads_copy_at_once(device):
    def work(seed: int) -> None:
        for i in range(40):
            elements = 300_000 if i % 10 == 0 else 50
            tree = [torch.full((elements,), float(seed * 1000 + i)), {"a": torch.arange(i + 1)}]
            handle = tdcopier.start_copy(tree, device)
            result = handle.get() if i % 2 else handle.wait()
            assert_same(result, oracle(tree, device))

    at_once(8, work)


class SlowKey:
    """A key whose hash runs Python code, so that threads switch while a result is built."""

    def __init__(self, name: int) -> None:
        self.name = name

    def __hash__(self) -> int:
        return sum(hash(self.name) for _ in range(20))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SlowKey) and self.name == other.name


@pytest.mark.parametrize("elements", [5, 200_000], ids=["inline", "background"])
def test_threads_that_build_one_result_at_once_get_one_object(device, elements):
    with switch_interval(1e-6):
        for _ in range(10):
            tree = {SlowKey(i): [torch.full((elements // 5,), float(i))] for i in range(40)}
            handle = tdcopier.start_copy(tree, device)
            results = at_once(4, lambda _, handle=handle: handle.get())
            assert all(result is results[0] for result in results)
            assert [leaf[0][0].item() for leaf in results[0].values()] == list(range(40))


def test_a_key_whose_hash_asks_the_handle_does_no_harm(device):
    class Asking:
        handle = None

        def __hash__(self) -> int:
            handle, Asking.handle = Asking.handle, None
            if handle is not None:
                handle.get()
            return 1

    tree = {Asking(): torch.ones(1 << 20), "b": torch.ones(2)}
    handle = Asking.handle = tdcopier.start_copy(tree, device)
    result = handle.get()
    assert handle.get() is result
    assert result["b"].tolist() == [1, 1]


@pytest.mark.sim
@pytest.mark.parametrize("elements", [10, 1 << 20], ids=["inline", "background"])
def test_get_waits_for_the_arrival_and_leaves_the_gil_free(sim, device, copy_stream, elements):
    """Another thread must run Python code to release the copy."""
    hold = sim.hold(copy_stream)
    handle = tdcopier.start_copy([torch.ones(elements)], device)
    with let_go_without_the_gil(hold) as order:
        result = handle.get()
        order.append("got")
    assert order == ["let go", "got"]
    assert result[0].sum().item() == elements


@pytest.mark.sim
@pytest.mark.parametrize("background", [True, False])
def test_staging_that_is_waited_for_leaves_the_gil_free(sim, device, copy_stream, background):
    tdcopier.set_staging_limit_bytes(4 << 20)
    tdcopier.staging_bytes(device)
    hold = sim.hold(copy_stream)
    first = tdcopier.start_copy([torch.ones(3)], device)
    with let_go_without_the_gil(hold):
        second = tdcopier.copy([torch.full((3,), 2.0)], device, use_background_thread=background)
    assert second[0].tolist() == [2, 2, 2]
    assert first.get()[0].tolist() == [1, 1, 1]


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


def test_the_interpreter_exits_cleanly_while_daemon_threads_copy():
    """Without a tensor that they drop: there, torch's own code would abort."""
    run_python(
        ENABLE
        + """
    import threading, time
    source = [torch.ones(2_000_000), torch.ones(5)]
    destinations = [[leaf.to(device) for leaf in source] for _ in range(3)]
    def fill(destination):
        while True:
            tdcopier.copy_into(source, destination)
    for destination in destinations:
        tdcopier.copy_into(source, destination)
        threading.Thread(target=fill, args=[destination], daemon=True).start()
    time.sleep(0.2)
    """
    )


def test_the_interpreter_exits_while_daemon_threads_call_again_and_again():
    """One without a pause, and one whose pauses are shorter than an idle thread of ours stays."""
    program = Path(__file__).parents[1] / "support" / "exit_phases.py"
    done = subprocess.run(
        [sys.executable, str(program), "1"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    endings = json.loads(done.stdout.splitlines()[-1])
    assert len(endings) == 16

    wrong = {kind: ends for kind, ends in endings.items() if set(ends) - {0, "aborted by torch"}}
    assert not wrong, done.stderr[-3000:]


def test_handles_that_live_until_the_end_are_dropped_in_silence():
    """In a module that Python empties before the objects are dropped."""
    run_python(
        ENABLE
        + """
    import sys, types
    kept = types.ModuleType("kept")
    sys.modules["kept"] = kept
    kept.tensor = torch.ones(100_000, device=device)
    kept.parked = tdcopier.park(kept.tensor)
    kept.batches = tdcopier.prefetch([torch.ones(3)] * 3, device, threaded=False)
    next(kept.batches)
    kept.cycle = kept
    for part in (tdcopier._park.park, tdcopier._prefetch.prefetcher):
        part.kept = kept
    unraisable = []
    sys.unraisablehook = lambda told: os._exit(3)
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


def test_a_copy_works_after_the_workers_are_gone():
    out = run_python(
        """
    import atexit, os, torch
    def last():
        print(tdcopier.copy([torch.ones(1_000_000)], device)[0].sum().item())
    atexit.register(last)  # before the package's own: runs after it
    """
        + ENABLE.replace("import os, torch, tdcopier", "import tdcopier")
        + """
    tdcopier.copy([torch.ones(1_000_000)], device)
    """
    )
    assert out.split() == ["1000000.0"]


@pytest.mark.sim
def test_a_child_is_told_that_a_copy_was_not_done_at_the_fork():
    """It would wait for a device that only the parent can ask."""
    run_python(
        ENABLE
        + """
    import signal, warnings
    from tdcopier import sim
    warnings.simplefilter("ignore")
    source, filled, gate = torch.ones(8).to(device), torch.zeros(8).to(device), sim.Gate()
    needs_gradient = torch.ones(8).to(device).requires_grad_()
    done = tdcopier.start_copy(source, "cpu")
    done.get()
    host = tdcopier.start_copy(torch.ones(3), "cpu")
    seen = tdcopier.start_copy(source, "cpu")
    while not seen.ready():
        pass
    sim.busy(gate)
    pending = [
        tdcopier.start_copy(source, "cpu"),
        tdcopier.start_copy_into(torch.ones(8), filled),
        tdcopier.start_copy(needs_gradient, "sim:1"),
    ]
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        assert done.get().tolist() == [1] * 8 and host.get().tolist() == [1] * 3
        assert done.ready() and host.ready() and seen.ready() and seen.get().sum() == 8
        for handle in pending:
            assert not handle.ready()
            for _ in range(2):
                try:
                    handle.get()
                except RuntimeError as error:
                    assert "before the process was forked" in str(error)
                else:
                    os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    gate.open()
    assert pending[0].get().tolist() == [1] * 8
    """
    )


def test_children_forked_while_copies_are_in_flight_run_and_end():
    """Workers may hold any lock during the fork; the child must not wait for one."""
    run_python(
        ENABLE
        + """
    import sys, warnings
    warnings.simplefilter("ignore")
    tree = [torch.ones(300_000) for _ in range(6)]
    for round in range(60):
        handles = [tdcopier.start_copy(tree, device) for _ in range(3)]
        pid = os.fork()
        if pid == 0:
            handles.clear()
            result = tdcopier.copy([torch.ones(3), "x"], "cpu")
            os._exit(0 if result[0].tolist() == [1, 1, 1] else 1)
        for handle in handles:
            handle.get()
        assert os.waitpid(pid, 0)[1] == 0
    """,
        timeout_s=100,
    )


@pytest.mark.sim
def test_a_child_that_is_the_first_to_use_the_device_gives_its_memory_back():
    """The parent has loaded the package but used no device: the child works as usual."""
    run_python(
        """
    import os, torch, tdcopier
    from tdcopier import sim
    tdcopier.copy([torch.ones(3)], "cpu")
    pid = os.fork()
    if pid == 0:
        sim.enable(devices=1)
        before = sim.memory_stats(0).allocated_bytes
        for _ in range(5):
            assert tdcopier.copy([torch.ones(1000), torch.ones(5)], "sim")[0].sum().item() == 1000
        ended = sim.memory_stats(0).allocated_bytes == before
        assert tdcopier.copy(torch.ones(1 << 20), "sim").sum().item() == 1 << 20  # by workers
        os._exit(0 if ended else 1)
    assert os.waitpid(pid, 0)[1] == 0
    """,
    )


def test_first_calls_under_a_function_mode_from_several_threads_end():
    run_python(
        """
    import threading, torch, tdcopier
    from torch.overrides import TorchFunctionMode
    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))
    def work():
        together.wait()
        with Mode():
            tdcopier.copy([torch.ones(2)], "cpu")
    together = threading.Barrier(4)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    """,
    )


def test_import_brings_neither_tensordict_nor_the_simulated_device():
    run_python(
        """
    import sys, tdcopier
    assert "tensordict" not in sys.modules
    assert "torchrl" not in sys.modules
    assert "tdcopier._sim" not in sys.modules
    """
    )


def test_a_process_that_gets_no_threads_copies_all_the_same(device):
    """More bytes than are staged in the call, in a process where no worker can start."""
    if device != "sim:0":
        pytest.skip("CUDA itself wants memory and threads")
    run_python(
        """
        import os
        import resource
        import sys

        # A thread's stack takes as much as a process may have, which is settled when it begins.
        if "STACKS_ARE_LARGE" not in os.environ:
            os.environ["STACKS_ARE_LARGE"] = "1"
            resource.setrlimit(resource.RLIMIT_STACK, (1 << 30, resource.RLIM_INFINITY))
            os.execv(sys.executable, sys.orig_argv)

        import torch
        import tdcopier
        from tdcopier import sim

        sim.enable()
        tdcopier.copy([torch.ones(10)], "sim")
        large = torch.ones(1 << 18)
        with open("/proc/self/statm") as statm:
            pages = int(statm.read().split()[0])
        # Room for data, and none for another thread.
        resource.setrlimit(resource.RLIMIT_AS, (pages * 4096 + (500 << 20), -1))
        handle = tdcopier.start_copy([large], "sim")
        assert handle.get()[0].eq(1).all()
        assert not handle.stats.background
        """
    )
