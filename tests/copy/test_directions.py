"""Copies from devices, to the host and to other devices: results and order."""

from __future__ import annotations

import pytest
import torch
from catalogue import ramp
from filled_leaves import filled, refill, values_of
from sim_support import BRIEFLY, becomes
from support import assert_same, oracle

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
    before = tdcopier.pinned.staging_bytes(device)
    tdcopier.copy([ramp(device, 10), ramp(device, 70_000)], "cpu")
    assert tdcopier.pinned.staging_bytes(device) == before


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
