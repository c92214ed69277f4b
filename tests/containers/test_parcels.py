"""Parcels: a tree as one run of bytes, read back as views, and copied without a walk."""

from __future__ import annotations

import gc
import itertools
import re
from collections import namedtuple
from contextlib import suppress
from typing import Any

import pytest
import torch
from catalogue_cases import ARRIVING, SOME_WRAPS, WRAPS, kind_and_ends
from each_case import together
from fault_support import assert_gives_back, in_use
from filled_leaves import refill, values_of
from parcel_support import assert_same, example, read
from sim_support import hazards_of
from support import oracle

import tdcopier
from tdcopier import Parcel, pack

TO_DEVICE = [case for case in ARRIVING if case.values[1] == "H2D"]


# ---- the same tree -------------------------------------------------------------------------------


@together(("name", "direction"), TO_DEVICE)
def test_every_kind_of_leaf_arrives_as_without_a_parcel_or_is_refused(
    device, registered_box, name, direction
):
    kind, source, target = kind_and_ends(name, direction, device)
    refusals = []
    for container in SOME_WRAPS if kind.large else WRAPS:
        with kind.within():
            tree = WRAPS[container][1](kind.make(source))
            try:
                parcel = pack(tree)
            except TypeError as error:
                refusals.append(str(error))
                continue
            handle = tdcopier.start_copy(read(bytes(parcel)), target)
            assert_same(handle.get(), oracle(tree, target))
            without = tdcopier.start_copy(tree, target)
            without.get()
            assert handle.stats[:5] == without.stats[:5]
    assert all(re.match(r"data.* cannot be (packed|pickled)", each) for each in refusals)
    kinds_without = ("gradient", "ZeroTensor", "Named tensors", "fake_mode", "Parcel")
    assert not refusals or any(each in refusals[0] for each in kinds_without), refusals


def test_the_tree_comes_back_and_what_needs_no_pickle_has_none(device):
    tree = example()
    parcel = read(bytes(pack(tree)), allow_pickle=False)
    assert not parcel.needs_pickle
    expected = oracle(oracle(tree, device), "cpu")  # without the gaps of strided leaves
    assert_same(parcel.tree(), expected)
    assert_same(tdcopier.copy(parcel, "cpu"), expected)
    control = tdcopier.copy(parcel, device)["control"]
    assert (str(control.device), control.names, control.is_locked) == (device, ["step"], True)


def test_a_parcel_anywhere_arrives_as_its_tree(device):
    tree, leaf = example(), torch.randn(5)
    parcel = pack(tree)
    data = [leaf, {"first": parcel, "again": parcel}, pack([leaf])]
    expected = oracle([leaf, {"first": tree, "again": tree}, [leaf]], device)
    handle = tdcopier.start_copy(data, device)
    assert_same(handle.get(), expected)
    assert handle.stats[:5] == tdcopier.explain(data, device).counts[:5]
    assert_same(pack(data).tree(), oracle(expected, "cpu"))


@pytest.mark.parametrize(
    "options", [{"pack_cpu_tensors": False}, {"max_packed_chunk_bytes": 20}, {}], ids=str
)
def test_the_options_of_a_copy_hold_for_a_parcel(device, options):
    tree = example()
    handles = [tdcopier.start_copy(each, device, **options) for each in (pack(tree), tree)]
    for handle in handles:
        assert_same(handle.get(), oracle(tree, device))
    assert handles[0].stats[:8] == handles[1].stats[:8]


def test_equal_trees_have_equal_bytes():
    """And none of what the memory was used for before."""
    tree = example()
    expected = bytes(pack(tree))
    for value in range(10):
        rubbish = torch.full((len(expected),), value, dtype=torch.uint8)
        del rubbish
        assert bytes(pack(tree)) == expected


def test_layouts_that_share_a_place_are_told_apart():
    parcels = {count: bytes(pack(torch.zeros(count))) for count in range(300)}
    for _ in range(2):
        for count, data in parcels.items():
            assert read(data).tree().shape == (count,)


# ---- memory --------------------------------------------------------------------------------------


