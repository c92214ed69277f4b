"""Copies from devices, to the host and to other devices: results and order."""

from __future__ import annotations

import pytest
import torch
from catalogue import ramp
from filled_leaves import filled, refill, sizes, values_of
from sim_support import BRIEFLY, becomes
from support import assert_same, oracle
from thread_support import let_go_without_the_gil

import tdcopier
from tdcopier import _C
from tdcopier.workloads import detection_batch

# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("ask", ["get", "wait"])
@pytest.mark.parametrize("pinned", [True, False])
def test_what_arrives_on_the_host_is_pinned_unless_the_caller_wants_none(device, ask, pinned):
    leaves = [ramp(device, 10), ramp(device, 70_000), ramp(device, 4, 6)[:, ::2], ramp(device, 7)]
    handle = tdcopier.start_copy(leaves, "cpu", use_pinned_staging=pinned)
    got = getattr(handle, ask)()
    assert [leaf.is_pinned() for leaf in got] == [pinned] * 4
    assert_same(got, oracle(leaves, "cpu"))


def test_pinned_results_do_not_count_as_staging(device):
    before = tdcopier.staging_bytes(device)
    tdcopier.copy([ramp(device, 10), ramp(device, 70_000)], "cpu")
    assert tdcopier.staging_bytes(device) == before


@pytest.mark.sim
def test_the_detection_batch_is_gathered_and_comes_back_in_a_transfer_for_each_dtype(sim, device):
    batch = oracle(detection_batch(), device)
    sim.reset_counts()
    handle = tdcopier.start_copy(batch, "cpu")
    handle.get()
    assert sim.counts().d2h == (3, handle.stats.transfer_bytes)
    assert handle.stats.packed_leaves == 528
    assert handle.stats.chunks == 3


@pytest.mark.sim
def test_the_detection_batch_goes_to_another_device_in_a_transfer_for_each_dtype(
    sim, device, other_device
):
    batch = oracle(detection_batch(), device)
    sim.reset_counts()
    handle = tdcopier.start_copy(batch, other_device)
    handle.get()
    assert sim.counts().d2d == (3, handle.stats.transfer_bytes)
    assert sim.counts().h2d == sim.counts().d2h == (0, 0)
    assert handle.stats.packed_leaves == 528


def test_a_tree_that_went_to_a_device_and_back_is_what_it_was(device):
    tree = {"a": [ramp("cpu", 3), ramp("cpu", 4, 5).t()], "b": (ramp("cpu", 70_000), "text")}
    assert_same(tdcopier.copy(tdcopier.copy(tree, device), "cpu"), tree)


# ---- order after work that was enqueued before ---------------------------------------------------


@sizes
@pytest.mark.parametrize("background", [True, False])
def test_sources_are_read_behind_what_their_current_stream_has(
    away, accelerator, stall, elements, background
):
    source, target = away
    leaves = filled(1, elements, source)
    with stall(accelerator.current_stream(source)):
        refill(leaves, 2)
        # Hangs if the call waits for the stream.
        handle = tdcopier.start_copy(leaves, target, use_background_thread=background)
        assert not becomes(handle.ready, within=BRIEFLY)
    assert values_of(handle.get()) == {2}


@sizes
def test_that_goes_for_a_stream_that_is_not_the_default_one(away, accelerator, stall, elements):
    source, target = away
    leaves = filled(1, elements, source)
    writer = accelerator.Stream(device=source)
    with accelerator.stream(writer), stall(writer):
        refill(leaves, 2)
        handle = tdcopier.start_copy(leaves, target)
        assert not becomes(handle.ready, within=BRIEFLY)
    assert values_of(handle.get()) == {2}


def test_other_streams_of_the_source_are_not_waited_for(stall, away, accelerator):
    source, target = away
    leaves = filled(1, [5, 6], source)
    with (
        stall(accelerator.default_stream(source)),
        accelerator.stream(accelerator.Stream(device=source)),
    ):
        got = tdcopier.start_copy(leaves, target).get()  # hangs if it waits
    assert values_of(got) == {1}


def test_without_pinned_memory_the_call_does_not_wait_for_the_source_either(
    stall, device, accelerator
):
    leaves = filled(1, [5, 6], device)
    with stall(accelerator.current_stream(device)):
        refill(leaves, 2)
        handle = tdcopier.start_copy(leaves, "cpu", use_pinned_staging=False)
        assert handle.stats.background
        assert not becomes(handle.ready, within=BRIEFLY)
    assert values_of(handle.get()) == {2}


@pytest.mark.sim
@sizes
def test_get_of_what_goes_to_the_host_waits_for_its_arrival(sim, device, reading_stream, elements):
    """Another thread releases the transfer, and must run Python code for it."""
    leaves = filled(3, elements, device)
    for ask in ("get", "wait"):
        hold = sim.hold(reading_stream)
        handle = tdcopier.start_copy(leaves, "cpu")
        with let_go_without_the_gil(hold) as order:
            got = getattr(handle, ask)()
            order.append("arrived")
        assert order == ["let go", "arrived"]
        assert values_of(got) == {3}


# ---- streams that wait for the copy --------------------------------------------------------------


