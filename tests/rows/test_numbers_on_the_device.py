"""Indices that are on the device: values, order with streams, rows that are out of range."""

from __future__ import annotations

import gc
import itertools
import os
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
        "name": "cart pole",
    }


def rows_of(tables: Any, index: torch.Tensor, device: str) -> Any:
    if isinstance(tables, dict):
        return {name: rows_of(table, index, device) for name, table in tables.items()}
    if isinstance(tables, list):
        return [rows_of(table, index, device) for table in tables]
    return tables[index].to(device) if isinstance(tables, torch.Tensor) else tables


INDICES = {
    "int64": torch.tensor([3, 3, 0, 49, -1, -50, 17]),
    "int32": torch.tensor([3, -3, 0], dtype=torch.int32),
    "int16": torch.tensor([49, -50], dtype=torch.int16),
    "none": torch.tensor([], dtype=torch.int64),
    "of two dimensions": torch.tensor([[1, 2, 3], [4, -5, 6]]),
    "with gaps": torch.arange(40)[::3],
}


@pytest.mark.parametrize("index", INDICES.values(), ids=list(INDICES))
def test_rows_are_those_of_the_storage(device, index):
    tables = storage()
    with tdcopier.pin_memory_(tables, device):
        handle = tdcopier.start_gather(tables, index.to(device), device)
        assert_same(handle.get(), rows_of(tables, index.long(), device))
        assert handle.stats.rows_in_place == (3 if index.numel() else 0)
        assert handle.stats.fallbacks == 0


EMPTY = {
    "of no memory": lambda: torch.empty(ROWS, 0),
    "at the end of its memory": lambda: torch.zeros(1)[1:].view(ROWS, 0),
    "array": lambda: np.empty((ROWS, 0)),
    "of several dimensions": lambda: torch.empty(ROWS, 4, 0, 3),
}


@pytest.mark.parametrize("make", EMPTY.values(), ids=list(EMPTY))
def test_rows_without_bytes_are_among_the_others(device, make):
    tables = {"a": torch.randn(ROWS, 7), "b": make(), "c": torch.arange(ROWS)}
    expected = {name: torch.as_tensor(table)[[3, -1]] for name, table in tables.items()}
    index = torch.tensor([3, -1]).to(device)
    out = {name: torch.zeros_like(rows, device=device) for name, rows in expected.items()}
    expected = {name: rows.to(device) for name, rows in expected.items()}
    with tdcopier.pin_memory_(tables, device):
        for given in (index, index.cpu()):
            assert_same(tdcopier.gather(tables, given, device), expected)
            assert_same(tdcopier.gather(tables, given, device, out=out), expected)
        tdcopier.scatter(expected, tables, torch.tensor([5, 6]).to(device))
        assert torch.equal(tables["c"][5:7], torch.tensor([3, ROWS - 1]))


def test_delegated_tables_on_the_device_take_every_dtype_of_numbers(device):
    """Torch's own indexing fills leaves from them, and takes no int16."""
    table = torch.arange(ROWS * 3).view(ROWS, 3)
    for dtype in (torch.int16, torch.int32, torch.int64):
        index = torch.tensor([3, -1], dtype=dtype).to(device)
        out = torch.zeros(2, 6, dtype=torch.int64, device=device)[:, ::2]
        there = table.to(device)
        tdcopier.gather([there], index, out=[out])
        assert torch.equal(out.cpu(), table[[3, -1]])
        tdcopier.scatter([out + 1], [there], index)
        assert torch.equal(there.cpu()[[3, -1]], table[[3, -1]] + 1)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        *itertools.product(
            ["out", "scatter"], ["gaps in the batch", "on the host", "gaps in rows"]
        ),
        ("scatter", "gradient"),
    ],
)
def test_what_torch_would_have_to_index_on_the_host_is_refused(device, call, why):
    table, batch = torch.arange(ROWS * 3.0).view(ROWS, 3), torch.zeros(2, 3, device=device)
    if why == "gaps in the batch":
        batch = torch.zeros(2, 6, device=device)[:, ::2]
    elif why == "on the host":
        batch = torch.zeros(2, 3)
    elif why == "gradient":
        batch.requires_grad_()
    else:
        table = torch.arange(ROWS * 3.0).view(3, ROWS).t()
    index = torch.tensor([1, 2]).to(device)
    calls = {
        "out": lambda: tdcopier.start_gather({"t": table}, index, out={"t": batch}),
        "scatter": lambda: tdcopier.start_scatter({"t": batch}, {"t": table}, index),
    }
    message = r"storage\['t'\] cannot be accessed by the device that has the index"
    if why != "gaps in rows":
        leaf = "out" if call == "out" else "batch"
        message = rf"^{leaf}\['t'\] is no contiguous tensor on {device} without gradients"
    with tdcopier.pin_memory_(table, device), pytest.raises(ValueError, match=message):
        calls[call]()


