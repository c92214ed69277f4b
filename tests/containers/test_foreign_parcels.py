"""Bytes of any origin: refused, or a tree; in memory of others, and without running their code."""

from __future__ import annotations

import abc
import dataclasses
import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from parcel_parts import joined, parts_of
from parcel_support import assert_same, example, read
from sim_support import becomes
from support import oracle, same_bytes
from tensordict import TensorDict
from tensordict_classes import Frames
from torch.utils._pytree import tree_leaves

import tdcopier
from tdcopier import Parcel, pack

TEXT_OS, A_KEY = (15, 2, *b"os"), (15, 1, 65)


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
        pytest.param([0, 0, 7, 28, 0], id="dtype after the last"),
        pytest.param(
            [0, 0, 7, 27, 0],
            id="dtype of torch 2.14",
            marks=pytest.mark.skipif(hasattr(torch, "bcomplex32"), reason="this torch has it"),
        ),
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


@dataclasses.dataclass
class Titled:
    title: Any
    rows: Any


REFUSED: dict[str, tuple[Any, str, str]] = {
    "a slice": ([torch.ones(2), {"boxes": slice(1, 2)}], "data[1]['boxes']", "builtins.slice"),
    "a set, which names nothing": ({"a": torch.ones(1), "b": ({1},)}, "data['b'][0]", ""),
    "a gradient": (
        TensorDict({"a": {"b": torch.ones(2, 1, requires_grad=True)}}, [2]),
        "data['a']['b']",
        "torch._utils._rebuild_tensor_v2",
    ),
    "of a dataclass": (Titled("a", [slice(1)]), "data.rows[0]", "builtins.slice"),
    "the batch itself": (slice(1), "data", "builtins.slice"),
    "a key": ({"a": {frozenset(): 1}}, "data['a']", ""),
}


@pytest.mark.parametrize(("tree", "path", "named"), REFUSED.values(), ids=REFUSED)
def test_a_pickle_is_refused_with_its_path_and_what_to_do(tree, path, named):
    with pytest.raises(ValueError, match="has a pickle") as raised:
        read(bytes(pack(tree)), allow_pickle=False)
    text = str(raised.value)
    assert text.startswith(f"{path} has a pickle{' (it names ' if named else ', which runs'}")
    assert named in text
    for word in ("tensors", "leave it out", "allow_pickle=True"):
        assert word in text
    assert ("detach() tensors that require a gradient" in text) == ("torch." in named)


def test_a_tensorclass_without_a_tensordict_is_refused():
    layout, body = parts_of(bytes(pack(Frames(torch.ones(2), "cat", batch_size=[2]))))
    head, state = layout.split(bytes([5, 18, 1, 4]))  # its TensorDict, of batch size [2]
    assert state
    for other in ([0, 0], [9, 10], [7, 6, 1, 0]):
        with pytest.raises(ValueError, match="a tensorclass has no TensorDict"):
            read(joined(head + bytes(other), body))


def test_a_pickled_value_that_is_no_tensor_is_refused_as_an_entry():
    entry = torch.ones(2, requires_grad=True)
    for other in ({"a set"}, torch.Tensor):  # a class has the methods of its objects
        data = bytes(pack([other, TensorDict({"a": entry}, [2])]))
        layout, body = parts_of(data)
        assert layout.endswith(bytes([9, 20, 1]))  # the second pickled value
        assert_same(read(data).tree()[1]["a"], entry)
        with pytest.raises(ValueError, match="a pickled value is of the wrong type"):
            read(joined(layout[:-1] + bytes([0]), body)).tree()


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


@pytest.mark.parametrize("is_in_thread", [False, True], ids=["main thread", "another"])
def test_memory_of_others_goes_with_the_last_leaf(is_in_thread):
    """Torch frees the memory of a tensor without the GIL, and nothing is packed or copied."""
    data = np.frombuffer(bytes(pack([torch.ones(1000)])), np.uint8)
    alive: list[weakref.ref[Any]] = []

    def receive() -> None:
        for _ in range(20):
            memory = data.copy()
            alive.append(weakref.ref(memory))
            leaves = Parcel.from_buffer(memory).tree()  # the parcel goes before its leaves
            del memory, leaves

    if is_in_thread:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(receive).result()
    else:
        receive()
    assert becomes(lambda: sum(ref() is not None for ref in alive) == 0)


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


