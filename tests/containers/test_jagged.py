"""Jagged nested tensors are packed, and those of one ragged size still match afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tdcopier


def jagged(device: str = "cpu", **options: Any) -> torch.Tensor:
    values = torch.arange(18.0).reshape(6, 3).to(device)
    return torch.nested.nested_tensor_from_jagged(
        values, torch.tensor([0, 2, 6]).to(device), **options
    )


def test_two_of_one_ragged_size_can_be_added_after_the_copy(ends):
    source, target = ends
    first = jagged(source)
    second = torch.nested.nested_tensor_from_jagged(first.values() * 2, first.offsets())
    a, b = tdcopier.copy([first, second], target)
    assert a.shape == b.shape == first.shape == first.to(target).shape
    summed = (a + b).values()
    assert torch.equal(summed.cpu(), (first + second).values().cpu())


def test_two_of_different_ragged_sizes_cannot(device):
    a, b = tdcopier.copy([jagged(), jagged()], device)
    assert a.shape != b.shape
    with pytest.raises(RuntimeError):
        a + b


def test_one_that_was_copied_goes_with_one_that_was_moved(device):
    source = jagged()
    copied, moved = tdcopier.copy(source, device), source.to(device)
    assert torch.equal((copied + moved).values().cpu(), (source.values() * 2))


def test_lengths_and_their_bounds_come_along(device):
    source = jagged(lengths=torch.tensor([1, 3]), min_seqlen=1, max_seqlen=3)
    copied = tdcopier.copy({"x": source}, device)["x"]
    assert copied.lengths().tolist() == [1, 3]
    assert (copied._get_min_seqlen(), copied._get_max_seqlen()) == (1, 3)
    for got, wanted in zip(copied.unbind(), source.unbind(), strict=True):
        assert torch.equal(got.cpu(), wanted)


def test_a_transposed_one_keeps_its_ragged_dimension(ends):
    source, target = ends
    turned = jagged(source).transpose(1, 2)
    copied, moved = tdcopier.copy(turned, target), turned.to(target)
    assert copied.shape == turned.shape == moved.shape
    assert copied.stride() == moved.stride()
    for got, wanted in zip(copied.unbind(), turned.unbind(), strict=True):
        assert torch.equal(got.cpu(), wanted.cpu())


def test_what_is_known_of_its_lengths_is_known_of_the_copy_and_looked_up_in_neither(ends):
    source, target = ends
    known = jagged(source, min_seqlen=2, max_seqlen=4)
    copied = tdcopier.copy([known], target)[0]
    assert copied._maybe_min_seqlen == 2
    assert copied._maybe_max_seqlen == 4
    unknown = tdcopier.copy([jagged(source)], target)[0]
    assert unknown._maybe_max_seqlen is None
    assert unknown._get_max_seqlen() == 4


def test_one_that_is_back_can_be_added_to_its_source(device):
    source = jagged()
    back = tdcopier.copy(tdcopier.copy({"x": source}, device), "cpu")["x"]
    assert torch.equal((back + source).values(), 2 * source.values())


def test_the_path_of_a_part_is_known(device):
    source = jagged()
    source._values.untyped_storage().resize_(8)
    with pytest.raises(ValueError, match=r"^data\['x'\]\._values reaches beyond its storage"):
        tdcopier.start_copy({"x": source}, device)


def test_in_a_tensordict_it_is_packed_with_the_rest(device):
    tensordict = pytest.importorskip("tensordict")
    td = tensordict.TensorDict({"ragged": jagged(), "x": torch.ones(2)}, batch_size=[2])
    handle = tdcopier.async_to(td, device)
    moved = handle.get()
    assert handle.stats[:5] == (3, 0, 0, 0, 0)
    assert moved.get("ragged").shape == td.get("ragged").shape
    assert torch.equal(moved.get("ragged").values().cpu(), td.get("ragged").values())
