"""Parcels: a tree as one run of bytes, read back as views, and copied without a walk."""

from __future__ import annotations

import abc
import dataclasses
import gc
import itertools
import re
from collections import namedtuple
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from catalogue_cases import ARRIVING, SOME_WRAPS, WRAPS, kind_and_ends
from fault_support import assert_gives_back, in_use
from filled_leaves import refill, values_of
from parcel_parts import joined, parts_of
from parcel_support import assert_same
from sim_support import hazards_of
from support import oracle, same_bytes
from tensordict import TensorDict
from tensordict_classes import Frames
from torch.utils._pytree import tree_leaves

import tdcopier
from tdcopier import Parcel, pack

TEXT_OS, A_KEY = (15, 2, *b"os"), (15, 1, 65)
TO_DEVICE = [case for case in ARRIVING if case.values[1] == "H2D"]


def read(data: bytes, allow_pickle: bool = True) -> Parcel:
    return Parcel.from_buffer(bytearray(data), allow_pickle=allow_pickle)


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


# ---- bytes of any origin -------------------------------------------------------------------------


def is_refused(data: bytes) -> bool:
    """Returns whether it is a ValueError; else every leaf can be read and copied."""
    try:
        parcel = read(data, allow_pickle=False)
    except ValueError:
        return True
    for leaf in tree_leaves(parcel.tree()):
        if isinstance(leaf, torch.Tensor):
            assert same_bytes(leaf.clone(), leaf)
    return False


def test_the_format_is_that_of_the_example():
    """A list of a float32 vector of two elements and a text."""
    data = bytes(pack([torch.tensor([1.0, 2.0]), "a"]))
    layout, body = parts_of(data)
    assert layout == bytes([0, 0, 0, 2, 7, 6, 1, 2, 9, 15, 1]) + b"a"
    assert body == torch.tensor([1.0, 2.0]).numpy().tobytes()
    assert data == joined(layout, body)


def test_every_byte_short_is_refused():
    data = bytes(pack(example()))
    for size in [*range(400), len(data) - 1]:
        assert is_refused(data[:size])
    assert is_refused(data + b"\0")
    assert not is_refused(data)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param([], id="no layout"),
        pytest.param([0, 0, 0, *[255] * 8, 127], id="more children than bytes"),
        pytest.param([0, *[255] * 8, 127], id="more pieces of memory than bytes"),
        pytest.param([0, 1, 200, 1, 9, 10], id="more memory than the parcel has"),
        pytest.param([0, 0, 7, 99, 0], id="unknown dtype"),
        pytest.param([0, 0, 7, 6, 65, *[1] * 65], id="too many dimensions"),
        pytest.param([0, 0, 7, 6, 3, *[255, 255, 255, 127] * 3], id="product beyond 64 bits"),
        pytest.param([0, 0, 8, 6, 2, 2, 2, 2, 2], id="strides beyond its bytes"),
        pytest.param([0, 0, 8, 6, 2, 2, 2, 1, 1], id="strides that repeat elements"),
        pytest.param([0, 0, 8, 6, 2, 2, 2, 0, 3], id="stride of zero"),
        pytest.param([0, 0, 9, 16, 0], id="text that is not there"),
        pytest.param([0, 0, 9, 20, 0], id="pickled value that is not there"),
        pytest.param([0, 0, 9, 15, 1, 255], id="no UTF-8"),
        pytest.param([0, 0, 2, 1, 16, 0, 9, 10], id="key that is not there"),
        pytest.param([0, 0, *[0, 1] * 1500, 9, 10], id="deep tree"),
        pytest.param([0, 0, 9, *[17, 1] * 1500, 10], id="deep value"),
        pytest.param([0, 0, 3, 0, 10, 10], id="container without a class"),
        pytest.param([0, 0, 4, 0, 15, 2, *b"os", 15, 4, *b"stat", 10], id="function as a class"),
        pytest.param(
            [0, 0, 4, 0, *TEXT_OS, 15, 11, *b"stat_result", 10], id="class of another kind"
        ),
        pytest.param([0, 0, 5, 10, 10, 10, 0], id="TensorDict without a batch size"),
        pytest.param(
            [0, 0, 5, 18, 1, 4, 10, 11, 1, *A_KEY, 7, 6, 1, 1], id="batch size that differs"
        ),
        pytest.param([0, 0, 5, 18, 0, 10, 11, 1, *A_KEY, 0, 0], id="list in a TensorDict"),
        pytest.param(
            [0, 0, 5, 18, 0, 10, 11, 1, 10, 7, 6, 0], id="key of a TensorDict that is no text"
        ),
        pytest.param([0, 0, 5, 18, 1, 4, 17, 0, 11, 0], id="fewer names than dimensions"),
        pytest.param([0, 0, 5, 18, 1, 4, 17, 1, 12, 11, 0], id="name that is no text"),
        pytest.param([0, 0, 5, 18, 1, 3, 10, 11, 0], id="negative batch size"),
        pytest.param(
            [0, 0, 5, 18, 2, 2, 2, 17, 2, *A_KEY, *A_KEY, 11, 0], id="dimensions of one name"
        ),
        pytest.param([0, 0, 9, 10, 10], id="bytes behind the tree"),
        pytest.param([4, 1, 2, 3, 4, 0, 9, 10], id="pickle without permission"),
    ],
)
def test_malformed_layouts_are_refused(layout):
    with pytest.raises(ValueError, match=r"^(?!.* another number of bytes)"):  # not just its size
        read(joined(bytes(layout), bytes(64)), allow_pickle=False)


