"""Parcels: a tree as one run of bytes, read back as views, and copied without a walk."""

from __future__ import annotations

import gc
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from catalogue_cases import ARRIVING, SOME_WRAPS, WRAPS, kind_and_ends
from support import assert_same as assert_same_objects
from support import oracle
from tensordict import TensorDict
from torch.utils._pytree import tree_leaves

import tdcopier
from tdcopier import _C

HEADER_BYTES, ALIGNMENT_BYTES = 32, 64
TO_DEVICE = [case for case in ARRIVING if case.values[1] == "H2D"]


def assert_same(got: Any, expected: Any) -> None:
    """Asserts that the trees are the same, but for the identity of values that are no tensors."""
    assert_same_objects(got, expected, is_same=is_equal)


def is_equal(got: Any, expected: Any) -> bool:
    if isinstance(expected, np.ndarray):
        return got.dtype == expected.dtype and np.array_equal(got, expected)
    return type(got) is type(expected) and pickled([got]) == pickled([expected])


def pickled(values: list[Any]) -> bytes:
    return pickle.dumps(values, 5)


def packed(tree: Any) -> _C.Parcel:
    return _C.pack(tree, pickled, pickle.loads)


def bytes_of(parcel: _C.Parcel) -> bytes:
    return parcel.bytes.numpy().tobytes()


def read(data: bytes, unpickle: Any = pickle.loads) -> _C.Parcel:
    return _C.Parcel.from_bytes(torch.frombuffer(bytearray(data), dtype=torch.uint8), unpickle)


def example() -> dict[Any, Any]:
    """A tree with everything that needs no pickle."""
    control = TensorDict(
        {"position": torch.randn(4, 3), "next": {"done": torch.ones(4, 1, dtype=torch.bool)}},
        [4],
        names=["step"],
    )
    return {
        "boxes": [torch.randn(3, 4).t(), torch.arange(20)[::3], torch.randn(0, 4)],
        "control": control.lock_(),
        ("key", 1, None): (torch.randn(2, 3, 4).permute(2, 0, 1), torch.ones(()).bfloat16()),
        "words": ["straße", 3, -(1 << 40), 2.5, True, None, (1, ("x",)), torch.Size([2, 3])],
        "image": torch.randn(300, 1000),
        "nothing": [(), {}, []],
    }


# ---- the same tree -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "direction"), TO_DEVICE)
def test_every_kind_of_leaf_arrives_as_without_a_parcel_or_is_refused(
    device, registered_box, name, direction
):
    kind, source, target = kind_and_ends(name, direction, device)
    refusals = []
    for container in SOME_WRAPS if kind.large else WRAPS:
        with kind.within():
            tree = WRAPS[container][1](kind.make(source))
            try:
                parcel = packed(tree)
            except (TypeError, pickle.PicklingError, AttributeError) as error:
                refusals.append(str(error))
                continue
            handle = tdcopier.start_copy(read(bytes_of(parcel)), target)
            assert_same(handle.get(), oracle(tree, target))
            without = tdcopier.start_copy(tree, target)
            without.get()
            assert handle.stats[:5] == without.stats[:5]
    unnamed = [each for each in refusals if "cannot be packed" not in each]
    assert all("pickle" in each for each in unnamed)
    is_plain = kind.outcome(direction) == "packed" and "jagged" not in name
    assert not is_plain or refusals == unnamed


def test_the_tree_comes_back_and_what_needs_no_pickle_has_none(device):
    tree = example()
    parcel = read(bytes_of(packed(tree)), unpickle=None)
    assert parcel.pickled is None
    expected = oracle(oracle(tree, device), "cpu")  # without the gaps of strided leaves
    assert_same(parcel.tree(), expected)
    assert_same(tdcopier.copy(parcel, "cpu"), expected)
    control = tdcopier.copy(parcel, device)["control"]
    assert (str(control.device), control.names, control.is_locked) == (device, ["step"], True)


def test_a_parcel_anywhere_arrives_as_its_tree(device):
    tree, leaf = example(), torch.randn(5)
    parcel = packed(tree)
    data = [leaf, {"first": parcel, "again": parcel}, packed([leaf])]
    expected = oracle([leaf, {"first": tree, "again": tree}, [leaf]], device)
    handle = tdcopier.start_copy(data, device)
    assert_same(handle.get(), expected)
    assert handle.stats[:5] == tdcopier.explain(data, device).counts[:5]
    assert_same(packed(data).tree(), oracle(expected, "cpu"))


