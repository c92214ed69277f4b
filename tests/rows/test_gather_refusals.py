"""Refusals of a gather and their messages: indices, tables, options."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from catalogue import ramp
from gather_support import ROWS
from support import assert_same, raises_exactly

import tdcopier


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
        (1.5, TypeError, "got the float 1.5"),
        (True, TypeError, "got the bool True"),
        ("a", TypeError, "got the str 'a'"),
        (None, TypeError, "got NoneType"),
        (torch.tensor([0.5]), TypeError, "it is of torch.float32"),
        (torch.tensor([1], dtype=torch.uint8), TypeError, "it is of torch.uint8"),
        (slice(None, None, -1), ValueError, "the step of a slice of rows must be positive; got -1"),
        (slice(None, None, 0), ValueError, "the step of a slice of rows must be positive; got 0"),
        (torch.ones(3, dtype=torch.bool), IndexError, r"the shape of the mask \[3\]"),
        (torch.ones(1, 1, 1, dtype=torch.bool), IndexError, "a mask counts rows by one"),
        ((0, 0, 0), TypeError, "got a tuple of 3"),
        ([slice(3)], TypeError, "index is a list, but not of row numbers"),
        ([[0, 1], [2]], TypeError, "index is a list, but not of row numbers"),
        (
            [torch.tensor([0, 1]), torch.tensor([2, 3])],
            TypeError,
            "for a pair of indices give a tu",
        ),
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


def test_an_index_on_a_device_needs_pinned_leaves(device):
    index = torch.tensor([1]).to(device)
    pinned, pageable = torch.randn(ROWS, 4).pin_memory(), torch.randn(ROWS, 2)
    for call in (
        lambda: tdcopier.start_gather({"a": pinned, "b": [pageable]}, index, device),
        lambda: tdcopier.start_gather({"a": pinned, "b": [pinned[:, ::2]]}, index, device),
        lambda: tdcopier.start_gather(
            {"a": pinned, "b": [pinned]}, index, device, use_pinned_staging=False
        ),
    ):
        with pytest.raises(ValueError, match=r"cannot be read by the device that has the index"):
            call()


def test_an_index_on_a_device_is_of_integers(device):
    pinned = torch.randn(ROWS, 2).pin_memory()
    for index, error, message in (
        (torch.ones(ROWS, dtype=torch.bool), ValueError, "give mask.nonzero"),
        (torch.ones(3), TypeError, "of integers"),
        ((torch.tensor([0]), torch.tensor([1])), ValueError, "a pair of indices must be on"),
    ):
        on_device = (
            tuple(i.to(device) for i in index) if isinstance(index, tuple) else index.to(device)
        )
        with pytest.raises(error, match=message):
            tdcopier.start_gather({"a": pinned}, on_device, device)
    with pytest.raises(ValueError, match=r"the rows go to cpu: give index\.cpu"):
        tdcopier.start_gather({"a": pinned}, torch.tensor([1]).to(device), "cpu")


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


def test_a_storage_without_leaves(device):
    assert tdcopier.start_gather({"a": 1, "b": []}, [5], device).get() == {"a": 1, "b": []}
    with raises_exactly(ValueError, "storage has no leaf, so its number of rows is unknown"):
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
