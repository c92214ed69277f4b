"""Takes the bytes of a parcel apart, changes its layout, and puts them together again.

The format is in `csrc/python/walk/parcel_layout.h` and `parcel_tokens.h`.
"""

from __future__ import annotations

import copy
import enum
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

HEADER_BYTES, ALIGNMENT_BYTES = 32, 64


def joined(layout: bytes, body: bytes) -> bytes:
    """Returns a parcel whose sizes are right, whatever the layout is."""
    begin = -(-(HEADER_BYTES + len(layout)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    numbers = (1, len(layout), begin + len(body))
    head = b"TDPARCEL" + b"".join(number.to_bytes(8, "little") for number in numbers) + layout
    return head + bytes(begin - len(head)) + body


def parts_of(data: bytes) -> tuple[bytes, bytes]:
    """Returns the layout and the body."""
    end = HEADER_BYTES + int.from_bytes(data[16:24], "little")
    return data[HEADER_BYTES:end], data[-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES :]


Token = enum.IntEnum(
    "Token",
    "LIST TUPLE DICT CUSTOM REBUILT TENSOR_DICT TENSOR_CLASS LEAF PERMUTED VALUE NONE FALSE TRUE "
    "INTEGER FLOAT TEXT AGAIN TUPLE_OF SIZES BYTES PICKLED",
    start=0,
)
DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.bfloat16,
    torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz,
    torch.uint16, torch.uint32, torch.uint64, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip
VALUES_OF_HEAD = {Token.CUSTOM: 2, Token.REBUILT: 3, Token.TENSOR_CLASS: 2}
NUMBERS = [0, 1, 2, 3, 4, 5, 8, 16, 63, 64, 65, 127, 128, 255, 1 << 16, 1 << 31, 1 << 32]
NUMBERS += [(1 << 40) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


@dataclass
class Part:
    """A node or a value: numbers, bytes, and other parts, one after the other."""

    token: int
    items: list[int | bytes | Part] = field(default_factory=list)

    @property
    def is_node(self) -> bool:
        return self.token <= Token.VALUE

    def parts(self) -> Iterator[Part]:
        yield self
        for item in self.items:
            if isinstance(item, Part):
                yield from item.parts()

    def written(self) -> bytes:
        return bytes([self.token]) + b"".join(map(_written, self.items))


def _written(item: int | bytes | Part) -> bytes:
    if isinstance(item, Part):
        return item.written()
    return item if isinstance(item, bytes) else _number(item)


def _number(value: int) -> bytes:
    made = bytearray()
    while value >= 128:
        made.append(value & 127 | 128)
        value >>= 7
    return bytes([*made, value])


class _Reader:
    """Reads a layout that may be broken: then it raises `ValueError` or `IndexError`."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def bytes(self, count: int) -> bytes:
        self.at += count
        if self.at > len(self.data):
            raise ValueError("too short")
        return self.data[self.at - count : self.at]

    def number(self) -> int:
        value = shift = 0
        while (byte := self.byte()) >= 128:
            value |= (byte & 127) << shift
            shift += 7
        return value | byte << shift

    def count(self) -> int:
        found = self.number()
        if found > len(self.data):
            raise ValueError("too many")
        return found

    def part(self, depth: int = 0) -> Part:
        if depth > 200:
            raise ValueError("too deep")
        part = Part(Token(self.byte()))
        token, items = part.token, part.items
        if token in (Token.LEAF, Token.PERMUTED):
            items += [self.bytes(1), dims := self.bytes(1)]
            items += [self.number() for _ in range(dims[0] * (1 + (token == Token.PERMUTED)))]
        elif token in (Token.TEXT, Token.BYTES):
            items += [count := self.number(), self.bytes(count)]
        elif token == Token.SIZES:
            items.append(self.count())
            items += [self.number() for _ in range(items[0])]
        elif token == Token.FLOAT:
            items.append(self.bytes(8))
        elif token in (Token.INTEGER, Token.AGAIN, Token.PICKLED):
            items.append(self.number())
        elif token in (Token.VALUE, Token.TENSOR_CLASS):
            values = VALUES_OF_HEAD.get(token, 0)
            items += [self.part(depth + 1) for _ in range(values + 1)]
        elif token <= Token.TENSOR_DICT or token == Token.TUPLE_OF:
            if token == Token.TENSOR_DICT:
                items += [self.part(depth + 1) for _ in range(3)]
            items.append(count := self.count())
            each = 2 if token in (Token.DICT, Token.TENSOR_DICT) else 1
            children = VALUES_OF_HEAD.get(token, 0) + count * each
            items += [self.part(depth + 1) for _ in range(children)]
        return part


@dataclass
class Layout:
    """The layout of a parcel, of which all but the pickle can be changed."""

    pickled: bytes
    memory: list[int]
    tree: Part

    @classmethod
    def read(cls, data: bytes) -> Layout:
        reader = _Reader(data)
        pickled = reader.bytes(reader.number())
        memory = [reader.number() for _ in range(reader.count())]
        made = cls(pickled, memory, reader.part())
        assert made.written() == data
        return made

    def written(self) -> bytes:
        memory = [len(self.memory), *self.memory]
        head = _number(len(self.pickled)) + self.pickled + b"".join(map(_number, memory))
        return head + self.tree.written()

    def mutated(self, dice: random.Random, others: list[Layout]) -> bytes:
        """Returns the bytes of a layout that differs in one to three places.

        Most mutations keep counts right, and replace nodes by nodes and values by values.
        """
        made = copy.deepcopy(self)
        for _ in range(dice.choice([1, 1, 2, 3])):
            dice.choice(_CHANGES)(made, dice, others)
        data = made.written()
        if dice.random() < 0.2:
            fixed = len(_number(len(self.pickled)) + self.pickled)
            data = data[:fixed] + _with_other_bytes(data[fixed:], dice)
        return data


def extents_of(layout: bytes) -> tuple[tuple[torch.dtype, int], ...]:
    """Returns the dtype and the number of elements of each leaf; of none, if it cannot be read."""
    try:
        made = Layout.read(layout)
    except (ValueError, IndexError, AssertionError):
        return ()
    leaves = [part for part in made.tree.parts() if part.token in (Token.LEAF, Token.PERMUTED)]
    found: list[Any] = []
    for leaf in leaves:
        (code,), (dims,) = leaf.items[:2]  # type: ignore[misc]
        if code >= len(DTYPES):
            return ()
        found.append((DTYPES[code], math.prod(leaf.items[2 : 2 + dims])))  # type: ignore[arg-type]
    return (*found, *((torch.uint8, size) for size in made.memory))


# ---- changes -------------------------------------------------------------------------------------


def _picked(layout: Layout, dice: random.Random, has: Any) -> Part | None:
    found = [part for part in layout.tree.parts() if has(part)]
    return dice.choice(found) if found else None


def _replace(layout: Layout, dice: random.Random, others: list[Layout]) -> None:
    """Puts a copy of a part in the place of another: a node for a node, a value for a value."""
    part = _picked(layout, dice, lambda part: True)
    other = dice.choice([layout, layout, *others])
    source = _picked(other, dice, lambda each: part is not None and each.is_node == part.is_node)
    if part is not None and source is not None:
        source = copy.deepcopy(source)
        part.token, part.items = source.token, source.items


def _change_number(layout: Layout, dice: random.Random, others: list[Layout]) -> None:
    if layout.memory and dice.random() < 0.3:
        at = dice.randrange(len(layout.memory))
        layout.memory[at] = max(0, layout.memory[at] + dice.choice([-8, -1, 1, 8, 64]))
        return
    part = _picked(layout, dice, lambda part: any(type(item) is int for item in part.items))
    if part is not None:
        at = dice.choice([at for at, item in enumerate(part.items) if type(item) is int])
        part.items[at] = dice.choice([*NUMBERS, max(0, part.items[at] + dice.choice([-1, 1]))])


def _change_sizes(layout: Layout, dice: random.Random, others: list[Layout]) -> None:
    """Changes a size or a stride of a leaf a little, or exchanges two."""
    part = _picked(layout, dice, lambda part: part.token in (Token.LEAF, Token.PERMUTED))
    if part is None or len(part.items) == 2:
        return
    one, other = (dice.randrange(2, len(part.items)) for _ in range(2))
    part.items[one], part.items[other] = part.items[other], part.items[one]
    if dice.random() < 0.5:
        part.items[one] = dice.choice([0, 1, 2, 3, 5, 7])


def _change_dtype(layout: Layout, dice: random.Random, others: list[Layout]) -> None:
    part = _picked(layout, dice, lambda part: part.token in (Token.LEAF, Token.PERMUTED))
    if part is not None:
        part.items[0] = bytes([dice.randrange(len(DTYPES) + 8)])


def _change_children(layout: Layout, dice: random.Random, others: list[Layout]) -> None:
    """Adds a child again, at any place, or leaves one out, with the count that is right then."""
    containers = (Token.LIST, Token.TUPLE, Token.REBUILT, Token.DICT, Token.TENSOR_DICT)
    part = _picked(layout, dice, lambda part: part.token in (*containers, Token.TUPLE_OF))
    if part is None:
        return
    count_at = 3 if part.token == Token.TENSOR_DICT else 0
    first = count_at + 1 + VALUES_OF_HEAD.get(part.token, 0)
    each = 2 if part.token in (Token.DICT, Token.TENSOR_DICT) else 1
    places = range(first, len(part.items), each)
    if not places:
        return
    at = dice.choice(places)
    child = part.items[at : at + each]
    if dice.random() < 0.5:
        del part.items[at : at + each]
    else:
        to = dice.choice(places)
        part.items[to:to] = copy.deepcopy(child)
        if each == 2 and dice.random() < 0.8:
            part.items[to] = Part(Token.TEXT, [2, b"k" + bytes([97 + dice.randrange(26)])])
    part.items[count_at] = (len(part.items) - first) // each


def _change_text(layout: Layout, dice: random.Random, others: list[Layout]) -> None:
    part = _picked(layout, dice, lambda part: part.token in (Token.TEXT, Token.BYTES))
    if part is None:
        return
    text = bytearray(part.items[1])  # type: ignore[arg-type]
    at = dice.randrange(len(text) + 1)
    text[at : at + dice.randrange(2)] = dice.choice([b"", b"\0", b"a", b".", b"_", "é".encode()])
    part.items = [len(text), bytes(text)]


def _wrap(layout: Layout, dice: random.Random, others: list[Layout]) -> None:
    """Puts a node into a list, a tuple, a dict, or a container of no class."""
    part = _picked(layout, dice, lambda part: part.is_node)
    if part is None:
        return
    inner = Part(part.token, part.items)
    part.token = dice.choice([Token.LIST, Token.TUPLE, Token.DICT, Token.CUSTOM])
    values = {Token.DICT: 1, Token.CUSTOM: 2}.get(part.token, 0)
    part.items = [1, *(Part(Token.INTEGER, [dice.randrange(9)]) for _ in range(values)), inner]


_CHANGES = [
    _replace, _replace, _change_number, _change_sizes, _change_sizes, _change_dtype,
    _change_children, _change_children, _change_text, _wrap,
]  # fmt: skip


def _with_other_bytes(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    at = dice.randrange(len(changed) + 1)
    what = dice.randrange(4)
    if what == 0 and at < len(changed):
        changed[at] = dice.choice([0, 1, 127, 128, 255, dice.randrange(256)])
    elif what == 1:
        del changed[at : at + dice.randrange(1, 4)]
    elif what == 2:
        changed[at:at] = dice.randbytes(dice.randrange(1, 4))
    else:
        changed[at:at] = b"\xff" * dice.randrange(1, 9) + b"\x7f"
    return bytes(changed)
