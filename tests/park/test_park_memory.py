"""The memory of parked states: who has it, when, and how much more is needed."""

from __future__ import annotations

import weakref

import pytest
import torch
from park_support import LARGE
from support import are_released

import tdcopier
from tdcopier import _C
from tdcopier import _pinned_pool as pinned


@pytest.mark.sim
def test_the_memory_returns_to_the_allocator_and_its_reuse_waits_for_the_copy(sim):
    tensor = torch.full((LARGE,), 3.0, device="sim")
    address = tensor.data_ptr()
    allocated = sim.memory_stats().allocated_bytes
    reading = _C.copy_stream("sim:0", "from_device")
    with sim.hold(reading):
        parked = tdcopier.park([tensor])
        assert sim.memory_stats().allocated_bytes <= allocated - 4 * LARGE
        assert not parked.ready()
        first = torch.zeros(LARGE, device="sim")
        assert first.data_ptr() != address
    parked.wait_parked()
    assert parked.ready()
    del first
    parked.resume()
    assert tensor.eq(3).all()
    assert sim.memory_stats().allocated_bytes == allocated


def test_allocated_memory_falls_in_the_call_and_rises_with_the_resume(device, accelerator):
    accelerator.synchronize()
    before = accelerator.memory_allocated(device)
    state = [torch.full((n,), 1.0, device=device) for n in (10, 5000, LARGE, 20 * LARGE)]
    held = accelerator.memory_allocated(device) - before
    for _ in range(3):
        parked = tdcopier.park(state)
        assert accelerator.memory_allocated(device) <= before + 2**21  # packed small ones
        parked.wait_parked()
        assert accelerator.memory_allocated(device) == before
        parked.resume()
        accelerator.synchronize()
        assert accelerator.memory_allocated(device) == before + held


@pytest.mark.cuda
def test_an_allocation_that_needs_the_memory_waits_for_the_copy(device, stall, reading_stream):
    state = [torch.full((50 * LARGE,), float(n), device=device) for n in range(4)]
    tdcopier.park(state).resume()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**22) / total)
    try:
        with stall(reading_stream):
            parked = tdcopier.park(state)
            other = [torch.full((50 * LARGE,), -1.0, device=device) for _ in range(4)]
        assert all(t.min().item() == t.max().item() == -1 for t in other)
        with pytest.raises(torch.OutOfMemoryError):
            parked.resume()
        del other
        parked.resume()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [t.mean().item() for t in state] == [0, 1, 2, 3]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_call_during_a_capture_is_refused(device):
    tensor = torch.full((LARGE,), 3.0, device=device)
    parked = tdcopier.park([torch.full((LARGE,), 4.0, device=device)])
    for call in (lambda: tdcopier.park([tensor]), parked.resume):
        with (
            pytest.raises(RuntimeError, match="capturing"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            call()
    parked.resume()
    assert tensor.eq(3).all()


@pytest.mark.sim
@pytest.mark.parametrize("ask", ["wait_parked", "ready", "resume"])
def test_memory_of_another_owner_is_released_when_the_copy_is_known_to_have_arrived(sim, ask):
    """Torch's allocator cannot be told of a use of memory that is not its own."""
    owner = torch.full((LARGE,), 3.0, device="sim")
    tensor = torch.from_dlpack(torch.utils.dlpack.to_dlpack(owner))
    del owner
    allocated = sim.memory_stats().allocated_bytes
    reading = _C.copy_stream("sim:0", "from_device")
    with sim.hold(reading):
        parked = tdcopier.park([tensor])
        assert sim.memory_stats().allocated_bytes == allocated
    sim.synchronize()
    if ask == "resume":
        parked.resume()
        torch.sim.synchronize()
        assert sim.memory_stats().allocated_bytes == allocated  # new memory, and not the old
    else:
        getattr(parked, ask)()
        assert sim.memory_stats().allocated_bytes <= allocated - 4 * LARGE
        parked.resume()
    assert tensor.eq(3).all()


@pytest.mark.sim
def test_the_extra_device_memory_is_bounded(sim):
    state = [torch.zeros(60_000, device="sim") for _ in range(700)]  # 168 MB of packed storages
    torch.sim.synchronize()
    torch.sim.reset_peak_memory_stats(0)
    before = sim.memory_stats().allocated_bytes
    parked = tdcopier.park(state)
    assert sim.memory_stats().peak_allocated_bytes - before <= 64 * 1024 * 1024
    parked.wait_parked()
    assert sim.memory_stats().allocated_bytes <= before - sum(t.numel() * 4 for t in state)
    torch.sim.reset_peak_memory_stats(0)
    parked.resume()
    torch.sim.synchronize()
    assert sim.memory_stats().peak_allocated_bytes - before <= 64 * 1024 * 1024


@pytest.mark.sim
def test_large_storages_are_transferred_from_and_to_where_they_are(sim):
    state = [torch.zeros(LARGE, device="sim") for _ in range(5)]
    torch.sim.synchronize()
    sim.reset_counts()
    parked = tdcopier.park(state)
    assert sim.counts().d2h == (5, 5 * 4 * LARGE)
    assert sim.counts().within == (0, 0)
    staging = tdcopier.pinned.staging_bytes("sim")
    parked.resume()
    assert sim.counts().h2d == (5, 5 * 4 * LARGE)
    assert sim.counts().within == (0, 0)
    assert tdcopier.pinned.staging_bytes("sim") == staging


@pytest.mark.sim
def test_small_storages_share_transfers(sim):
    state = [torch.full((100,), float(n), device="sim") for n in range(500)]
    torch.sim.synchronize()
    sim.reset_counts()
    parked = tdcopier.park(state)
    assert sim.counts().d2h.transfers <= 2
    parked.resume()
    assert sim.counts().h2d.transfers <= 2
    assert all(t.eq(n).all() for n, t in enumerate(state))


def test_the_pinned_memory_is_released_once_it_has_been_read(device, monkeypatch):
    leased = []

    def lease(sizes):
        made = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in sizes]
        leased.extend(weakref.ref(each) for each in made)
        return made

    monkeypatch.setattr("tdcopier._pinned_pool.lease", lease)
    state = [torch.zeros(LARGE, device=device) for _ in range(3)]
    parked = tdcopier.park(state)
    assert len(leased) == 3
    assert all(reference() is not None for reference in leased)
    parked.resume()
    torch.get_device_module(device).synchronize()
    assert are_released(leased)
    assert not parked.is_parked


def test_the_next_call_leases_the_memory_that_the_one_before_has_released(device, accelerator):
    state = [torch.zeros(LARGE, device=device)]
    addresses = set()
    of_torch = pinned.lease

    def lease(sizes):
        for each in of_torch(sizes):
            addresses.add(each.data_ptr())
            yield each

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "lease", lease)
        for _ in range(20):
            with tdcopier.parked(state):
                pass
            accelerator.synchronize()
    assert len(addresses) == 1


