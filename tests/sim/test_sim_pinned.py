"""Pinned host memory of the simulated device: how it is recognized, and when it is reused."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from sim_support import differences, marker
from sim_support import fresh as fresh

pytestmark = pytest.mark.sim


def test_pinned_memory_is_known_as_such() -> None:
    assert torch.ones(3).pin_memory().is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned()
    assert torch.ones(3).pin_memory()[1:].is_pinned()
    assert not torch.ones(3).is_pinned()
    assert torch.arange(3).pin_memory().tolist() == [0, 1, 2]
    assert torch.empty(0).pin_memory().numel() == 0


@pytest.mark.parametrize("direction", ["to device", "to host"])
def test_a_freed_block_is_reused_after_the_copies_that_use_it(
    sim: ModuleType, direction: str
) -> None:
    on_device = torch.zeros(1000, device="sim")
    torch.sim.synchronize()
    on_host = torch.ones(1000).pin_memory()
    address = on_host.data_ptr()
    with sim.hold():
        if direction == "to device":
            on_device.copy_(on_host, non_blocking=True)
        else:
            on_host.copy_(on_device, non_blocking=True)
        del on_host
        other = torch.empty(1000, pin_memory=True)
        assert other.data_ptr() != address
    torch.sim.synchronize()
    assert torch.empty(1000, pin_memory=True).data_ptr() == address


def test_a_block_without_copies_is_reused_at_once(sim: ModuleType) -> None:
    with sim.hold():
        marker(torch.sim.current_stream())
        address = torch.empty(1000, pin_memory=True).data_ptr()
        assert torch.empty(1000, pin_memory=True).data_ptr() == address


def test_pinned_bytes_are_counted(sim: ModuleType) -> None:
    before = sim.pinned_bytes()
    assert before == (before.in_use,) * 3

    def growth() -> tuple[int, ...]:
        return differences(sim.pinned_bytes(), before)

    a = torch.empty(100, dtype=torch.uint8, pin_memory=True)
    b = torch.empty(513, dtype=torch.uint8, pin_memory=True)
    assert growth() == sim.PinnedBytes(in_use=1536, current=1536, peak=1536)
    del a
    assert growth() == (1024, 1536, 1536)
    sim.empty_pinned_cache()
    assert growth() == (1024, 1024, 1536)
    sim.reset_peak_pinned_bytes()
    assert growth() == (1024, 1024, 1024)
    del b