class Both(NamedTuple):
    x: Any
    y: Any = 1


@dataclasses.dataclass
class Open:
    x: Any
    y: Any = 1


@dataclasses.dataclass
class Closed:
    __slots__ = ("x", "y")
    x: Any
    y: Any


def bytes_of_class(cls: type, children: int, rest: list[int]) -> bytes:
    """Returns the bytes of a container of this class, whose children are None."""
    module, name = cls.__module__.encode(), cls.__qualname__.encode()
    head = [0, 0, 4, children, 15, len(module), *module, 15, len(name), *name]
    return joined(bytes([*head, *rest, *[9, 10] * children]), b"")


def attributes(places: str, others: str = "", in_slots: str = "") -> list[int]:
    """Returns the third part: the place of each child, attributes that are None, which are slots.

    Each name is one letter.
    """
    its = [[17, 1, 15, 1, ord(name)] for name in places]
    pairs = [[17, 2, 15, 1, ord(name), 10] for name in others]
    slots = [[15, 1, ord(name)] for name in in_slots]
    parts = [[17, len(part), *itertools.chain(*part)] for part in (its, pairs, slots)]
    return [17, 3, *itertools.chain(*parts)]


@pytest.mark.parametrize(
    ("cls", "rest", "is_whole"),
    [
        (Both, [10], True),
        (Open, attributes("xy"), True),
        (Open, attributes("yx"), True),
        (Open, attributes("xz"), True),  # y has a default
        (Open, attributes("xyz"), True),
        (Open, attributes("xy", "y"), True),
        (Open, attributes("yz"), False),
        (Open, attributes("xy", in_slots="x"), False),
        (Open, attributes("y", "x"), True),
        (Open, attributes("x"), True),
        (Open, attributes("y"), False),
        (Closed, attributes("xy", in_slots="xy"), True),
        (Closed, attributes("xy", in_slots="x"), False),
        (Closed, attributes("xy"), False),
        (Closed, attributes("x", in_slots="x"), False),
        (Closed, attributes("xy", "z", in_slots="xy"), False),
    ],
)
def test_bytes_make_no_dataclass_that_lacks_a_field(cls, rest, is_whole):
    data = bytes_of_class(cls, 2 if cls is Both else rest[3], rest)
    if is_whole:
        made = read(data, allow_pickle=False).tree()
        assert type(made) is cls
        assert made.x is None
        assert made.y in (None, 1)
    else:
        with pytest.raises(ValueError, match=f"a {cls.__qualname__} that cannot be rebuilt: "):
            read(data, allow_pickle=False)


@pytest.mark.parametrize("children", [0, 1, 3])
def test_bytes_make_no_named_tuple_of_other_items_than_its_fields(children):
    with pytest.raises(ValueError, match=f"rebuilt: it has {children} items for 2 fields"):
        read(bytes_of_class(Both, children, [10]), allow_pickle=False)


@dataclasses.dataclass
class Computed:
    """Both fields are stored under other names."""

    a: Any
    b: Any

    def _get_a(self) -> Any:
        return self._a

    def _get_b(self) -> Any:
        return self._b

    def _set_a(self, value: Any) -> None:
        self._a = value

    def _set_b(self, value: Any) -> None:
        self._b = value


Computed.a = property(Computed._get_a, Computed._set_a)
Computed.b = property(Computed._get_b, Computed._set_b)


@pytest.mark.parametrize("value", [None, 1, torch.ones(2)])
def test_whether_a_dataclass_needs_a_pickle_does_not_depend_on_its_values(value):
    data = bytes(pack([Computed(value, value), torch.ones(1)]))
    (got, _) = read(data, allow_pickle=False).tree()
    assert_same([got.a, got.b], [value, value])


def test_a_dataclass_that_lacks_a_field_is_pickled():
    value = Open(torch.ones(2), 3)
    del value.x
    parcel = pack([value, torch.ones(1)])
    (got, _) = parcel.tree()
    assert vars(got) == {"y": 3}
    with pytest.raises(ValueError, match="allow_pickle"):
        read(bytes(parcel), allow_pickle=False)
