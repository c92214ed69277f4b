"""Packed storages in forked children."""

from __future__ import annotations

import pytest
from support import run_python

pytest.importorskip("torchrl")


def test_rows_that_another_process_wrote_are_read_again():
    code = """
    import os, torch
    from tensordict import TensorDict
    from tdcopier.torchrl import PackedLazyMemmapStorage

    storage = PackedLazyMemmapStorage(10)
    storage.set(range(10), TensorDict({"x": torch.zeros(10)}, [10]))
    index = (torch.tensor([3, 7]),)
    storage[index]
    child = os.fork()
    if child == 0:
        storage.set(range(10), TensorDict({"x": torch.ones(10)}, [10]))
        os._exit(0)
    print(os.waitpid(child, 0)[1], storage.get(index)["x"].tolist())
    """
    assert run_python(code).splitlines()[-1] == "0 [1.0, 1.0]"


@pytest.mark.usefixtures("sim")
def test_a_forked_child_reads_a_storage_that_a_thread_was_writing():
    code = """
    import os, signal, threading, torch
    from tensordict import TensorDict
    from tdcopier import sim
    from tdcopier.torchrl import PackedLazyTensorStorage

    sim.enable()
    storage = PackedLazyTensorStorage(10, sample_device="sim", pinned=True)
    storage.set(range(10), TensorDict({"x": torch.arange(10)}, [10]))
    entered, forked = threading.Event(), threading.Event()

    def write():
        with storage.writing():
            entered.set()
            forked.wait()

    thread = threading.Thread(target=write)
    thread.start()
    entered.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        assert storage._storage["x"].tolist() == list(range(10))
        with storage.writing():
            storage._storage["x"].fill_(1)
        os._exit(0)
    forked.set()
    thread.join()
    print(os.waitpid(child, 0)[1], storage._storage["x"].tolist() == list(range(10)))
    """
    assert run_python(code).splitlines()[-1] == "0 True"
