"""Memory of the simulated device: its reuse, its statistics and its limit."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from sim_support import differences, is_reused, marker, pinned
from sim_support import fresh as fresh

pytestmark = pytest.mark.sim


def test_a_freed_block_is_reused_at_once_by_its_stream(sim: ModuleType) -> None:
    source = pinned(1)
    with sim.hold():
        blocks = [torch.empty(1, device="sim") for _ in range(3)]
        addresses = [block.data_ptr() for block in blocks]
        for block in blocks:
            block.copy_(source, non_blocking=True)  # pending work makes no difference
        del block
        while blocks:
            del blocks[0]
        again = [torch.empty(100, device="sim") for _ in range(3)]
        assert [block.data_ptr() for block in again] == addresses[::-1]  # last in, first out


def test_a_freed_block_is_not_shared_with_other_streams_or_sizes() -> None:
    address = torch.empty(1000, device="sim").data_ptr()
    with torch.sim.stream(torch.sim.Stream()):
        assert torch.empty(1000, device="sim").data_ptr() != address
    assert torch.empty(2000, device="sim").data_ptr() != address
    assert torch.empty(1000, device="sim:1").data_ptr() != address
    assert torch.empty(1000, device="sim").data_ptr() == address


@pytest.mark.hazardous
def test_reuse_without_ordering_destroys_bytes_that_another_stream_needs(sim: ModuleType) -> None:
    """Shows the mistake that record_stream prevents."""
    side, result = torch.sim.Stream(), pinned(0)
    source, overwrite = pinned(1), pinned(9)
    block = source.to("sim", non_blocking=True)
    torch.sim.synchronize()
    with sim.hold(side):
        with torch.sim.stream(side):
            result.copy_(block, non_blocking=True)
        del block
        overwriting = overwrite.to("sim", non_blocking=True)
        torch.sim.current_stream().synchronize()
    side.synchronize()
    assert result.item() == 9
    assert overwriting.item() == 9


def test_a_recorded_stream_delays_reuse_until_its_work_is_done(sim: ModuleType) -> None:
    side = torch.sim.Stream()
    block = torch.empty(1000, device="sim")
    address = block.data_ptr()
    with sim.hold(side):
        busy_then = marker(side)
        block.record_stream(side)
        del block
        assert torch.empty(1000, device="sim").data_ptr() != address
    busy_then.synchronize()
    assert is_reused(address)


def test_only_work_of_before_the_free_delays_reuse(sim: ModuleType) -> None:
    side = torch.sim.Stream()
    block = torch.empty(1000, device="sim")
    address = block.data_ptr()
    block.record_stream(side)
    marker(side).synchronize()
    with sim.hold(side):
        del block
        marker(side)
        assert torch.empty(1000, device="sim").data_ptr() == address


def test_recording_the_own_stream_changes_nothing(sim: ModuleType) -> None:
    block = torch.empty(1000, device="sim")
    address = block.data_ptr()
    block.record_stream(torch.sim.current_stream())
    with sim.hold():
        marker(torch.sim.current_stream())
        del block
        assert torch.empty(1000, device="sim").data_ptr() == address


def test_a_block_belongs_to_the_stream_of_its_allocation() -> None:
    side = torch.sim.Stream()
    with torch.sim.stream(side):
        block = torch.empty(1000, device="sim")
    address = block.data_ptr()
    del block  # while another stream is current
    with torch.sim.stream(side):
        assert torch.empty(1000, device="sim").data_ptr() == address


def test_statistics_are_kept_by_device_in_blocks_of_512_bytes(sim: ModuleType) -> None:
    before, elsewhere = sim.memory_stats(0), sim.memory_stats(1)
    in_use = before.allocated_bytes
    assert before[:4] == (in_use,) * 4

    def growth() -> tuple[int, ...]:
        return differences(sim.memory_stats("sim:0"), before)

    a, b = torch.empty(1, device="sim"), torch.empty(129, device="sim")
    assert a.data_ptr() % 512 == b.data_ptr() % 512 == 0
    assert growth() == (1536, 1536, 1536, 1536, 2)
    del a
    assert growth() == (1024, 1536, 1536, 1536, 2)
    assert torch.sim.memory_allocated() == in_use + 1024
    assert torch.sim.max_memory_allocated() == in_use + 1536
    assert torch.sim.memory_reserved() == in_use + 1536
    assert torch.accelerator.memory.memory_allocated(0) == in_use + 1024
    torch.sim.empty_cache()
    torch.sim.reset_peak_memory_stats()
    assert growth() == (1024, 1024, 1024, 1024, 2)
    assert sim.memory_stats(1) == elsewhere


def test_memory_that_pending_work_may_touch_stays(sim: ModuleType) -> None:
    side = torch.sim.Stream()
    before = torch.sim.memory_reserved()
    with sim.hold(side):
        marker(side)
        torch.empty(1, device="sim")
        torch.sim.empty_cache()
        assert torch.sim.memory_reserved() == before + 512
    side.synchronize()
    torch.sim.empty_cache()
    assert torch.sim.memory_reserved() == before


def test_fresh_memory_does_not_read_as_zero() -> None:
    assert torch.empty(100_000, dtype=torch.uint8, device="sim").eq(0xA5).all().item()


def test_no_elements_need_no_memory(sim: ModuleType) -> None:
    before = sim.memory_stats(1)
    empty = torch.empty(0, device="sim:1")
    assert empty.device == torch.device("sim:1")
    assert empty.data_ptr() == 0
    assert sim.memory_stats(1) == before


def test_beyond_the_limit_memory_is_out(sim: ModuleType) -> None:
    limit = torch.sim.memory_reserved() + 2048
    sim.set_memory_limit_bytes("sim:0", limit)
    kept = torch.empty(1024, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match=rf"sim:0 is out of memory.*limit of {limit}"):
        torch.empty(1025, dtype=torch.uint8, device="sim")
    torch.empty(4096, dtype=torch.uint8, device="sim:1")
    torch.empty(512, dtype=torch.uint8, device="sim")
    torch.empty(1024, dtype=torch.uint8, device="sim")  # freeing the unused block makes room
    del kept
    sim.set_memory_limit_bytes("sim:0", None)
    torch.empty(4096, dtype=torch.uint8, device="sim")


def test_memory_is_out_only_when_blocks_in_use_by_streams_have_been_waited_for(sim: ModuleType):
    """As with CUDA's allocator: a loop that runs ahead of a device keeps memory for a while."""
    block_bytes = 1 << 20
    sim.set_memory_limit_bytes("sim:0", torch.sim.memory_reserved() + 2 * block_bytes)
    stream = torch.sim.Stream()
    for _ in range(6):
        batch = torch.empty(block_bytes - 512, dtype=torch.uint8, device="sim")
        sim.busy(0.02, stream)
        batch.record_stream(stream)
        del batch
    assert torch.empty(2 * block_bytes, dtype=torch.uint8, device="sim").numel() == 2 * block_bytes
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 * block_bytes, dtype=torch.uint8, device="sim")
    sim.set_memory_limit_bytes("sim:0", None)


def test_a_negative_limit_is_rejected(sim: ModuleType) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        sim.set_memory_limit_bytes(0, -1)
