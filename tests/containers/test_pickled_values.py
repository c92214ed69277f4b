"""Values with tensors inside, pickled without the memory of those tensors."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from catalogue_cases import ARRIVING, kind_and_ends
from support import assert_same as assert_same_objects

from tdcopier import _pickled_values
from tdcopier._pickled_memory import Views

HOST = torch.device("cpu")
TENSORS_ON_HOST = [case for case in ARRIVING if case.values[1] == "H2D"]


class Holder:
    """An object of a class that only pickle can take apart."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def path_of(index: int) -> str:
    return f"data[{index}]"


def dump(values: list[Any], device: torch.device = HOST) -> tuple[bytes, list[torch.Tensor]]:
    return _pickled_values.dump(values, path_of, device)


def passed_on(values: list[Any], device: torch.device = HOST, to: str | None = None) -> list[Any]:
    """Returns the values again, over a copy of their memory that is one body, as in a parcel."""
    pickled, memory = dump(values, device)
    assert all(run.dtype == torch.uint8 and run.dim() == 1 for run in memory)
    assert all(run.is_contiguous() and run.device == device for run in memory)
    begins, size = [], 64
    for run in memory:
        begins.append(size)
        size += -(-run.numel() // 64) * 64 + 64
    body = torch.full((size,), 255, dtype=torch.uint8, device=to or device)
    there = [body[at : at + run.numel()] for at, run in zip(begins, memory, strict=True)]
    for run, place in zip(memory, there, strict=True):
        place.copy_(run)
    return _pickled_values.load(pickled, there)


def by_pickle(value: Any) -> Any:
    """Returns the same value as pickle does, but strided tensors without gaps."""
    if isinstance(value, np.ndarray):
        assert type(pickle.loads(pickle.dumps(value, 5))) is type(value)
        return value  # numpy's own pickle changes the order of bytes of some arrays with gaps
    pickled = pickle.dumps(value, 5)
    try:
        again = pickle.loads(pickled)
    except AttributeError:  # torch cannot load what it pickles of tensors of some newer dtypes
        again = value
    return without_gaps(again)


def without_gaps(value: Any) -> Any:
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    if not is_strided or value.is_nested or hasattr(value, "__tensor_flatten__"):
        return value
    if value.is_neg():
        return torch._neg_view(without_gaps(torch._neg_view(value)))
    if value.is_conj() or isinstance(value, torch._subclasses.FakeTensor):
        return value
    if value.stride() == torch.empty_like(value).stride():
        return value
    return torch.empty_like(value).copy_(value.detach()).requires_grad_(value.requires_grad)


def assert_same(got: Any, expected: Any, path: str = "data") -> None:
    assert_same_objects(got, expected, path, is_same=is_equal)


def is_equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        if got.dtype.kind in "fc":
            return got.dtype == expected.dtype and np.array_equal(got, expected, equal_nan=True)
        return got.dtype == expected.dtype and np.array_equal(got, expected)
    if isinstance(expected, Holder):
        assert_same(vars(got), vars(expected))
        return type(got) is type(expected)
    return type(got) is type(expected) and pickle.dumps(got) == pickle.dumps(expected)


def bytes_of(memory: list[torch.Tensor]) -> int:
    return sum(run.numel() for run in memory)


# ---- what comes back -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize(("name", "direction"), TENSORS_ON_HOST)
def test_every_kind_of_leaf_inside_an_object_comes_back_as_by_pickle(device, name, direction):
    kind, source, _ = kind_and_ends(name, direction, device)
    with kind.within():
        leaf = kind.make(source)
        leaves = leaf if isinstance(leaf, list) else [leaf]
        try:
            expected = [by_pickle(each) for each in leaves]
        except (TypeError, AttributeError, RuntimeError):
            with pytest.raises(TypeError, match=r"data\[0\].* cannot be pickled"):
                dump(leaves)
            return
        held, *got = passed_on([Holder(leaf=leaf), *leaves])
        assert type(held) is Holder
        if len(leaves) == 1:
            assert held.leaf is got[0]
        for each, wanted in zip(got, expected, strict=True):
            assert_same(each, wanted)


def test_the_pickle_has_no_bytes_that_no_view_shows():
    large = torch.arange(1 << 24)
    values = [
        Holder(a=large[1000:1512]),
        large[5000:5512].as_subclass(Labelled),
        Holder(array=large.numpy()[9000:9512]),
        torch.nn.Parameter(large[20000:20512].double()),
    ]
    pickled, memory = dump(values)
    assert len(pickled) < 2048
    assert [run.numel() for run in memory] == [4096] * 4
    for got, value in zip(passed_on(values), values, strict=True):
        assert_same(got, value)


class Labelled(torch.Tensor):
    """A subclass that adds nothing."""


def test_views_that_overlap_share_memory_again():
    base = torch.arange(16.0)
    values = [base[2:10], Holder(ints=base.view(torch.int32)[4:12]), base.numpy()[5:14:2]]
    _, memory = dump(values)
    assert [run.numel() for run in memory] == [12 * 4]
    got, held, array = passed_on(values)
    got[3] = 2.0
    assert held.ints[1] == torch.tensor(2.0).view(torch.int32)
    assert array[0] == 2.0


def test_a_test_of_sharing_fails_where_it_is_broken(monkeypatch):
    def alone(self: Views) -> Any:
        return ([number] for number in range(len(self._views)))

    monkeypatch.setattr(Views, "_groups", alone)
    with pytest.raises(AssertionError):
        test_views_that_overlap_share_memory_again()