def test_views_keep_the_parcel_and_none_reaches_its_neighbours():
    tree = [torch.arange(5), torch.arange(5, 9), torch.zeros(0)]
    parcel = pack(tree)
    size = parcel.nbytes
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
    with stall(tdcopier._C.copy_stream(device, "to_device")):
        handles = [tdcopier.start_copy(pack(tree), device) for _ in range(3)]
        gc.collect()
        others = [torch.full((100_000,), 9.0) for _ in range(30)]
    for handle in handles:
        assert_same(handle.get(), oracle(tree, device))
    assert all((each == 9).all() for each in others)


def test_a_tree_on_a_device_is_packed_behind_its_kernels_which_the_host_does_not_wait_for(
    device, accelerator, stall
):
    leaves = [torch.zeros(n, device=device) for n in (3, 70_000, 5)]
    given = torch.empty(pack(leaves).nbytes, dtype=torch.uint8, device=device)
    accelerator.synchronize(device)
    stream = accelerator.Stream(device=device)
    with accelerator.stream(stream), stall(stream):
        refill(leaves, 2)
        parcels = [pack(leaves), pack(leaves, out=given)]  # hangs if it waits
        refill(leaves, 3)
        copies = [parcel._bytes.clone() for parcel in parcels]
        handles = [tdcopier.start_copy(parcel, "cpu") for parcel in parcels]
        assert not stream.query()
    stream.synchronize()
    for handle, copied in zip(handles, copies, strict=True):
        assert values_of(handle.get()) == {2}
        assert values_of(Parcel.from_buffer(copied.cpu()).tree()) == {2}
    assert values_of(leaves) == {3}


@pytest.mark.sim
def test_whatever_fails_while_a_tree_on_a_device_is_packed_is_raised_and_given_back(sim, device):
    tree = [torch.full((n,), 3.0, device=device) for n in (100, 50, 70_000)]
    tdcopier.copy(pack(tree), "cpu")
    before = in_use(sim)
    failed = 0
    for fail in (sim.fail_transfer, sim.fail_device_allocation):
        for n in itertools.count(1):
            with fail(n) as fault:
                parcel = None
                with suppress(torch.AcceleratorError, torch.OutOfMemoryError):
                    parcel = pack(tree)
                assert fault.fired == (parcel is None)
            if parcel is not None:
                break
            failed += 1
            assert_gives_back(sim, before)
        assert values_of(tdcopier.copy(parcel, "cpu")) == {3}
        del parcel
        assert_gives_back(sim, before)
    assert failed > 4


@pytest.mark.sim
@pytest.mark.parametrize("n", [2, 30])
def test_memory_of_a_parcel_on_a_device_that_fails_is_not_used_again_while_it_is_written(
    sim, device, n
):
    tree = [torch.ones(3000, device=device) for _ in range(40)]
    size = pack(tree).nbytes
    torch.sim.synchronize(device)
    with sim.detect():
        with sim.fail_transfer(n, direction="within"), pytest.raises(torch.AcceleratorError):
            pack(tree)
        torch.empty(size, dtype=torch.uint8, device=device).fill_(1)  # of the current stream


def test_a_dtype_is_not_taken_for_non_blocking(device):
    parcel: Any = tdcopier.pack([torch.ones(3)])
    with pytest.raises(TypeError, match=r"non_blocking must be a bool; got torch\.float16"):
        parcel.to(device, torch.float16)


@pytest.mark.sim
@pytest.mark.hazardous
@pytest.mark.parametrize("waits", [True, False])
def test_memory_that_is_packed_into_before_the_device_has_read_it_is_told(sim, device, waits):
    trees = [[torch.full((100,), float(value))] for value in range(2)]
    memory = torch.empty(pack(trees[0]).nbytes, dtype=torch.uint8).pin_memory()

    def program() -> None:
        with sim.hold(tdcopier._C.copy_stream(device)) as held:
            handle = tdcopier.start_copy(pack(trees[0], out=memory), device)
            if waits:
                held.release()
                handle.wait_staged()
            pack(trees[1], out=memory)

    kinds = {hazard.kind for hazard in hazards_of(sim, program)}
    assert kinds == (set() if waits else {"changed"})


