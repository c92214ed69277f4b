"""Batches written into rows of a storage: the same as `storage[index] = batch`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from catalogue import ramp
from each_case import together
from support import assert_same, raises_exactly
from tensordict import TensorDict, UnbatchedTensor
from torch.utils._pytree import tree_map

import tdcopier

ROWS = 50
INDICES = {
    "tensor": torch.tensor([3, 0, 49, 17]),
    "int32": torch.tensor([3, 0, 49], dtype=torch.int32),
    "negative": torch.tensor([-1, 0, 7]),
    "array": np.array([4, 5, -3]),
    "list": [1, 2, 3, 10, 11],
    "none": torch.tensor([], dtype=torch.int64),
    "slice": slice(5, 30),
    "slice with a step": slice(None, None, 3),
    "wrapped around": torch.arange(45, 55) % ROWS,
    "mask": torch.arange(ROWS) % 3 == 0,
    "one": 7,
    "matrix": torch.randperm(ROWS)[:12].reshape(3, 4),
    "all": slice(None),
}


def storage() -> dict[str, Any]:
    wide = ramp("cpu", ROWS, 24)
    return {
        "frames": torch.randint(0, 255, (ROWS, 4, 21, 21), dtype=torch.uint8),
        "reward": torch.randn(ROWS),
        "large": torch.arange(ROWS * 3000).reshape(ROWS, 3000),
        "array": np.arange(ROWS * 2.0).reshape(ROWS, 2),
        "left": wide[:, :12],
        "right": wide[:, 12:],
        "nested": [torch.randn(ROWS, 2), ({"x": torch.rand(ROWS, 2, 2) > 0.5},)],
        "name": "kept",
    }


def batch_for(tables: Any, index: Any, device: str) -> Any:
    """Makes other values in the shape of these rows."""

    def rows_of(table: Any) -> Any:
        if isinstance(table, np.ndarray):
            table = torch.from_numpy(table)
        if not isinstance(table, torch.Tensor):
            return table
        rows = table[index].clone()
        return (rows == 0 if rows.dtype == torch.bool else 100 - rows).to(device)

    return tree_map(rows_of, tables)


def as_torch_writes(tables: Any, index: Any, batch: Any) -> Any:
    copies = tree_map(
        lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else torch.clone(leaf)
        if isinstance(leaf, torch.Tensor) else leaf, tables,
    )  # fmt: skip

    def write(table: Any, rows: Any) -> None:
        if isinstance(table, np.ndarray):
            torch.from_numpy(table)[index] = rows.cpu()
        elif isinstance(table, torch.Tensor):
            table[index] = rows.cpu()

    tree_map(write, copies, batch)
    return copies


def assert_written(tables: Any, expected: Any) -> None:
    def same(table: Any, wanted: Any) -> None:
        if isinstance(table, np.ndarray):
            assert (table == wanted).all()
        elif isinstance(table, torch.Tensor):
            assert torch.equal(table, wanted)
        else:
            assert table is wanted

    tree_map(same, tables, expected)


@pytest.mark.parametrize(
    "options", [{}, {"use_pinned_staging": False}, {"use_background_thread": False}]
)
@pytest.mark.parametrize("on", ["device", "cpu"])
@together("index", INDICES.values(), ids=INDICES.keys())
def test_it_equals_torchs_own_indexing(device, index, on, options):
    tables = storage()
    batch = batch_for(tables, index, device if on == "device" else "cpu")
    expected = as_torch_writes(tables, index, batch)
    handle = tdcopier.start_scatter(batch, tables, index, **options)
    assert handle.get() is tables
    assert_written(tables, expected)
    assert handle.stats.delegated_leaves == 0


@pytest.mark.parametrize("rows", [1 << 12, 1 << 15])
def test_large_batches_go_through_many_windows(device, rows):
    tables = {"a": torch.zeros(rows, 300, dtype=torch.int64), "b": torch.zeros(rows, 33)}
    index = torch.randperm(rows)[: rows // 2]
    for on in (device, "cpu"):
        batch = {name: torch.rand(rows // 2, *t.shape[1:]).mul(99).to(t.dtype).to(on)
                 for name, t in tables.items()}  # fmt: skip
        expected = as_torch_writes(tables, index, batch)
        tdcopier.start_scatter(batch, tables, index).wait()
        assert_written(tables, expected)


@pytest.mark.parametrize(
    "index",
    [
        (torch.tensor([0, 3, -1]), torch.tensor([1, -6, 5])),
        (slice(1, 4), slice(None, None, 2)),
        (torch.tensor([[0], [3]]), torch.tensor([1, 2])),
        torch.arange(42).reshape(7, 6) % 5 == 0,
    ],
    ids=["numbers", "slices", "grid", "mask"],
)
def test_two_leading_dimensions(device, index):
    tables = {
        "x": torch.randn(7, 6, 4),
        "part": torch.randn(7, 8, 3)[:, 1:7],
        "y": torch.randn(7, 6),
    }
    batch = batch_for(tables, index, device)
    expected = as_torch_writes(tables, index, batch)
    tdcopier.start_scatter(batch, tables, index).get()
    assert_written(tables, expected)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_tensordict_takes_a_batch_from_the_device(device, mapped, tmp_path):
    td = TensorDict({"x": torch.randn(ROWS, 3), "next": {"x": torch.randn(ROWS, 3)}}, [ROWS])
    index = torch.tensor([4, 49, 0])
    batch = TensorDict({"x": torch.ones(3, 3), "next": {"x": torch.zeros(3, 3)}}, [3]).to(device)
    expected = td.clone()
    expected[index] = batch.to("cpu")
    if mapped:
        td = td.memmap_(tmp_path)
    handle = tdcopier.start_scatter(batch, td, index)
    assert handle.get() is td
    assert torch.equal(td["x"], expected["x"])
    assert torch.equal(td["next", "x"], expected["next", "x"])
    assert handle.stats.delegated_leaves == 0
    if mapped:
        assert torch.equal(TensorDict.load_memmap(tmp_path)["x"], expected["x"])


def test_what_is_left_to_torch_is_counted(device):
    tables = {
        "columns": ramp("cpu", 6, ROWS).t(),
        "device": torch.zeros(ROWS, 2, device=device),
        "turned": torch.zeros(ROWS, 2, 3),
        "plain": torch.zeros(ROWS, 2),
    }
    batch = {
        "columns": torch.ones(2, 6, device=device),
        "device": torch.ones(2, 2, device=device),
        "turned": torch.ones(2, 3, 2, device=device).transpose(1, 2),
        "plain": torch.ones(2, 2, device=device),
    }
    handle = tdcopier.start_scatter(batch, tables, [1, 4])
    handle.get()
    for table in tables.values():
        assert (table.cpu()[[1, 4]] == 1).all()
    assert (tables["plain"].sum(), tables["device"].sum()) == (4, 4)
    assert (handle.stats.delegated_leaves, handle.stats.packed_leaves) == (3, 1)


# ---- mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ([1, 50], IndexError, "index 50 is out of bounds: there are 50 rows"),
        ([1, 1], ValueError, "row 1 is in the index more than once"),
        ([5, -45], ValueError, "row 5 is in the index more than once"),
        (1.5, TypeError, "got the float 1.5"),
        ([1, 2, 3], ValueError, r"batch\['x'\] has shape \(2, 3\), and the rows that it is for "
         r"have \(3, 3\) together"),
    ],
)  # fmt: skip
def test_a_wrong_index_is_an_error_and_nothing_is_written(device, index, error, message):
    tables = {"a": torch.zeros(ROWS, 3), "x": torch.zeros(ROWS, 3)}
    count = 3 if index == [1, 2, 3] else 2
    batch = {"a": torch.ones(count, 3, device=device), "x": torch.ones(2, 3, device=device)}
    with pytest.raises(error, match=message):
        tdcopier.start_scatter(batch, tables, index)
    assert (tables["a"].sum(), tables["x"].sum()) == (0, 0)


@pytest.mark.parametrize("index", [([1, 4, 1], [2, 0, 2]), (slice(1, 2), [2, 2])])
def test_a_repeated_row_of_two_dimensions_is_named_by_both(index):
    tables = {"x": torch.zeros(10, 5, 3)}
    batch = {"x": torch.ones_like(tables["x"][index])}
    with pytest.raises(ValueError, match=r"row \(1, 2\) is in the index more than once"):
        tdcopier.start_scatter(batch, tables, index)
    assert tables["x"].sum() == 0


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.ones(2, 3)}, "storage has 'y', which batch lacks"),
        ({"x": torch.ones(2, 3).double(), "y": torch.ones(2)}, r"batch\['x'\] has dtype"),
        ({"x": torch.ones(2, 3), "y": 5}, r"\['y'\]"),
        ({"x": torch.ones(2, 3), "y": torch.ones(2, 1)}, r"batch\['y'\] has shape \(2, 1\)"),
    ],
)
def test_a_batch_that_does_not_fit_is_named(batch, message):
    tables = {"x": torch.zeros(ROWS, 3), "y": torch.zeros(ROWS)}
    with pytest.raises((ValueError, TypeError), match=message):
        tdcopier.start_scatter(batch, tables, [1, 2])
    assert tables["x"].sum() == 0


def test_tables_that_share_memory_are_refused():
    table = torch.zeros(ROWS, 3)
    batch = {"x": torch.ones(1, 3), "y": torch.ones(1, 3)}
    with pytest.raises(ValueError, match=r"storage\['x'\] and storage\['y'\] share memory"):
        tdcopier.start_scatter(batch, {"x": table, "y": table}, [1])
    with pytest.raises(ValueError, match=r"storage and batch share memory"):
        tdcopier.start_scatter(table[2:4], table, [1, 7])


@pytest.mark.parametrize(
    "table",
    [
        np.zeros((10, 2), "f4")[::-1],
        np.zeros((10, 2), "f4")[:, ::-1],
        np.zeros((10, 2), dtype=[("a", "f4"), ("b", "i1")])["a"],
    ],
    ids=["reversed", "reversed rows", "a field of records"],
)
def test_an_array_that_no_tensor_is_over_is_refused(device, table):
    with pytest.raises(ValueError, match="storage is an array with strides that no tensor has"):
        tdcopier.start_scatter(torch.ones(1, 2, device=device), table, [1])


def test_a_batch_of_arrays_of_any_strides_and_byte_order_is_written():
    table = torch.zeros(ROWS, 2)
    swapped = np.arange(4, dtype=">f4").reshape(2, 2)
    tdcopier.start_scatter({"x": swapped}, {"x": table}, [3, 5]).get()
    assert table[[3, 5]].tolist() == swapped.tolist()
    tdcopier.start_scatter({"x": swapped.astype("f4")[::-1]}, {"x": table}, [3, 5]).get()
    assert table[[3, 5]].tolist() == swapped[::-1].tolist()


def test_a_table_of_the_wrong_kind_is_named(device):
    read_only = np.zeros((ROWS, 2))
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="storage is an array that torch cannot write to"):
        tdcopier.start_scatter(torch.ones(1, 2).double(), read_only, [1])
    with raises_exactly(
        ValueError,
        "storage requires a gradient, and writing in place would break it: make the call within "
        "torch.no_grad(), or give detach()",
    ):
        tdcopier.start_scatter(torch.ones(1), torch.zeros(5, requires_grad=True), [1])
    assert_same(tdcopier.copy(torch.ones(2), device), torch.ones(2, device=device))


@pytest.mark.parametrize("wrap", [lambda td: td, lambda td: {"data": [td]}], ids=["root", "within"])
def test_a_tensor_that_belongs_to_all_rows_is_refused_and_named(device, wrap):
    def made(value: float) -> TensorDict:
        shared = UnbatchedTensor(torch.full((3, 2), value))
        return TensorDict({"x": torch.full((3, 2), value), "deep": {"shared": shared}}, [3])

    storage = wrap(made(0.0))
    with pytest.raises(ValueError, match=r"\['deep'\]\['shared'\] is an UnbatchedTensor, which "):
        tdcopier.start_scatter(wrap(made(1.0).to(device)), storage, [2, 0, 1])
    leaf = storage if isinstance(storage, TensorDict) else storage["data"][0]
    assert not leaf["x"].any()
    assert not leaf["deep", "shared"].any()
