"""Says which value of a parcel needs a pickle that is not allowed. Nothing is unpickled."""

from __future__ import annotations

import encodings.raw_unicode_escape as _  # noqa: F401  (bytes could let pickletools do it)
import io
import pickletools
from collections.abc import Iterator
from typing import NoReturn

_MOST_BYTES, _MOST_NAMES = 64 * 1024, 3
"""Of a pickle that are looked at, and of what it names that a message has."""
_LONGEST = 100
_OF_TENSORS = "torch._utils._rebuild"
_PARTS = ("tdcopier.", "collections.OrderedDict", "copyreg.")
"""Names that say nothing of a value."""


def refuse(path: str, pickled: bytes) -> NoReturn:
    """Raise a ValueError that names the value, what it is, and what to do.

    Args:
        path: of the first pickled value, from the root of the tree.
        pickled: of all values.
    """
    names = list(dict.fromkeys(_named_in(pickled)))[:_MOST_NAMES]
    found = f" (it names {', '.join(names)})" if names else ""
    hint = "convert the value, or leave it out"
    if any(name.startswith(_OF_TENSORS) for name in names):
        hint = "detach() tensors that require a gradient, convert the value, or leave it out"
    raise ValueError(
        f"{path} has a pickle{found}, which runs code when it is read. Plain tensors, arrays, "
        f"numbers, strings, bytes, None and containers of these need none: {hint}; or give the end "
        "that reads it allow_pickle=True, if you trust where it comes from"
    )


def _named_in(pickled: bytes) -> Iterator[str]:
    """Yield the classes and functions that the values name, as far as the pickle can be read."""
    file = io.BytesIO(pickled[:_MOST_BYTES])
    strings: list[str] = []
    memo: list[str] = []
    last = ""
    try:
        for _ in pickletools.genops(file):  # the table, which precedes the values
            pass
        for opcode, argument, _ in pickletools.genops(file):
            if opcode.name == "STACK_GLOBAL":
                yield from _shown(".".join(strings[-2:]))
            elif opcode.name == "MEMOIZE":
                memo.append(last)
            elif opcode.name in ("BINGET", "LONG_BINGET") and isinstance(argument, int):
                strings.append(memo[argument])
            elif isinstance(argument, str):
                strings.append(argument)
            last = argument if isinstance(argument, str) else ""
    except Exception:  # the bytes are damaged, or go on
        return


def _shown(name: str) -> Iterator[str]:
    """Yield a name that tells what a value is. The bytes may have anything as a name."""
    parts = name.split(".")
    if len(name) <= _LONGEST and all(map(str.isidentifier, parts)) and not name.startswith(_PARTS):
        yield name
