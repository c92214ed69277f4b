"""The statistics of a handle agree with an independent count."""

from __future__ import annotations

import ctypes
import json

import pytest
import torch
from each_case import together
from staged_windows import windows_of
from support import oracle

import tdcopier
from tdcopier import _C
from tdcopier.workloads import detection_batch

TREES = {
    "detection batch": lambda: detection_batch(),
    "one leaf": lambda: torch.ones(10),
    "large and small": lambda: [torch.ones(3 << 20), torch.ones(5), {"a": torch.ones(7)}],
    "nothing": list,
    "strided": lambda: [torch.ones(40, 50)[:, ::2], torch.ones(3, 1).expand(3, 4)],
    "only empty leaves": lambda: [torch.empty(0), torch.empty(2, 0)],
}
OPTIONS = [
    {},
    {"pack_cpu_tensors": False},
    {"use_pinned_staging": False},
    {"max_packed_chunk_bytes": 10_000},
]


@pytest.mark.sim
@pytest.mark.parametrize("direction", ["h2d", "d2h", "d2d"])
@pytest.mark.parametrize("kind", TREES)
@together("options", OPTIONS)
def test_transfers_and_bytes_are_those_that_the_simulated_device_counted(
    sim, device, other_device, kind, options, direction
):
    source = "cpu" if direction == "h2d" else other_device
    tree = oracle(TREES[kind](), source)
    sim.reset_counts()
    handle = tdcopier.start_copy(tree, "cpu" if direction == "d2h" else device, **options)
    handle.get()
    counts = sim.counts()._asdict()
    assert counts.pop(direction) == (handle.stats.transfers, handle.stats.transfer_bytes)
    within = counts.pop("within").transfers  # gathered on its device first
    assert within == 0 or direction != "h2d"
    assert set(counts.values()) == {(0, 0)}


@pytest.mark.cuda
@pytest.mark.parametrize("direction", ["H2D", "D2H", "D2H by a chunk"])
@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_transfers_are_those_that_the_profiler_counted(request, device, kind, options, direction):
    from torch.profiler import ProfilerActivity, profile

    source, target = ("cpu", device) if direction == "H2D" else (device, "cpu")
    if direction == "D2H by a chunk":
        _C.testing.set_max_straight_bytes(0)
        request.addfinalizer(lambda: _C.testing.set_max_straight_bytes(_C.MAX_STRAIGHT_BYTES))
    _C.testing.use_batch_transfers(False)
    request.addfinalizer(lambda: _C.testing.use_batch_transfers(True))
    tree = oracle(TREES[kind](), source)
    tdcopier.copy(tree, target, **options)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        handle = tdcopier.start_copy(tree, target, **options)
        handle.get()
        torch.cuda.synchronize()
    # A kernel that gathers straight into pinned memory is a transfer; one for a chunk precedes it.
    straight = direction == "D2H" and options.get("use_pinned_staging", True)
    names = ["Memcpy HtoD" if direction == "H2D" else "Memcpy DtoH"]
    names += ["move_segments"] if straight else []
    seen = sum(
        event.count for event in profiler.key_averages() if any(name in event.key for name in names)
    )
    assert handle.stats.transfers == seen


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["pageable", "pinned", "on the device"])
def test_transfers_in_batches_have_the_bytes_that_the_profiler_counted(device, kind, tmp_path):
    from torch.profiler import ProfilerActivity, profile

    if not hasattr(ctypes.CDLL("libcuda.so.1"), "cuMemcpyBatchAsync"):
        pytest.skip("the driver has no batches")
    tree = [torch.rand(1 << 18) for _ in range(70)]
    if kind != "pageable":
        tree = [leaf.to(device) if kind == "on the device" else leaf.pin_memory() for leaf in tree]
    target = "cpu" if kind == "on the device" else device
    tdcopier.copy(tree, target)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        handle = tdcopier.start_copy(tree, target)
        got = handle.get()
        torch.cuda.synchronize()
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(got, tree, strict=True))
    way = "HtoD" if target == device else "DtoH"
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    seen = [each["args"]["bytes"] for each in events if each["name"].startswith(f"Memcpy {way}")]
    # One for each batch: of 16 leaves that are read in place, of 64 others, or of two windows while
    # the device is busy.
    most = {"pinned": 5, "on the device": 2, "pageable": handle.stats.transfers}
    assert 0 < len(seen) <= most[kind]
    assert sum(seen) == handle.stats.transfer_bytes
    assert handle.stats.fallbacks == 0


@pytest.mark.parametrize("megabytes", [1, 3, 8, 20])
def test_windows_grow_to_two_mebibytes(device, megabytes):
    leaves = [torch.ones(megabytes << 18), torch.ones(5)]
    for background in (True, False):
        handle = tdcopier.start_copy(leaves, device, use_background_thread=background)
        got = handle.get()
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, leaves, strict=True))
        assert handle.stats.transfers == len(windows_of(megabytes << 20)) + 1  # the small leaf


def test_windows_depend_on_the_bytes_that_are_staged(device):
    pinned = torch.ones(16 << 18).pin_memory()  # read in place: one transfer
    handle = tdcopier.start_copy([pinned, torch.ones(3 << 18)], device)
    handle.get()
    assert handle.stats.transfers == 1 + len(windows_of(3 << 20))


def test_the_detection_batch_is_528_packed_leaves_and_a_transfer_for_each_dtype(device):
    handle = tdcopier.start_copy(detection_batch(), device)
    handle.get()
    stats = handle.stats
    assert stats.packed_leaves == 528
    assert stats.transfers == 3
    assert stats.chunks == 3
    assert (
        stats.alone_leaves
        == stats.delegated_leaves
        == stats.reused_leaves
        == stats.opaque_leaves
        == 0
    )


def test_every_leaf_is_counted_once(device):
    tree = [
        torch.ones(3), torch.ones(2, 6)[:, ::2],
        torch.ones(1 << 20), torch.ones(2).requires_grad_(), torch.ones(2, device=device),
        "text", None,
    ]  # fmt: skip
    handle = tdcopier.start_copy(tree, device)
    handle.get()
    assert handle.stats[:5] == (2, 1, 1, 1, 2)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("direction", ["H2D", "D2H", "D2D"])
def test_nothing_falls_back_to_torch_where_the_device_has_its_fast_way_or_none(
    request, device, direction, options
):
    other = request.getfixturevalue("other_device") if direction == "D2D" else device
    source, target = {"H2D": ("cpu", device), "D2H": (device, "cpu"), "D2D": (other, device)}[
        direction
    ]
    tree = oracle([detection_batch(), *TREES["large and small"](), *TREES["strided"]()], source)
    tdcopier.copy(tree, target, **options)  # CUDA's driver may refuse a thread's first call
    handle = tdcopier.start_copy(tree, target, use_background_thread=False, **options)
    moved = handle.get()
    assert handle.stats.transfers > 0
    assert handle.stats.fallbacks == 0
    filling = tdcopier.start_copy_into(tree, moved, use_background_thread=False)
    filling.get()
    assert filling.stats.fallbacks == 0