def test_what_cannot_be_packed_is_named_and_the_next_call_works(device):
    tree = {"x": [torch.ones(1), lambda: None]}
    with pytest.raises(TypeError, match=r"^data\['x'\]\[1\] cannot be pickled"):
        pack(tree)
    tree["x"][1] = torch.ones(2, device=device)
    with pytest.raises(TypeError, match=r"^data\['x'\]\[1\] is on .*, and other leaves are on cpu"):
        pack(tree)
    assert_same(pack([torch.ones(1)]).tree(), [torch.ones(1)])


# ---- what is pickled, and odd values -------------------------------------------------------------


def test_leaves_that_get_other_memory_while_values_are_pickled_are_packed_as_they_were():
    leaf = torch.arange(100_000)

    class Replaces:
        def __reduce__(self) -> tuple[Any, ...]:
            leaf.data = torch.zeros(1, dtype=torch.int64)
            return (int, (3,))

    assert_same(pack([Replaces(), leaf]).tree(), [3, torch.arange(100_000)])


def test_memory_that_is_freed_while_values_are_pickled_is_not_read():
    leaf = torch.arange(100_000)

    class Frees:
        def __reduce__(self) -> tuple[Any, ...]:
            leaf.untyped_storage().resize_(0)
            return (int, (3,))

    with pytest.raises(RuntimeError, match="has resized memory of the tree"):
        pack([Frees(), leaf])


def test_a_tree_on_a_device_is_packed_there_whatever_its_tensors_are(device, other_device):
    needs_grad = torch.ones(3, device=device, requires_grad=True)
    parcel = pack([needs_grad])
    assert str(parcel.device) == device
    assert_same(parcel.tree(), [needs_grad])
    assert_same(tdcopier.copy(parcel, "cpu"), oracle([needs_grad], "cpu"))
    for other in (torch.ones(2), torch.ones(2, device=other_device, requires_grad=True)):
        with pytest.raises(TypeError, match="a parcel is on one device"):
            pack([needs_grad, other])


Two = namedtuple("Two", "a b")


def test_a_named_tuple_of_other_items_than_its_fields_arrives():
    (got,) = pack([tuple.__new__(Two, [torch.ones(1)])]).tree()
    assert type(got) is Two
    assert len(got) == 1


def test_a_tensor_without_memory_is_refused():
    for tree in ([torch.empty(2, device="meta")], [torch.ones(1), torch.empty(2, device="meta")]):
        with pytest.raises(TypeError, match="on meta"):
            pack(tree)


def test_strides_of_dimensions_with_one_element_or_none_are_kept(device):
    leaves = [torch.empty_strided((1, 3), (2**41, 1)).fill_(2), torch.empty_strided((0, 3), (9, 1))]
    assert_same(tdcopier.copy(pack(leaves), device), tdcopier.copy(leaves, device))


def test_deep_values_are_pickled():
    deep: Any = ()
    for _ in range(500):
        deep = (deep,)
    assert_same(pack({deep: torch.ones(1)}).tree(), {deep: torch.ones(1)})


@pytest.mark.parametrize("made_by", ["pin_memory", "from_buffer", "out"])
def test_torch_knows_the_streams_that_read_a_pinned_parcel(made_by, stall, device):
    tree = {"x": torch.full((50_000,), 3.0)}
    parcel = pack(tree)
    if made_by == "pin_memory":
        parcel = parcel.pin_memory()
    else:
        whole = torch.empty(parcel.nbytes + 100, dtype=torch.uint8, pin_memory=True)[64:]
        if made_by == "out":
            parcel = pack(tree, out=whole)
        else:
            whole = whole[: parcel.nbytes]
            whole.copy_(torch.frombuffer(bytearray(parcel), dtype=torch.uint8))
            parcel = tdcopier.Parcel.from_buffer(whole)
        del whole
    size, tree = parcel.nbytes, parcel.tree()
    del parcel
    with stall(torch.accelerator.current_stream(device)):
        copied = tree["x"].to(device, non_blocking=True)
        del tree
        for _ in range(3):
            torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(255)
    assert copied.eq(3).all()
