"""Random storages of all kinds of leaves, and random indices of their rows, for `play_rows.py`."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
ROWS = [(), (), (1,), (3,), (7,), (17,), (2, 3), (5, 4, 3), (33,), (300,), (0,)]
PLAIN = ["dense"] * 4 + ["columns", "every other", "unaligned", "pinned by torch"]
"""Kinds of leaves whose rows the device reads. The next ones are delegated to torch's indexing."""
DELEGATED = ["transposed", "repeated"]

Shape = tuple[int, ...]


def _dict(leaves: list[Any], _: Shape) -> Any:
    return {str(number): leaf for number, leaf in enumerate(leaves)}


def _nested(leaves: list[Any], _: Shape) -> Any:
    return {"a": [leaves[0], (*leaves[1:3],)], "name": "cart pole", "b": {"c": leaves[3:]}}


def _tensordict(leaves: list[Any], shape: Shape) -> Any:
    inner = {str(number): leaf for number, leaf in enumerate(leaves[1:], 1)}
    return TensorDict({"0": leaves[0], "next": TensorDict(inner, shape)}, shape)


BUILDERS: list[Callable[[list[Any], Shape], Any]] = [_dict, _dict, _nested, _nested, _tensordict]


class Pick(NamedTuple):
    """An index of rows."""

    given: Any
    """As the call gets it."""
    key: Any
    """As torch's own indexing gets it."""
    lead: int = 1
    """How many leading dimensions it counts rows by."""
    bad: bool = False
    """Whether a row is out of range."""

    def shape(self, lead_shape: Shape) -> Shape:
        """Returns the shape that replaces the leading dimensions."""
        if isinstance(self.key, torch.Tensor) and self.key.dtype != torch.bool:
            return tuple(self.key.shape)
        return tuple(torch.empty(lead_shape[: self.lead])[self.key].shape)


