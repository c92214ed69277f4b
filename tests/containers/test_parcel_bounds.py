"""What is allocated to read a parcel is in proportion to its layout, however large its leaves are.

A layout can be bytes of any origin, and so can its counts: `ByteReader::count` refuses one that
exceeds the bytes that are left, so each byte pays for what is reserved for it. The most expensive
bytes are the sizes of memory beside a pickle, each of which makes a leaf.
"""

from __future__ import annotations

import os
import sys

import pytest
from support import run_python

pytestmark = [
    pytest.mark.sim,
    pytest.mark.skipif("LD_PRELOAD" in os.environ, reason="a sanitizer takes memory of its own"),
]

MOST_READ, MOST_MADE = 160, 1000
"""Bytes for each byte of a layout: to read it, and to make its tree."""
PROGRAM = f"""
import sys
sys.path[:0] = {sys.path}
import torch
from parcel_parts import Layout, Part, Token, joined
from play_parcels import limited_memory
from tdcopier import Parcel, pack
from tensordict import TensorDict

def play(memory, most_read, most_made):
    with limited_memory(most_read):
        parcel = Parcel.from_buffer(memory)
    with limited_memory(most_made):
        return parcel, parcel.tree()

empty, none, few = Part(Token.SIZES, (0,)), Part(Token.NONE), 1 << 20
play(bytearray(pack(TensorDict({{}}, []))), few, few)  # imports what it needs
"""


def test_each_byte_of_a_layout_pays_for_what_is_allocated():
    run_python(
        PROGRAM
        + f"""
parts = {{  # the smallest of each kind
    "leaf": Part(Token.LEAF, (b"\\0", b"\\1", 0)),
    "TensorDict": Part(Token.TENSOR_DICT, (empty, none, Part(Token.FALSE), 0)),
    "list": Part(Token.LIST, (0,)),
    "number": Part(Token.VALUE, (Part(Token.INTEGER, (1 << 14,)),)),
    "text": Part(Token.VALUE, (Part(Token.TEXT, (0, b"")),)),
    "sizes": Part(Token.VALUE, (empty,)),
}}
count = 100_000
layouts = {{"memory": Layout(b"", (0,) * count, Part(Token.VALUE, (none,)))}}
for kind, part in parts.items():
    layouts[kind] = Layout(b"", (), Part(Token.LIST, (count, *[part] * count)))
kept = []  # so that none uses the memory of another
for kind, layout in layouts.items():
    memory = bytearray(joined(layout.written(), b""))
    print(kind, flush=True)
    kept += play(memory, len(memory) * {MOST_READ}, len(memory) * {MOST_MADE})
"""
    )


def test_the_bytes_of_leaves_are_neither_copied_nor_reserved():
    run_python(
        PROGRAM
        + """
memory = bytearray(pack([torch.zeros(1 << 24), torch.zeros(1 << 23)]))
play(memory, few, few)
"""
    )


def test_a_lack_of_memory_is_a_memory_error():
    run_python(
        PROGRAM
        + """
count, leaf = 200_000, Part(Token.LEAF, (b"\\0", b"\\1", 0))
layout = Layout(b"", (), Part(Token.LIST, (count, *[leaf] * count)))
memory = bytearray(joined(layout.written(), b""))
try:
    play(memory, few, few)
except MemoryError:
    pass
else:
    raise SystemExit("it has found memory")
"""
    )
