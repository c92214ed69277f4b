"""The times that a copy reports for its steps."""

from __future__ import annotations

import time

import pytest
import torch
from support import run_python

import tdcopier
from tdcopier import _C

STEPS = ["flatten", "plan", "stage", "enqueue", "outputs", "unflatten", "wait"]


def test_they_are_none_unless_they_are_asked_for(device):
    assert tdcopier.start_copy([torch.ones(3)], device).stats.steps is None
    with tdcopier.stats.time_steps():
        timed = tdcopier.start_copy([torch.ones(3)], device)
    after = tdcopier.start_copy([torch.ones(3)], device)
    assert timed.stats.steps is not None
    assert after.stats.steps is None


def test_the_switch_holds_until_all_have_left():
    first, second = tdcopier.stats.time_steps(), tdcopier.stats.time_steps()
    assert not _C.are_steps_timed()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert _C.are_steps_timed()
    second.__exit__(None, None, None)
    assert not _C.are_steps_timed()


@pytest.mark.parametrize("direction", ["H2D", "D2H"])
def test_every_step_of_a_copy_takes_some_time_and_no_more_than_all(device, direction):
    source = [torch.ones(20).to("cpu" if direction == "H2D" else device) for _ in range(200)]
    with tdcopier.stats.time_steps():
        begin = time.perf_counter()
        handle = tdcopier.start_copy(source, device if direction == "H2D" else "cpu")
        handle.get()
        whole_us = (time.perf_counter() - begin) * 1e6
    steps = handle.stats.steps
    assert [name.removesuffix("_us") for name in steps._fields] == STEPS
    if direction == "D2H" and _C.why_no_segment_kernel(device) == "":
        steps = steps._replace(enqueue_us=1)  # the kernel that gathers is also the transfer
    assert min(steps) > 0
    assert sum(handle.stats.steps) <= whole_us  # one thread copies so few bytes


def test_copy_into_takes_them_too(device):
    source, destination = [torch.ones(20)] * 50, list(torch.zeros(50, 20, device=device))
    with tdcopier.stats.time_steps():
        handle = tdcopier.start_copy_into(source, destination)
        handle.get()
    steps = handle.stats.steps
    assert min(steps.flatten_us, steps.plan_us, steps.stage_us, steps.enqueue_us, steps.wait_us) > 0
    assert steps.outputs_us == steps.unflatten_us == 0


def test_the_wait_is_the_hosts_alone(stall, device, copy_stream):
    with tdcopier.stats.time_steps():
        with stall(copy_stream):
            handle = tdcopier.start_copy([torch.ones(3)], device)
            before = handle.stats.steps
            handle.wait()
            assert handle.stats.steps.wait_us == before.wait_us == 0
        handle.get()
    assert handle.stats.steps.wait_us > 0


def test_they_show_as_ranges_of_the_profiler(device):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        tdcopier.copy([torch.ones(20)] * 50, device)
    seen = {event.key for event in profiler.key_averages()}
    assert {f"tdcopier: {step}" for step in STEPS} <= seen


def test_the_environment_switches_them_on():
    code = "import tdcopier; print(tdcopier._C.are_steps_timed())"
    assert run_python(code, TDCOPIER_TIME_STEPS="1").strip() == "True"
    assert run_python(code, TDCOPIER_TIME_STEPS="0").strip() == "False"