def test_nothing_is_unpickled_without_permission():
    parcel = pack([torch.ones(2), {"a set"}])
    assert parcel.needs_pickle
    with pytest.raises(ValueError, match="pickle"):
        read(bytes(parcel), allow_pickle=False)
    assert_same(read(bytes(parcel)).tree(), [torch.ones(2), {"a set"}])


def test_a_tensorclass_without_a_tensordict_is_refused():
    layout, body = parts_of(bytes(pack(Frames(torch.ones(2), "cat", batch_size=[2]))))
    head, state = layout.split(bytes([5, 18, 1, 4]))  # its TensorDict, of batch size [2]
    assert state
    for other in ([0, 0], [9, 10], [7, 6, 1, 0]):
        with pytest.raises(ValueError, match="a tensorclass has no TensorDict"):
            read(joined(head + bytes(other), body))


def test_what_has_no_buffer_is_refused():
    for data in ([1, 2], 3, "text", torch.zeros(0).to_sparse()):
        with pytest.raises(TypeError):
            Parcel.from_buffer(data)
    for data, why in (
        (b"", "end too early"),
        (torch.zeros(64), "no parcel"),
        (torch.zeros(8, 16)[:, ::2].byte().t(), "contiguous"),
    ):
        with pytest.raises(ValueError, match=why):
            Parcel.from_buffer(data)


def test_memory_of_others_stays_while_a_parcel_uses_it(device):
    tree = {"a": torch.arange(1000), "b": torch.ones(3)}
    memory = bytearray(bytes(pack(tree)))
    tensor = torch.frombuffer(bytearray(memory), dtype=torch.uint8).clone()
    parcels = [Parcel.from_buffer(each) for each in (memory, tensor)]
    with pytest.raises(BufferError):
        memory.clear()
    with pytest.raises(RuntimeError, match="not resizable"):
        tensor.untyped_storage().resize_(0)
    views = [each.tree() for each in parcels]
    del memory, tensor
    gc.collect()
    for each, seen in zip(parcels, views, strict=True):
        assert_same(seen, tree)
        assert_same(tdcopier.copy(each, device), oracle(tree, device))


@pytest.mark.parametrize(
    ("leaf", "copied_from"),
    [
        pytest.param(torch.arange(9), 4, id="elements of 8 bytes"),
        pytest.param(torch.ones(3, dtype=torch.complex128), 8, id="of 16 bytes"),
        pytest.param(torch.nn.Parameter(torch.ones(3)), 8, id="pickled"),
    ],
)
def test_memory_is_used_where_it_is_if_its_elements_can_be_read_there(leaf, copied_from, device):
    data = bytes(pack([leaf]))
    for offset in (0, 8, 4):
        whole = np.zeros(len(data) + 16, np.uint8)
        start = -whole.ctypes.data % 16 + offset
        memory = whole[start : start + len(data)]
        memory[:] = np.frombuffer(data, np.uint8)
        parcel = Parcel.from_buffer(memory, allow_pickle=True)
        is_copied = parcel._bytes.data_ptr() != memory.ctypes.data
        assert is_copied == (offset != 0 and offset <= copied_from)
        assert_same(parcel.tree(), [leaf])
        (back,) = tdcopier.copy(tdcopier.copy(parcel, device), "cpu")
        assert torch.equal(back.detach(), leaf.detach())


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


class Proxy:
    """Stands in a module for something else, as in some libraries."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("this code ran")

    __dict__ = property(lambda self: self.__getattr__("__dict__"))  # type: ignore[assignment]


PROXY = Proxy()


def test_names_of_classes_run_no_code_of_what_they_name():
    for name in (b"PROXY.x", b"PROXY", b"Proxy.__dict__"):
        module = __name__.encode()
        text = [0, 0, 4, 0, 15, len(module), *module, 15, len(name), *name, 10]
        with pytest.raises(ValueError, match="does not know"):
            read(joined(bytes(text), bytes(64)), allow_pickle=False)


@dataclasses.dataclass
class Abstract(abc.ABC):
    @abc.abstractmethod
    def method(self) -> None: ...


@dataclasses.dataclass
class Number(int):
    pass


@dataclasses.dataclass
class Finalized:
    def __del__(self) -> None:
        raise AssertionError("this code ran")


@dataclasses.dataclass
class Harmless:
    pass


def test_a_tensor_without_memory_is_refused():
    for tree in ([torch.empty(2, device="meta")], [torch.ones(1), torch.empty(2, device="meta")]):
        with pytest.raises(TypeError, match="on meta"):
            pack(tree)


@pytest.mark.parametrize("cls", [Abstract, Number, Finalized, Harmless])
def test_bytes_may_name_only_dataclasses_that_can_be_made_and_run_no_code(cls):
    module, name = cls.__module__.encode(), cls.__qualname__.encode()
    no_attributes = [17, 3, 17, 0, 17, 0, 17, 0]
    text = [0, 0, 4, 0, 15, len(module), *module, 15, len(name), *name, *no_attributes]
    data = joined(bytes(text), b"")
    if cls is Harmless:
        assert type(read(data, allow_pickle=False).tree()) is Harmless
    else:
        with pytest.raises(ValueError, match="does not know"):
            read(data, allow_pickle=False)


def test_strides_of_dimensions_with_one_element_or_none_are_kept(device):
    leaves = [torch.empty_strided((1, 3), (2**41, 1)).fill_(2), torch.empty_strided((0, 3), (9, 1))]
    assert_same(tdcopier.copy(pack(leaves), device), tdcopier.copy(leaves, device))


def test_deep_values_are_pickled():
    deep: Any = ()
    for _ in range(500):
        deep = (deep,)
    assert_same(pack({deep: torch.ones(1)}).tree(), {deep: torch.ones(1)})
