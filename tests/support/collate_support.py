"""Datasets in a module that workers can import, and helpers to inspect batches and processes."""

from __future__ import annotations

import os
from collections import OrderedDict, UserList, namedtuple
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

import tdcopier

Pair = namedtuple("Pair", ["left", "right"])


class Attributed(dict):  # type: ignore[type-arg]
    """A mapping that has attributes besides its items."""

    note = "none"


def attributed(**items: Any) -> Attributed:
    made = Attributed(items)
    made.note = "kept"
    return made


class Nested:
    """A dataset whose sample `index` has `leaves` float tensors and other nested values."""

    def __init__(self, leaves: int, length: int = 8) -> None:
        self.leaves = leaves
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return {
            "many": [torch.full((k % 5 + 1,), float(index * 1000 + k)) for k in range(self.leaves)],
            "array": np.full((2, 3), index, np.int16),
            "number": index,
            "fraction": index / 2,
            "name": f"sample {index}",
            "pair": Pair(torch.tensor(index), (np.float32(index), b"x")),
            "nothing": torch.empty(0, 3),
        }


class Ragged(Nested):
    """A dataset in which every fourth sample has a larger leaf."""

    def __getitem__(self, index: int) -> Any:
        return {"boxes": [torch.zeros(3 + (index % 4 == 3))]}


class Mixed(Nested):
    """A dataset whose samples alternate between two dtypes."""

    def __getitem__(self, index: int) -> Any:
        dtype = (torch.float32, torch.float64)[index % 2]
        return torch.tensor([index], dtype=dtype)


class Tensordicts(Nested):
    """A dataset whose samples are dicts of TensorDicts."""

    def __getitem__(self, index: int) -> Any:
        from tensordict import TensorDict

        many = {f"x{k}": torch.full((2,), float(index * 1000 + k)) for k in range(self.leaves)}
        return {"td": TensorDict({"many": many, "name": f"{index}"}, device="cpu"), "index": index}


class Boxes(NamedTuple):
    """A batch of a user's collate function."""

    boxes: list[torch.Tensor]
    names: list[str]


def as_boxes(samples: list[Any]) -> Boxes:
    several = [torch.full((each["number"] + 1, 4), 2.0) for each in samples]
    return Boxes(several, [each["name"] for each in samples])


