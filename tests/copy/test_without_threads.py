"""A process that cannot start threads: every call does its work in the calling thread."""

from __future__ import annotations

import pytest
from not_yet import NOT_YET_WITHOUT_THREADS
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
CALLS = {
    "H2D": 'same(tdcopier.start_copy([large], "sim:0").get()[0], large)',
    "H2D of a small batch": 'same(tdcopier.start_copy([large[:9]], "sim:0").wait()[0], large[:9])',
    "D2H": 'same(tdcopier.start_copy([large.to("sim:0")], "cpu").get()[0], large)',
    "D2D": 'same(tdcopier.start_copy([large.to("sim:0")], "sim:1").get()[0], large)',
    "prepare": 'same(tdcopier.prepare([large], "sim:0").start_copy([large]).get()[0], large)',
    "filling a device": """
static = [torch.zeros_like(large, device="sim:0")]
same(tdcopier.start_copy_into([large], static).get()[0], large)
""",
    "filling the host": """
static = [torch.zeros_like(large)]
same(tdcopier.start_copy_into([large.to("sim:0")], static).get()[0], large)
same(tdcopier.start_copy_into([large + 1], static).get()[0], large + 1)
""",
    "gather": """
rows = tdcopier.start_gather([large.view(512, -1)], index, "sim:0").get()[0]
same(rows, large.view(512, -1)[index])
""",
    "gather to the host": """
rows = tdcopier.start_gather([large.view(512, -1)], index, "cpu").get()[0]
same(rows, large.view(512, -1)[index])
""",
    "scatter": """
storage = torch.zeros_like(large).view(512, -1)
batch = large.view(512, -1)[index]
tdcopier.start_scatter([batch.to("sim:0")], [storage], index).get()
same(storage[index], batch)
""",
    "prefetch in the loop": """
for batch in tdcopier.prefetch([[large]] * 3, "sim:0", threaded=False):
    same(batch[0], large)
""",
    "dropped handles": """
for _ in range(3):
    tdcopier.start_copy([large.pin_memory()], "sim:0")
    tdcopier.start_copy([large.to("sim:1")], "cpu")
torch.sim.synchronize("sim:0")
torch.sim.synchronize("sim:1")
""",
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_works_where_no_thread_can_be_made(
    call: str, request: pytest.FixtureRequest
) -> None:
    if call in NOT_YET_WITHOUT_THREADS:
        request.applymarker(pytest.mark.xfail(reason=NOT_YET_WITHOUT_THREADS[call], strict=True))
    run_python(PROGRAM + CALLS[call])


INLINE = {
    "H2D": 'same(tdcopier.start_copy([large], "sim:0", **inline).get()[0], large)',
    "gather to the host": """
rows = tdcopier.start_gather([large.view(512, -1)], index, "cpu", **inline).get()[0]
same(rows, large.view(512, -1)[index])
""",
    "filling a device": """
static = [torch.zeros_like(large, device="sim:0")]
same(tdcopier.start_copy_into([large], static, **inline).get()[0], large)
""",
    "filling the host": """
static = [torch.zeros_like(large)]
same(tdcopier.start_copy_into([large], static, **inline).get()[0], large)
""",
}


@pytest.mark.parametrize("call", INLINE)
def test_no_thread_is_made_for_a_call_that_is_to_use_none(
    call: str, request: pytest.FixtureRequest
) -> None:
    if f"{call} inline" in NOT_YET_WITHOUT_THREADS:
        reason = NOT_YET_WITHOUT_THREADS[f"{call} inline"]
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True))
    code = "\ninline = {'use_background_thread': False}\n" + INLINE[call]
    told = run_python(PROGRAM + code + "\nprint(faults[0].fired)")
    assert told == "False\n"


def test_the_attempts_to_make_threads_are_what_fails() -> None:
    told = run_python(PROGRAM + CALLS["H2D"] + "\nprint(faults[0].struck)")
    assert told == "the creation of a thread\n"
