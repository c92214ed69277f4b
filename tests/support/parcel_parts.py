"""Takes the bytes of a parcel apart, changes its layout, and puts them together again.

The format is in `csrc/python/walk/parcel_layout.h` and `parcel_tokens.h`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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
TOKENS = (*Token,)
COUNTED = {  # the item that is its count, its first child, and the items of each child
    Token.LIST: (0, 1, 1), Token.TUPLE: (0, 1, 1), Token.DICT: (0, 1, 2), Token.CUSTOM: (0, 3, 1),
    Token.REBUILT: (0, 4, 1), Token.TENSOR_DICT: (3, 4, 2), Token.TUPLE_OF: (0, 1, 1),
}  # fmt: skip
NUMBERS = [0, 1, 2, 3, 4, 5, 8, 16, 63, 64, 65, 127, 128, 255, 1 << 16, 1 << 31, 1 << 32]
NUMBERS += [(1 << 40) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
BYTES = [bytes([value]) for value in range(256)]

Extents: TypeAlias = "tuple[tuple[torch.dtype, int], ...]"


@dataclass(frozen=True)
class Part:
    """A node or a value: numbers, bytes, and other parts, one after the other.

    Parts are never changed, so a layout and its mutations share those that are the same in both.
    """

    token: int
    items: tuple[int | bytes | Part, ...] = ()

    @property
    def is_node(self) -> bool:
        return self.token <= Token.VALUE

    @property
    def is_leaf(self) -> bool:
        return self.token in (Token.LEAF, Token.PERMUTED)

    @functools.cached_property
    def parts(self) -> tuple[Part, ...]:
        """Itself, and then all that are in it, in the order in which they are written."""
        inner = [item.parts for item in self.items if isinstance(item, Part)]
        return (self, *itertools.chain.from_iterable(inner))

    def with_part(self, number: int, part: Part) -> Part:
        """Returns this with another one in the place of `parts[number]`."""
        if number == 0:
            return part
        first = 1
        for at, item in enumerate(self.items):
            if isinstance(item, Part):
                if number < first + len(item.parts):
                    inner = item.with_part(number - first, part)
                    return Part(self.token, (*self.items[:at], inner, *self.items[at + 1 :]))
                first += len(item.parts)
        raise IndexError(number)

    @functools.cached_property
    def written(self) -> bytes:
        return bytes([self.token]) + b"".join(map(_written, self.items))

    @functools.cached_property
    def has_right_counts(self) -> bool:
        """Whether a reader takes the bytes apart as they were put together."""
        items, own = self.items, True
        if self.token in (Token.TEXT, Token.BYTES):
            own = items[0] == len(items[1])  # type: ignore[arg-type]
        elif self.token == Token.SIZES:
            own = items[0] == len(items) - 1
        elif self.token in COUNTED:
            count_at, first, each = COUNTED[self.token]
            own = items[count_at] * each == len(items) - first  # type: ignore[operator]
        return own and all(item.has_right_counts for item in items if isinstance(item, Part))

    @functools.cached_property
    def extents(self) -> Extents | None:
        """The dtype and the number of elements of each leaf; None if a dtype is unknown."""
        if self.is_leaf:
            (code,), (dims,) = self.items[:2]  # type: ignore[misc]
            sizes = self.items[2 : 2 + dims]
            return ((DTYPES[code], math.prod(sizes)),) if code < len(DTYPES) else None  # type: ignore[arg-type]
        found = [item.extents for item in self.items if isinstance(item, Part)]
        return None if None in found else (*itertools.chain.from_iterable(found),)  # type: ignore[arg-type]


def _written(item: int | bytes | Part) -> bytes:
    if isinstance(item, Part):
        return item.written
    return item if isinstance(item, bytes) else _number(item)


def _number(value: int) -> bytes:
    if value < 128:
        return BYTES[value]
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
        token = TOKENS[self.byte()]
        items: list[int | bytes | Part] = []
        if token in (Token.LEAF, Token.PERMUTED):
            items += [self.bytes(1), dims := self.bytes(1)]
            items += [self.number() for _ in range(dims[0] * (1 + (token == Token.PERMUTED)))]
        elif token in (Token.TEXT, Token.BYTES):
            items += [count := self.number(), self.bytes(count)]
        elif token == Token.SIZES:
            items += [count := self.count(), *(self.number() for _ in range(count))]
        elif token == Token.FLOAT:
            items.append(self.bytes(8))
        elif token in (Token.INTEGER, Token.AGAIN, Token.PICKLED):
            items.append(self.number())
        elif token in (Token.VALUE, Token.TENSOR_CLASS):
            items += self.parts(1 if token == Token.VALUE else 3, depth)
        elif token in COUNTED:
            count_at, first, each = COUNTED[token]
            items += self.parts(count_at, depth)
            items.append(count := self.count())
            items += self.parts(first - count_at - 1 + count * each, depth)
        return Part(token, (*items,))

    def parts(self, count: int, depth: int) -> list[Part]:
        return [self.part(depth + 1) for _ in range(count)]


@dataclass(frozen=True)
class Layout:
    """The layout of a parcel, of which all but the pickle can be changed."""

    pickled: bytes
    memory: tuple[int, ...]
    tree: Part

    @classmethod
    def read(cls, data: bytes) -> Layout:
        reader = _Reader(data)
        pickled = reader.bytes(reader.number())
        memory = tuple(reader.number() for _ in range(reader.count()))
        made = cls(pickled, memory, reader.part())
        assert made.written() == data
        return made

    def head(self) -> bytes:
        """Returns the bytes that are not changed."""
        return _number(len(self.pickled)) + self.pickled

    def written(self) -> bytes:
        memory = map(_number, (len(self.memory), *self.memory))
        return self.head() + b"".join(memory) + self.tree.written

    def extents(self) -> Extents:
        """Returns the dtype and the number of elements of each leaf; none if a dtype is unknown."""
        tree = self.tree.extents
        return () if tree is None else (*tree, *((torch.uint8, size) for size in self.memory))

    def with_part(self, number: int, token: int, items: Sequence[int | bytes | Part]) -> Layout:
        """Returns this with another part in the place of `tree.parts[number]`."""
        return dataclasses.replace(self, tree=self.tree.with_part(number, Part(token, (*items,))))

    def mutated(self, dice: random.Random, others: list[Layout]) -> tuple[bytes, Extents]:
        """Returns the bytes of a layout that differs in one to three places, and its extents.

        Most mutations keep counts right, and replace nodes by nodes and values by values.
        """
        made = self
        for _ in range(dice.choice([1, 1, 2, 3])):
            made = dice.choice(_CHANGES)(made, dice, others)
        data, is_as_made = made.written(), made.tree.has_right_counts
        if dice.random() < 0.2:
            fixed = len(self.head())
            data, is_as_made = data[:fixed] + _with_other_bytes(data[fixed:], dice), False
        return data, made.extents() if is_as_made else extents_of(data)


def extents_of(layout: bytes) -> Extents:
    """Returns the extents of a layout; none if it cannot be read."""
    try:
        return Layout.read(layout).extents()
    except (ValueError, IndexError, AssertionError):
        return ()


# ---- changes -------------------------------------------------------------------------------------

Change: TypeAlias = Callable[[Layout, random.Random, list[Layout]], Layout]


def _picked(
    layout: Layout, dice: random.Random, has: Callable[[Part], bool]
) -> tuple[int, Part] | None:
    """Returns a part that has something, and its number; None if there is none."""
    found = [numbered for numbered in enumerate(layout.tree.parts) if has(numbered[1])]
    return dice.choice(found) if found else None


def _replace(layout: Layout, dice: random.Random, others: list[Layout]) -> Layout:
    """Puts a part in the place of another as well: a node for a node, a value for a value."""
    number, part = dice.choice([*enumerate(layout.tree.parts)])
    other = dice.choice([layout, layout, *others])
    source = _picked(other, dice, lambda each: each.is_node == part.is_node)
    return layout if source is None else layout.with_part(number, source[1].token, source[1].items)


def _change_number(layout: Layout, dice: random.Random, others: list[Layout]) -> Layout:
    if layout.memory and dice.random() < 0.3:
        memory, at = [*layout.memory], dice.randrange(len(layout.memory))
        memory[at] = max(0, memory[at] + dice.choice([-8, -1, 1, 8, 64]))
        return dataclasses.replace(layout, memory=tuple(memory))
    picked = _picked(layout, dice, lambda part: any(type(item) is int for item in part.items))
    if picked is None:
        return layout
    number, part = picked
    items = [*part.items]
    at = dice.choice([at for at, item in enumerate(items) if type(item) is int])
    items[at] = dice.choice([*NUMBERS, max(0, items[at] + dice.choice([-1, 1]))])
    return layout.with_part(number, part.token, items)


def _change_sizes(layout: Layout, dice: random.Random, others: list[Layout]) -> Layout:
    """Changes a size or a stride of a leaf a little, or exchanges two."""
    picked = _picked(layout, dice, lambda part: part.is_leaf)
    if picked is None or len(picked[1].items) == 2:
        return layout
    number, part = picked
    items = [*part.items]
    one, other = (dice.randrange(2, len(items)) for _ in range(2))
    items[one], items[other] = items[other], items[one]
    if dice.random() < 0.5:
        items[one] = dice.choice([0, 1, 2, 3, 5, 7])
    return layout.with_part(number, part.token, items)


def _change_dtype(layout: Layout, dice: random.Random, others: list[Layout]) -> Layout:
    picked = _picked(layout, dice, lambda part: part.is_leaf)
    if picked is None:
        return layout
    number, part = picked
    code = BYTES[dice.randrange(len(DTYPES) + 8)]
    return layout.with_part(number, part.token, (code, *part.items[1:]))


def _change_children(layout: Layout, dice: random.Random, others: list[Layout]) -> Layout:
    """Adds a child again, at any place, or leaves one out, with the count that is right then."""
    picked = _picked(
        layout, dice, lambda part: part.token in COUNTED and part.token != Token.CUSTOM
    )
    if picked is None:
        return layout
    number, part = picked
    items, (count_at, first, each) = [*part.items], COUNTED[part.token]
    places = range(first, len(items), each)
    if not places:
        return layout
    at = dice.choice(places)
    child = items[at : at + each]
    if dice.random() < 0.5:
        del items[at : at + each]
    else:
        to = dice.choice(places)
        items[to:to] = child
        if each == 2 and dice.random() < 0.8:
            items[to] = Part(Token.TEXT, (2, b"k" + BYTES[97 + dice.randrange(26)]))
    items[count_at] = (len(items) - first) // each
    return layout.with_part(number, part.token, items)


def _change_text(layout: Layout, dice: random.Random, others: list[Layout]) -> Layout:
    picked = _picked(layout, dice, lambda part: part.token in (Token.TEXT, Token.BYTES))
    if picked is None:
        return layout
    number, part = picked
    text = bytearray(part.items[1])  # type: ignore[arg-type]
    at = dice.randrange(len(text) + 1)
    text[at : at + dice.randrange(2)] = dice.choice([b"", b"\0", b"a", b".", b"_", "é".encode()])
    return layout.with_part(number, part.token, (len(text), bytes(text)))


def _wrap(layout: Layout, dice: random.Random, others: list[Layout]) -> Layout:
    """Puts a node into a list, a tuple, a dict, or a container of no class."""
    picked = _picked(layout, dice, lambda part: part.is_node)
    if picked is None:
        return layout
    number, part = picked
    token = dice.choice([Token.LIST, Token.TUPLE, Token.DICT, Token.CUSTOM])
    values = {Token.DICT: 1, Token.CUSTOM: 2}.get(token, 0)
    head = [Part(Token.INTEGER, (dice.randrange(9),)) for _ in range(values)]
    return layout.with_part(number, token, (1, *head, part))


_CHANGES: list[Change] = [
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
