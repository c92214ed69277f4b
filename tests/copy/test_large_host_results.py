"""Large results on the host, whose memory is leased from the pool of pinned memory."""

from __future__ import annotations

import io
import os
import pickle

import pytest
import torch
from pinned_pool_support import MIB, used_when_idle
from pinned_pool_support import all_comes_back as all_comes_back
from support import run_python

import tdcopier
from tdcopier._pinned_pool import lease

PAGE = os.sysconf("SC_PAGE_SIZE")

pytestmark = pytest.mark.usefixtures("all_comes_back")


def large_state(device: str) -> list[torch.Tensor]:
    """Makes 69 MB: leaves that share a piece of the pool, one that has its own, and a small one."""
    return [
        *(torch.randn(1_300_000, device=device) for _ in range(8)),
        torch.randn(3, 2_200_000, device=device).t(),
        torch.randn(5, device=device),
    ]


def test_large_results_are_leased_in_their_exact_sizes(device):
    source = large_state(device)
    handle = tdcopier.start_copy(source, "cpu")
    result = handle.get()
    assert all(got.equal(leaf.cpu()) for got, leaf in zip(result, source, strict=True))
    assert all(got.is_pinned() for got in result)
    assert handle.stats.fallbacks == 0
    large = sum(leaf.nbytes for leaf in source[:-1])
    del handle
    leased, free = used_when_idle()
    assert large <= leased < large + 10 * PAGE
    assert free == 0
    addresses = sorted(leaf.data_ptr() for leaf in result[:-1])
    del result
    assert used_when_idle() == (0, leased)
    result = tdcopier.copy(source, "cpu")
    assert sorted(leaf.data_ptr() for leaf in result[:-1]) == addresses
    assert used_when_idle() == (leased, 0)


def test_a_leaf_of_a_large_result_is_saved_pickled_shared_and_grown_alone(device):
    source = large_state(device)
    first, second, *_, last, small = tdcopier.copy(source, "cpu")
    for leaf, wanted in ((first, source[0]), (small, source[-1])):
        file = io.BytesIO()
        torch.save(leaf, file)
        assert len(file.getvalue()) < leaf.nbytes + 4000
        assert torch.load(io.BytesIO(file.getvalue())).equal(wanted.cpu())
        assert pickle.loads(pickle.dumps(leaf)).equal(wanted.cpu())
    assert last.stride() == source[-2].stride()
    first.resize_(2_000_000)
    assert first[:1_300_000].equal(source[0].cpu())
    assert second.equal(source[1].cpu())
    second.share_memory_()
    assert second.equal(source[1].cpu())
    second.add_(1)
    assert last.equal(source[-2].cpu())


def test_a_large_result_goes_to_torchs_allocator_if_the_pool_has_no_room(device):
    source = large_state(device)
    tdcopier.limits.set_pinned_bytes(64 * MIB)
    handle = tdcopier.start_copy(source, "cpu", require_pinned_results=True)
    assert all(got.equal(leaf.cpu()) for got, leaf in zip(handle.get(), source, strict=True))
    assert all(got.is_pinned() for got in handle.get())
    assert handle.stats.fallbacks == 1
    assert used_when_idle() == (0, 0)


def test_a_large_result_waits_for_no_device_to_get_room_in_the_pool(device, accelerator, stall):
    source = large_state(device)
    (leased,) = lease([60 * MIB])
    tdcopier.limits.set_pinned_bytes(80 * MIB)
    side = accelerator.Stream(device=device)
    with stall(accelerator.current_stream()):
        leased.to(device, non_blocking=True)
        del leased
        with accelerator.stream(side):
            handle = tdcopier.start_copy(source, "cpu")
        assert handle.stats.fallbacks == 1
        with pytest.raises(MemoryError, match="exceed the pool's limit"):
            lease([100 * MIB])  # nor does a lease, if that would not be enough
    assert all(got.equal(leaf.cpu()) for got, leaf in zip(handle.get(), source, strict=True))


@pytest.mark.sim
def test_a_forked_child_leases_no_results():
    run_python(
        """
import os, torch, tdcopier
from tdcopier import sim
sim.enable()
source = [torch.ones(20 << 20, device="sim:0")]
result = tdcopier.copy(source, "cpu")
assert tdcopier.pinned.usage().leased_bytes > 0
if os.fork() == 0:
    assert result[0][-1] == 1
    try:
        tdcopier.copy(source, "cpu")
    except RuntimeError:
        pass  # no device in a forked child
    os._exit(tdcopier.pinned.usage().leased_bytes != 0)
assert os.wait()[1] == 0
"""
    )


def test_smaller_results_are_not_leased(device):
    result = tdcopier.copy(large_state(device)[:5], "cpu")
    assert used_when_idle() == (0, 0)
    del result


def test_a_large_result_is_not_leased_again_while_another_stream_reads_it(
    device, accelerator, stall
):
    source = large_state(device)[:8] * 2
    result = tdcopier.copy(source, "cpu")
    side = accelerator.Stream(device=device)
    with stall(side):
        with accelerator.stream(side):
            copied = result[3].to(device, non_blocking=True)
        del result
        again = [torch.zeros_like(leaf) for leaf in source]
        other = tdcopier.copy(again, "cpu")
    side.synchronize()
    assert copied.equal(source[3])
    del other
