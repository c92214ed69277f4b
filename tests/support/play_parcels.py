"""Plays mutated layouts of parcels: refused, or trees; as a program, as many as you like.

    python tests/support/play_parcels.py --mutations 1000000 --jobs 2
    python tests/support/play_parcels.py --seed 4711

A seed takes the layout of one kind of parcel, and plays a number of mutations of it (those of
`parcel_parts.py`). Then the sizes in the header and that of the body are made right again, since
most would be refused for a wrong size otherwise. A parcel is right if

- it is a `ValueError`, or a tree all of whose leaves can be read, and which a device gets as it is,
- it is a `ValueError` without permission to unpickle, if it has a pickle,
- no module was imported for it without that permission,
- Python has not allocated more than `MOST_BYTES_PER_BYTE` for each of its bytes, and the process
  has not grown: a limit on its address space makes an allocation in C++ fail that has nothing to do
  with the number of bytes. Under the address sanitizer, `max_allocation_size_mb` does that; see
  `tests/sanitizers/run.py`.

"At most twice the parcel" would be wrong for an allocation, since a tree of empty leaves has more
bytes than its layout. True is that nothing is allocated for the bytes of leaves, of which the tree
has views, and at most a number of bytes for each byte of the layout: for which, see
`tests/containers/test_parcel_bounds.py`. A layout is small beside its leaves where they are not.

Pickles are not changed, since a caller who permits them trusts them. Their code may raise anything
if the memory beside them is not what it was, and a value that is pickled as a TensorDict's entry
keeps its batch size beside a TensorDict that was given another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import re
import resource
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from container_classes import FrozenSlottedSample, Pair, Sample, SlottedSample
from parcel_parts import Extents, Layout, joined, parts_of
from played_seeds import DEVICE_TYPE, Tally, played_by_arguments, print_played
from support import same_bytes
from tensordict import TensorDict
from tensordict_classes import Frames

import tdcopier
import tdcopier._refused_pickles  # at the first refusal otherwise
from tdcopier import Parcel, pack

MUTATIONS = 100  # of a seed
A_BATCH = 20  # seeds that a process plays at a time
MOST_BYTES_PER_BYTE = 1000  # an empty TensorDict is made of six bytes, and has two thousand
FREE_BYTES = 128 * 1024
MOST_BODY_BYTES = 64 * 1024
MORE_ADDRESS_SPACE_BYTES = 1 << 30

# ---- parcels of many kinds -----------------------------------------------------------------------


def _named() -> Any:
    return TensorDict(
        {"x": torch.rand(4, 3), "next": TensorDict({"y": torch.ones(4, 3, 2)}, [4, 3])},
        [4],
        names=["time"],
    )


def _deep() -> Any:
    inner = TensorDict({"z": torch.arange(6).view(2, 3)}, [2, 3], names=["a", None])
    return TensorDict({"in": {"in": inner, "empty": {}}}, [2], names=["a"]).lock_()


def _memory() -> Any:
    # Parcels have memory in the order of its addresses, and a seed is to be the same game always.
    weight, base = sorted(
        (torch.zeros(20, dtype=torch.float64) for _ in range(2)), key=torch.Tensor.data_ptr
    )
    weight = weight[:6].view(torch.float32).view(3, 4).requires_grad_()
    return [weight, {"set"}, torch.nn.Parameter(base[2:9]), torch.ones(5, dtype=torch.bool)]


def _one() -> torch.Tensor:
    return torch.ones(1)


KINDS: dict[str, Callable[[], Any]] = {
    "lists": lambda: [torch.ones(3), ("x", torch.zeros(2, 0)), [[], (), {}], torch.ones(())],
    "dicts": lambda: {"a": {"b": torch.ones(2), ("k", 1, None): 3}, 2: torch.arange(3), None: "a"},
    "texts": lambda: {"v" * n: [n, 0.5, ("a", None), "straße", b"bytes"] for n in range(9)},
    "numbers": lambda: [1, -1, 1 << 62, -(1 << 63), 2.5, float("nan"), True, torch.Size([2, 3])],
    "dtypes": lambda: [torch.ones(n, dtype=d) for n, d in enumerate(_DTYPES)],
    "permuted": lambda: [
        torch.rand(2, 3, 4).permute(2, 0, 1), torch.arange(20)[::3], torch.ones(3, 1, 2).mT,
        torch.empty_strided((1, 3), (1 << 41, 1)).fill_(2), torch.empty_strided((0, 3), (9, 1)),
    ],
    "named tuples": lambda: Pair(Pair(torch.ones(2), 3), [Pair("a", torch.arange(3))]),
    "dataclasses": lambda: [Sample(torch.ones(2), torch.zeros(1)), SlottedSample(_one(), 4)],
    "frozen": lambda: {"f": FrozenSlottedSample(_one(), (1, ("x",))), "s": Sample([], {})},
    "TensorDict": _named,
    "TensorDicts": lambda: [_deep(), {"t": TensorDict({}, [])}],
    "large": lambda: [torch.rand(70, 100), *(torch.ones(n) for n in range(20))],
    "memory": _memory,
    "tensorclass": lambda: [Frames(torch.ones(2, 3), "cat", None, batch_size=[2]), torch.ones(3)],
}  # fmt: skip

_DTYPES = [
    torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64,
    torch.complex64, torch.bool, torch.float8_e5m2, torch.uint32,
]  # fmt: skip

_made: dict[str, Layout] = {}


def layouts() -> dict[str, Layout]:
    """Returns the layout of a parcel of each kind."""
    if not _made:
        _made.update({name: Layout.read(parts_of(bytes(pack(KINDS[name]())))[0]) for name in KINDS})
    return _made


# ---- what is right -------------------------------------------------------------------------------


@dataclass
class Played(Tally):
    """The outcome of a number of mutations."""

    mutations: int = 0
    wrong: list[str] = field(default_factory=list)
    trees: Counter[str] = field(default_factory=Counter)
    """By the kind of the parcel that was mutated."""
    refusals: Counter[str] = field(default_factory=Counter)


def play_seeds(seeds: range) -> Played:
    """Plays mutations. Requires: a device is enabled."""
    total = Played()
    layouts()
    with limited_memory():
        for seed in seeds:
            total.add(play(seed))
    return total


def play(seed: int) -> Played:
    dice = random.Random(seed)
    played = Played()
    name = dice.choice(sorted(KINDS))
    others = list(layouts().values())
    for number in range(MUTATIONS):
        layout, extents = layouts()[name].mutated(dice, others)
        data = joined(layout, dice.randbytes(_body_bytes(extents)))
        played.mutations += 1
        try:
            refusal = judge(data)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            played.wrong.append(f"seed {seed}, {name}, {number}: {told}; {layout[:300]!r}")
            continue
        if refusal is None:
            played.trees[name] += 1
        else:
            played.refusals[refusal] += 1
    return played


def judge(data: bytes) -> str | None:
    """Returns why the bytes are refused, or None for a tree. Raises: what is wrong."""
    memory = bytearray(data)
    modules = len(sys.modules)
    with _few_bytes_of_python(len(data)):
        try:
            parcel = Parcel.from_buffer(memory)
            tree = parcel.tree()
        except ValueError as error:
            refusal = _without_details(error)
        else:
            refusal = ""
    assert len(sys.modules) == modules, "a module was imported"
    if "has a pickle" in refusal:
        try:
            parcel = Parcel.from_buffer(memory, allow_pickle=True)
        except ValueError as error:
            return _without_details(error)
        try:
            check(parcel, parcel.tree())
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            if "alloc" in str(error):  # `std::bad_alloc` is a RuntimeError, too
                raise
            return f"its pickle: {type(error).__name__}"  # of what it has in other places
        return None
    if refusal:
        return refusal
    assert not parcel.needs_pickle
    check(parcel, tree)
    return None


def _without_details(error: ValueError) -> str:
    return re.sub(r"[\w.]*\d[\w.]*|: .*", "_", str(error))


@contextlib.contextmanager
def _few_bytes_of_python(size: int) -> Iterator[None]:
    """Asserts that Python allocates few bytes for each of this number of bytes."""
    tracemalloc.start()
    try:
        yield
        _, used = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used <= FREE_BYTES + MOST_BYTES_PER_BYTE * size, f"{used:,} bytes for {size:,}"


def check(parcel: Parcel, tree: Any) -> None:
    """Reads all leaves, and copies the parcel to a device, where the leaves are the same."""
    device = f"{DEVICE_TYPE}:0"
    there = tdcopier.copy(parcel, device, on_unknown="ignore")
    for made, copied in zip(tensordicts_of(tree), tensordicts_of(there), strict=True):
        assert is_sound(made)
        assert (copied.batch_size, copied.names) == (made.batch_size, made.names)
    for leaf, arrived in zip(leaves_of(tree), leaves_of(there), strict=True):
        expected = leaf.detach().to(device)
        assert (arrived.dtype, arrived.shape) == (leaf.dtype, leaf.shape)
        assert (arrived.device, arrived.stride()) == (expected.device, expected.stride())
        assert same_bytes(arrived.detach().cpu(), leaf.detach())
    pack(tree)


def is_sound(tensordict: TensorDict) -> bool:
    """Returns whether its shape fits its entries', but those that are pickled, and its names do.

    A TensorDict within it may have other names, as users can set them.
    """
    dims = len(tensordict.batch_size)
    entries = [v for v in tensordict.values() if isinstance(v, (torch.Tensor, TensorDict))]
    fit = all(value.shape[:dims] == tensordict.batch_size for value in entries)
    named = [name for name in tensordict.names if name is not None]
    return fit and all(type(name) is str for name in named) and len({*named}) == len(named)


def leaves_of(tree: Any) -> list[torch.Tensor]:
    return [node for node in nodes_of(tree) if isinstance(node, torch.Tensor)]


def tensordicts_of(tree: Any) -> list[TensorDict]:
    return [node for node in nodes_of(tree) if isinstance(node, TensorDict)]


def nodes_of(tree: Any) -> Iterator[Any]:
    """Yields a tree and all values in it, without keys."""
    yield tree
    children: list[Any] = []
    if isinstance(tree, (dict, TensorDict)):
        children = [*tree.values()]
    elif isinstance(tree, (list, tuple)):
        children = [*tree]
    elif isinstance(tree, Frames):
        children = [tree._tensordict]
    elif dataclasses.is_dataclass(tree):
        names = [each.name for each in dataclasses.fields(tree) if hasattr(tree, each.name)]
        children = [getattr(tree, name) for name in names]
    for child in children:
        yield from nodes_of(child)


@functools.lru_cache(10_000)
def _body_bytes(extents: Extents) -> int:
    """Returns the size of the body that such leaves have, if they are not too large."""
    if sum(dtype.itemsize * elements for dtype, elements in extents) > MOST_BODY_BYTES:
        return MOST_BODY_BYTES
    leaves = [torch.empty(elements, dtype=dtype) for dtype, elements in extents]
    return len(parts_of(bytes(pack(leaves)))[1])


# ---- as a program --------------------------------------------------------------------------------


@contextlib.contextmanager
def limited_memory(more_bytes: int = MORE_ADDRESS_SPACE_BYTES) -> Iterator[None]:
    """Lets an allocation fail by which the process would have grown by more than this.

    An allocation in C++ is made for a count that `ByteReader.count` has compared with the bytes
    that are left, or for sizes whose sum is that of the body. If one were not, it could have any
    size, and would be refused by the limit on the address space: that is no `ValueError`.
    """
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        yield  # whose shadow needs the address space; it has `max_allocation_size_mb`
        return
    page_bytes = resource.getpagesize()
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * page_bytes
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + more_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> int:
    total = played_by_arguments(__doc__, play_seeds, Played(), "mutations", MUTATIONS, A_BATCH)
    print_played(total.refusals + total.trees, total.wrong)
    print(f"{total.mutations:,} mutations, {sum(total.trees.values()):,} trees, torch "
          f"{torch.__version__}: {len(total.wrong)} wrong")  # fmt: skip
    return bool(total.wrong)


if __name__ == "__main__":
    sys.exit(main())
