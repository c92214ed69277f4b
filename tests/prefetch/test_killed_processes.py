"""Workers end with the process that trains, and of a killed worker no memory is left."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from sim_support import becomes
from support import run_python
from torch.utils.data import DataLoader, Dataset

import tdcopier
from tdcopier import _slabs

SCRIPT = Path(__file__).parents[1] / "support" / "train_until_killed.py"
WITHIN_S = 10.0
MOST_BATCHES = 100  # that workers have packed ahead, and more

pytestmark = pytest.mark.sim  # what a device adds is its context, which dies with the process


def is_running(process: int) -> bool:
    return _slabs._began(process) is not None


def are_gone(processes: list[int]) -> bool:
    end = time.monotonic() + WITHIN_S
    while any(map(is_running, processes)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_running, processes))


@pytest.mark.parametrize(
    ("context", "elements"),
    [("fork", 10), ("fork", 100_000), ("spawn", 100_000), ("forkserver", 100_000)],
)
def test_workers_end_with_the_process_that_trains(context, elements):
    command = [sys.executable, "-W", "ignore", str(SCRIPT), context, str(elements)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trains:
        try:
            workers = [int(number) for number in trains.stdout.readline().split()]
            assert len(workers) == 2
            assert all(map(is_running, workers))
        finally:
            trains.kill()
    assert are_gone(workers)


def test_a_process_ends_with_another_where_python_has_no_pidfds():
    """A Python that was built on an old system has none, whatever the kernel."""
    program = """
    import os
    from tdcopier import _slabs

    vars(os).pop("pidfd_open", None)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        try:
            _slabs._end_with(os.getppid(), reader)
        finally:
            os._exit(2)
    os.close(reader)
    print(os.waitpid(child, os.WNOHANG)[0])
    os.close(writer)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_python(program).split() == ["0", "1"]


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((30_000,), float(index))


def error_of(reading: Any, kept: list[Any]) -> str:
    """Reads on until an error, and returns its text: its traceback would keep the loader."""
    try:
        kept += [batch for _, batch in islice(reading, MOST_BATCHES)]
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.fixture
def no_handler_of_torch() -> Iterator[None]:
    """Disarms torch's handler of SIGCHLD, which raises wherever the main thread is, and again when
    the other workers end. Without it the pass tells the error.
    """
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


def test_after_a_worker_was_killed_nothing_is_left(device, no_handler_of_torch):
    loader = DataLoader(Numbers(), 2, num_workers=2, multiprocessing_context="fork")
    before, kept = tdcopier.pinned.usage().slab_bytes, []
    others = {*active_children()}  # of loaders that no collection has reached yet
    with tdcopier.prefetch(loader, device) as batches:
        reading: Any = enumerate(batches)
        for number, batch in reading:
            assert batch[1, -1].item() == 2 * number + 1
            kept.append(batch)
            if number == 3:
                break
        assert tdcopier.pinned.usage().slab_bytes > before
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the loader has set its handler
        worker = ({*active_children()} - others).pop()
        os.kill(worker.pid, signal.SIGKILL)
        assert "worker" in error_of(reading, kept)
    del reading, batches
    assert [batch[1, -1].item() for batch in kept] == [2 * i + 1 for i in range(len(kept))]

    def is_nothing_left() -> bool:
        gc.collect()  # the error has left a cycle with the loader's iterator
        tdcopier._C.reclaim()  # of batches that were on their way
        _slabs.drop_ended()
        return tdcopier.pinned.usage().slab_bytes == before and not _slabs._mapped

    assert becomes(is_nothing_left)
