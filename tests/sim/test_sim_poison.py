"""The contents of memory when it is allocated and after it is freed."""

from __future__ import annotations

import ctypes
from types import ModuleType

import pytest
import torch
from sim_support import becomes, marker, pinned
from sim_support import fresh as fresh

pytestmark = pytest.mark.sim


def bytes_at(address: int, count: int = 64) -> set[int]:
    """Returns bytes of device or pinned memory, which stays mapped after it is freed."""
    return set(ctypes.string_at(address, count))


def filled(place: str, value: int = 7, count: int = 4096) -> torch.Tensor:
    if place == "pinned":
        return torch.full((count,), value, dtype=torch.uint8).pin_memory()
    leaf = torch.full((count,), value, dtype=torch.uint8).to(place)
    torch.sim.synchronize(place)
    return leaf


@pytest.mark.parametrize("place", ["sim:0", "pinned"])
def test_freed_memory_keeps_its_bytes_unless_told_otherwise(sim: ModuleType, place: str) -> None:
    leaf = filled(place)
    address = leaf.data_ptr()
    del leaf
    assert bytes_at(address) == {7}
    with sim.poison():
        leaf = filled(place)
        address = leaf.data_ptr()
        del leaf
        assert bytes_at(address) == {0xDD}
        again = torch.empty(4096, dtype=torch.uint8, device=place) if place != "pinned" else None
        assert again is None or again.eq(0xDD).all().item()
    leaf = filled(place)
    address = leaf.data_ptr()
    del leaf
    assert bytes_at(address) == {7}


def test_fresh_memory_is_poisoned_unless_told_otherwise(sim: ModuleType) -> None:
    with sim.poison(at_allocation=False, at_free=False):
        large = torch.empty(64 << 20, dtype=torch.uint8, device="sim")
        assert not large.cpu().eq(0xA5).all()  # zeros, or old bytes of the process
    other = torch.empty(64 << 20, dtype=torch.uint8, device="sim")
    assert other.cpu().eq(0xA5).all()


def test_a_use_after_free_on_another_stream_shows(sim: ModuleType) -> None:
    """The allocator does not know that the other stream reads it, and it is not reused."""
    side, result = torch.sim.Stream(), torch.zeros(4096, dtype=torch.uint8).pin_memory()
    with sim.poison(), sim.hold(side):
        leaf = filled("sim:0")
        with torch.sim.stream(side):
            result.copy_(leaf, non_blocking=True)
        del leaf
    side.synchronize()
    assert set(result.tolist()) == {0xDD}


def test_work_that_is_entitled_to_the_memory_finds_it_as_it_was(sim: ModuleType) -> None:
    """Pending work of its own stream, and of a stream that was recorded."""
    side = torch.sim.Stream()
    results = [torch.zeros(4096, dtype=torch.uint8).pin_memory() for _ in range(2)]
    with sim.poison():
        for result, stream in zip(results, (torch.sim.default_stream(), side), strict=True):
            leaf = filled("sim:0")
            address = leaf.data_ptr()
            with sim.hold(stream):
                with torch.sim.stream(stream):
                    result.copy_(leaf, non_blocking=True)
                leaf.record_stream(stream)
                del leaf
                assert bytes_at(address) == {7}
            stream.synchronize()

            def poisoned(address: int = address) -> bool:
                torch.empty(1, device="sim")  # makes the allocator check which work is done
                return bytes_at(address) == {0xDD}

            assert becomes(poisoned)
    assert [set(result.tolist()) for result in results] == [{7}, {7}]


def test_poison_does_not_make_a_stream_wait_for_another(sim: ModuleType) -> None:
    side = torch.sim.Stream()
    with sim.poison(), sim.hold(side):
        leaf = filled("sim:0")
        marker(side)
        leaf.record_stream(side)
        del leaf
        torch.sim.default_stream().synchronize()  # hangs if it is not released
    side.synchronize()


def test_pinned_memory_that_the_device_still_reads_is_not_poisoned(sim: ModuleType) -> None:
    with sim.poison(), sim.hold():
        source = pinned(*[5.0] * 100)
        target = source.to("sim", non_blocking=True)
        del source
        torch.empty(100, pin_memory=True)
    assert set(target.tolist()) == {5}


def test_a_second_end_does_not_undo_what_came_later(sim: ModuleType) -> None:
    first = sim.poison()
    first.end()
    with sim.poison():
        first.end()
        leaf = filled("sim:0")
        address = leaf.data_ptr()
        del leaf
        assert bytes_at(address) == {0xDD}
