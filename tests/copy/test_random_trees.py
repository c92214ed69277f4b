"""Random trees of containers and leaves, on any devices and under any options."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from container_classes import (
    Box,
    Defaults,
    FrozenSample,
    FrozenSlottedSample,
    Lowercase,
    Numbered,
    Options,
    Ordered,
    Output,
    Pair,
    Sample,
    SlottedSample,
    Tagged,
    Versioned,
    Window,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import assert_same, oracle

import tdcopier

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32, torch.int64,
    torch.complex64, torch.complex128, torch.float8_e5m2,
]  # fmt: skip
ARRAY_DTYPES = ["?", "u1", "<i2", ">i4", "<f4", ">f8", "<c8", "<u8"]
PLACES = ("host", "first", "second")

Leaf = Callable[[dict[str, str], Counter[str]], Any]
"""Makes a leaf, given the devices by their places; counts the leaves that it makes."""


@st.composite
def tensors(draw: st.DrawFn) -> Leaf:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    place = draw(st.sampled_from(PLACES))
    seed = draw(st.integers(0, 1000))
    steps = draw(st.lists(st.tuples(st.sampled_from("tsex"), st.integers(0, 7)), max_size=3))
    with_gradient = draw(st.integers(0, 9)) == 0 and dtype is torch.float32

    def make(devices: dict[str, str], made: Counter[str]) -> torch.Tensor:
        elements = int(np.prod(shape)) + 3
        values = (torch.arange(elements) * 37 + seed) % 101
        base = values.to(dtype).to(devices[place])
        leaf = base[3:].reshape(shape)
        for kind, number in steps:
            leaf = view(leaf, kind, number)
        made[devices[place], with_gradient] += 1
        return leaf.requires_grad_() if with_gradient else leaf

    return make


def view(leaf: torch.Tensor, kind: str, number: int) -> torch.Tensor:
    if kind == "t" and leaf.dim() > 1:  # transposed
        return leaf.transpose(number % leaf.dim(), (number + 1) % leaf.dim())
    if kind == "s" and leaf.dim() > 0:  # sliced
        dim = number % leaf.dim()
        return leaf[(slice(None),) * dim + (slice(number % 2, None, 1 + number % 3),)]
    if kind == "e" and leaf.dim() < 5:  # expanded
        dim = number % (leaf.dim() + 1)
        return leaf.unsqueeze(dim).expand(*leaf.shape[:dim], number % 4, *leaf.shape[dim:])
    if kind == "x" and leaf.dim() == 1 and leaf.numel() > 2:  # overlapping
        return leaf.unfold(0, 2, 1)
    return leaf


@st.composite
def arrays(draw: st.DrawFn) -> Leaf:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = draw(st.sampled_from(ARRAY_DTYPES))
    step = draw(st.sampled_from([1, 1, 2, -1, -2]))
    transposed = draw(st.booleans())

    def make(devices: dict[str, str], made: Counter[str]) -> np.ndarray[Any, Any]:
        array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
        if array.ndim:
            array = array[::step]
        made["array", False] += 1
        return array.T if transposed else array

    return make


MARKER = object()


def opaque(value: Any) -> Leaf:
    def make(devices: dict[str, str], made: Counter[str]) -> Any:
        made["opaque", False] += 1
        return value

    return make


FROM_LIST: list[Callable[[list[Any]], Any]] = [
    list,
    tuple,
    deque,
    lambda children: deque(children, maxlen=max(1, len(children))),
    lambda children: Window(children),
    lambda children: Numbered(*children, number=len(children)),
    lambda children: Versioned(4, *children),
    lambda children: Box(*children, name=str(len(children))),
    lambda children: dict(enumerate(children)),
    lambda children: {("k", i): child for i, child in enumerate(children)},
    lambda children: OrderedDict(reversed(list(enumerate(children)))),
    lambda children: Ordered(enumerate(children)),
    lambda children: defaultdict(list, enumerate(children)),
    lambda children: Defaults(None, enumerate(children)),
    lambda children: Counter(dict(enumerate(children))),
    lambda children: UserDict(enumerate(children)),
    lambda children: Lowercase({f"K{i}": child for i, child in enumerate(children)}),
    lambda children: Options("o", **{f"k{i}": child for i, child in enumerate(children)}),
]
FROM_PAIR: list[Callable[[Any, Any], Any]] = [
    Pair,
    Tagged,
    Sample,
    FrozenSample,
    SlottedSample,
    FrozenSlottedSample,
    Output,
    lambda left, right: torch.return_types.max((left, right)),
]


def containers(children: st.SearchStrategy[Leaf]) -> st.SearchStrategy[Leaf]:
    def around(wrap: Callable[..., Any], parts: list[Leaf], spread: bool) -> Leaf:
        def make(devices: dict[str, str], made: Counter[str]) -> Any:
            inner = [part(devices, made) for part in parts]
            return wrap(*inner) if spread else wrap(inner)

        return make

    lists = st.lists(children, max_size=5)
    pairs = st.lists(children, min_size=2, max_size=2)
    return st.one_of(
        st.builds(around, st.sampled_from(FROM_LIST), lists, st.just(False)),
        st.builds(around, st.sampled_from(FROM_PAIR), pairs, st.just(True)),
    )


trees = st.recursive(
    st.one_of(
        tensors(),
        tensors(),
        arrays(),
        st.sampled_from([None, 3, "text", MARKER, torch.Size([2])]).map(opaque),
    ),
    containers,
    max_leaves=30,
)


@given(
    tree=trees,
    target=st.sampled_from(PLACES),
    pinned=st.booleans(),
    pack=st.booleans(),
    alignment=st.sampled_from([1, 16, 24, 512, 4096]),
    chunk=st.sampled_from([1, 100, 4096, 1 << 25]),
    background=st.booleans(),
)
@settings(
    max_examples=500,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_random_trees_equal_to_under_any_options(
    device, accelerator, registered_box, tree, target, pinned, pack, alignment, chunk, background
):
    second = device[:-1] + "1" if accelerator.device_count() > 1 else device
    devices = {"host": "cpu", "first": device, "second": second}
    made: Counter[Any] = Counter()
    source = tree(devices, made)
    handle = tdcopier.start_copy(
        source, devices[target], use_pinned_staging=pinned, pack_cpu_tensors=pack,
        min_packed_alignment_bytes=alignment, max_packed_chunk_bytes=chunk,
        use_background_thread=background, on_unknown="ignore",
    )  # fmt: skip
    assert_same(handle.get(), oracle(source, devices[target]))
    stats = handle.stats
    there = sum(n for (place, _), n in made.items() if place == devices[target])
    there += made["array", False] if target == "host" else 0
    delegated = sum(n for (place, grad), n in made.items() if grad and place != devices[target])
    assert (stats.reused_leaves, stats.delegated_leaves) == (there, delegated)
    assert stats.opaque_leaves == made["opaque", False]
    assert sum(stats[:5]) == sum(made.values())