def test_more_numbers_than_one_kernel_takes_from_the_host(device):
    tables = [torch.arange(ROWS * 3).view(ROWS, 3) + i for i in range(20)]
    index = torch.randint(-ROWS, ROWS, (20_000,))
    with tdcopier.pin_memory_(tables, device):
        handle = tdcopier.start_gather(tables, index.to(device), device)
        assert_same(handle.get(), [table[index].to(device) for table in tables])
        assert handle.stats.transfers == 1


def test_tensordicts(device):
    tensordict = pytest.importorskip("tensordict")
    data = tensordict.TensorDict(
        {"a": torch.randn(ROWS, 4), "next": {"b": torch.arange(ROWS)}}, [ROWS]
    )
    index = torch.tensor([1, -1, 40])
    with tdcopier.pin_memory_(data, device):
        assert_same(tdcopier.gather(data, index.to(device), device), data[index].to(device))


def test_the_host_waits_for_nothing(stall, device):
    """Neither in the call nor in `wait()`, though the index is not known yet."""
    tables = storage()
    index = torch.tensor([7, 8, 9])
    on_device = torch.zeros(3, dtype=torch.int64, device=device)
    staged, other = index.pin_memory(), torch.full((3,), 10**6).pin_memory()
    with tdcopier.pin_memory_(tables, device):
        stream = torch.accelerator.current_stream()
        with stall(stream):
            on_device.copy_(staged, non_blocking=True)
            handle = tdcopier.start_gather(tables, on_device, device)
            rows = handle.wait()
            assert not handle.ready()
            # The call has copied it, in the order of the stream.
            on_device.copy_(other, non_blocking=True)
        doubled = rows["nested"][0] * 2
        assert torch.equal(doubled.cpu(), tables["nested"][0][index] * 2)
        assert_same(handle.get(), rows_of(tables, index, device))


def test_rows_out_of_range_are_reported_and_not_read(device):
    tables = storage()
    with tdcopier.pin_memory_(tables, device):
        for bad in (ROWS, -ROWS - 1, 2**40):
            index = torch.tensor([4, bad, 7, 10**6]).to(device)
            handle = tdcopier.start_gather(tables, index, device)
            rows = handle.wait()["nested"][0]
            message = rf"index {bad} is out of bounds: there are {ROWS} rows .* at place 1 of"
            for report in (handle.get, handle.get, handle.wait_gathered):
                with pytest.raises(IndexError, match=message):
                    report()
            assert torch.equal(rows[[0, 2]].cpu(), tables["nested"][0][[4, 7]])
        index = torch.tensor([1, 2]).to(device)
        assert_same(tdcopier.gather(tables, index, device), rows_of(tables, index.cpu(), device))


