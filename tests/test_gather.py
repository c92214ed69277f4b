"""Rows of nested tables on their way to a device: equal to indexing each leaf and moving it."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import ramp
from container_classes import Pair
from support import are_released, assert_same, raises_exactly, run_python
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

import tdcopier
from tdcopier import _C

ROWS = 50


def storage(rows: int = ROWS) -> dict[str, Any]:
    """Of every width, dtype and container."""
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


def rows_of(tree: Any, index: Any, device: str) -> Any:
    """What a gather is to give."""
    if isinstance(index, range):
        index = list(index)
    elif isinstance(index, np.ndarray):
        index = index.astype(index.dtype.newbyteorder("="))

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = torch.as_tensor(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf[index].to(device, copy=True)

    return tree_map(of_leaf, tree)


@pytest.mark.parametrize("on", ["device", "cpu"])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES.keys())
def test_it_equals_indexing_and_moving_each_leaf(device, index, on):
    target = device if on == "device" else "cpu"
    tree = storage()
    handle = tdcopier.start_gather(tree, index, target)
    assert_same(handle.get(), rows_of(tree, index, target))


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


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [ROWS, -ROWS - 1, 10**12])
@pytest.mark.parametrize("form", [torch.tensor, list, np.array, lambda rows: rows[1]])
def test_a_row_that_is_not_there_is_an_error_before_any_is_read(device, wrong, form):
    message = f"index {wrong} is out of bounds: there are {ROWS} rows"
    tree = {"a": torch.randn(ROWS, 2), "columns": ramp("cpu", 6, ROWS).t()}
    with raises_exactly(IndexError, message):
        tdcopier.start_gather(tree, form([0, wrong]), device)
    assert_same(tdcopier.copy([torch.ones(2)], device), [torch.ones(2).to(device)])


def test_a_pair_with_a_row_that_is_not_there_is_an_error(device):
    tree = {"a": torch.randn(4, 5)}
    for index, wrong, rows in ((([4], [0]), 4, 4), (([0], [-6]), -6, 5)):
        with raises_exactly(IndexError, f"index {wrong} is out of bounds: there are {rows} rows"):
            tdcopier.start_gather(tree, index, device)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        (1.5, TypeError, "got float"),
        (True, TypeError, "got bool"),
        ("a", TypeError, "got str"),
        (None, TypeError, "got NoneType"),
        (torch.tensor([0.5]), TypeError, "it is of torch.float32"),
        (torch.tensor([1], dtype=torch.uint8), TypeError, "it is of torch.uint8"),
        (slice(None, None, -1), ValueError, "the step of a slice of rows must be positive; got -1"),
        (slice(None, None, 0), ValueError, "the step of a slice of rows must be positive; got 0"),
        (torch.ones(3, dtype=torch.bool), IndexError, r"the shape of the mask \[3\]"),
        (torch.ones(1, 1, 1, dtype=torch.bool), IndexError, "a mask counts rows by one"),
        ((0, 0, 0), TypeError, "got a tuple of 3"),
        ([slice(3)], TypeError, "index is a list that is not one of rows"),
        ([[0, 1], [2]], TypeError, "index is a list that is not one of rows"),
        (1 << 70, IndexError, "index 1180591620717411303424 is out of bounds"),
        ([0, 1 << 70], IndexError, "index has a row that is out of bounds"),
        (([0, 1], [0, 1, 0]), IndexError, r"pick \[2\] and \[3\], which cannot be broadcast"),
        ((torch.arange(ROWS) < 3, [0, 1]), IndexError, r"pick \[3\] and \[2\]"),
        ((torch.arange(3) < 1, 0), IndexError, r"the shape of the mask \[3\]"),
        ((torch.ones(ROWS, 2, dtype=torch.bool), 0), IndexError, "each of a pair"),
    ],
)
def test_what_is_no_index_of_rows_is_refused(device, index, error, message):
    with pytest.raises(error, match=message):
        tdcopier.start_gather({"a": torch.randn(ROWS, 2)}, index, device)


def test_an_index_on_a_device_is_refused(device):
    index = torch.tensor([1]).to(device)
    with pytest.raises(ValueError, match=f"it is on {device}: give index.cpu"):
        tdcopier.start_gather({"a": torch.randn(ROWS, 2)}, index, device)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (torch.randn(ROWS + 1, 2), r"data\['x'\]\[1\] has 51 rows, where other leaves have 50"),
        (torch.tensor(1.0), r"data\['x'\]\[1\] has 0 dimensions, and the index counts rows by 1"),
        (np.zeros((3, 2)), r"data\['x'\]\[1\] has 3 rows, where other leaves have 50"),
    ],
)
def test_a_leaf_with_other_rows_is_named(device, leaf, message):
    tree = {"a": torch.randn(ROWS, 2), "x": [torch.randn(ROWS), leaf]}
    with pytest.raises(ValueError, match=message):
        tdcopier.start_gather(tree, [0], device)


def test_a_table_that_reaches_beyond_its_storage_is_named(device):
    table = torch.arange(20.0).view(10, 2)
    short = table[:]
    table.untyped_storage().resize_(8)
    with pytest.raises(
        ValueError, match=r"data\['x'\] reaches beyond its storage, which has only 8"
    ):
        tdcopier.start_gather({"x": short}, [9], device)


@pytest.mark.parametrize("count", [4, 4000], ids=["small", "large"])
def test_an_array_over_a_file_is_read_by_workers(device, tmp_path, count):
    table = np.lib.format.open_memmap(tmp_path / "rows.npy", "w+", np.float32, (ROWS, 300))
    table[:] = np.arange(ROWS * 300).reshape(ROWS, 300)
    index = torch.randint(0, ROWS, (count,))
    got = tdcopier.start_gather({"x": table}, index, device).get()["x"]
    assert torch.equal(got.cpu(), torch.from_numpy(np.array(table))[index])


def test_a_storage_without_leaves(device):
    assert tdcopier.start_gather({"a": 1, "b": []}, [5], device).get() == {"a": 1, "b": []}
    with raises_exactly(ValueError, "storage has no leaf, so nobody knows how many rows there are"):
        tdcopier.start_gather({}, slice(3), device)


def test_a_storage_with_fewer_dimensions_than_the_index_counts(device):
    message = "index counts rows by 2 dimensions; the shape of data['a'] is (5,)"
    with raises_exactly(ValueError, message):
        tdcopier.start_gather({"a": torch.zeros(5)}, (0, 0), device)


def test_options_and_devices_are_checked(device):
    tree = {"a": torch.randn(ROWS, 2)}
    with pytest.raises(ValueError, match="min_packed_alignment_bytes"):
        tdcopier.start_gather(tree, [0], device, min_packed_alignment_bytes=0)
    with pytest.raises((ValueError, RuntimeError)):
        tdcopier.start_gather(tree, [0], "nonsense")


class Rows:
    """What a mode may make of rows."""

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


# ---- lifetime and order --------------------------------------------------------------------------


@pytest.mark.parametrize("count", [20, 20_000], ids=["small", "large"])
def test_the_index_is_copied_in_the_call(stall, device, copy_stream, count):
    tree = {"a": torch.randn(ROWS, 300)}
    index = torch.randint(0, ROWS, (count,))
    expected = rows_of(tree, index, "cpu")
    with stall(copy_stream):
        handle = tdcopier.start_gather(tree, index, device)
        index.fill_(10**9)
    assert_same(handle.get()["a"].cpu(), expected["a"])


@pytest.mark.parametrize("count", [20, 3000], ids=["small", "large"])
def test_a_writer_may_go_on_when_rows_are_gathered(stall, device, copy_stream, count):
    tree = {"a": torch.randn(ROWS, 300), "b": np.ones((ROWS, 2))}
    index = torch.randint(0, ROWS, (count,))
    expected = rows_of(tree, index, "cpu")
    with stall(copy_stream):
        handle = tdcopier.start_gather(tree, index, device)
        handle.wait_gathered()  # while the device has not even begun
        tree["a"].zero_()
        tree["b"].fill(0)
    moved = handle.get()
    assert_same(moved["a"].cpu(), expected["a"])
    assert_same(moved["b"].cpu(), expected["b"])


@pytest.mark.parametrize("count", [20, 20_000], ids=["small", "large"])
@pytest.mark.parametrize("on", ["device", "cpu"])
def test_storage_and_handle_may_be_dropped_at_once(device, accelerator, count, on):
    table = torch.randn(ROWS, 300)
    gone = [weakref.ref(table)]
    tdcopier.start_gather(
        [table], torch.randint(0, ROWS, (count,)), device if on == "device" else on
    )
    del table
    gc.collect()
    accelerator.synchronize()
    _C.settle()
    assert are_released(gone)


def test_the_gil_is_free_while_rows_are_read(device):
    """Many threads gather at once, and each gets its own rows."""
    tree = {"a": torch.arange(ROWS * 40).reshape(ROWS, 40), "b": torch.arange(ROWS)}
    together = threading.Barrier(8)
    failures: list[BaseException] = []

    def gather(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        try:
            together.wait(30)
            for _ in range(20):
                index = torch.randint(0, ROWS, (seed * 100 + 1,), generator=generator)
                assert_same(
                    tdcopier.start_gather(tree, index, device).get(), rows_of(tree, index, device)
                )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=gather, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.sim
def test_a_forked_child_gathers_into_ordinary_memory():
    """Its parent may have held the lock of the pinned allocator when it was forked."""
    code = """
    import os, torch, tdcopier
    from tdcopier import sim

    sim.enable()
    table = torch.arange(40_000.0).reshape(400, 100)
    under_way = tdcopier.start_gather(table, torch.arange(400).repeat(50), "cpu")
    child = os.fork()
    if child == 0:
        rows = tdcopier.start_gather(table, [3, 7], "cpu").get()
        os._exit(0 if torch.equal(rows, table[[3, 7]]) else 1)
    print(os.waitpid(child, 0)[1], under_way.get().is_pinned())
    """
    assert run_python(code).split() == ["0", "True"]


def test_no_python_runs_for_each_leaf(device):
    """A thousand leaves take no more calls than ten, but for those of anybody's collector."""

    def calls(leaves: int) -> int:
        tree = {f"{i}": torch.randn(ROWS, 2) for i in range(leaves)}
        count = 0

        def count_calls(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        index = torch.tensor([1, 2])
        gc.disable()
        sys.setprofile(count_calls)
        try:
            tdcopier.start_gather(tree, index, device).get()
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    calls(10)
    assert calls(1000) < calls(10) + 100
