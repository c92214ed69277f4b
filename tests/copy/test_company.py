"""Copies beside other copies and the caller's kernels: which of these each must not wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from sim_support import becomes

import tdcopier
from tdcopier import _C

SMALL, LARGE = 1_000, 300_000  # floats: packed, and alone


# Each prepares a copy, and returns a function that starts it.


def _to_host(device: str) -> Callable[[], Any]:
    source = torch.ones(SMALL, device=device)
    return lambda: tdcopier.start_copy([source], "cpu")


def _into_device(device: str) -> Callable[[], Any]:
    source, destination = torch.ones(LARGE), torch.zeros(LARGE, device=device)
    return lambda: tdcopier.start_copy_into([source], [destination])


def _into_device_scattered(device: str) -> Callable[[], Any]:
    source, destination = torch.ones(40, 50), torch.zeros(40, 100, device=device)[:, ::2]
    return lambda: tdcopier.start_copy_into([source], [destination])


def _into_host(device: str) -> Callable[[], Any]:
    source, destination = torch.ones(LARGE, device=device), torch.zeros(LARGE)
    return lambda: tdcopier.start_copy_into([source], [destination])


def _within(device: str) -> Callable[[], Any]:
    source, destination = torch.ones(SMALL, device=device), torch.zeros(SMALL, device=device)
    return lambda: tdcopier.start_copy_into([source], [destination])


def _scatter(device: str) -> Callable[[], Any]:
    rows, storage = torch.ones(8, SMALL, device=device), torch.zeros(64, SMALL)
    return lambda: tdcopier.start_scatter([rows], [storage], torch.arange(8))


OTHERS = {
    "D2H": _to_host,
    "into the device": _into_device,
    "scattered on the device": _into_device_scattered,
    "into the host": _into_host,
    "within the device": _within,
    "scatter of rows": _scatter,
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_a_copy_to_the_device_does_not_wait_for_kernels_that_another_copy_waits_for(
    stall, device, accelerator, other, size
):
    stream = accelerator.Stream(device=device)
    OTHERS[other](device)().get()  # work that only the first call does
    tdcopier.copy([torch.ones(size)], device)
    start = OTHERS[other](device)
    accelerator.synchronize()
    with stall(stream):
        with accelerator.stream(stream):
            late = start()
        handle = tdcopier.start_copy([torch.full((size,), 5.0)], device)
        assert becomes(handle.ready)
        assert not late.ready()
        assert not stream.query()
    late.get()
    assert handle.get()[0].eq(5).all()


def test_a_copy_to_another_device_keeps_no_copy_from_the_host_waiting(
    stall, device, other_device, accelerator
):
    stream = accelerator.Stream(device=device)
    source = torch.ones(SMALL, device=device)
    accelerator.synchronize()
    with stall(stream):
        with accelerator.stream(stream):
            late = tdcopier.start_copy([source], other_device)
        for target in (device, other_device):
            handle = tdcopier.start_copy([torch.full((SMALL,), 5.0)], target)
            assert becomes(handle.ready)
        assert not late.ready()
    assert late.get()[0].eq(1).all()


@pytest.mark.parametrize("size", [LARGE, 5_000_000])
def test_workers_are_free_while_a_large_fill_waits_for_kernels(stall, device, accelerator, size):
    stream = accelerator.Stream(device=device)
    source, destination = torch.ones(12_000_000), torch.zeros(12_000_000, device=device)
    other = torch.full((size,), 5.0)
    tdcopier.copy(other, device)
    for _ in range(1 if device.startswith("cuda") else 20):  # buffers are returned in any order
        accelerator.synchronize()
        with stall(stream):
            with accelerator.stream(stream):
                late = tdcopier.start_copy_into([source], [destination])
            handle = tdcopier.start_copy([other], device)
            assert becomes(handle.ready)
            assert not late.ready()
        assert late.get()[0].eq(1).all()
        assert handle.get()[0].eq(5).all()


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("call", ["wait", "get", "wait_staged"])
def test_a_mapped_source_may_be_refilled_as_soon_as_the_call_has_returned(
    device, size, call, tmp_path, slow_link
):
    """As in a loop that fills one buffer again and again."""
    path = str(tmp_path / "leaf")
    source = torch.from_file(path, shared=True, size=size, dtype=torch.float32)
    results = []
    with slow_link:
        for step in range(4):
            source.fill_(step)
            handle = tdcopier.start_copy({"batch": source}, device)
            getattr(handle, call)()
            source.fill_(-1)
            results.append(handle.wait()["batch"])
    assert [set(result.tolist()) for result in results] == [{0.0}, {1.0}, {2.0}, {3.0}]


@pytest.mark.sim
@pytest.mark.parametrize("call", ["to new memory", "into memory that exists", "to host memory"])
def test_staging_that_cannot_be_pinned_is_done_without_and_counted(sim, device, call):
    tdcopier.set_staging_limit_bytes(_C.STAGING_BUFFER_BYTES)
    _C.set_staging_limit_bytes(0)
    assert tdcopier.staging_bytes(device) == 0
    tdcopier.set_staging_limit_bytes(_C.DEFAULT_STAGING_LIMIT_BYTES)
    source = [torch.full((LARGE,), 5.0), torch.full((SMALL,), 5.0)]
    if call == "to host memory":
        source = [leaf.to(device) for leaf in source]
    with sim.fail_pinned_allocation(1) as fault:
        if call == "to new memory":
            handle = tdcopier.start_copy(source, device)
        else:
            target = "cpu" if call == "to host memory" else device
            handle = tdcopier.start_copy_into(
                source, [torch.zeros_like(leaf, device=target) for leaf in source]
            )
        result = handle.get()
        assert fault.fired
    assert all(leaf.eq(5).all() for leaf in result)
    assert handle.stats.fallbacks >= 1


@pytest.mark.sim
def test_staging_that_cannot_be_pinned_waits_for_a_buffer_that_comes_back(sim, device, copy_stream):
    tdcopier.set_staging_limit_bytes(_C.STAGING_BUFFER_BYTES)
    tdcopier.staging_bytes(device)
    first, second = torch.full((SMALL,), 1.0), torch.full((SMALL,), 2.0)
    with sim.hold(copy_stream):
        before = tdcopier.start_copy([first], device)  # occupies the only buffer
        tdcopier.set_staging_limit_bytes(_C.DEFAULT_STAGING_LIMIT_BYTES)
        _C.testing.set_max_inline_bytes(0)  # a worker waits for it
        try:
            with sim.fail_pinned_allocation(1) as fault:
                handle = tdcopier.start_copy([second], device)
                assert becomes(lambda: fault.fired)
        finally:
            _C.testing.set_max_inline_bytes(_C.MAX_INLINE_BYTES)
        assert not handle.ready()
    assert handle.get()[0].eq(2).all()
    assert before.get()[0].eq(1).all()
    assert handle.stats.fallbacks == 1


@pytest.mark.parametrize("target", ["device", "host"])
def test_a_result_is_saved_and_loaded_whole_and_leaf_by_leaf(device, target, tmp_path):
    batch = {"a": torch.rand(5, 3), "b": torch.ones(5, dtype=torch.bool), "c": torch.arange(7)}
    result = tdcopier.copy(batch, device)
    if target == "host":
        result = tdcopier.copy(result, "cpu")
    for number, saved in enumerate([result, *({"leaf": leaf} for leaf in result.values())]):
        path = tmp_path / f"{number}.pt"
        torch.save(saved, path)
        loaded = torch.load(path)
        assert all(torch.equal(loaded[key].cpu(), saved[key].cpu()) for key in saved)


@pytest.mark.sim
def test_a_copy_to_the_device_is_sent_while_pageable_results_wait_for_kernels(sim, device):
    source = [torch.ones(SMALL, device=device)]
    torch.sim.synchronize(device)
    with sim.hold(torch.sim.current_stream(device)):
        waiting = [
            tdcopier.start_copy(source, "cpu", use_pinned_staging=False)
            for _ in range(_C.default_worker_count() + 1)
        ]
        handle = tdcopier.start_copy([torch.ones(1 << 20)], device)  # workers stage it
        assert becomes(handle.ready)
        assert not any(each.ready() for each in waiting)
    for each in waiting:
        assert each.get()[0].eq(1).all()
    assert handle.get()[0].eq(1).all()


@pytest.mark.sim
def test_a_hand_over_whose_event_fails_is_counted_and_the_result_stands(sim, device):
    handle = tdcopier.start_copy([torch.full((SMALL,), 5.0)], device)
    assert becomes(handle.ready)
    before = handle.stats.fallbacks
    with sim.fail_event_record(1) as fault:
        result = handle.get()
        assert fault.fired
    assert handle.stats.fallbacks == before + 1
    assert result[0].eq(5).all()
