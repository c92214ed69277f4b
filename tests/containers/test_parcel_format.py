"""The page on the format of parcels is right and complete: a reader that was made from it agrees.

The reader knows nothing of the package. It reads parcels that need no pickle, and of others the
leaves.
"""

from __future__ import annotations

import dataclasses
import random
import re
import struct
import sys
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from each_case import together
from support import assert_same
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict

from tdcopier import Parcel, pack

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "parcel_format.md"
DTYPES = [
    *("uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"),
    *("complex32", "complex64", "complex128", "bool", "bfloat16", "float8_e5m2"),
    *("float8_e4m3fn", "float8_e5m2fnuz", "float8_e4m3fnuz", "uint16", "uint32", "uint64"),
    *("float8_e8m0fnu", "float4_e2m1fn_x2"),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    "bcomplex32",  # from torch 2.14 on
]


# ---- a reader, from the page ---------------------------------------------------------------------


class Leaf(NamedTuple):
    dtype: torch.dtype
    sizes: list[int]
    strides: list[int]

    @property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.sizes:
            count *= size
        return count


class Pickled(NamedTuple):
    """Stands for a value that only a pickle has."""

    index: int


class Layout:
    """Reads the tree of a layout, with a `Leaf` for each tensor."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.texts: list[str] = []
        self.leaves: list[Leaf] = []
        self.pickle = self.bytes(self.number())
        memory = [self.number() for _ in range(self.number())]
        self.tree = self.node()
        assert self.at == len(data)
        self.leaves += [Leaf(torch.uint8, [size], [1]) for size in memory]

    def bytes(self, count: int) -> bytes:
        self.at += count
        assert self.at <= len(self.data)
        return self.data[self.at - count : self.at]

    def byte(self) -> int:
        return self.bytes(1)[0]

    def number(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def signed(self) -> int:
        value = self.number()
        return -(value + 1) // 2 if value % 2 else value // 2

    def node(self) -> Any:
        kind = self.byte()
        if kind in (0, 1):
            children = self.children(self.number())
            return children if kind == 0 else tuple(children)
        if kind == 2:
            return self.entries()
        if kind == 3:
            count, _, _ = self.number(), self.value(), self.value()
            return self.children(count)
        if kind == 4:
            count, module, name, value = self.number(), self.value(), self.value(), self.value()
            return named(getattr(sys.modules[module], name), value, self.children(count))
        if kind == 5:
            sizes, names, is_locked = self.value(), self.value(), self.value()
            return (sizes, names, is_locked, self.entries())
        if kind == 6:
            return (self.value(), self.value(), self.node())
        if kind in (7, 8):
            return self.leaf(is_permuted=kind == 8)
        assert kind == 9
        return self.value()

    def children(self, count: int) -> list[Any]:
        return [self.node() for _ in range(count)]

    def entries(self) -> dict[Any, Any]:
        return {self.value(): self.node() for _ in range(self.number())}

    def leaf(self, is_permuted: bool) -> Leaf:
        dtype, dims = getattr(torch, DTYPES[self.byte()]), self.byte()
        sizes = [self.number() for _ in range(dims)]
        strides = [self.number() for _ in range(dims)] if is_permuted else in_order(sizes)
        self.leaves.append(Leaf(dtype, sizes, strides))
        return self.leaves[-1]

    def value(self) -> Any:
        kind = self.byte()
        if kind in (10, 11, 12):
            return (None, False, True)[kind - 10]
        if kind == 13:
            return self.signed()
        if kind == 14:
            return struct.unpack("<d", self.bytes(8))[0]
        if kind == 15:
            self.texts.append(self.bytes(self.number()).decode())
            return self.texts[-1]
        if kind == 16:
            return self.texts[self.number()]
        if kind == 17:
            return tuple([self.value() for _ in range(self.number())])
        if kind == 18:
            return torch.Size([self.signed() for _ in range(self.number())])
        if kind == 19:
            return self.bytes(self.number())
        assert kind == 20
        return Pickled(self.number())


def in_order(sizes: list[int]) -> list[int]:
    strides, product = [], 1
    for size in reversed(sizes):
        strides.append(product)
        product *= max(size, 1)
    return strides[::-1]


def named(cls: Any, value: Any, children: list[Any]) -> Any:
    if value is None:
        return tuple.__new__(cls, children)
    made = object.__new__(cls)
    places, others, _ = value
    for names, child in zip(places, children, strict=True):
        for name in names:
            object.__setattr__(made, name, child)
    for name, other in others:
        object.__setattr__(made, name, other)
    return made


def up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def offsets(leaves: list[Leaf]) -> tuple[list[int], int]:
    """Returns where each leaf begins in the body, and the bytes of the body."""
    ends: list[int] = []  # of each chunk, from its beginning
    places: dict[int, tuple[int, int]] = {}  # of each leaf: its chunk, and where it is there
    open_chunks: dict[torch.dtype, int] = {}
    for number, leaf in enumerate(leaves):
        if leaf.bytes > 262_144:
            continue
        chunk = open_chunks.get(leaf.dtype)
        at = 0 if chunk is None else up(ends[chunk], 16)
        if chunk is None or at + leaf.bytes > 33_554_432:
            chunk, at = len(ends), 0
            open_chunks[leaf.dtype] = chunk
            ends.append(0)
        ends[chunk] = at + leaf.bytes
        places[number] = chunk, at
    for number, leaf in enumerate(leaves):
        if leaf.bytes > 262_144:
            places[number] = len(ends), 0
            ends.append(leaf.bytes)
    begins, end = [], 0
    for size in ends:
        begins.append(up(end, 64))
        end = begins[-1] + size
    return [begins[chunk] + at for chunk, at in (places[i] for i in range(len(leaves)))], end


def tensor_of(leaf: Leaf, data: bytes, at: int) -> torch.Tensor:
    memory = torch.empty(leaf.bytes, dtype=torch.uint8)
    if leaf.bytes != 0:
        memory.copy_(torch.frombuffer(bytearray(data[at : at + leaf.bytes]), dtype=torch.uint8))
    return memory.view(leaf.dtype).as_strided(leaf.sizes, leaf.strides)


def read(data: bytes) -> tuple[Any, list[torch.Tensor]]:
    """Returns the tree of a parcel, and all its leaves."""
    assert data[:8] == b"TDPARCEL"
    version, layout_bytes, total = (
        int.from_bytes(data[at : at + 8], "little") for at in (8, 16, 24)
    )
    assert (version, total) == (1, len(data))
    layout = Layout(data[32 : 32 + layout_bytes])
    begins, body_bytes = offsets(layout.leaves)
    body = up(32 + layout_bytes, 64)
    assert body + body_bytes == total
    tensors = [
        tensor_of(leaf, data, body + begin)
        for leaf, begin in zip(layout.leaves, begins, strict=True)
    ]
    used = bytearray(data)
    used[: 32 + layout_bytes] = bytes(32 + layout_bytes)
    for leaf, begin in zip(layout.leaves, begins, strict=True):
        used[body + begin : body + begin + leaf.bytes] = bytes(leaf.bytes)
    assert not any(used), "padding is zeros"
    return filled(layout.tree, iter(tensors)), tensors


def filled(tree: Any, tensors: Any) -> Any:
    """Puts the tensors in the places of the leaves, in the order of the layout."""
    if isinstance(tree, Leaf):
        return next(tensors)
    if isinstance(tree, list):
        return [filled(each, tensors) for each in tree]
    if isinstance(tree, dict):
        return {key: filled(each, tensors) for key, each in tree.items()}
    if isinstance(tree, tuple) and any(
        isinstance(each, (Leaf, list, dict, tuple)) for each in tree
    ):
        return tuple.__new__(type(tree), [filled(each, tensors) for each in tree])
    if dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            child = filled(getattr(tree, field.name), tensors)
            object.__setattr__(tree, field.name, child)
    return tree


# ---- parcels of random trees ---------------------------------------------------------------------


class Point(NamedTuple):
    x: torch.Tensor
    y: Any


@dataclasses.dataclass
class Boxes:
    boxes: Any
    name: str


PACKABLE = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]
COMPARABLE = [each for each in PACKABLE if "bits" not in str(each)]


def random_leaf(rng: random.Random) -> torch.Tensor:
    dtype = rng.choice(COMPARABLE)
    sizes = [rng.choice([0, 1, 2, 3, 5, 17]) for _ in range(rng.randrange(5))]
    if rng.random() < 0.1:  # larger than what is packed, or just as large
        sizes = [262_144 // dtype.itemsize + rng.choice([-1, 0, 1, 1000])]
    count = dtype.itemsize
    for size in sizes:
        count *= size
    leaf = torch.frombuffer(bytearray(rng.randbytes(count) or b"?"), dtype=torch.uint8)[:count]
    if dtype == torch.bool:
        leaf = leaf % 2
    shaped = torch.empty(0, dtype=dtype) if count == 0 else leaf.clone().view(dtype)
    shaped = shaped.as_strided(sizes, in_order(sizes))
    return shaped.permute(rng.sample(range(len(sizes)), len(sizes)))


def random_value(rng: random.Random) -> Any:
    return rng.choice(
        [
            *(None, True, False, 0, 63, 64, -64, -65, 2**63 - 1, -(2**63)),
            *(0.1, float("-inf"), "", "straße", "x" * 200, b"", b"\0\xff"),
            *(torch.Size([2, 0, 300]), rng.getrandbits(40), rng.random()),
        ]
    )


def random_tree(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.random()
    if depth == 4 or kind < 0.35:
        return random_leaf(rng)
    if kind < 0.5:
        return random_value(rng)
    children = [random_tree(rng, depth + 1) for _ in range(rng.randrange(6))]
    if kind < 0.65:
        return children
    if kind < 0.75:
        return tuple(children)
    if kind < 0.8:
        return Point(random_leaf(rng), random_tree(rng, depth + 1))
    if kind < 0.85:
        return Boxes(random_tree(rng, depth + 1), "boxes")
    return {rng.choice([number, "key", f"key {number}", ("key", number, None)]): child
            for number, child in enumerate(children)}  # fmt: skip


def is_equal(got: Any, expected: Any) -> bool:
    return type(got) is type(expected) and repr(got) == repr(expected)


@together("seed", range(60))
def test_a_reader_that_was_made_from_the_page_agrees(seed):
    data = bytes(pack(random_tree(random.Random(seed))))
    parcel = Parcel.from_buffer(bytearray(data))
    assert not parcel.needs_pickle
    assert_same(read(data)[0], parcel.tree(), is_same=is_equal)


def test_every_dtype_has_its_code():
    leaves = [torch.arange(32, dtype=torch.uint8).view(dtype) for dtype in PACKABLE]
    _, got = read(bytes(pack(leaves)))
    assert [each.dtype for each in got] == PACKABLE
    assert [as_bytes(each) for each in got] == [bytes(range(32))] * len(PACKABLE)


def as_bytes(leaf: torch.Tensor) -> bytes:
    return leaf.view(torch.uint8).numpy().tobytes()


def test_chunks_end_at_32_mib():
    leaves = [torch.full((262_144 - 8 * (i % 3),), i, dtype=torch.uint8) for i in range(200)]
    leaves[100:100] = [torch.ones(1), torch.ones(300_000), torch.ones(0)]
    assert_same(read(bytes(pack(leaves)))[0], leaves)


def test_a_tensordict_is_its_state_and_its_entries():
    entries = {"a": torch.ones(4, 2), "next": {"done": torch.zeros(4, 1, dtype=torch.bool)}}
    batch = TensorDict(entries, [4], names=["step"]).lock_()
    (sizes, names, is_locked, got), _ = read(bytes(pack(batch)))
    assert (sizes, names, is_locked) == (torch.Size([4]), ("step",), True)
    assert_same(got["a"], entries["a"])
    inner = (torch.Size([4]), ("step",), False)  # the outer one locks it
    assert got["next"][:3] == inner
    assert_same(got["next"][3], entries["next"])


def test_the_memory_of_pickled_values_follows_the_leaves():
    sparse = torch.eye(3).to_sparse()
    data = bytes(pack([torch.ones(2, dtype=torch.uint8), {sparse}, torch.arange(3)]))
    tree, leaves = read(data)
    assert_same([tree[0], tree[2]], [torch.ones(2, dtype=torch.uint8), torch.arange(3)])
    assert tree[1] == Pickled(0)
    memory = [as_bytes(each) for each in leaves[2:]]
    assert sorted(memory) == sorted([as_bytes(sparse.values()), as_bytes(sparse.indices())])


@pytest.mark.parametrize(
    "value",
    [
        *(torch.ones(2).requires_grad_(), torch.nn.Parameter(torch.ones(2))),
        *(torch.eye(2).to_sparse(), torch.ones(2, dtype=torch.complex64).conj()),
        *(OrderedDict(a=1), deque([1]), {1}),
        *(LazyStackedTensorDict(TensorDict(), TensorDict()), TensorDict(a=NonTensorData("x"))),
        *(np.float32(1), 1j, torch.float32, torch.device("cpu")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_values_that_the_guide_names_need_a_pickle(value):
    assert pack([value]).needs_pickle


# ---- the page ------------------------------------------------------------------------------------


def rows_below(heading: str) -> list[list[str]]:
    """Returns the rows of the first table below a heading of the page."""
    text = PAGE.read_text("utf-8").split(f"\n{heading}\n")[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table is not None
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in
            table[0].splitlines()[2:]]  # fmt: skip


def test_the_bytes_of_the_example_are_those_on_the_page():
    block = re.search(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {"print": lambda *_: None}
    exec(block[1], names)
    stated = b""
    for at, cell, _ in rows_below("## An example"):
        assert len(stated) == int(at)
        zeros = re.fullmatch(r"(\d+) zeros", cell)
        stated += bytes(int(zeros[1])) if zeros else bytes.fromhex(cell.strip("`"))
    assert stated == names["data"]
    assert_same(read(stated)[0], names["example"], is_same=is_equal)


def test_the_codes_of_dtypes_are_those_on_the_page():
    listed = [name for _, names in rows_below("### Dtypes") for name in names.split(", ")]
    assert listed == DTYPES
