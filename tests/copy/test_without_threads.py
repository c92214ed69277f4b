"""What is not in the table of calls, in a process that cannot start threads; and calls without any.

`tests/promises/test_processes.py` makes the calls of the table there.
"""

from __future__ import annotations

import pytest
from support import run_python

pytestmark = pytest.mark.sim

PROGRAM = """
import torch, tdcopier
from tdcopier import _C, sim

sim.enable(devices=2)
_C.set_most_workers(3)
faults = [sim.fail_thread(n) for n in range(1, 100)]  # each attempt of the process
large = torch.arange(1 << 19)  # 4 MiB: nothing is small enough for the call itself
index = torch.arange(0, 512, 2)

def same(got, wanted):
    assert torch.equal(got.cpu(), wanted.cpu())
"""


def test_a_prefetcher_works_in_the_loop_where_no_thread_can_be_made() -> None:
    told = run_python(
        PROGRAM
        + """
for batch in tdcopier.prefetch([[large]] * 3, "sim:0", threaded=False):
    same(batch[0], large)
print(faults[0].struck)
"""
    )
    assert told == "the creation of a thread\n"


def test_no_thread_is_made_for_calls_that_are_to_use_none() -> None:
    told = run_python(
        PROGRAM
        + """
inline = {"use_background_thread": False}
same(tdcopier.start_copy([large], "sim:0", **inline).get()[0], large)
rows = tdcopier.start_gather([large.view(512, -1)], index, "cpu", **inline).get()[0]
same(rows, large.view(512, -1)[index])
for place in ("sim:0", "cpu"):
    static = [torch.zeros_like(large, device=place)]
    same(tdcopier.start_copy_into([large], static, **inline).get()[0], large)
print(faults[0].fired)
"""
    )
    assert told == "False\n"
