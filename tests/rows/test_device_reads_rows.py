"""Rows of pinned storages that the device reads itself: values, order, counts, failures."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_same

import tdcopier

ROWS = 50
ON_CUDA = os.environ.get("TDCOPIER_TEST_DEVICE") == "cuda"


def storage() -> dict[str, Any]:
    """Returns tables whose rows have 0 to 1200 bytes, at addresses of any alignment."""
    memory = torch.arange(40 * ROWS + 1, dtype=torch.uint8)
    return {
        "pixels": torch.arange(ROWS * 1200, dtype=torch.int64)
        .remainder(251)
        .byte()
        .view(ROWS, 30, 40),
        "action": torch.randn(ROWS, 17),
        "reward": torch.randn(ROWS),
        "done": torch.rand(ROWS, 1) < 0.5,
        "unaligned": memory[1:].view(ROWS, 40)[:, 3:34],
        "half": torch.randn(ROWS, 3).half(),
        "complex": torch.randn(ROWS, 2, dtype=torch.complex128),
        "empty": torch.empty(ROWS, 0),
        "array": np.arange(ROWS * 3.0).reshape(ROWS, 3),
        "name": "cart pole",
    }


def selected(tables: dict[str, Any], index: Any, device: str) -> dict[str, Any]:
    def rows(table: Any) -> Any:
        if isinstance(table, str):
            return table
        read = torch.as_tensor(table)[index]
        if not isinstance(index, torch.Tensor):
            return read.to(device, copy=True)
        return torch.empty(read.shape, dtype=read.dtype).copy_(read).to(device)

    return {name: rows(table) for name, table in tables.items()}


INDICES = {
    "numbers": torch.tensor([3, 3, 0, 49, -1, -50, 17]),
    "none": torch.tensor([], dtype=torch.int64),
    "of two dimensions": torch.tensor([[1, 2, 3], [4, -5, 6]]),
    "slice": slice(5, 40, 3),
    "all": slice(None),
    "mask": torch.arange(ROWS) % 3 == 1,
    "one": 7,
}


@pytest.mark.parametrize("index", INDICES.values(), ids=list(INDICES))
def test_rows_are_those_of_the_storage(device, index):
    tables = storage()
    with tdcopier.pin_memory_(tables, device):
        handle = tdcopier.start_gather(tables, index, device)
        assert_same(handle.get(), selected(tables, index, device))
    stats = handle.stats
    assert not stats.background
    if isinstance(index, torch.Tensor):
        assert stats.rows_in_place == (8 if torch.arange(ROWS)[index].numel() else 0)
        assert stats.fallbacks == 0
    else:  # views of two tables have gaps, and share chunks with others
        assert stats.rows_in_place >= 4


def test_no_host_thread_reads_the_rows(device):
    """Not even of a batch that would be left to workers otherwise."""
    tables = {"pixels": torch.randint(0, 255, (300, 20_000), dtype=torch.uint8)}
    index = torch.randint(0, 300, (256,))
    before = tdcopier.start_gather(tables, index, device)
    assert before.get()["pixels"].shape == (256, 20_000)
    assert before.stats.background
    assert before.stats.rows_in_place == 0
    with tdcopier.pin_memory_(tables, device):
        handle = tdcopier.start_gather(tables, index, device)
        assert_same(handle.get(), selected(tables, index, device))
        assert not handle.stats.background
        assert handle.stats.rows_in_place == 1
        assert handle.stats.transfers == 1
        assert handle.stats.transfer_bytes == 256 * 20_000


@pytest.mark.parametrize("count", [4095, 4096, 4097, 9001])
@pytest.mark.parametrize("leaves", [1, 13, 450])
def test_more_rows_and_tables_than_one_kernel_takes(device, count, leaves):
    tables = [torch.arange(ROWS * 3).view(ROWS, 3) + i for i in range(leaves)]
    index = torch.randint(-ROWS, ROWS, (count,))
    with tdcopier.pin_memory_(tables, device):
        handle = tdcopier.start_gather(tables, index, device)
        assert_same(handle.get(), [table[index].to(device) for table in tables])
    assert handle.stats.rows_in_place == leaves
    assert handle.stats.transfers == -(-count // 4096) * -(-leaves // 407)


def test_memory_that_torch_has_pinned(device):
    tables = {"a": torch.randn(ROWS, 5).pin_memory(), "b": torch.arange(ROWS).pin_memory()}
    handle = tdcopier.start_gather(tables, INDICES["numbers"], device)
    assert_same(handle.get(), selected(tables, INDICES["numbers"], device))
    assert handle.stats.rows_in_place == 2


def test_pinned_and_pageable_tables_in_one_storage(device):
    tables = storage()
    pinned = {name: tables[name] for name in ("pixels", "reward", "done")}
    with tdcopier.pin_memory_(pinned, device):
        handle = tdcopier.start_gather(tables, INDICES["numbers"], device)
        assert_same(handle.get(), selected(tables, INDICES["numbers"], device))
    assert 0 < handle.stats.rows_in_place < 9


def test_tables_that_count_rows_by_two_dimensions(device):
    tables = {"a": torch.randn(5, 10, 3), "b": torch.arange(50).view(5, 10)}
    index = (torch.tensor([0, 4, 2]), torch.tensor([9, 0, 5]))
    with tdcopier.pin_memory_(tables, device):
        handle = tdcopier.start_gather(tables, index, device)
        assert_same(handle.get(), {name: t[index].to(device) for name, t in tables.items()})
        assert handle.stats.rows_in_place == 2


def test_tensordicts(device):
    tensordict = pytest.importorskip("tensordict")
    data = tensordict.TensorDict(
        {"a": torch.randn(ROWS, 4), "next": {"b": torch.arange(ROWS)}}, [ROWS]
    )
    index = torch.tensor([1, 1, 40])
    with tdcopier.pin_memory_(data, device):
        handle = tdcopier.start_gather(data, index, device)
        assert_same(handle.get(), data[index].to(device))
        assert handle.stats.rows_in_place == 2


@pytest.mark.sim
@pytest.mark.hazardous
def test_rows_that_are_written_too_early_are_found(sim, device, copy_stream):
    tables = {"a": torch.zeros(ROWS, 100)}

    def write_too_early() -> None:
        with sim.hold(copy_stream):
            handle = tdcopier.start_gather(tables, torch.arange(10), device)
            tables["a"].fill_(1)
        handle.get()

    with (
        tdcopier.pin_memory_(tables, device),
        pytest.raises(sim.HazardError, match="changed"),
        sim.detect(),
    ):
        write_too_early()


def test_random_tables_and_indices(device):
    dice = random.Random(5)
    dtypes = [torch.uint8, torch.int16, torch.float32, torch.int64, torch.complex128]
    for seed in range(200 if ON_CUDA else 40):
        torch.manual_seed(seed)
        rows = dice.randint(1, 60)
        tables = {}
        for number in range(dice.randint(1, 6)):
            dtype = dice.choice(dtypes)
            row = [dice.randint(1, 9) for _ in range(dice.randint(0, 2))]
            table = torch.randint(0, 200, (rows, *row)).to(dtype)
            if row and dice.random() < 0.3:  # gaps between rows
                table = torch.cat([table, table], 1)[:, : row[0]]
            tables[f"{number}"] = table
        index = torch.randint(-rows, rows, (dice.randint(0, 40),))
        with tdcopier.pin_memory_(tables, device):
            found = tdcopier.gather(tables, index, device)
            assert_same(found, selected(tables, index, device))