@pytest.mark.sim
def test_transfers_begin_while_later_memory_is_leased(sim, monkeypatch):
    monkeypatch.setattr("tdcopier._park.transfers.GROUP_BYTES", 10 * LARGE)
    of_pool = pinned.lease
    begun = []

    def lease(sizes):
        assert sizes == [4 * LARGE] * 5
        for part in of_pool(sizes):
            begun.append(sim.counts().d2h.transfers)
            yield part

    monkeypatch.setattr(pinned, "lease", lease)
    state = [torch.full((LARGE,), float(n), device="sim") for n in range(5)]
    torch.sim.synchronize()
    sim.reset_counts()
    with tdcopier.parked(state):
        assert begun == [0, 0, 2, 2, 4]
    assert [t[0].item() for t in state] == [0, 1, 2, 3, 4]


def test_without_memory_to_pin_everything_stays_resident(device):
    tdcopier.pinned.trim()  # of what other tests have returned
    use = tdcopier.pinned.usage()
    state = [torch.full((n,), 3.0, device=device) for n in (10, LARGE, 30_000_000)]
    tdcopier.limits.set_pinned_bytes(use.leased_bytes + use.free_bytes + 2**24)
    try:
        with pytest.raises(MemoryError, match="limit"):
            tdcopier.park(state)
    finally:
        tdcopier.limits.set_pinned_bytes(use.limit_bytes)
    assert all(t.eq(3).all() for t in state)
    with tdcopier.parked(state):
        pass
    assert all(t.eq(3).all() for t in state)


@pytest.mark.sim  # CUDA refuses to resize what has no memory
@pytest.mark.parametrize("elements", [2 * LARGE, 10])
def test_a_tensor_that_is_resized_while_it_is_parked_can_be_used_again(sim, elements):
    tensor, other = (torch.full((LARGE,), value, device="sim") for value in (3.0, 4.0))
    parked = tdcopier.park([tensor, other])
    tensor.resize_(elements)
    parked.resume()
    assert tensor.fill_(5).eq(5).sum() == elements
    assert other.eq(4).all()
