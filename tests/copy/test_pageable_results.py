"""Tests results on the host if no more memory can be pinned: they are pageable.

Any other error of a pinned allocation is raised.
"""

from __future__ import annotations

import pytest
import torch
from fault_support import assert_gives_back, in_use, leaves_on, sizes
from fault_support import warm as warm
from filled_leaves import values_of
from sim_support import fresh as fresh

import tdcopier

pytestmark = pytest.mark.sim


@sizes
@pytest.mark.parametrize("n", [1, 2])
def test_results_are_pageable_if_no_more_memory_can_be_pinned(sim, elements, n):
    batch = leaves_on(["sim:0"], elements, 3.0)
    before = in_use(sim)
    with sim.fail_pinned_allocation(n):
        handle = tdcopier.start_copy(batch, "cpu", max_packed_chunk_bytes=1)
        result = handle.get()
    assert handle.stats.fallbacks == 1
    assert values_of(result) == {3}
    assert not any(leaf.is_pinned() for leaf in result)
    del handle, result
    assert_gives_back(sim, before)


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
def test_gathered_rows_are_pageable_if_no_more_memory_can_be_pinned(sim, place):
    tables = leaves_on([place], [40, 50_000], 3.0)
    storage, index = {"a": tables[0], "b": tables[1][:40]}, torch.arange(30)
    usual = tdcopier.start_gather(storage, index, "cpu")  # its own code reads tables on a device
    assert usual.get()["a"].is_pinned()
    with sim.fail_pinned_allocation(1):
        handle = tdcopier.start_gather(storage, index, "cpu")
        result = handle.get()
    assert handle.stats.fallbacks == usual.stats.fallbacks + 1
    assert values_of(list(result.values())) == {3}
    assert not result["a"].is_pinned()


ILLEGAL_ADDRESS = 700  # an error code of CUDA: an earlier kernel has broken the device


@pytest.mark.parametrize("place", ["cpu", "sim:0"])
@pytest.mark.parametrize("code", [ILLEGAL_ADDRESS, 1, 3, 999])
def test_another_error_of_the_device_in_a_pinned_allocation_is_raised(sim, place, code):
    """Pageable memory would hide it: only a lack of memory has that way out."""
    batch = leaves_on([place], [40, 10], 3.0)
    before = in_use(sim)
    calls = {
        "gather": lambda: tdcopier.start_gather(batch[:1], torch.arange(30), "cpu"),
        "copy": lambda: tdcopier.start_copy(batch, "cpu"),
    }
    if place == "cpu":
        del calls["copy"]  # leaves on the host are reused
    for call in calls.values():
        usual = call().stats.fallbacks  # tables on a device are read by their own code
        with sim.fail_pinned_allocation(code=code) as fault:
            handle = call()
            for ask in (handle.get, handle.wait, handle.get):
                with pytest.raises(torch.AcceleratorError) as caught:
                    ask()
                assert str(caught.value).startswith(f"{fault.struck} was made to fail")
                assert caught.value.error_code == code
        assert handle.stats.fallbacks == usual
        del handle, caught, ask
        assert call().get()[0].is_pinned()
    assert_gives_back(sim, before)


def test_a_call_can_insist_on_pinned_results(sim):
    batch = leaves_on(["sim:0"], [10, 10], 3.0)
    with sim.fail_pinned_allocation(1):
        handle = tdcopier.start_copy(batch, "cpu", require_pinned_results=True)
        for _ in range(2):
            with pytest.raises(torch.AcceleratorError, match="pinned"):
                handle.get()
    assert tdcopier.copy(batch, "cpu", require_pinned_results=True)[0].is_pinned()
    with pytest.raises(ValueError, match="needs use_pinned_staging=True"):
        tdcopier.copy(batch, "cpu", require_pinned_results=True, use_pinned_staging=False)


def test_a_pageable_result_does_not_hold_the_caller_while_a_kernel_runs(sim):
    batch = leaves_on(["sim:0"], [10, 10], 3.0)
    with sim.hold(), sim.fail_pinned_allocation(1):
        handle = tdcopier.start_copy(batch, "cpu")  # would not return
        assert not handle.ready()
    assert values_of(handle.get()) == {3}
