"""A nested list as index is one tensor, and not a tuple of indices as in torch's old form."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from gather_support import ROWS
from support import assert_same, same_bytes
from tensordict import TensorDict

import tdcopier

INDICES: dict[str, Any] = {
    "rows": [[0, 1], [2, 3]],
    "one list": [[4, 0]],
    "three dimensions": [[[1], [2]], [[3], [0]]],
    "no rows": [[], []],
    "a mask": [[i == j for j in range(5)] for i in range(ROWS)],
}


def storage(device: str) -> dict[str, Any]:
    host = torch.arange(ROWS * 5.0).reshape(ROWS, 5)
    return {
        "host": host,
        "device": host.to(device) + 1,
        "columns": torch.randn(5, ROWS).t(),
        "needs a gradient": torch.randn(ROWS, 5, requires_grad=True),
    }


def tensor_of(index: Any) -> torch.Tensor:
    numbers = torch.tensor(index)
    return numbers if numbers.numel() else numbers.long()


@pytest.mark.parametrize("name", INDICES)
def test_every_leaf_has_the_rows_of_one_tensor(device, name):
    index = INDICES[name]
    tree = storage(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of its old form
        found = tdcopier.gather(tree, index, device)
    for key, leaf in tree.items():
        assert same_bytes(found[key].detach(), leaf[tensor_of(index)].detach()), key
    array = tree["host"].numpy()
    assert np.array_equal(tdcopier.gather(array, index, "cpu"), array[tensor_of(index).numpy()])
    tensordict = TensorDict({"x": tree["host"]}, [ROWS, 5])
    wanted = tensordict[tensor_of(index)].to(device)
    assert_same(tdcopier.gather(tensordict, index, device), wanted)


def test_a_tuple_of_lists_is_a_pair(device):
    table = torch.arange(ROWS * 5.0).reshape(ROWS, 5)
    found = tdcopier.gather(table, ([0, 1], [2, 3]), device)
    assert same_bytes(found, table[torch.tensor([0, 1]), torch.tensor([2, 3])])
    assert found.shape == (2,)


@pytest.mark.parametrize("place", ["cpu", "device"])
def test_rows_are_written_by_one_tensor_too(device, place):
    index = INDICES["rows"]
    table = torch.zeros(ROWS, 5, device=device if place == "device" else "cpu")
    batch = torch.randn(2, 2, 5).to(device)
    tdcopier.scatter(batch, table, index)
    expected = torch.zeros(ROWS, 5)
    expected[torch.tensor(index)] = batch.cpu()
    assert same_bytes(table, expected)
    out = torch.zeros_like(batch)
    tdcopier.gather(table, index, out=out)
    assert same_bytes(out, batch)
