"""Gathers beside writers, threads and forks: when memory may be written or dropped."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
from gather_support import ROWS, rows_of
from support import assert_same

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
