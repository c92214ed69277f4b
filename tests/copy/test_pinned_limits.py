"""The pool of pinned memory: its limit, memory that is pinned beforehand, and what is refused."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from pinned_pool_support import LIMIT, MIB, used_when_idle
from pinned_pool_support import all_comes_back as all_comes_back
from support import run_python

import tdcopier
from tdcopier import _C
from tdcopier._pinned_pool import lease

PAGE = os.sysconf("SC_PAGE_SIZE")

pytestmark = pytest.mark.usefixtures("all_comes_back")


# ---- limits --------------------------------------------------------------------------------------


def test_a_lease_over_the_limit_is_refused_with_figures_and_leases_nothing(device):
    tdcopier.limits.set_pinned_bytes(40 * MIB)
    kept = list(lease([20 * MIB]))
    with pytest.raises(MemoryError, match=f"{21 * MIB} bytes .* limit of {40 * MIB} bytes: ") as no:
        lease([MIB, 20 * MIB])
    assert f"{20 * MIB} are leased" in str(no.value)
    assert used_when_idle() == (20 * MIB, 0)
    kept += lease([20 * MIB])
    assert used_when_idle() == (40 * MIB, 0)


def test_free_blocks_make_room_for_a_lease_that_they_do_not_fit(device):
    tdcopier.limits.set_pinned_bytes(60 * MIB)
    list(lease([20 * MIB, 30 * MIB]))
    assert used_when_idle() == (0, 50 * MIB)
    (tensor,) = lease([40 * MIB])
    assert used_when_idle() == (40 * MIB, 20 * MIB)
    del tensor


def test_at_the_limit_a_lease_waits_for_memory_that_a_device_still_reads(
    device, accelerator, stall
):
    tdcopier.limits.set_pinned_bytes(20 * MIB)
    (tensor,) = lease([20 * MIB])
    got: list[Any] = []
    taker = threading.Thread(target=lambda: got.extend(lease([20 * MIB])))
    with stall(accelerator.current_stream()):
        copied = tensor.fill_(1).to(device, non_blocking=True)
        del tensor
        taker.start()
        assert got == []
    taker.join()
    got[0].fill_(2)
    assert copied.cpu().eq(1).all()


@pytest.mark.parametrize("bad", [-1, 1 << 61])
def test_reserved_bytes_are_checked(device, bad):
    with pytest.raises(ValueError, match=f"nbytes must be from 0 .*{bad}"):
        tdcopier.pinned.reserve(bad)


def test_a_negative_limit_is_refused(device):
    with pytest.raises(ValueError, match="must not be negative; got -1"):
        tdcopier.limits.set_pinned_bytes(-1)


def test_reserved_memory_is_leased_first(device):
    reserved = tdcopier.pinned.reserve(50 * MIB - 5)
    assert 50.04 * MIB < reserved < 50.06 * MIB
    assert reserved % PAGE == 0
    assert tdcopier.pinned.reserve(50 * MIB - 5) == 0
    assert used_when_idle() == (0, reserved)
    leased = list(lease([20 * MIB, 5, 29 * MIB]))
    assert used_when_idle() == (49 * MIB + PAGE, reserved - 49 * MIB - PAGE)
    del leased
    assert used_when_idle() == (0, reserved)
    assert tdcopier.pinned.trim() == reserved
    tdcopier.limits.set_pinned_bytes(MIB)
    with pytest.raises(MemoryError):
        tdcopier.pinned.reserve(2 * MIB)


def test_memory_that_is_reserved_for_odd_sizes_is_enough_for_them(device):
    sizes = [16 * MIB + 1, 20 * MIB + 3, 17 * MIB + 5, 300_000]
    reserved = tdcopier.pinned.reserve(sum(sizes))
    leased = list(lease(sizes))
    assert sum(used_when_idle()) == reserved
    del leased


def test_a_lease_of_more_than_the_system_has_leaves_nothing(device):
    tdcopier.limits.set_pinned_bytes(1 << 61)
    for call in (lambda: tdcopier.pinned.reserve(1 << 59), lambda: lease([1 << 59, 5])):
        with pytest.raises(MemoryError, match="no memory for a pinned block"):
            call()
        assert used_when_idle() == (0, 0)


def test_trim_leaves_blocks_of_which_a_part_is_leased(device):
    reserved = tdcopier.pinned.reserve(50 * MIB)
    (tensor,) = lease([20 * MIB])
    tensor.fill_(1)
    list(lease([40 * MIB]))
    used_when_idle()
    assert tdcopier.pinned.trim() == 40 * MIB
    assert used_when_idle() == (20 * MIB, reserved - 20 * MIB)
    assert tensor.is_pinned()
    assert tdcopier.copy(tensor, device).cpu().eq(1).all()
    del tensor
    used_when_idle()
    assert tdcopier.pinned.trim() == reserved
    used_when_idle()
    assert tdcopier.pinned.trim() == 0


def test_the_use_includes_staging_and_torchs_memory(device):
    tdcopier.copy(torch.zeros(3 * MIB), device)
    kept = torch.zeros(5 * MIB, dtype=torch.uint8).pin_memory()
    now = tdcopier.pinned.usage()
    assert now.staging_bytes >= tdcopier.pinned.staging_bytes(device) > 0
    assert now.torch_bytes is None or now.torch_bytes >= now.staging_bytes + kept.numel()
    assert now.limit_bytes == LIMIT > 0


def test_the_environment_sets_the_limit():
    program = "import tdcopier; print(tdcopier.pinned.usage().limit_bytes)"
    assert run_python(program, TDCOPIER_PINNED_LIMIT_BYTES="12345").split() == ["12345"]


# ---- faults --------------------------------------------------------------------------------------


@pytest.mark.sim
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_refusal_to_pin_a_block_leaves_earlier_leases_usable(sim, device, n):
    got: list[torch.Tensor] = []
    refused = rf"a block of {17 * MIB} bytes cannot be pinned for sim:0: the system cannot lock"
    with sim.fail_pinned_allocation(n):
        tensors = lease([17 * MIB] * 3)
        with pytest.raises(RuntimeError, match=refused):
            got.extend(tensors)
    assert len(got) < 3
    assert list(tensors) == []
    for tensor in got:
        assert tdcopier.copy(tensor.fill_(5), device).cpu().eq(5).all()
    _C.testing.settle()
    assert used_when_idle()[0] == len(got) * 17 * MIB
    assert len(list(lease([17 * MIB] * 3))) == 3


@pytest.mark.sim
def test_a_failed_reservation_leaves_nothing(sim, device):
    with sim.fail_pinned_allocation(1), pytest.raises(RuntimeError, match="cannot be pinned"):
        tdcopier.pinned.reserve(MIB)
    _C.testing.settle()
    assert used_when_idle() == (0, 0)


@pytest.mark.sim
def test_memory_that_no_event_guards_is_not_leased_again_until_one_does(sim, device, stall):
    (tensor,) = lease([2 * MIB])
    with stall(torch.sim.current_stream(device)):
        copied = tensor.fill_(1).to(device, non_blocking=True)
        with sim.fail_event_record(1):
            del tensor
        (other,) = lease([2 * MIB])
        other.fill_(9)
    assert copied.cpu().eq(1).all()


@pytest.mark.parametrize("use", ["turns", "dropped snapshots"])
def test_at_the_limit_a_lease_waits_for_copies_whose_handles_are_gone(device, use):
    """There is room for one state and a half, so each turn has the memory of the one before."""
    states = [torch.full((MIB,), float(i), device=device) for i in range(2)]  # 4 MiB
    tdcopier.limits.set_pinned_bytes(6 * MIB)
    for _ in range(20):
        for state in states:
            if use == "turns":
                tdcopier.park([state]).resume()
            else:
                tdcopier.snapshot([state])
    torch.accelerator.synchronize()
    assert [state.mean().item() for state in states] == [0, 1]


def test_a_lease_that_cannot_fit_ends_although_others_copy_all_the_time(device, monkeypatch):
    tdcopier.limits.set_pinned_bytes(MIB)
    waits = []
    monkeypatch.setattr(_C, "wait_for_release", lambda: waits.append(None) is None)
    with pytest.raises(MemoryError):
        lease([2 * MIB])
    assert 1 < len(waits) < 100


def test_a_lower_limit_returns_memory_that_is_not_in_use(device):
    reserved = tdcopier.pinned.reserve(10 * MIB)
    tdcopier.limits.set_pinned_bytes(reserved)
    assert used_when_idle() == (0, reserved)
    tdcopier.limits.set_pinned_bytes(MIB)
    assert used_when_idle() == (0, 0)
    with pytest.raises(MemoryError):
        lease([2 * MIB])