@sizes
@pytest.mark.parametrize("late", ["source", "target"])
def test_a_consumer_on_another_device_waits_for_a_copy_that_is_late(
    stall, device, other_device, accelerator, elements, late
):
    leaves = filled(7, elements, device)
    consumer = accelerator.Stream(device=other_device)
    stalled = _C.copy_stream(device, "from_device")
    if late == "target":
        stalled = _C.copy_stream(other_device, "ordered")
    with stall(stalled):
        handle = tdcopier.start_copy(leaves, other_device)
        with accelerator.stream(consumer):
            moved = handle.wait()
            copied = [torch.empty_like(leaf) for leaf in moved]
            for to, leaf in zip(copied, moved, strict=True):
                to.copy_(leaf, non_blocking=True)
        assert not becomes(consumer.query, within=BRIEFLY)
        assert not handle.ready()
    consumer.synchronize()
    assert values_of(copied) == {7}


def test_a_given_stream_of_the_target_is_the_one_that_waits(
    stall, device, other_device, accelerator, reading_stream
):
    consumer = accelerator.Stream(device=other_device)
    with stall(reading_stream):
        handle = tdcopier.start_copy(filled(1, [3], device), other_device)
        handle.wait(consumer)
        assert not becomes(consumer.query, within=BRIEFLY)
        assert becomes(accelerator.current_stream(other_device).query)
        with pytest.raises(ValueError, match="give a stream of that device"):
            handle.wait(accelerator.current_stream(device))
    consumer.synchronize()


@pytest.mark.parametrize("hand_over", ["get", "wait"])
def test_memory_on_another_device_is_not_reused_while_a_consumer_can_still_read_it(
    stall, device, other_device, accelerator, hand_over
):
    consumer = accelerator.Stream(device=other_device)
    tdcopier.set_run_ahead_limit(1000)
    kept = []
    with accelerator.stream(consumer), stall(consumer):
        for value in range(20):
            handle = tdcopier.start_copy(filled(float(value), [50, 9], device), other_device)
            moved = getattr(handle, hand_over)()
            late = torch.empty(50, device=other_device)
            late.copy_(moved[0], non_blocking=True)
            kept.append(late)
            del moved, handle
    consumer.synchronize()
    assert [late[0].item() for late in kept] == list(range(20))


def test_streams_of_ones_own_on_every_side(away, accelerator):
    """Data that changes each round on one stream, consumed on another, compared at the end."""
    source, target = away
    writer = accelerator.Stream(device=source)
    leaves = filled(0, [300, 40, 5], source)
    accelerator.synchronize()
    sums, expected = [], []
    reader = accelerator.Stream(device=target) if target != "cpu" else None
    for i in range(50):
        with accelerator.stream(writer):
            refill(leaves, float(i))
            handle = tdcopier.start_copy(leaves, target)
            handle.wait_staged()  # the next round may overwrite them
        with accelerator.stream(reader):
            sums.append(sum(leaf.sum() for leaf in handle.wait()))
        expected.append(345.0 * i)
    for place in {source, target} - {"cpu"}:
        accelerator.synchronize(place)
    assert [total.item() for total in sums] == expected


# ---- several source devices ----------------------------------------------------------------------


def mixed(device: str, other_device: str) -> dict[str, list[torch.Tensor]]:
    return {
        place: [ramp(place, 30), ramp(place, 4, 3).t(), ramp(place, 70_000)]
        for place in ("cpu", device, other_device)
    }


@pytest.mark.parametrize("target", ["cpu", "device", "other device"])
def test_leaves_of_several_devices_arrive_together(device, other_device, target):
    target = {"cpu": "cpu", "device": device, "other device": other_device}[target]
    tree = mixed(device, other_device)
    handle = tdcopier.start_copy(tree, target)
    got = handle.get()
    assert_same(got, oracle(tree, target))
    assert all(a is b for a, b in zip(got[target], tree[target], strict=True))
    assert handle.stats[:5] == (4, 2, 0, 3, 0)
    assert (handle.stats.chunks, handle.stats.transfers) == (4, 4)


@pytest.mark.parametrize("late", ["device", "other device"])
def test_a_mixed_copy_is_ready_when_all_of_it_has_arrived(
    stall, device, other_device, accelerator, late
):
    tree = mixed(device, other_device)
    consumer = accelerator.Stream(device=device)
    stalled = _C.copy_stream(device, "to_device")
    if late == "other device":
        stalled = _C.copy_stream(other_device, "from_device")
    with stall(stalled):
        handle = tdcopier.start_copy(tree, device)
        handle.wait(consumer)
        assert not becomes(consumer.query, within=BRIEFLY)
        assert not handle.ready()
    consumer.synchronize()
    assert_same(handle.get(), oracle(tree, device))
    assert handle.ready()


def test_each_source_device_is_read_behind_its_own_current_stream(
    stall, device, other_device, accelerator
):
    leaves = filled(1, [3, 4], device) + filled(1, [3, 4], other_device)
    for held in (device, other_device):
        with stall(accelerator.current_stream(held)):
            refill([leaf for leaf in leaves if str(leaf.device) == held], 2)
            handle = tdcopier.start_copy(leaves, "cpu")
            assert not becomes(handle.ready, within=BRIEFLY)
        handle.get()
    assert values_of(handle.get()) == {2}
