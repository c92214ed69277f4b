"""`wait_staged`: after it the sources may be overwritten, long before the copy is done."""

from __future__ import annotations

import pytest
import torch
from filled_leaves import filled, refill, values_of
from sim_support import BRIEFLY, becomes
from thread_support import Call, let_go_without_the_gil

import tdcopier
from tdcopier import _C

# ---- sources on the host -------------------------------------------------------------------------


def test_host_sources_may_be_written_once_workers_have_read_them(device):
    leaves = filled(1, [1 << 20, 3 << 20, 5], "cpu")
    handle = tdcopier.start_copy(leaves, device)
    handle.wait_staged()
    for leaf in leaves:
        leaf.fill_(2)
    assert values_of(handle.get()) == {1}


@pytest.mark.sim
@pytest.mark.parametrize("pinned", [True, False])
def test_it_waits_until_the_last_byte_was_read_and_leaves_the_gil_free(
    sim, device, copy_stream, pinned
):
    """The second staging buffer, or the only pageable transfer, waits for the held stream."""
    tdcopier.limits.set_staging_bytes(4 << 20)
    tdcopier.pinned.staging_bytes(device)
    leaf = torch.full((2 << 20,), 1.0)
    hold = sim.hold(copy_stream)
    handle = tdcopier.start_copy([leaf], device, use_pinned_staging=pinned)
    with let_go_without_the_gil(hold) as order:
        handle.wait_staged()
        order.append("staged")
    assert order == ["let go", "staged"]
    leaf.fill_(2)
    assert values_of(handle.get()) == {1}


# ---- sources on a device -------------------------------------------------------------------------


def test_it_waits_for_the_last_chunk(stall, away, accelerator):
    """The last leaves are overwritten first, as soon as the stream may."""
    source, target = away
    leaves = filled(1, [100] * 80, source)
    with stall(_C.copy_stream(source, "from_device")):
        handle = tdcopier.start_copy(leaves, target, max_packed_chunk_bytes=900)  # two leaves each
        assert handle.stats.chunks == 40
        handle.wait_staged()
        refill(leaves[::-1], 2)
    assert values_of(handle.get()) == {1}


def test_it_waits_for_the_read_and_not_for_the_transfer(stall, device, other_device, accelerator):
    """Gathered leaves have been read once they are in the chunk; the target is late."""
    leaves = filled(1, [10, 20], device)
    with stall(_C.copy_stream(other_device, "ordered")):
        handle = tdcopier.start_copy(leaves, other_device)
        handle.wait_staged()
        assert becomes(accelerator.current_stream(device).query)
        assert not handle.ready()
    assert values_of(handle.get()) == {1}


def test_each_device_of_a_mixed_tree_gets_its_own_order(stall, device, other_device, accelerator):
    tree = {place: filled(1, [10, 20], place) for place in ("cpu", device, other_device)}
    with stall(_C.copy_stream(other_device, "from_device")):
        handle = tdcopier.start_copy(tree, "cpu")
        handle.wait_staged()
        for place in (device, other_device):
            with accelerator.device(place):
                refill(tree[place], 2)
        assert becomes(accelerator.current_stream(device).query)
        assert not becomes(accelerator.current_stream(other_device).query, within=BRIEFLY)
    assert {place: values_of(leaves) for place, leaves in handle.get().items()} == {
        "cpu": {1}, device: {1}, other_device: {1},
    }  # fmt: skip
    assert values_of(tree[device]) == values_of(tree[other_device]) == {2}


# ---- other cases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("tree", [[], {"a": "text"}, [torch.empty(0)]], ids=str)
def test_where_there_is_nothing_to_read_it_returns(device, tree):
    for target in (device, "cpu"):
        handle = tdcopier.start_copy(tree, target)
        handle.wait_staged()
        assert handle.ready()


def test_it_may_be_called_again_and_after_the_copy_is_done(away, accelerator):
    source, target = away
    handle = tdcopier.start_copy(filled(1, [10, 20], source), target)
    for _ in range(3):
        handle.wait_staged()
    handle.get()
    handle.wait_staged()
    assert values_of(handle.get()) == {1}


def test_a_host_thread_that_waits_is_let_go_with_the_others(stall, device, copy_stream):
    """Several threads wait for one copy at once."""
    tdcopier.limits.set_staging_bytes(4 << 20)
    tdcopier.pinned.staging_bytes(device)
    leaf = torch.full((2 << 20,), 1.0)
    with stall(copy_stream):
        handle = tdcopier.start_copy([leaf], device)
        calls = [Call(call) for call in (handle.wait_staged, handle.get, handle.wait) for _ in "ab"]
        assert not becomes(lambda: not all(call.is_running() for call in calls), within=BRIEFLY)
    for call in calls:
        call.join()
    assert values_of(handle.get()) == {1}
