"""How often a small copy calls the driver: each call takes about a microsecond.

The simulated device is the witness; on CUDA the calls of the memory allocators come on top.
"""

from __future__ import annotations

import threading

import pytest
import torch

import tdcopier
from tdcopier import _C

pytestmark = pytest.mark.sim
COPIES = 40


def small(device: str, dtypes: int) -> list[torch.Tensor]:
    kinds = (torch.float32, torch.int64, torch.bool)[:dtypes]
    return [torch.ones(n, dtype=kind, device=device) for kind in kinds for n in (3, 5)]


def calls_per_copy(sim, source, target: str) -> tuple[list[float], float]:
    """Returns event records, stream waits and queries of one copy, and its transfers."""
    # Of more buffers, several come back at once, and not in every copy that is counted.
    tdcopier.limits.set_staging_bytes(_C.STAGING_BUFFER_BYTES)
    for warm in (True, False):
        if not warm:
            sim.reset_counts()
        for _ in range(COPIES):
            tdcopier.start_copy(source, target).wait()
            torch.sim.synchronize()
    records, waits, queries, _ = (calls / COPIES for calls in sim.event_counts())
    counts = sim.counts()
    return [records, waits, queries], (counts.h2d.transfers + counts.d2h.transfers) / COPIES


@pytest.mark.parametrize("dtypes", [1, 3])
def test_a_small_copy_to_the_device_makes_few_calls(sim, device, dtypes):
    """The end of its transfers is recorded, and its hand-over; the caller's stream waits.

    One query asks whether the staging buffer is free again. Those for the limit on hand-overs come
    once for several copies.
    """
    events, transfers = calls_per_copy(sim, small("cpu", dtypes), device)
    assert events[:2] == [2, 1]
    assert events[2] <= 1 + 1 / 4 + 0.1
    assert transfers == dtypes


def test_a_small_copy_to_the_host_makes_few_calls(sim, device):
    """Queries depend on how long the wait is."""
    events, transfers = calls_per_copy(sim, small(device, 1), "cpu")
    assert events[:2] == [3, 1]
    assert transfers == 1


def test_hand_overs_to_several_streams_keep_the_limit(sim, device):
    """The newest hand-over may have ended on one stream, while those on another are pending.

    The next copy waits for those that are pending only.
    """
    busy, idle = torch.Stream(device), torch.Stream(device)
    source = small("cpu", 1)
    limit = 4
    beyond = threading.Thread(target=lambda: tdcopier.start_copy(source, device).wait(idle))
    with sim.hold(busy):
        for _ in range(limit - 1):
            tdcopier.start_copy(source, device).wait(busy)
        for _ in range(2 * limit):
            tdcopier.start_copy(source, device).wait(idle)
            idle.synchronize()
        tdcopier.start_copy(source, device).wait(busy)
        beyond.start()
        beyond.join(timeout=0.2)
        assert beyond.is_alive()
    beyond.join()
    torch.sim.synchronize()
