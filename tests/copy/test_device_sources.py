"""Sources on a device: copies of them that fail."""

from __future__ import annotations

import weakref

import pytest
import torch
from filled_leaves import filled
from sim_support import BRIEFLY, becomes
from support import are_released

import tdcopier
from tdcopier import _C


@pytest.fixture
def no_memory(sim, device, other_device):
    """Makes a device refuse allocations beyond its present use and a few bytes more."""

    def limit(place: str, more_bytes: int = 0) -> None:
        sim.synchronize()
        _C.testing.settle()  # what earlier copies have kept must not come back later
        torch.sim.empty_cache()
        sim.set_memory_limit_bytes(place, sim.memory_stats(place).reserved_bytes + more_bytes)

    yield limit
    for place in (device, other_device):
        sim.set_memory_limit_bytes(place, None)


def assert_fails_every_time(handle: tdcopier.AsyncCopyHandle) -> None:
    for ask in (handle.get, handle.wait, handle.get, handle.wait):
        with pytest.raises(torch.OutOfMemoryError, match="is out of memory"):
            ask()
        assert becomes(handle.ready)


def test_what_a_failed_copy_has_enqueued_keeps_its_sources_until_it_was_read(
    stall, device, reading_stream, no_memory
):
    """Memory suffices for the gathered chunk, but not for the leaf with gaps, copied alone."""
    leaves = filled(1, [250, 250], device)
    leaves.append(torch.ones(600, 600, device=device)[:, ::2])
    alive = [weakref.ref(leaf) for leaf in leaves]
    no_memory(device, more_bytes=2560)
    with stall(reading_stream):
        handle = tdcopier.start_copy(leaves, "cpu")
        assert_fails_every_time(handle)
        assert handle.stats.transfers == 1
        leaves.clear()
        del handle
        tdcopier.copy([torch.ones(2)], "cpu")
        assert all(ref() is not None for ref in alive)
    assert are_released(alive)


@pytest.mark.sim
@pytest.mark.parametrize("first_fails", [True, False])
def test_one_device_that_fails_fails_the_whole_of_a_mixed_copy(
    sim, device, other_device, no_memory, first_fails
):
    tree = [torch.ones(3), *filled(1, [100, 50], device), *filled(1, [100, 50], other_device)]
    alive = [weakref.ref(leaf) for leaf in tree]
    no_memory(device if first_fails else other_device)
    handle = tdcopier.start_copy(tree, "cpu")
    assert_fails_every_time(handle)
    tree.clear()
    del handle
    assert are_released(alive)


def test_an_error_comes_at_once_though_the_rest_of_the_copy_is_late(
    stall, device, other_device, no_memory
):
    leaves = filled(1, [100, 50], device) + filled(1, [100, 50], other_device)
    no_memory(device)
    with stall(_C.copy_stream(other_device, "from_device")):
        handle = tdcopier.start_copy(leaves, "cpu")
        with pytest.raises(torch.OutOfMemoryError):
            handle.get()  # hangs if it waits for the other device first
        assert not becomes(handle.ready, within=BRIEFLY)  # the other device is still copying
    assert becomes(handle.ready)
