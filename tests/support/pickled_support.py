"""Values passed on as a pickle and memory beside it, and what pickle alone makes of them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import torch
from support import assert_same as assert_same_objects

from tdcopier import _pickled_values

HOST = torch.device("cpu")


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
    if isinstance(expected, torch.nn.Module):
        assert str(got) == str(expected)
        assert [key for key, _ in got.named_parameters()] == [
            key
            for key, _ in expected.named_parameters()  # each tied one once
        ]
        assert_same(dict(got.state_dict()), dict(expected.state_dict()))
        return True
    if isinstance(expected, torch.storage.TypedStorage):
        return (got.dtype, got.tolist()) == (expected.dtype, expected.tolist())
    if isinstance(expected, Holder):
        assert_same(vars(got), vars(expected))
        return type(got) is type(expected)
    return type(got) is type(expected) and pickle.dumps(got) == pickle.dumps(expected)


def bytes_of(memory: list[torch.Tensor]) -> int:
    return sum(run.numel() for run in memory)
