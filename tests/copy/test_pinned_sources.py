"""Large pinned sources, which the device reads in place: nothing is staged."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from support import are_released, assert_same

import tdcopier
from tdcopier import _C

LARGE = 3 << 20  # floats: several windows, if it were staged


def pinned(value: float, size: int = LARGE) -> torch.Tensor:
    return torch.full((size,), value).pin_memory()


def test_a_large_pinned_leaf_is_one_transfer_of_the_call_itself(device):
    source = torch.arange(float(LARGE)).pin_memory()
    handle = tdcopier.start_copy({"a": source, "b": source[5:]}, device)
    assert_same(handle.get(), {"a": source.to(device), "b": source[5:].to(device)})
    assert handle.stats.transfers == handle.stats.alone_leaves == 2
    assert not handle.stats.background


def test_what_is_small_has_gaps_or_is_not_pinned_is_staged_beside_it(device):
    base = torch.arange(float(LARGE)).pin_memory()
    source = [base, base[:7], base[::2], torch.arange(float(LARGE)), base.view(3, -1).t()]
    handle = tdcopier.start_copy(source, device)
    assert_same(handle.get(), [leaf.to(device) for leaf in source])
    assert handle.stats.background
    assert (handle.stats.packed_leaves, handle.stats.alone_leaves) == (1, 4)


@pytest.mark.sim
def test_nothing_of_it_goes_through_staging_buffers(sim, device):
    source = pinned(1.0)
    tdcopier.limits.set_staging_bytes(_C.STAGING_BUFFER_BYTES)
    with sim.fail_pinned_allocation(1):  # none is requested
        handle = tdcopier.start_copy(source, device)
        assert handle.get().sum().item() == LARGE
    assert handle.stats.transfer_bytes == source.nbytes


def test_without_pinned_staging_it_is_read_by_a_transfer_that_blocks(device):
    source = pinned(2.0)
    handle = tdcopier.start_copy(source, device, use_pinned_staging=False)
    assert_same(handle.get(), source.to(device))


def test_wait_staged_lasts_until_the_device_has_read_it(stall, device, copy_stream):
    source = pinned(1.0)
    staged = threading.Event()
    with stall(copy_stream):
        handle = tdcopier.start_copy([source, torch.ones(3)], device)

        def overwrite() -> None:
            handle.wait_staged()
            source.fill_(2)
            staged.set()

        writer = threading.Thread(target=overwrite)
        writer.start()
        assert not staged.wait(0.05)  # it cannot end: the device has not begun
    writer.join()
    assert handle.get()[0].eq(1).all()


@pytest.mark.sim
def test_a_copy_that_fails_keeps_what_the_device_reads(sim, device):
    source = [pinned(1.0), torch.full((LARGE,), 2.0)]
    reference = weakref.ref(source[0])
    with sim.hold(_C.copy_stream(device)):
        with sim.fail_transfer(2):
            handle = tdcopier.start_copy(source, device, use_background_thread=False)
        with pytest.raises(RuntimeError):
            handle.get()
        del source, handle
        scratch = torch.zeros(10_000)
        for _ in range(100):
            scratch.add_(1)
        assert reference() is not None
    assert are_released([reference])


def test_the_backends_to_returns_when_it_may_be_overwritten(device):
    tensordict = pytest.importorskip("tensordict")
    source = tensordict.TensorDict({"a": pinned(1.0)}, [])
    with tdcopier.tensordict.backend():
        moved = source.to(device)
    source["a"].fill_(2)
    assert moved["a"].eq(1).all()
