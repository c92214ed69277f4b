"""Gathering rows of nested tables to a device equals indexing each leaf and moving it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import ramp
from container_classes import Pair
from each_case import together
from gather_support import ROWS, rows_of
from support import assert_same, run_python
from torch.overrides import TorchFunctionMode

import tdcopier


def storage(rows: int = ROWS) -> dict[str, Any]:
    """Makes leaves of every width and dtype in every container."""
    wide = ramp("cpu", rows, 2 * 12)
    return {
        "frames": torch.randint(0, 255, (rows, 4, 21, 21), dtype=torch.uint8),
        "observation": torch.randn(rows, 17),
        "done": torch.rand(rows) > 0.5,
        "reward": torch.randn(rows, 1, dtype=torch.float64),
        "half": torch.randn(rows, 3).to(torch.bfloat16),
        "large": torch.arange(rows * 3000).reshape(rows, 3000),
        "empty": torch.empty(rows, 0, 3),
        "with gaps": wide[:, :12],
        "columns": ramp("cpu", 6, rows).t(),
        "expanded": ramp("cpu", 5).expand(rows, 5),
        "channels last": torch.randn(rows, 3, 4, 4).to(memory_format=torch.channels_last),
        "nested": [torch.randn(rows, 2), (torch.arange(rows), {"x": torch.randn(rows, 2, 2)})],
        "pair": Pair(torch.randn(rows, 8), np.arange(rows * 4.0).reshape(rows, 4)),
        "read-only": np.broadcast_to(np.arange(rows, dtype=np.int16), (rows, rows)).copy(),
        "name": "cartpole",
        "size": rows,
        "nothing": None,
    }


INDICES = {
    "tensor": torch.tensor([3, 0, 49, 3, 3, 17]),
    "int32": torch.tensor([3, 0, 49, 3], dtype=torch.int32),
    "negative": torch.tensor([-1, 0, -50, 7]),
    "array": np.array([4, 4, -3]),
    "read-only array": np.broadcast_to(np.array([7]), (3,)),
    "reversed array": np.arange(5)[::-1],
    "array in another byte order": np.arange(5, dtype=">i8"),
    "list": [1, 2, 3, 10, 11],
    "empty list": [],
    "range": range(10, 40, 7),
    "slice": slice(5, 30),
    "slice with a step": slice(None, None, 3),
    "slice to the end": slice(-4, None),
    "empty slice": slice(9, 3),
    "one row as a slice": slice(2, 3),
    "all": slice(None),
    "mask": torch.arange(ROWS) % 3 == 0,
    "mask of none": torch.zeros(ROWS, dtype=torch.bool),
    "array mask": np.arange(ROWS) > 44,
    "list mask": [i == 4 for i in range(ROWS)],
    "one": 7,
    "numpy's one": np.int64(-2),
    "scalar tensor": torch.tensor(5),
    "matrix": torch.randint(-ROWS, ROWS, (3, 4)),
    "in a tuple": (torch.tensor([1, 2]),),
    "strided": torch.arange(40)[::7],
    "many": torch.randint(0, ROWS, (2000,)),
}


@pytest.mark.parametrize("on", ["device", "cpu"])
@together("index", INDICES.values(), ids=INDICES.keys())
def test_it_equals_indexing_and_moving_each_leaf(device, index, on):
    target = device if on == "device" else "cpu"
    tree = storage()
    handle = tdcopier.start_gather(tree, index, target)
    assert_same(handle.get(), rows_of(tree, index, target))


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_an_index_is_read_on_the_host_whatever_the_default_device(device, index):
    tree = storage()
    with torch.device(device):
        got = tdcopier.gather(tree, index, device)
    assert_same(got, rows_of(tree, index, device))


@pytest.mark.parametrize("index", ["tensor", "mask", "many", "slice"])
def test_rows_of_plain_memory_are_packed_and_nothing_is_left_to_torch(device, index):
    tree = {f"{i}": torch.randn(ROWS, 1 + i % 7) for i in range(200)}
    handle = tdcopier.start_gather(tree, INDICES[index], device)
    moved = handle.get()
    assert_same(moved, rows_of(tree, INDICES[index], device))
    stats = handle.stats
    assert (stats.packed_leaves, stats.delegated_leaves, stats.fallbacks) == (200, 0, 0)
    assert stats.transfers == stats.chunks or stats.background


def test_what_is_left_to_its_own_indexing_is_counted(device):
    with_gradient = torch.randn(ROWS, 3, requires_grad=True)
    tree = {
        "rows": torch.randn(ROWS, 2),
        "columns": ramp("cpu", 6, ROWS).t(),
        "gradient": with_gradient,
        "device": torch.randn(ROWS, 2).to(device),
        "parameter": torch.nn.Parameter(torch.randn(ROWS, 2)),
    }
    handle = tdcopier.start_gather(tree, torch.tensor([1, 1, 4]), device)
    moved = handle.get()
    assert_same(moved, rows_of(tree, torch.tensor([1, 1, 4]), device))
    assert handle.stats.fallbacks == 4
    moved["gradient"].sum().backward()
    assert with_gradient.grad is not None
    assert with_gradient.grad[:5].sum(1).tolist() == [0, 6, 0, 0, 3]


PAIRS = {
    "tensors": (torch.tensor([0, 3, -1]), torch.tensor([1, -6, 5])),
    "broadcast": (torch.tensor([[0], [3]]), torch.tensor([1, 2, 2])),
    "tensor and one": (torch.tensor([0, 3]), 2),
    "one and tensor": (-2, torch.tensor([0, 3])),
    "two numbers": (1, 2),
    "slices": (slice(1, 4), slice(None, None, 2)),
    "one row of slices": (slice(1, 2), slice(3, 4)),
    "slice and tensor": (slice(1, 6), torch.tensor([0, 0, 4])),
    "tensor and slice": (torch.tensor([0, 6]), slice(2, 4)),
    "slice and mask": (slice(None), torch.arange(6) > 2),
    "lists": ([0, 1], [1, 0]),
    "arrays": (np.array([0, 1]), np.array([-1, -1])),
    "mask": torch.arange(42).reshape(7, 6) % 5 == 0,
    "array mask": np.arange(42).reshape(7, 6) > 30,
}


@pytest.mark.parametrize("on", ["device", "cpu"])
@pytest.mark.parametrize("index", PAIRS.values(), ids=PAIRS.keys())
def test_two_leading_dimensions_count_rows_as_one_does(device, index, on):
    target = device if on == "device" else "cpu"
    tree = {
        "frames": torch.randint(0, 255, (7, 6, 4, 9), dtype=torch.uint8),
        "reward": torch.randn(7, 6),
        "with gaps": torch.randn(7, 6, 10)[..., :4],
        "part": torch.randn(7, 8, 10)[:, 1:7],
        "turned": torch.randn(6, 7, 3).transpose(0, 1),
    }
    handle = tdcopier.start_gather(tree, index, target)
    assert_same(handle.get(), rows_of(tree, index, target))


@pytest.mark.parametrize(
    "index",
    [(5, slice(None)), (slice(3), torch.tensor([1])), (torch.arange(1 << 16) < 2, 3)],
    ids=["one and slice", "slice and tensor", "mask and one"],
)
def test_a_pair_takes_no_memory_for_rows_that_are_not_asked_for(device, index):
    tree = torch.zeros(1 << 16, 100, dtype=torch.uint8)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as profiler:
        tdcopier.start_gather(tree, index, device).get()
    taken = max(event.cpu_memory_usage for event in profiler.events())
    assert taken <= 1 << 20


def test_a_tensor_and_an_array_are_storages_too(device):
    index = torch.tensor([2, 0])
    for table in (torch.randn(5, 3), np.arange(10.0).reshape(5, 2)):
        assert_same(
            tdcopier.start_gather(table, index, device).get(), rows_of(table, index, device)
        )


def test_on_meta_rows_have_shapes_only():
    tree = {"x": torch.randn(ROWS, 3), "name": "cartpole"}
    moved = tdcopier.start_gather(tree, [1, 4], "meta").get()
    assert (moved["x"].shape, moved["x"].device) == ((2, 3), torch.device("meta"))
    assert moved["name"] == "cartpole"
    with pytest.raises(IndexError):
        tdcopier.start_gather(tree, [ROWS], torch.device("meta"))


@pytest.mark.parametrize("rows", [1 << 12, 1 << 16])
def test_large_gathers_go_through_many_windows(device, rows):
    tree = {"a": torch.arange(rows * 300).reshape(rows, 300), "b": torch.randn(rows, 33)}
    index = torch.randint(0, rows, (20_000,))
    for target in (device, "cpu"):
        handle = tdcopier.start_gather(tree, index, target)
        assert_same(handle.get(), rows_of(tree, index, target))
        assert handle.stats.background


@pytest.mark.parametrize(
    "options",
    [
        {"use_pinned_staging": False},
        {"pack_cpu_tensors": False},
        {"use_background_thread": False},
        {"max_packed_chunk_bytes": 100},
        {"min_packed_alignment_bytes": 256},
    ],
)
def test_the_options_of_start_copy_hold(device, options):
    tree = storage()
    index = torch.randint(0, ROWS, (300,))
    for target in (device, "cpu"):
        handle = tdcopier.start_gather(tree, index, target, **options)
        assert_same(handle.get(), rows_of(tree, index, target))
        if "use_background_thread" in options:
            assert not handle.stats.background


def test_rows_arrive_on_the_host_in_pinned_memory_that_is_sent_as_it_is(device):
    tree = {f"{i}": torch.randn(ROWS, 4 + 4 * (i % 3)) for i in range(100)}
    index = torch.randint(0, ROWS, (100,))
    gathered = tdcopier.start_gather(tree, index, "cpu").get()
    assert all(leaf.is_pinned() for leaf in gathered.values())
    handle = tdcopier.start_copy(gathered, device)
    assert_same(handle.get(), rows_of(tree, index, device))
    assert (handle.stats.transfers, handle.stats.background) == (1, False)
    plain = tdcopier.start_gather(tree, index, "cpu", use_pinned_staging=False).get()
    assert not any(leaf.is_pinned() for leaf in plain.values())


@pytest.mark.sim
def test_rows_of_tables_on_a_device_are_pageable_only_for_lack_of_pinned_memory(sim, device):
    tree = [torch.full((ROWS, 4), 3.0, device=device)]

    def gather() -> tdcopier.AsyncCopyHandle[list[torch.Tensor]]:
        return tdcopier.start_gather(tree, torch.arange(30), "cpu")

    usual = gather()
    assert usual.get()[0].is_pinned()
    with sim.fail_pinned_allocation():
        handle = gather()
        assert handle.get()[0].eq(3).all()
    assert handle.stats.fallbacks == usual.stats.fallbacks + 1
    assert not handle.get()[0].is_pinned()
    with sim.fail_pinned_allocation(code=700):
        handle = gather()
        for ask in (handle.get, handle.wait):
            with pytest.raises(torch.AcceleratorError) as caught:
                ask()
            assert caught.value.error_code == 700
    assert gather().get()[0].is_pinned()


def test_rows_for_the_host_do_not_begin_to_use_an_accelerator(accelerator, monkeypatch):
    """A query for pinned memory would initialize CUDA, which takes 0.3 s and 0.5 GB."""
    monkeypatch.setattr(accelerator, "is_initialized", lambda: False)
    (gathered,) = tdcopier.start_gather([torch.randn(ROWS, 4)], torch.arange(3), "cpu").get()
    assert not gathered.is_pinned()


@pytest.mark.cuda
def test_a_process_that_only_samples_does_not_begin_to_use_cuda():
    run_python("""
        import torch, tdcopier
        table = torch.arange(8)
        (rows,) = tdcopier.start_gather([table], torch.tensor([3, 1]), "cpu").get()
        assert rows.tolist() == [3, 1]
        assert not torch.cuda.is_initialized()
    """)


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded:DeprecationWarning")
def test_rows_for_the_host_are_pageable_in_a_child_of_a_fork(device):
    (before,) = tdcopier.start_gather([torch.arange(8)], torch.tensor([3, 1]), "cpu").get()
    assert before.is_pinned()
    child = os.fork()
    if child == 0:  # where a tensor cannot be asked whether it is pinned
        status = 1
        try:
            (rows,) = tdcopier.start_gather([torch.arange(8)], torch.tensor([3, 1]), "cpu").get()
            with pytest.raises(RuntimeError, match="is a forked child"):
                tdcopier.gather([rows], [0], "cpu", require_pinned_results=True)
            status = int(rows.tolist() != [3, 1])
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0


def test_an_array_over_a_file_is_read_in_the_windows_of_mapped_files(device, tmp_path):
    table = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float32, (ROWS, 300))
    table[:] = np.arange(ROWS * 300).reshape(ROWS, 300)
    plain = np.array(table)
    index = torch.randint(0, ROWS, (4000,))  # 4.8 MB, in windows of 1 MiB
    handle = tdcopier.start_gather({"x": table}, index, device)
    assert torch.equal(handle.get()["x"].cpu(), torch.from_numpy(plain)[index])
    other = tdcopier.start_gather({"x": plain}, index, device)
    other.get()
    assert handle.stats.transfers == 5 < other.stats.transfers


class Rows:
    """The class that a mode turns rows into."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def to(self, device: Any) -> Any:
        return Rows(self.rows.to(device))


def test_under_a_mode_rows_are_what_the_mode_makes_of_them(device):
    class Wrapping(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            made = function(*args, **(kwargs or {}))
            return Rows(made) if function is torch.Tensor.__getitem__ else made

    table = torch.randn(ROWS, 2)
    with Wrapping():
        got = tdcopier.start_gather({"x": table}, [3, 1], device).get()["x"]
    assert type(got) is Rows
    assert torch.equal(got.rows.cpu(), table[[3, 1]])
