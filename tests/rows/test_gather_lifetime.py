"""Gathers beside writers, threads and forks: when memory may be written or dropped."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
import torch
from gather_support import ROWS, rows_of
from support import assert_same, run_python
from thread_support import at_once

import tdcopier


@pytest.mark.parametrize("count", [20, 20_000], ids=["small", "large"])
def test_the_index_is_copied_in_the_call(stall, device, copy_stream, count):
    tree = {"a": torch.randn(ROWS, 300)}
    index = torch.randint(0, ROWS, (count,))
    expected = rows_of(tree, index, "cpu")
    with stall(copy_stream):
        handle = tdcopier.start_gather(tree, index, device)
        index.fill_(10**9)
    assert_same(handle.get()["a"].cpu(), expected["a"])


@pytest.mark.parametrize("count", [20, 3000], ids=["small", "large"])
def test_a_writer_may_go_on_when_rows_are_gathered(stall, device, copy_stream, count):
    tree = {"a": torch.randn(ROWS, 300), "b": np.ones((ROWS, 2))}
    index = torch.randint(0, ROWS, (count,))
    expected = rows_of(tree, index, "cpu")
    with stall(copy_stream):
        handle = tdcopier.start_gather(tree, index, device)
        handle.wait_gathered()  # the device has not even begun
        tree["a"].zero_()
        tree["b"].fill(0)
    moved = handle.get()
    assert_same(moved["a"].cpu(), expected["a"])
    assert_same(moved["b"].cpu(), expected["b"])


def test_many_threads_gather_at_once_and_each_gets_its_own_rows(device):
    tree = {"a": torch.arange(ROWS * 40).reshape(ROWS, 40), "b": torch.arange(ROWS)}

    def gather(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            index = torch.randint(0, ROWS, (seed * 100 + 1,), generator=generator)
            got = tdcopier.start_gather(tree, index, device).get()
            assert_same(got, rows_of(tree, index, device))

    at_once(8, gather)


@pytest.mark.sim
def test_a_forked_child_gathers_into_ordinary_memory():
    """Its parent may have held the lock of the pinned allocator during the fork."""
    code = """
    import os, torch, tdcopier
    from tdcopier import sim

    sim.enable()
    table = torch.arange(40_000.0).reshape(400, 100)
    under_way = tdcopier.start_gather(table, torch.arange(400).repeat(50), "cpu")
    child = os.fork()
    if child == 0:
        rows = tdcopier.start_gather(table, [3, 7], "cpu").get()
        os._exit(0 if torch.equal(rows, table[[3, 7]]) else 1)
    print(os.waitpid(child, 0)[1], under_way.get().is_pinned())
    """
    assert run_python(code).split() == ["0", "True"]


def test_no_python_runs_for_each_leaf(device):
    """A thousand leaves take no more calls than ten, apart from the garbage collector's."""

    def calls(leaves: int) -> int:
        tree = {f"{i}": torch.randn(ROWS, 2) for i in range(leaves)}
        count = 0

        def count_calls(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        index = torch.tensor([1, 2])
        gc.disable()
        sys.setprofile(count_calls)
        try:
            tdcopier.start_gather(tree, index, device).get()
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    calls(10)
    assert calls(1000) < calls(10) + 100