class World:
    """A storage. `tables` are its leaves as tensors, in the order of `leaves()`."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self.lead_shape: Shape = (dice.randint(1, 60),)
        if dice.random() < 0.15:
            self.lead_shape = (dice.randint(1, 9), dice.randint(1, 8))
        self.build_with = dice.choice(BUILDERS)
        delegates = len(self.lead_shape) == 1 and dice.random() < 0.15
        self.kinds = [
            dice.choice(DELEGATED if delegates and dice.random() < 0.5 else PLAIN)
            for _ in range(dice.randint(1, 6))
        ]
        are_two = len(self.lead_shape) == 2  # then rows of one dimension may have gaps
        self.takes_numbers_there = not set(self.kinds) & {*DELEGATED, *["columns"] * are_two}
        self.takes_scatters = "repeated" not in self.kinds
        self.tables = [self._table(kind) for kind in self.kinds]
        self.has_bytes = any(table.numel() for table in self.tables)
        as_arrays = self.build_with is not _tensordict
        leaves = [
            table.numpy()
            if as_arrays and table.dtype != torch.bfloat16 and dice.random() < 0.15
            else table
            for table in self.tables
        ]
        self.storage = self.build(leaves, self.lead_shape)

    def __str__(self) -> str:
        tables = (
            f"{kind} {tuple(table.shape)} {table.dtype}"
            for kind, table in zip(self.kinds, self.tables, strict=True)
        )
        return f"{self.build_with.__name__.strip('_')} of {', '.join(tables)}"

    def values(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, 100, shape).remainder(2 if dtype == torch.bool else 100).to(dtype)

    def _table(self, kind: str) -> torch.Tensor:
        dtype, row = self._dice.choice(DTYPES), self._dice.choice(ROWS)
        shape = (*self.lead_shape, *row)
        if kind == "columns" and row:
            wide = self.values((*self.lead_shape, 2 * row[0] + 1, *row[1:]), dtype)
            return wide.narrow(len(self.lead_shape), 1, row[0])
        if kind == "every other":
            return self.values((2 * shape[0], *shape[1:]), dtype)[::2]
        if kind == "unaligned":
            return self.values((prod(shape) + 1,), dtype)[1:].view(shape)
        if kind == "transposed" and row:
            return self.values((*row, *self.lead_shape), dtype).movedim(-1, 0)
        if kind == "pinned by torch":
            return self.values(shape, dtype).pin_memory()
        if kind == "repeated":
            return self.values(row, dtype).expand(shape)
        return self.values(shape, dtype)

    def build(self, leaves: list[Any], shape: Shape) -> Any:
        return self.build_with(leaves, shape)

    def leaves(self, tree: Any) -> list[torch.Tensor]:
        if isinstance(tree, (torch.Tensor, np.ndarray)):
            return [torch.as_tensor(tree)]
        if isinstance(tree, TensorDict):
            return [tree.get(key) for key in sorted(tree.keys(True, True), key=_number)]
        children = tree.values() if isinstance(tree, dict) else tree
        return [
            leaf for child in children if not isinstance(child, str) for leaf in self.leaves(child)
        ]

    def has(self, row: int) -> bool:
        return -self.lead_shape[0] <= row < self.lead_shape[0]

    def change(self) -> None:
        """Writes other values to all rows."""
        for kind, table in zip(self.kinds, self.tables, strict=True):
            if kind != "repeated":
                table.logical_not_() if table.dtype == torch.bool else table.neg_().add_(99)

    def is_same(self, result: Any, expected: list[torch.Tensor], shape: Shape, device: str) -> bool:
        """Whether a result has the classes of the storage, and these leaves on this device."""
        if not _has_classes_of(result, self.storage):
            return False
        if isinstance(result, TensorDict) and tuple(result.batch_size) != shape:
            return False
        found = self.leaves(result)
        here = all(str(leaf.device) == device for leaf in found)
        return here and len(found) == len(expected) and all(map(same, found, expected))

    # ---- indices -----------------------------------------------------------------------------

    def pick(self, *, unique: bool, numbers_only: bool, bad: bool) -> Pick:
        dice, rows = self._dice, self.lead_shape[0]
        if not numbers_only and len(self.lead_shape) == 2 and dice.random() < 0.6:
            return self._pick_of_two(unique)
        kind = "tensor" if numbers_only else dice.choice(KINDS)
        if kind == "slice":
            given = slice(
                dice.choice((None, 0, dice.randint(-rows, rows))), None, dice.choice((1, 2))
            )
            return Pick(given, given)
        if kind == "mask":
            mask = torch.rand(rows) < dice.random()
            return Pick(mask, mask.clone())
        numbers = self._numbers(unique, at_least=int(bad))
        if bad:
            row = dice.choice((rows, -rows - 1, rows + 1000))
            numbers[dice.randrange(len(numbers))] = row
        key = numbers.clone()
        if kind == "one" and len(numbers):
            return Pick(int(numbers[0]), int(numbers[0]))
        if kind == "list":
            return Pick(numbers.tolist(), key)
        if kind == "array":
            return Pick(numbers.numpy().astype(dice.choice(("<i8", ">i4", "<i2"))), key)
        if kind == "two dimensions" and len(numbers) % 2 == 0:
            return Pick(numbers.view(2, -1), key.view(2, -1))
        given = numbers.to(dice.choice((torch.int64, torch.int64, torch.int32, torch.int16)))
        if dice.random() < 0.15:
            given = given.repeat_interleave(2)[::2]  # with gaps
        return Pick(given, key, bad=bad)

    def _numbers(self, unique: bool, at_least: int) -> torch.Tensor:
        """Returns row numbers: some negative, and without `unique` some of them repeated."""
        rows = self.lead_shape[0]
        if unique:
            numbers = torch.randperm(rows)[: self._dice.randint(at_least, rows)]
            return torch.where(torch.rand(len(numbers)) < 0.3, numbers - rows, numbers)
        return torch.randint(-rows, rows, (self._dice.randint(at_least, 40),))

    def _pick_of_two(self, unique: bool) -> Pick:
        rows, columns = self.lead_shape
        kind = self._dice.choice(("mask", "numbers", "slices"))
        if kind == "mask":
            mask = torch.rand(rows, columns) < 0.4
            return Pick(mask, mask.clone(), 2)
        if kind == "slices":
            given = (slice(self._dice.randint(0, rows), None), slice(None, None, 2))
            return Pick(given, given, 2)
        count = self._dice.randint(0, rows * columns)
        places = torch.randperm(rows * columns)[:count]
        if not unique:
            places = torch.randint(0, rows * columns, (count,))
        pair = (places // columns, places % columns - columns)
        return Pick(pair, tuple(each.clone() for each in pair), 2)


KINDS = ["tensor"] * 8 + ["slice", "mask", "one", "list", "array", "two dimensions"]


def last_places(numbers: torch.Tensor, rows: int) -> tuple[list[int], list[int]]:
    """Returns the rows in range, and the last place of each in the index."""
    last = {
        row % rows: place
        for place, row in enumerate(numbers.flatten().tolist())
        if -rows <= row < rows
    }
    return list(last.keys()), list(last.values())


def spoil(given: Any) -> None:
    """Overwrites an index that a call has copied."""
    for part in given if isinstance(given, tuple) else (given,):
        if isinstance(part, torch.Tensor):
            part.logical_not_() if part.dtype == torch.bool else part.fill_(30_000)
        elif isinstance(part, np.ndarray):
            part.fill(30_000)


def filled(shape: Shape, dtype: torch.dtype, device: str, gaps: bool) -> torch.Tensor:
    """Returns existing memory for a result."""
    if gaps:
        return torch.ones(*shape, 2, dtype=dtype, device=device)[..., 0]
    return torch.ones(shape, dtype=dtype, device=device)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found.cpu(), expected)


def _number(key: Any) -> int:
    return int(key[-1] if isinstance(key, tuple) else key)


def _has_classes_of(result: Any, storage: Any) -> bool:
    if isinstance(storage, np.ndarray):
        return type(result) in (torch.Tensor, np.ndarray)
    if type(result) is not type(storage):
        return False
    if isinstance(storage, dict):
        return list(result) == list(storage) and all(
            _has_classes_of(result[key], storage[key]) for key in storage
        )
    if isinstance(storage, (list, tuple)):
        return len(result) == len(storage) and all(map(_has_classes_of, result, storage))
    return isinstance(storage, (torch.Tensor, TensorDict)) or result is storage
