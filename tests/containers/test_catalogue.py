"""Copies every kind of leaf, in every container and under every option, in every direction.

The result must equal that of `.to`, and the counts must be those of the catalogue.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from catalogue import ARRAY_DTYPES, DIRECTIONS, DTYPES, KINDS, Kind
from catalogue_cases import (
    ARRIVING,
    FAILING,
    OPTIONS,
    REFUSED,
    WRAPS,
    ends_of,
    kind_and_ends,
    wraps_for,
)
from each_case import together
from support import assert_same, oracle

import tdcopier


def expected_counts(kind: Kind, leaf: Any, direction: str, options: dict[str, Any]) -> list[int]:
    """Returns the numbers of packed, alone, delegated, reused and opaque leaves."""
    names = ["packed", "alone", "delegated", "reused", "opaque"]
    outcome = kind.outcome(direction)
    counts = dict.fromkeys(names, 0)
    if outcome == "packed" and options:  # by default the catalogue's outcome holds
        limit = options.get("max_packed_chunk_bytes", 1 << 25)
        for each in kind.parts(leaf):
            packed = options.get("pack_cpu_tensors", True) and each.nbytes <= limit
            counts["packed" if packed else "alone"] += 1
    else:
        counts[outcome] = kind.leaves
    return list(counts.values())


@pytest.mark.parametrize("options", OPTIONS)
@together(("name", "direction"), ARRIVING, by="direction")
def test_a_leaf_arrives_as_through_to_and_is_counted(
    device, registered_box, name, direction, options
):
    kind, source, target = kind_and_ends(name, direction, device)
    # Options decide how leaves travel, after the walk through the containers.
    for container in wraps_for(direction, kind.large or options != "default"):
        _, wrap, opaque = WRAPS[container]
        with kind.within():
            leaf = kind.make(target if kind.on_target else source)
            tree = wrap(leaf)
            handle = tdcopier.start_copy(tree, target, **OPTIONS[options])
            got = handle.get()
            expected = oracle(tree, target)
            try:
                assert_same(got, expected)
                counts = expected_counts(kind, leaf, direction, OPTIONS[options])
                counts[-1] += opaque
                assert list(handle.stats[:5]) == counts
            except AssertionError as error:
                raise AssertionError(f"in the container {container!r}: {error}") from error


@together(("name", "direction"), REFUSED, by="direction")
def test_a_leaf_that_cannot_be_read_is_refused_by_the_call(device, registered_box, name, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    for container, (_, wrap, _) in WRAPS.items():
        with pytest.raises(kind.outcome(direction)) as caught:
            tdcopier.start_copy(wrap(kind.make(source)), target)
        assert str(caught.value).startswith("data"), container
    assert_same(tdcopier.copy([torch.ones(2)], device), [torch.ones(2).to(device)])


@together("name", FAILING)
def test_a_leaf_whose_own_to_fails_fails_the_copy_as_to_does(device, registered_box, name):
    kind = KINDS[name]
    leaf = kind.make("cpu")
    with pytest.raises(kind.fails) as expected:
        leaf.to(device)
    for container, (_, wrap, _) in WRAPS.items():
        handle = tdcopier.start_copy(wrap(leaf), device)
        for ask in (handle.get, handle.wait):
            with pytest.raises(kind.fails) as caught:
                ask()
            assert str(caught.value) == str(expected.value), container


# ---- dtypes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", DIRECTIONS)
@together("dtype", DTYPES)
def test_every_dtype_arrives_bit_for_bit(device, dtype, direction):
    source, target = ends_of(direction, device)
    element_bytes = DTYPES[dtype].itemsize
    most = 2 if dtype == "bool" else 256
    raw = torch.randint(0, most, (6, element_bytes), dtype=torch.uint8)
    rows = raw if dtype == "uint8" else raw.view(DTYPES[dtype])
    there = rows.to(source)
    handle = tdcopier.start_copy([there, there[2:], there[::2], there.expand(2, 6, -1)], target)
    got = handle.get()
    bytes_of = [leaf.contiguous().cpu().view(torch.uint8) for leaf in got]
    wanted = [raw, raw[2:], raw[::2], raw.expand(2, 6, -1)]
    for leaf, expected in zip(bytes_of, wanted, strict=True):
        assert torch.equal(leaf, expected)
    assert [leaf.dtype for leaf in got] == [DTYPES[dtype]] * 4
    assert handle.stats[:5] == (4, 0, 0, 0, 0)


@pytest.mark.parametrize("order", ["=", ">"], ids=["native", "big-endian"])
@together("dtype", ARRAY_DTYPES)
def test_every_array_dtype_arrives(device, dtype, order):
    array = np.arange(12).reshape(3, 4).astype(np.dtype(dtype).newbyteorder(order))
    tree = [array, array[1:, ::2], array[::-1], array.T, array[:0], array[0, 0, ...]]
    handle = tdcopier.start_copy(tree, device)
    assert_same(handle.get(), oracle(tree, device))
    assert handle.stats[:5] == (6, 0, 0, 0, 0)
