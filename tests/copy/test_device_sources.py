"""Sources on a device: how long they are kept, and copies of them that fail or are dropped."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from filled_leaves import filled, sizes, values_of
from sim_support import BRIEFLY, becomes
from support import are_released

import tdcopier
from tdcopier import _C

# ---- lifetime ------------------------------------------------------------------------------------


@sizes
def test_sources_that_are_dropped_right_after_the_call_are_copied_all_the_same(
    away, accelerator, stall, elements
):
    """Otherwise their memory would be the first that the same stream reuses."""
    source, target = away
    late = accelerator.Stream(device=source)
    leaves = filled(1, elements, source)
    accelerator.synchronize()
    with stall(late):
        with accelerator.stream(late):
            handle = tdcopier.start_copy(leaves, target)
        leaves.clear()
        others = [filled(9, elements, source) for _ in range(4)]
        accelerator.current_stream(source).synchronize()
    assert values_of(handle.get()) == {1}
    assert values_of([leaf for leaves in others for leaf in leaves]) == {9}


@sizes
def test_sources_are_kept_until_the_device_has_read_them_and_no_longer(stall, away, elements):
    source, target = away
    leaves = filled(1, elements, source)
    alive = [weakref.ref(leaf) for leaf in leaves]
    with stall(_C.copy_stream(source, "from_device")):
        handle = tdcopier.start_copy(leaves, target)
        leaves.clear()
        tdcopier.copy([torch.ones(2)], "cpu")  # a call would release returned references
        assert all(ref() is not None for ref in alive)
    # The handle is not used: a pending call of the interpreter releases them.
    assert are_released(alive)
    assert values_of(handle.get()) == {1}


@sizes
@pytest.mark.parametrize("stream", ["copy stream", "current stream"])
def test_a_handle_that_is_dropped_early_does_not_block_and_lets_go_of_its_sources(
    stall, away, accelerator, elements, stream
):
    source, target = away
    leaves = filled(1, elements, source)
    alive = [weakref.ref(leaf) for leaf in leaves]
    late = accelerator.current_stream(source)
    if stream == "copy stream":
        late = _C.copy_stream(source, "from_device")
    with stall(late):
        handle = tdcopier.start_copy(leaves, target)
        leaves.clear()
        del handle  # hangs if it waits for the device
        gc.collect()
    assert are_released(alive)
    assert values_of(tdcopier.copy(filled(2, elements, source), target)) == {2}


@pytest.mark.parametrize("elements", [[100, 50], [70_000]], ids=["packed", "alone"])
def test_pinned_results_that_are_dropped_early_are_not_reused_early(
    device, accelerator, stall, elements
):
    """The transfer still writes to them, and would overwrite memory that was reused too early."""
    leaves = filled(1, elements, device)
    accelerator.synchronize()
    with stall(accelerator.current_stream(device)):
        handles = [tdcopier.start_copy(leaves, "cpu") for _ in range(3)]
        handles.clear()
        gc.collect()
        others = [torch.full((sum(elements),), 5.0).pin_memory() for _ in range(6)]
    accelerator.synchronize()
    assert values_of(others) == {5}


@pytest.mark.sim
def test_pinned_results_are_given_back_when_they_are_dropped(sim, device):
    tdcopier.copy(filled(1, [100, 50, 70_000], device), "cpu")
    gc.collect()
    before = sim.pinned_bytes().in_use
    kept = tdcopier.copy(filled(1, [100, 50, 70_000], device), "cpu")
    assert sim.pinned_bytes().in_use > before
    del kept
    assert sim.pinned_bytes().in_use == before


def test_a_copy_leaves_no_memory_behind_on_the_source(away, accelerator):
    source, target = away
    leaves = filled(1, [100, 50, 70_000], source)
    before = accelerator.memory_allocated(source)
    handle = tdcopier.start_copy(leaves, target)
    handle.get()
    assert accelerator.memory_allocated(source) == before  # the gathered chunk is freed


def test_results_outlive_the_handle_and_the_sources(away):
    source, target = away
    moved = tdcopier.start_copy(filled(4, [100, 50, 70_000], source), target).wait()
    gc.collect()
    others = [filled(9, [100, 50, 70_000], source) for _ in range(3)]
    assert values_of(moved) == {4}
    assert len(others) == 3


def test_a_source_whose_last_reference_the_copy_holds_is_finalised_with_the_gil(away):
    source, target = away
    finalised = []
    alive = []
    for value in range(20):
        leaves = filled(float(value), [1 << 18, 3], source)
        for leaf in leaves:
            weakref.finalize(leaf, finalised.append, value)
            alive.append(weakref.ref(leaf))
        handle = tdcopier.start_copy(leaves, target)
        del leaves, leaf
        handle.get()
    assert are_released(alive)
    assert sorted(finalised) == sorted([*range(20), *range(20)])


# ---- failures ------------------------------------------------------------------------------------


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


@pytest.mark.sim
@pytest.mark.parametrize("elements", [[100, 50], [1 << 18, 3, 4]], ids=["inline", "background"])
def test_a_gather_that_finds_no_memory_fails_the_copy(sim, device, no_memory, elements):
    leaves = filled(1, elements, device)
    alive = [weakref.ref(leaf) for leaf in leaves]
    no_memory(device)
    handle = tdcopier.start_copy(leaves, "cpu")
    assert_fails_every_time(handle)
    leaves.clear()
    assert are_released(alive)
    sim.set_memory_limit_bytes(device, None)
    assert values_of(tdcopier.copy(filled(2, elements, device), "cpu")) == {2}


@pytest.mark.sim
@pytest.mark.parametrize("elements", [[100, 50], [100], [1 << 18]])
def test_a_target_device_without_memory_fails_the_copy(
    sim, device, other_device, no_memory, elements
):
    leaves = filled(1, elements, device)
    alive = [weakref.ref(leaf) for leaf in leaves]
    no_memory(other_device)
    handle = tdcopier.start_copy(leaves, other_device)
    assert_fails_every_time(handle)
    leaves.clear()
    assert are_released(alive)
    sim.set_memory_limit_bytes(other_device, None)
    assert values_of(tdcopier.copy(filled(2, elements, device), other_device)) == {2}


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
