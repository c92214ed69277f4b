"""Threads, forks and the end of the interpreter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support import run_program, run_python
from thread_support import at_once, let_go_without_the_gil, switch_interval

import tdcopier


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
@pytest.mark.parametrize("background", [True, False])
def test_staging_that_is_waited_for_leaves_the_gil_free(sim, device, copy_stream, background):
    tdcopier.limits.set_staging_bytes(4 << 20)
    tdcopier.pinned.staging_bytes(device)
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


def test_the_interpreter_exits_while_daemon_threads_call_again_and_again():
    """One without a pause, and one whose pauses are shorter than an idle thread of ours stays."""
    program = Path(__file__).parents[1] / "support" / "exit_phases.py"
    done = run_program(str(program), "1", timeout_s=500)
    assert done.returncode == 0, done.stderr[-3000:]
    endings = json.loads(done.stdout.splitlines()[-1])
    assert len(endings) == 17

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
