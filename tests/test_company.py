"""Copies beside one another and beside the caller's kernels: what each must not wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from filled_leaves import filled, refill, values_of
from sim_support import becomes

import tdcopier
from tdcopier import _C

SMALL, LARGE = 1_000, 300_000  # floats: packed, and alone


# Each makes what it needs, and returns the call.


def _to_host(device: str) -> Callable[[], Any]:
    source = torch.ones(SMALL, device=device)
    return lambda: tdcopier.start_copy([source], "cpu")


def _into_device(device: str) -> Callable[[], Any]:
    source, destination = torch.ones(LARGE), torch.zeros(LARGE, device=device)
    return lambda: tdcopier.copy_into([source], [destination])


def _into_device_scattered(device: str) -> Callable[[], Any]:
    source, destination = torch.ones(40, 50), torch.zeros(40, 100, device=device)[:, ::2]
    return lambda: tdcopier.copy_into([source], [destination])


def _into_host(device: str) -> Callable[[], Any]:
    source, destination = torch.ones(LARGE, device=device), torch.zeros(LARGE)
    return lambda: tdcopier.copy_into([source], [destination])


def _within(device: str) -> Callable[[], Any]:
    source, destination = torch.ones(SMALL, device=device), torch.zeros(SMALL, device=device)
    return lambda: tdcopier.copy_into([source], [destination])


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


def _pageable(size: int, folder: Any) -> torch.Tensor:
    return torch.zeros(size)


def _pinned(size: int, folder: Any) -> torch.Tensor:
    return torch.zeros(size).pin_memory()


def _mapped(size: int, folder: Any) -> torch.Tensor:
    return torch.from_file(str(folder / "leaf"), shared=True, size=size, dtype=torch.float32)


@pytest.mark.parametrize("make", [_pageable, _pinned, _mapped])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("call", ["wait", "get", "wait_staged"])
def test_a_host_source_may_be_refilled_as_soon_as_the_call_has_returned(
    device, make: Callable[..., torch.Tensor], size, call, tmp_path, slow_link
):
    """What a loop does that fills one buffer again and again."""
    source = make(size, tmp_path)
    results = []
    with slow_link:
        for step in range(4):
            source.fill_(step)
            handle = tdcopier.start_copy({"batch": source}, device)
            getattr(handle, call)()
            source.fill_(-1)
            results.append(handle.wait()["batch"])
    assert [set(result.tolist()) for result in results] == [{0.0}, {1.0}, {2.0}, {3.0}]


@pytest.mark.parametrize("call", ["wait", "wait_staged"])
def test_a_device_source_may_be_overwritten_on_its_stream_as_soon_as_the_call_has_returned(
    stall, device, other_device, accelerator, call
):
    leaves = filled(1, [10, 20], device)
    accelerator.synchronize()
    with stall(_C.copy_stream(device, "from_device")):
        handle = tdcopier.start_copy(leaves, other_device)
        getattr(handle, call)()
        refill(leaves, 2)
        assert not handle.ready()
    assert values_of(handle.get()) == {1}
    assert values_of(leaves) == {2}