@pytest.mark.parametrize(
    "options", [{"pack_cpu_tensors": False}, {"max_packed_chunk_bytes": 20}, {}], ids=str
)
def test_the_options_of_a_copy_hold_for_a_parcel(device, options):
    tree = example()
    handles = [tdcopier.start_copy(each, device, **options) for each in (packed(tree), tree)]
    for handle in handles:
        assert_same(handle.get(), oracle(tree, device))
    assert handles[0].stats[:8] == handles[1].stats[:8]


def test_equal_trees_have_equal_bytes():
    """And none of what the memory was used for before."""
    tree = example()
    expected = bytes_of(packed(tree))
    for value in range(10):
        rubbish = torch.full((len(expected),), value, dtype=torch.uint8)
        del rubbish
        assert bytes_of(packed(tree)) == expected


def test_layouts_that_share_a_place_are_told_apart():
    parcels = {count: bytes_of(packed(torch.zeros(count))) for count in range(300)}
    for _ in range(2):
        for count, data in parcels.items():
            assert read(data).tree().shape == (count,)


# ---- memory --------------------------------------------------------------------------------------


def test_views_keep_the_parcel_and_none_reaches_its_neighbours():
    tree = [torch.arange(5), torch.arange(5, 9), torch.zeros(0)]
    parcel = packed(tree)
    size = parcel.bytes.numel()
    first, second, empty = parcel.tree()
    del parcel
    gc.collect()
    rubbish = [torch.full((size,), 9, dtype=torch.uint8) for _ in range(100)]
    assert_same([first, second, empty], tree)
    assert [each.untyped_storage().nbytes() for each in (first, second, empty)] == [40, 32, 0]
    empty.resize_(100).fill_(7)
    first.resize_(100).fill_(7)
    assert torch.equal(second, tree[1])
    assert all((each == 9).all() for each in rubbish)


def test_a_parcel_that_is_dropped_right_after_the_call_arrives_all_the_same(device, stall):
    tree = example()
    with stall(_C.copy_stream(device, "to_device")):
        handles = [tdcopier.start_copy(packed(tree), device) for _ in range(3)]
        gc.collect()
        others = [torch.full((100_000,), 9.0) for _ in range(30)]
    for handle in handles:
        assert_same(handle.get(), oracle(tree, device))
    assert all((each == 9).all() for each in others)


def test_what_cannot_be_packed_is_named_and_the_next_call_works(device):
    for leaf in (torch.eye(2).to_sparse(), torch.ones(2, device=device)):
        with pytest.raises(TypeError, match=r"^data\['x'\]\[1\] cannot be packed"):
            packed({"x": [torch.ones(1), leaf]})
    assert_same(packed([torch.ones(1)]).tree(), [torch.ones(1)])


# ---- bytes of any origin -------------------------------------------------------------------------


