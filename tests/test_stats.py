"""What the handle says it did is what an outside witness saw."""

from __future__ import annotations

import pytest
import torch

import tdcopier
from tdcopier.workloads import detection_batch

TREES = {
    "detection batch": lambda: detection_batch(),
    "one leaf": lambda: torch.ones(10),
    "large and small": lambda: [torch.ones(3 << 20), torch.ones(5), {"a": torch.ones(7)}],
    "nothing": list,
    "only empty leaves": lambda: [torch.empty(0), torch.empty(2, 0)],
}
OPTIONS = [
    {},
    {"pack_cpu_tensors": False},
    {"use_pinned_staging": False},
    {"max_packed_chunk_bytes": 10_000},
]


@pytest.mark.sim
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_transfers_and_bytes_are_those_that_the_simulated_device_counted(
    sim, device, kind, options
):
    tree = TREES[kind]()
    sim.reset_counts()
    handle = tdcopier.start_copy(tree, device, **options)
    handle.get()
    counted = sim.counts().h2d
    assert (handle.stats.transfers, handle.stats.transfer_bytes) == (
        counted.transfers,
        counted.bytes,
    )


@pytest.mark.cuda
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_transfers_are_those_that_the_profiler_counted(device, kind, options):
    from torch.profiler import ProfilerActivity, profile

    tree = TREES[kind]()
    tdcopier.copy(tree, device, **options)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        handle = tdcopier.start_copy(tree, device, **options)
        handle.get()
        torch.cuda.synchronize()
    seen = sum(event.count for event in profiler.key_averages() if "Memcpy HtoD" in event.key)
    assert handle.stats.transfers == seen


def test_the_detection_batch_is_528_packed_leaves_and_one_transfer(device):
    handle = tdcopier.start_copy(detection_batch(), device)
    handle.get()
    stats = handle.stats
    assert stats.packed_leaves == 528
    assert stats.transfers == 1
    assert stats.chunks == 1
    assert (
        stats.alone_leaves
        == stats.delegated_leaves
        == stats.reused_leaves
        == stats.opaque_leaves
        == 0
    )


def test_every_leaf_is_counted_once(device):
    tree = [
        torch.ones(3), torch.ones(1 << 20), torch.ones(2, 6)[:, ::2], torch.ones(2, device=device),
        "text", None,
    ]  # fmt: skip
    handle = tdcopier.start_copy(tree, device)
    handle.get()
    assert handle.stats[:5] == (1, 1, 1, 1, 2)