def shared_memory_descriptors() -> int:
    """Returns how many file descriptors of torch's shared memory this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += "/torch_" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return count


DTYPES = [torch.uint8, torch.bool, torch.int16, torch.float16, torch.float32, torch.int64]
DTYPES += [torch.float64, torch.bfloat16, torch.complex64, torch.complex128]


def tensor(shape: tuple[int, ...], dtype: torch.dtype, value: int) -> torch.Tensor:
    return (
        torch.arange(value, value + max(int(np.prod(shape)), 1))[: int(np.prod(shape))]
        .reshape(shape)
        .to(dtype)
    )


LEAVES = {
    **{
        f"{dtype} of shape {shape}": (lambda i, s=shape, d=dtype: tensor(s, d, i))
        for dtype in DTYPES
        for shape in [(), (3,), (2, 5), (0, 4)]
    },
    "transposed": lambda i: tensor((4, 3), torch.float32, i).t(),
    "channels last": lambda i: tensor((4, 5, 3), torch.uint8, i).permute(2, 0, 1),
    "with gaps": lambda i: tensor((6, 4), torch.int64, i)[::2, 1:3],
    "expanded": lambda i: tensor((1, 4), torch.float32, i).expand(3, 4),
    "conjugated": lambda i: tensor((3,), torch.complex64, i).mul(1j).conj(),
    "parameter": lambda i: torch.nn.Parameter(tensor((3,), torch.float32, i)),
    "with a gradient": lambda i: tensor((3,), torch.float32, i).requires_grad_(),
    "of two dtypes": lambda i: tensor((3,), DTYPES[3 + i % 3], i),
    "on another device": lambda i: torch.empty(3, device="meta"),
    "array": lambda i: np.full((2, 3), i, np.float64),
    "array without dimensions": lambda i: np.array(i, np.int32),
    "array with gaps": lambda i: np.arange(i, i + 12).reshape(3, 4)[:, ::2],
    "array scalar": lambda i: np.float32(i),
    "array bool": lambda i: np.bool_(i % 2),
    "int": lambda i: i,
    "float": lambda i: i / 4,
    "bool": lambda i: bool(i % 2),
    "int, then float": lambda i: i if i == 0 else i / 2,
    "str": lambda i: f"text {i}",
    "bytes": lambda i: b"bytes" * i,
}

CONTAINERS = {
    "list": lambda children: list(children),
    "tuple": lambda children: tuple(children),
    "dict": lambda children: {f"k{i}": child for i, child in enumerate(children)},
    "OrderedDict": lambda children: OrderedDict(enumerate(children)),
    "dict with an attribute": lambda children: attributed(
        **{f"k{i}": child for i, child in enumerate(children)}
    ),
    "mapping that cannot be changed": lambda children: MappingProxyType(dict(enumerate(children))),
    "UserList": lambda children: UserList(children),
    "named tuple": lambda children: Pair(children[0], list(children[1:])),
}


def assert_like(got: Any, expected: Any, path: str = "batch") -> None:
    """Asserts equality of class, dtype, shape, strides, gradient and value."""
    assert type(got) is type(expected), f"{path}: {type(got)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        for name in ("dtype", "shape", "device", "requires_grad"):
            assert getattr(got, name) == getattr(expected, name), f"{path}: {name}"
        assert got.stride() == expected.stride(), f"{path}: strides"
        equal = torch.equal(got.nan_to_num(), expected.nan_to_num())
        assert equal, f"{path}: {got} is not {expected}"
    elif hasattr(expected, "items"):
        assert list(got) == list(expected), path
        assert getattr(got, "note", None) == getattr(expected, "note", None), path
        for key in expected:
            assert_like(got[key], expected[key], f"{path}[{key!r}]")
    elif isinstance(expected, (list, tuple, UserList)):
        assert len(got) == len(expected), path
        for index, value in enumerate(expected):
            assert_like(got[index], value, f"{path}[{index}]")
    else:
        assert got == expected, f"{path}: {got!r} is not {expected!r}"


def collate_and_tell(samples: Any) -> Any:
    """Returns the batch, and whether its chunk was in shared memory before it was sent."""
    batch = tdcopier.collate(samples)
    return batch, leaves_of(batch)[0].is_shared()


def leaves_of(tree: Any) -> list[torch.Tensor]:
    """Returns the non-empty tensors of a batch, in order."""
    if isinstance(tree, torch.Tensor):
        return [tree] if tree.numel() else []
    if hasattr(tree, "items"):
        return [leaf for child in tree.values() for leaf in leaves_of(child)]
    if isinstance(tree, (list, tuple, UserList)):
        return [leaf for child in tree for leaf in leaves_of(child)]
    return []


def collate_as_a_worker(samples: Any) -> Any:
    """Makes the batch in shared memory, as `collate` does in a DataLoader's worker."""
    with patch("tdcopier._collate.get_worker_info", return_value=object()):
        return tdcopier.collate(samples)


def assert_one_chunk_per_dtype(leaves: list[torch.Tensor]) -> None:
    """Asserts that leaves of one dtype follow one another in one storage, aligned to 16 bytes."""
    chunks = {leaf.dtype: leaf.untyped_storage() for leaf in leaves}
    assert len({chunk.data_ptr() for chunk in chunks.values()}) == len(chunks)
    ends = dict.fromkeys(chunks, 0)
    for leaf in leaves:
        assert leaf.untyped_storage().data_ptr() == chunks[leaf.dtype].data_ptr()
        begin = leaf.storage_offset() * leaf.element_size()
        assert begin == ends[leaf.dtype]
        assert leaf.data_ptr() % 16 == 0
        ends[leaf.dtype] = begin + -(-leaf.nbytes // 16) * 16
    assert ends == {dtype: chunk.nbytes() for dtype, chunk in chunks.items()}


def dtypes_of(tree: Any) -> set[torch.dtype]:
    return {leaf.dtype for leaf in leaves_of(tree)}


RAGGED = "stack expects each tensor to be equal size, but got [3] at entry 0 and [4] at entry 1"

CONTEXTS: list[Any] = [
    pytest.param(
        "fork", marks=pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
    ),
    "forkserver",
]
