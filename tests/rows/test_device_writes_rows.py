"""Rows of pinned storages that the device writes itself."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import tdcopier

ROWS = 50


def storage() -> dict[str, Any]:
    return {
        "pixels": torch.zeros(ROWS, 30, 40, dtype=torch.uint8),
        "nested": [torch.zeros(ROWS, 17), torch.zeros(ROWS, 1, dtype=torch.bool)],
        "unaligned": torch.zeros(40 * ROWS + 1, dtype=torch.uint8)[1:].view(ROWS, 40)[:, 3:34],
    }


def batch(rows: int, device: str) -> dict[str, Any]:
    return {
        "pixels": torch.randint(1, 255, (rows, 30, 40), dtype=torch.uint8).to(device),
        "nested": [torch.randn(rows, 17).to(device), (torch.rand(rows, 1) < 0.5).to(device)],
        "unaligned": torch.randint(1, 255, (rows, 31), dtype=torch.uint8).to(device),
    }


def assert_equal(tables: Any, expected: Any) -> None:
    for table, rows in zip(pytree.tree_leaves(tables), pytree.tree_leaves(expected), strict=True):
        assert torch.equal(table, rows)


def written(tables: Any, index: torch.Tensor, values: Any) -> Any:
    """Returns what the tables have when torch has written the values."""
    if isinstance(tables, dict):
        return {name: written(table, index, values[name]) for name, table in tables.items()}
    if isinstance(tables, list):
        return [written(table, index, part) for table, part in zip(tables, values, strict=True)]
    expected = tables.clone()
    for place, row in enumerate(index.flatten().tolist()):  # the last one wins
        expected[row] = values.cpu().flatten(0, index.dim() - 1)[place]
    return expected


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([3, 0, 49, -2]),
        torch.randperm(ROWS),
        torch.tensor([7]),
        torch.tensor([]).long(),
    ],
    ids=["numbers", "all", "one", "none"],
)
def test_the_rows_have_the_values_of_the_batch(device, index, on_device):
    tables = storage()
    values = batch(len(index), device)
    expected = written(tables, index, values)
    with tdcopier.pin_memory_(tables, device):
        handle = tdcopier.start_scatter(values, tables, index.to(device) if on_device else index)
        assert handle.get() is tables
        assert_equal(tables, expected)
        assert handle.stats.rows_in_place == (4 if len(index) else 0)
        assert handle.stats.transfers == (1 if len(index) else 0)


def test_the_last_of_equal_rows_wins_on_the_device(device):
    tables = storage()
    with tdcopier.pin_memory_(tables, device):
        for count in (2, 40, 3000):
            index = torch.randint(-ROWS, ROWS, (count,))
            values = batch(count, device)
            expected = written(tables, index, values)
            tdcopier.scatter(values, tables, index.to(device))
            assert_equal(tables, expected)
        with pytest.raises(ValueError, match="row 3 is in the index more than once"):
            tdcopier.start_scatter(batch(2, device), tables, torch.tensor([3, 3]))


def test_rows_out_of_range_are_reported_and_not_written(device):
    tables = storage()
    values = batch(4, device)
    with tdcopier.pin_memory_(tables, device):
        expected = written(
            tables,
            torch.tensor([4, 7, 9]),
            {
                "pixels": values["pixels"][[0, 2, 3]],
                "nested": [part[[0, 2, 3]] for part in values["nested"]],
                "unaligned": values["unaligned"][[0, 2, 3]],
            },
        )
        handle = tdcopier.start_scatter(values, tables, torch.tensor([4, -51, 7, 9]).to(device))
        with pytest.raises(IndexError, match="index -51 is out of bounds: there are 50 rows"):
            handle.get()
        assert_equal(tables, expected)


def test_gathers_see_what_was_scattered_before(device):
    table = torch.zeros(ROWS, 64)
    index = torch.randperm(ROWS)[:20]
    with tdcopier.pin_memory_(table, device):
        for step in range(5):
            values = torch.full((20, 64), float(step), device=device)
            tdcopier.scatter([values], [table], index)
            rows = tdcopier.start_gather([table], index.to(device), device).wait()
            assert rows[0].eq(step).all()


def test_pageable_and_pinned_tables_in_one_storage(device):
    tables = storage()
    index = torch.tensor([1, 5, 2])
    values = batch(3, device)
    expected = written(tables, index, values)
    with tdcopier.pin_memory_(tables["nested"], device):
        handle = tdcopier.start_scatter(values, tables, index)
        handle.get()
        assert_equal(tables, expected)
        assert handle.stats.rows_in_place == 2
        with pytest.raises(
            ValueError, match=r"storage\['pixels'\] cannot be accessed by the device"
        ):
            tdcopier.start_scatter(values, tables, index.to(device))


def test_random_tables_and_indices(device):
    dice = random.Random(9)
    for seed in range(30):
        torch.manual_seed(seed)
        rows = dice.randint(1, 60)
        tables = [
            torch.randint(0, 200, (rows, *[dice.randint(1, 9)] * dice.randint(0, 2))).to(dtype)
            for dtype in (torch.uint8, torch.int16, torch.float32, torch.complex128)
        ]
        index = torch.randperm(rows)[: dice.randint(1, rows)]
        values = [table[index].add(1).to(device) for table in tables]
        expected = written(tables, index, values)
        with tdcopier.pin_memory_(tables[: dice.randint(0, 4)], device):
            tdcopier.scatter(values, tables, index)
        assert_equal(tables, expected)


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_the_streams_writes_other_rows(sim, device, seed):
    table = torch.zeros(50, 8)
    with tdcopier.pin_memory_(table, device), sim.detect(), sim.schedule(seed):
        for step in range(1, 4):
            values = torch.full((4, 8), float(step), device=device)
            index = torch.tensor([step, 3 * step, 40, -1])
            handle = tdcopier.start_scatter(
                [values], [table], index.to(device) if step % 2 else index
            )
            handle.wait_staged()
            values.fill_(-1)
            handle.get()
            assert table[index].eq(step).all()
        assert not table.eq(-1).any()