def test_an_error_that_nobody_asked_for_is_raised_by_the_next_call(device):
    tables = storage()
    with tdcopier.pin_memory_(tables, device):
        handle = tdcopier.start_gather(tables, torch.tensor([ROWS + 5]).to(device), device)
        handle.wait()
        torch.accelerator.synchronize()
        del handle
        gc.collect()
        index = torch.tensor([1]).to(device)
        with pytest.raises(IndexError, match=f"index {ROWS + 5} is out of bounds"):
            tdcopier.start_gather(tables, index, device)
        assert_same(tdcopier.gather(tables, index, device), rows_of(tables, index.cpu(), device))


def test_many_reports_are_in_use_at_once(device):
    table = torch.arange(ROWS)
    with tdcopier.pin_memory_(table, device):
        handles = [
            tdcopier.start_gather([table], torch.tensor([0, n]).to(device), device)
            for n in range(600)
        ]
        for n, handle in enumerate(handles):
            if n < ROWS:
                assert handle.get()[0].tolist() == [0, n]
            else:
                with pytest.raises(IndexError, match=f"index {n} is"):
                    handle.get()


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_the_streams_gives_other_rows(sim, device, seed):
    table = torch.arange(400.0).view(50, 8)
    with tdcopier.pin_memory_(table, device), sim.detect(), sim.schedule(seed):
        index = torch.zeros(4, dtype=torch.int64, device=device)
        results = []
        for step in range(3):
            index.copy_(torch.tensor([step, 3 * step, 40, -1]).pin_memory(), non_blocking=True)
            handle = tdcopier.start_gather([table], index, device)
            index.fill_(10**6)
            results.append(handle.wait()[0] + 0)
            handle.wait_gathered()
            table.add_(1)
        for step, rows in enumerate(results):
            first = torch.tensor([step, 3 * step, 40, 49]) * 8.0 + step
            assert torch.equal(rows[:, 0].cpu(), first)


def test_a_call_with_numbers_on_the_host_raises_the_error_of_a_dropped_one(device):
    table = torch.arange(ROWS)
    with tdcopier.pin_memory_(table, device):
        tdcopier.start_gather([table], torch.tensor([ROWS + 5]).to(device), device).wait()
        torch.accelerator.synchronize()
        gc.collect()
        with pytest.raises(IndexError, match=f"index {ROWS + 5} is out of bounds"):
            tdcopier.start_gather([table], torch.tensor([1]), device)
        tdcopier.gather([table], torch.tensor([1]), device)


@pytest.mark.sim
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_leaves_the_error_to_its_parent(sim, device):
    table = torch.arange(ROWS)
    with tdcopier.pin_memory_(table, device):
        tdcopier.start_gather([table], torch.tensor([ROWS + 5]).to(device), device).wait()
        torch.accelerator.synchronize()
        gc.collect()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                tdcopier.scatter([torch.ones(1)], [torch.zeros(4)], [2])
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        with pytest.raises(IndexError):
            tdcopier.start_gather([table], torch.tensor([1]), device)


@pytest.mark.sim
def test_get_raises_the_error_though_no_event_can_be_recorded(sim, device):
    table = torch.arange(ROWS)
    index = torch.tensor([1, ROWS + 3]).to(device)
    with tdcopier.pin_memory_(table, device):
        with sim.fail_event_record(2), sim.fail_event_record(3):
            handle = tdcopier.start_gather([table], index, device)
        for _ in range(2):
            with pytest.raises(IndexError):
                handle.get()
        assert handle.stats.fallbacks > 0
        del handle
        tdcopier.gather([table], torch.tensor([1]).to(device), device)  # raises it no more


@pytest.mark.sim
def test_reports_of_failed_launches_are_used_again(sim, device):
    table = torch.arange(ROWS)
    index = torch.tensor([1]).to(device)
    with tdcopier.pin_memory_(table, device):
        tdcopier.gather([table], index, device)
        before = sim.pinned_bytes().in_use
        for _ in range(600):  # a page has 256
            with sim.fail_transfer(), pytest.raises(RuntimeError):
                tdcopier.gather([table], index, device)
        assert sim.pinned_bytes().in_use == before
