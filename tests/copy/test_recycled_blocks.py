"""Arrays of one copy come from those that earlier copies gave back.

Asked for a block of 1 KiB or more, glibc first consolidates all small blocks that the program has
freed: up to 280 us after the 640 tensors of a result of `.to()` were dropped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdcopier
from tdcopier import _C
from tdcopier.workloads import WORKLOADS

COPIES = 100


def of_dtypes(leaves: int) -> list[torch.Tensor]:
    kinds = (torch.float32, torch.int64, torch.bool)
    return [torch.ones(3, dtype=kinds[i % 3]) for i in range(leaves)]


def blocks_of_a_loop(batch: Any, device: str) -> int:
    before = _C.testing.blocks_made()
    for _ in range(COPIES):
        tdcopier.copy(batch, device)
    return _C.testing.blocks_made() - before


@pytest.mark.parametrize("kept", [0, 100])
@pytest.mark.parametrize(
    "batch",
    [of_dtypes(13), of_dtypes(640), WORKLOADS["detection_batch"].make(0)],
    ids=["13 leaves", "640 leaves", "detection batch"],
)
def test_a_loop_of_copies_asks_for_no_new_blocks(batch, kept, device):
    """However many results the program keeps. The first copies may: until theirs come back."""
    results = [tdcopier.copy(batch, device) for _ in range(kept)]
    assert 0 in (blocks_of_a_loop(batch, device) for _ in range(4))
    assert blocks_of_a_loop(batch, device) == 0
    del results


def test_chunks_that_live_on_are_still_known_after_many_others(device):
    """A copy into them crosses their padding, so each takes one transfer."""
    kept = [tdcopier.copy([torch.ones(3), torch.ones(3)], device) for _ in range(5)]
    for _ in range(COPIES):
        tdcopier.copy(of_dtypes(13), device)
    for chunk in kept:
        handle = tdcopier.start_copy_into([torch.zeros(3), torch.zeros(3)], chunk)
        handle.get()
        assert handle.stats.transfers == 1
        assert [leaf.tolist() for leaf in chunk] == [[0] * 3] * 2
