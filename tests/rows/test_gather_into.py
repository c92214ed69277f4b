"""Rows that are gathered into existing memory: by the device, by threads, and in CUDA graphs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_same

import tdcopier

ROWS = 50


def storage() -> dict[str, Any]:
    return {
        "pixels": torch.randint(0, 255, (ROWS, 30, 40), dtype=torch.uint8),
        "nested": [torch.randn(ROWS, 17), torch.rand(ROWS, 1) < 0.5],
        "unaligned": torch.arange(40 * ROWS + 1, dtype=torch.uint8)[1:].view(ROWS, 40)[:, 3:34],
        "empty": torch.empty(ROWS, 0),
        "name": "cart pole",
    }


def rows_of(tables: Any, index: torch.Tensor, device: Any) -> Any:
    if isinstance(tables, dict):
        return {name: rows_of(table, index, device) for name, table in tables.items()}
    if isinstance(tables, list):
        return [rows_of(table, index, device) for table in tables]
    if not isinstance(tables, torch.Tensor):
        return tables
    return tables[index].contiguous().to(device)


def batch_like(tables: Any, shape: tuple[int, ...], device: Any) -> Any:
    if isinstance(tables, dict):
        return {name: batch_like(table, shape, device) for name, table in tables.items()}
    if isinstance(tables, list):
        return [batch_like(table, shape, device) for table in tables]
    if not isinstance(tables, torch.Tensor):
        return tables
    return torch.zeros(*shape, *tables.shape[1:], dtype=tables.dtype, device=device)


@pytest.mark.parametrize("where", ["device", "cpu"])
@pytest.mark.parametrize("pinned", [True, False])
def test_the_batch_is_filled_with_the_rows(device, where, pinned):
    tables = storage()
    target = device if where == "device" else "cpu"
    memory = tdcopier.pin_memory_(tables, device) if pinned else None
    for index in (torch.tensor([3, 3, 0, -1, 17]), torch.tensor([[1, 2], [-5, 6]])):
        out = batch_like(tables, tuple(index.shape), target)
        before = [leaf.data_ptr() for leaf in (out["pixels"], *out["nested"])]
        version = out["pixels"]._version
        handle = tdcopier.start_gather(tables, index, target, out=out)
        assert handle.get() is out
        assert_same(out, rows_of(tables, index, target))
        assert [leaf.data_ptr() for leaf in (out["pixels"], *out["nested"])] == before
        assert out["pixels"]._version == version + 1
        in_place = pinned and where == "device"
        assert handle.stats.rows_in_place == (4 if in_place else 0)
        assert handle.stats.transfers == 1 or not in_place
        assert tdcopier.gather(tables, index, out=out) is out
    if memory:
        memory.close()


def test_the_index_may_be_on_the_device(device):
    tables = storage()
    index = torch.tensor([3, 3, 0, -1, 17], dtype=torch.int32)
    out = batch_like(tables, (5,), device)
    with tdcopier.pin_memory_(tables, device):
        handle = tdcopier.start_gather(tables, index.to(device), out=out)
        assert handle.wait() is out
        assert_same(out, rows_of(tables, index.long(), device))
        out["nested"][0].fill_(5)
        handle = tdcopier.start_gather(tables, torch.tensor([0, ROWS, 1, 2, 3]).to(device), out=out)
        with pytest.raises(IndexError, match=f"index {ROWS} is out of bounds"):
            handle.get()
        assert out["nested"][0][1].eq(5).all()  # what is not read stays as it is


def test_tensordicts(device):
    tensordict = pytest.importorskip("tensordict")
    data = tensordict.TensorDict(
        {"a": torch.randn(ROWS, 4), "next": {"b": torch.arange(ROWS)}}, [ROWS]
    )
    index = torch.tensor([1, 1, 40])
    out = data[:3].clone().to(device)
    with tdcopier.pin_memory_(data, device):
        handle = tdcopier.start_gather(data, index, device, out=out)
        assert handle.wait() is out
        assert_same(out, data[index].to(device))
        assert handle.stats.rows_in_place == 2


def test_batches_with_gaps_and_arrays(device):
    tables = [torch.randn(ROWS, 6), np.arange(ROWS * 3.0).reshape(ROWS, 3)]
    index = torch.tensor([5, 1, 1])
    out = [torch.zeros(3, 12, device=device)[:, ::2], torch.zeros(3, 3, device=device).double()]
    with tdcopier.pin_memory_(tables, device):
        tdcopier.gather(tables, index, device, out=out)
    assert torch.equal(out[0].cpu(), tables[0][index])
    assert torch.equal(out[1].cpu(), torch.from_numpy(tables[1])[index])
    here = np.zeros((3, 3))
    tdcopier.gather(tables[1:], index, "cpu", out=[here])
    assert np.array_equal(here, tables[1][index.numpy()])


def test_mistakes_are_named_and_nothing_is_written(device):
    tables = {"a": torch.ones(ROWS, 3), "b": [torch.ones(ROWS)]}
    good = {"a": torch.zeros(2, 3, device=device), "b": [torch.zeros(2, device=device)]}
    for out, error, message in (
        ({**good, "b": [torch.zeros(3, device=device)]}, ValueError, r"out\['b'\]\[0\] has shape"),
        ({**good, "b": [torch.zeros(2, device=device).int()]}, ValueError, r"has dtype"),
        ({**good, "b": [torch.zeros(2)]}, ValueError, r"out\['b'\]\[0\] is on cpu, and not on"),
        ({"a": good["a"]}, ValueError, "out"),
    ):
        with pytest.raises(error, match=message):
            tdcopier.start_gather(tables, [0, 1], device, out=out)
    assert good["a"].eq(0).all()
    with pytest.raises(IndexError, match="index 50 is out of bounds"):
        tdcopier.start_gather(tables, [0, 50], out=good)
    with pytest.raises(TypeError, match="needs a device, or existing memory"):
        tdcopier.start_gather(tables, [0, 1])
    shared = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="share memory"):
        tdcopier.start_gather([tables["a"], tables["a"].clone()], [0, 1], out=[shared, shared])
    with pytest.raises(ValueError, match="share memory"):
        tdcopier.start_gather([tables["a"]], [0, 1], out=[tables["a"][:2]])


def test_the_write_waits_for_readers_of_the_batch(stall, device):
    table = torch.arange(ROWS * 100.0).view(ROWS, 100)
    out = torch.zeros(4, 100, device=device)
    with tdcopier.pin_memory_(table, device):
        stream = torch.accelerator.current_stream()
        with stall(stream):
            before = out.clone()
            handle = tdcopier.start_gather([table], torch.arange(4), out=[out])
            assert not handle.ready()
        handle.wait()
        assert before.eq(0).all()
        assert torch.equal(out.cpu(), table[:4])


def test_random_tables_and_batches(device):
    dice = random.Random(7)
    for seed in range(30):
        torch.manual_seed(seed)
        rows = dice.randint(1, 60)
        tables = [
            torch.randint(0, 200, (rows, *[dice.randint(1, 9)] * dice.randint(0, 2))).to(dtype)
            for dtype in (torch.uint8, torch.int16, torch.float32, torch.complex128)
        ]
        index = torch.randint(-rows, rows, (dice.randint(0, 40),))
        out = batch_like(tables, (len(index),), device)
        with tdcopier.pin_memory_(tables[: dice.randint(0, 4)], device):
            tdcopier.gather(tables, index, device, out=out)
        assert_same(out, rows_of(tables, index, device))


@pytest.mark.cuda
def test_a_graph_gathers_the_rows_that_the_index_names_at_each_replay():
    device = "cuda:0"
    tables = {"x": torch.randn(1000, 17), "nested": [torch.arange(1000)]}
    index = torch.zeros(64, dtype=torch.int64, device=device)
    out = batch_like(tables, (64,), device)
    total = torch.zeros((), device=device)
    graph = torch.cuda.CUDAGraph()
    with tdcopier.pin_memory_(tables, device):
        with torch.cuda.graph(graph):
            handle = tdcopier.start_gather(tables, index, out=out)
            batch = handle.wait()
            total.copy_(batch["x"].sum())
        assert batch is out
        wrong = 0
        for _ in range(1000):
            numbers = torch.randint(-1000, 1000, (64,))
            index.copy_(numbers)
            graph.replay()
            torch.cuda.synchronize()
            wrong += not torch.equal(out["x"].cpu(), tables["x"][numbers])
            wrong += not torch.equal(out["nested"][0].cpu(), tables["nested"][0][numbers])
        assert wrong == 0
        assert torch.allclose(total.cpu(), tables["x"][numbers].sum(), rtol=1e-4, atol=1e-4)
        assert handle.get() is out
        index[3] = 1000
        graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(IndexError, match=r"index 1000 is out of bounds: .* at place 3"):
            handle.get()
        index[3] = 7
        graph.replay()
        torch.cuda.synchronize()
        assert handle.get() is out


def gather_three_times(table: torch.Tensor) -> None:
    for _ in range(3):
        tdcopier.gather([table], torch.arange(3), "cuda:0")


@pytest.mark.cuda
def test_of_many_dropped_captures_each_still_reports_its_replays():
    """Their reports are looked at in turn, some in each call."""
    device = "cuda:0"
    table = torch.arange(1000)
    index = torch.zeros(4, dtype=torch.int64, device=device)
    out = torch.zeros(4, dtype=torch.int64, device=device)
    graphs = []
    with tdcopier.pin_memory_(table, device):
        for _ in range(600):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                tdcopier.start_gather([table], index, out=[out]).wait()
        index[2] = 1000
        for which in (0, 300, 599):
            graphs[which].replay()
            torch.cuda.synchronize()
            with pytest.raises(IndexError, match="index 1000 is out of bounds"):
                gather_three_times(table)
        gather_three_times(table)


def new_graph() -> Any:
    return torch.cuda.graph(torch.cuda.CUDAGraph())


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_scatters_and_refuses_what_needs_the_host():
    device = "cuda:0"
    table = torch.zeros(1000, 5)
    index = torch.arange(64, device=device)
    batch = torch.randn(64, 5, device=device)
    graph = torch.cuda.CUDAGraph()
    with tdcopier.pin_memory_(table, device):
        with torch.cuda.graph(graph):
            tdcopier.start_scatter([batch], [table], index).wait()
        for _ in range(5):
            batch.normal_()
            index.copy_(torch.randperm(1000)[:64])
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(table[index.cpu()], batch.cpu())
        with pytest.raises(RuntimeError, match="capturing"), new_graph():
            tdcopier.start_gather([table], index, device)
    with pytest.raises(RuntimeError, match="capturing"), new_graph():
        tdcopier.start_gather([table], torch.arange(3), out=[batch[:3]])
    assert torch.equal(tdcopier.gather([table], torch.arange(9), device)[0].cpu(), table[:9])