def with_layout(layout: bytes, body: bytes) -> bytes:
    """Returns a parcel whose sizes are right, whatever the layout is."""
    begin = -(-(HEADER_BYTES + len(layout)) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    numbers = (1, len(layout), begin + len(body))
    head = b"TDPARCEL" + b"".join(number.to_bytes(8, "little") for number in numbers) + layout
    return head + bytes(begin - len(head)) + body


def parts_of(data: bytes) -> tuple[bytes, bytes]:
    """Returns the layout and the body."""
    end = HEADER_BYTES + int.from_bytes(data[16:24], "little")
    return data[HEADER_BYTES:end], data[-(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES :]


def is_refused(data: bytes) -> bool:
    """Returns whether it is a ValueError; else every leaf can be read and copied."""
    try:
        parcel = read(data, unpickle=None)
    except ValueError:
        return True
    for leaf in tree_leaves(parcel.tree()):
        if isinstance(leaf, torch.Tensor):
            leaf.clone().untyped_storage().tolist()
    return False


def mutations(layout: bytes, rng: random.Random) -> Iterator[bytes]:
    while True:
        changed = bytearray(layout)
        for _ in range(rng.choice([1, 1, 1, 2])):
            at = rng.randrange(len(changed) + 1)
            what = rng.randrange(4)
            if what == 0 and at < len(changed):
                changed[at] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
            elif what == 1:
                del changed[at : at + rng.randrange(1, 4)]
            elif what == 2:
                changed[at:at] = rng.randbytes(rng.randrange(1, 4))
            else:
                changed[at:at] = b"\xff" * rng.randrange(1, 9) + b"\x7f"
        yield bytes(changed)


def test_the_format_is_that_of_the_example():
    """A list of a float32 vector of two elements and a text."""
    data = bytes_of(packed([torch.tensor([1.0, 2.0]), "a"]))
    layout, body = parts_of(data)
    assert layout == bytes([0, 0, 2, 6, 6, 1, 2, 8, 14, 1]) + b"a"
    assert body == torch.tensor([1.0, 2.0]).numpy().tobytes()
    assert data == with_layout(layout, body)


def test_every_byte_short_is_refused():
    data = bytes_of(packed(example()))
    for size in [*range(400), len(data) - 1]:
        assert is_refused(data[:size])
    assert is_refused(data + b"\0")
    assert not is_refused(data)


def test_mutated_layouts_are_refused_or_are_trees():
    small = [
        example() | {"image": 0},
        [torch.ones(3), ("x", torch.zeros(2, 0))],
        {"value" * count: [count, 0.5, ("a", None)] for count in range(9)},
    ]
    parts = [parts_of(bytes_of(packed(tree))) for tree in small]
    rng = random.Random(4)
    sources = [(mutations(layout, rng), body) for layout, body in parts]
    found = [
        is_refused(with_layout(next(changed), body))
        for _ in range(7000)
        for changed, body in sources
    ]
    assert found.count(False) > len(found) / 20  # not refused for a simple reason


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([0, 0, *[255] * 8, 127], id="more children than bytes"),
        pytest.param([0, 6, 99, 0], id="unknown dtype"),
        pytest.param([0, 6, 6, 65, *[1] * 65], id="too many dimensions"),
        pytest.param([0, 6, 6, 3, *[255, 255, 255, 127] * 3], id="product beyond 64 bits"),
        pytest.param([0, 7, 6, 2, 2, 2, 2, 2], id="strides beyond its bytes"),
        pytest.param([0, 8, 15, 0], id="text that is not there"),
        pytest.param([0, 8, 18, 0], id="pickled value that is not there"),
        pytest.param([0, 8, 14, 1, 255], id="no UTF-8"),
        pytest.param([0, 2, 1, 15, 0, 8, 9], id="key that is not there"),
        pytest.param([0, *[0, 1] * 1500, 8, 9], id="deep tree"),
        pytest.param([0, 8, *[16, 1] * 1500, 9], id="deep value"),
        pytest.param([0, 3, 0, 9, 9], id="container without a class"),
        pytest.param([0, 4, 9, 9, 9, 0], id="TensorDict without a batch size"),
        pytest.param([0, 8, 9, 9], id="bytes behind the tree"),
        pytest.param([4, 1, 2, 3, 4, 8, 9], id="pickle without permission"),
    ],
)
def test_malformed_layouts_are_refused(layout):
    assert is_refused(with_layout(bytes(layout), bytes(64)))


def test_nothing_is_unpickled_without_permission():
    parcel = packed([torch.ones(2), {"a set"}])
    assert parcel.pickled is not None
    with pytest.raises(ValueError, match="pickle"):
        read(bytes_of(parcel), unpickle=None)
    assert_same(read(bytes_of(parcel)).tree(), [torch.ones(2), {"a set"}])


@pytest.mark.parametrize(
    "data",
    [b"", torch.zeros(64), torch.zeros(8, 8, dtype=torch.uint8)],
    ids=["bytes", "floats", "2d"],
)
def test_bytes_of_another_shape_or_type_are_refused(data):
    with pytest.raises(TypeError, match="the bytes of a parcel are"):
        _C.Parcel.from_bytes(data, None)


def test_changes_of_the_bytes_of_others_leave_a_parcel_as_it_is(device):
    tree = {"a": torch.arange(1000), "b": torch.ones(3)}
    parcel = packed(tree)
    views = parcel.tree()
    given = parcel.bytes.clone()
    second = _C.Parcel.from_bytes(given, None)
    for each in (parcel.bytes, given):
        each.share_memory_()
    parcel.bytes.untyped_storage().resize_(0)
    given.untyped_storage().resize_(0)
    for got in (views, parcel.tree(), second.tree()):
        assert_same(got, tree)
    assert_same(tdcopier.copy(second, device), oracle(tree, device))
    with pytest.raises(ValueError, match="reaches beyond its storage"):
        _C.Parcel.from_bytes(given, None)


def test_leaves_that_get_other_memory_while_values_are_pickled_are_packed_as_they_were():
    leaf = torch.arange(100_000)

    class Replaces:
        def __reduce__(self) -> tuple[Any, ...]:
            leaf.data = torch.zeros(1, dtype=torch.int64)
            return (int, (3,))

    assert_same(packed([Replaces(), leaf]).tree(), [3, torch.arange(100_000)])


def test_strides_of_dimensions_with_one_element_or_none_are_kept(device):
    leaves = [torch.empty_strided((1, 3), (2**41, 1)).fill_(2), torch.empty_strided((0, 3), (9, 1))]
    assert_same(tdcopier.copy(packed(leaves), device), tdcopier.copy(leaves, device))


def test_deep_values_are_pickled():
    deep: Any = ()
    for _ in range(500):
        deep = (deep,)
    assert_same(packed({deep: torch.ones(1)}).tree(), {deep: torch.ones(1)})
