"""Values with tensors inside, pickled without the memory of those tensors."""

from __future__ import annotations

import copyreg
import enum
import multiprocessing
import pickle
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import KINDS
from catalogue_cases import ARRIVING
from each_case import together
from libraries import library
from library_stand_ins import LIBRARY_OR_STAND_IN, tv_tensors
from pickled_support import (
    Holder,
    assert_same,
    by_pickle,
    bytes_of,
    dump,
    passed_on,
)
from support import memory_reference, raises_exactly
from tensordict import TensorDict
from tensordict_kinds import TD_KINDS
from tensordict_kinds_of_memory import MEMORY
from tensordict_same import Twins, assert_same_tensordict, leaves_of, nodes_of
from torch.testing._internal.two_tensor import TwoTensor

from tdcopier import _pickled_values

LEAVES = [
    pytest.param(case.values[0], id=case.values[0], marks=case.marks)
    for case in ARRIVING
    if case.values[1] == "H2D"
]


# ---- what comes back -----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch, if quantized
@together("name", LEAVES)
@pytest.mark.usefixtures("device")
def test_every_kind_of_leaf_inside_an_object_comes_back_as_by_pickle(name):
    kind = KINDS[name]
    if kind.why_missing("cpu"):
        pytest.skip(kind.why_missing("cpu"))
    with kind.within():
        leaf = kind.make("cpu")
        leaves = leaf if isinstance(leaf, list) else [leaf]
        try:
            expected = [by_pickle(each) for each in leaves]
        except (TypeError, AttributeError, RuntimeError):
            with pytest.raises(TypeError, match=r"data\[0\].* cannot be pickled"):
                dump(leaves)
            return
        held, *got = passed_on([Holder(leaf=leaf), *leaves])
        assert type(held) is Holder
        if len(leaves) == 1:
            assert held.leaf is got[0]
        for each, wanted in zip(got, expected, strict=True):
            assert_same(each, wanted)


class OwnSharing(Twins):
    """Allows leaves to share storages otherwise than after a pickle of torch's."""

    def pair_storages(self, got: torch.Tensor, expected: torch.Tensor, path: str) -> None:
        pass


IN_OTHER_MEMORY = {
    *MEMORY,
    "expanded",
    "strided leaves",
    "negative view",
    "consolidated one in a lazy stack",
    "TypedTensorDict of a memory-mapped one",
}
"""Kinds whose leaves were mapped, consolidated or had gaps, which pickle keeps."""


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")  # torch, if quantized
@together("name", TD_KINDS)
def test_every_kind_of_tensordict_comes_back_as_by_pickle(device, name):
    kind = TD_KINDS[name]
    if kind.why_missing("cpu"):
        pytest.skip(kind.why_missing("cpu"))
    with kind.within():
        td = kind.make("cpu")
        (got,) = passed_on([td])
        for _, node in nodes_of(got):
            for question in ("is_memmap", "is_shared", "is_consolidated"):
                assert not getattr(node, question, bool)()
        if name in IN_OTHER_MEMORY:
            assert (type(got), got.device, got.is_locked) == (type(td), td.device, td.is_locked)
            for (path, leaf), (_, wanted) in zip(leaves_of(got), leaves_of(td), strict=True):
                plain = wanted.as_subclass(type(leaf)).resolve_neg()
                assert_same(leaf.resolve_neg().contiguous(), plain.contiguous(), path)
        else:
            # torch cannot load what it pickles of tensors of some newer dtypes.
            expected = td if "dtype" in name else pickle.loads(pickle.dumps(td, 5))
            assert_same_tensordict(got, expected, twins=OwnSharing())


class Labelled(torch.Tensor):
    """A subclass that adds nothing."""


class Colour(enum.Enum):
    RED = 1


def structured() -> Any:
    records = np.zeros(1 << 20, [("flag", "u1"), ("x", "f4", (2,)), ("name", "U3")])
    records["x"][:8] = np.arange(16).reshape(8, 2)
    return records[:8]


def labelled_and_more() -> torch.Tensor:
    made = torch.arange(1 << 20)[7:15].as_subclass(Labelled)
    made.weights, made.words = torch.arange(1 << 20)[:4], ["a", "b"]
    return made


def tied() -> torch.nn.Module:
    first, second = torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    return torch.nn.Sequential(first, second, torch.nn.BatchNorm1d(4))


def quantized(dtype: torch.dtype) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.arange(1024.0), 1.0, 0, dtype)


OBJECTS: dict[str, tuple[Callable[[], Any], int]] = {
    "slice": (lambda: torch.arange(1 << 20)[64:72], 64),
    "gapped": (lambda: torch.arange(1 << 20)[: 1 << 19 : 1 << 16], 64),
    "two columns that overlap no other": (lambda: torch.zeros(4, 1 << 16)[:, :: 1 << 15], 32),
    "subclass with attributes": (labelled_and_more, 64 + 32),
    "parameter": (lambda: torch.nn.Parameter(torch.rand(1 << 20)[8:16]), 32),
    "buffer": (lambda: torch.nn.Buffer(torch.rand(1 << 20)[8:16]), 32),
    "gradient of an operation": (lambda: torch.rand(8).requires_grad_() * 2, 32),
    "quantized": (lambda: quantized(torch.qint32)[::128], 32),
    "quantized, of half bytes": (lambda: quantized(torch.quint4x2), 512),
    "float8": (lambda: torch.rand(1 << 20)[8:16].to(torch.float8_e5m2), 8),
    "module with tied weights": (tied, 64 + 4 * 16 + 8),
    "storage": (lambda: torch.arange(8.0).storage(), 32),
    "array": (lambda: np.arange(1 << 20)[8:16], 64),
    "array, reversed with gaps": (lambda: np.arange(1 << 20)[: 1 << 19][:: -(1 << 16)], 64),
    "structured array": (structured, 8 * (1 + 8 + 12)),
    "structured array, reversed": (lambda: structured()[::-1], 8 * (1 + 8 + 12)),
    "field of a structured array": (lambda: structured()["x"], 8 * 8),
    "records": (lambda: structured().view(np.recarray), 8 * (1 + 8 + 12)),
    "dates": (lambda: np.arange(1 << 20)[:8].view("datetime64[D]"), 64),
    "array of objects": (lambda: np.array([None, "a", {1: 2}], object), 0),
    "enum": (lambda: [Colour.RED, {Colour.RED}, frozenset([1, 2])], 0),
    "device and dtype": (lambda: [torch.device("cpu"), torch.float32, torch.strided], 0),
    "nothing": (list, 0),
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
@together("name", OBJECTS)
def test_an_object_comes_back_as_by_pickle_with_few_bytes(name):
    make, most_bytes = OBJECTS[name]
    value = make()
    pickled, memory = dump([Holder(value=value)])
    assert len(pickled) < 2048
    assert bytes_of(memory) <= most_bytes
    (got,) = passed_on([Holder(value=value)])
    assert type(got) is Holder
    assert_same(got.value, by_pickle(value))
    if isinstance(value, torch.Tensor):
        assert got.value.__dict__.keys() == value.__dict__.keys()
        for attribute, wanted in value.__dict__.items():
            assert_same(got.value.__dict__[attribute], wanted)


def test_the_tensors_in_a_wrapper_keep_the_strides_that_it_says():
    (got,) = passed_on([TwoTensor(torch.arange(8)[::2], torch.arange(8)[::2])])
    assert got.stride() == got.a.stride() == got.b.stride() == (2,)
    assert got.a.tolist() == got.b.tolist() == [0, 2, 4, 6]


@pytest.mark.parametrize("which", LIBRARY_OR_STAND_IN)
def test_images_and_boxes_bring_only_what_they_show(monkeypatch, registry, which):
    tv = tv_tensors(which, monkeypatch)
    images = torch.arange(3 * 1000 * 1000).to(torch.uint8).view(3, 1000, 1000)
    crop = tv.Image(images[:, 10:14, 10:14])
    boxes = tv.BoundingBoxes(torch.rand(1000, 4)[10:12], format="XYXY", canvas_size=(8, 6))
    pickled, memory = dump([crop, boxes])
    assert (len(pickled) < 1024, bytes_of(memory)) == (True, 48 + 32)
    for got, expected in zip(passed_on([crop, boxes]), [crop, boxes], strict=True):
        assert (type(got), got.__dict__) == (type(expected), expected.__dict__)
        plain = expected.as_subclass(torch.Tensor)
        assert_same(got.as_subclass(torch.Tensor), plain.contiguous())


def test_graphs_and_encodings_bring_only_what_they_show():
    pyg, transformers = library("torch_geometric.data"), library("transformers")
    nodes, edges = torch.rand(1 << 16, 4), torch.tensor([[0, 1], [1, 0]])
    graph = pyg.Batch.from_data_list([pyg.Data(x=nodes[:2], edge_index=edges)] * 2)
    encoding = transformers.BatchEncoding({"input_ids": nodes[:3], "mask": nodes[:3].numpy()})
    values = [graph, encoding]
    pickled, memory = dump(values)
    assert len(pickled) < 4096
    assert bytes_of(memory) < 1024
    got, got_encoding = passed_on(values)
    assert type(got) is type(graph)
    for key, wanted in graph.to_dict().items():
        assert_same(got[key], wanted)
    assert got[1].x.tolist() == nodes[:2].tolist()
    assert_same(got_encoding["input_ids"], nodes[:3])
    got_encoding["mask"][2, 3] = 7  # the array and the tensor are over one memory, as before
    assert got_encoding["input_ids"][2, 3] == 7


def test_an_object_that_is_met_twice_stays_one():
    shared, leaf = Holder(x=torch.ones(2)), torch.ones(3).as_subclass(Labelled)
    first, again, (inside, same_leaf) = passed_on(
        [shared, Holder(shared=shared, leaf=leaf), [shared, leaf]]
    )
    assert first is again.shared is inside
    assert again.leaf is same_leaf


def test_no_values_are_values():
    assert passed_on([]) == []
    assert dump([1, "a"])[1] == []
    assert passed_on([1, "a"]) == [1, "a"]


# ---- registered reducers -------------------------------------------------------------------------


class Handle:
    """Refers to something that its own pickle cannot have."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.lock = tensor, threading.Lock()


def reduced_handle(handle: Handle) -> Any:
    return Handle, (handle.tensor,)


class Plain(torch.Tensor):
    """A subclass that arrives as a plain tensor."""


def reduced_plain(tensor: Plain) -> Any:
    return tensor.as_subclass(torch.Tensor).__reduce_ex__(5)


@pytest.mark.parametrize("module", ["copyreg", "multiprocessing"])
def test_reducers_that_are_registered_apply(monkeypatch, module):
    extra = copyreg.dispatch_table if module == "copyreg" else ForkingPickler._extra_reducers
    monkeypatch.setitem(extra, Handle, reduced_handle)
    monkeypatch.setitem(extra, Plain, reduced_plain)
    large = torch.arange(1 << 20)
    values = [Handle(large[:4]), large[8:12].as_subclass(Plain)]
    pickled, memory = dump(values)
    assert (len(pickled) < 1024, bytes_of(memory)) == (True, 64)
    handle, plain = passed_on(values)
    assert_same(handle.tensor, large[:4])
    assert_same(plain, large[8:12])


class Frames(TensorDict):
    """A class of TensorDicts."""


def reduced_frames(frames: Frames) -> Any:
    return dict, (dict(frames.items()),)


def test_a_users_reducer_for_tensordicts_applies(monkeypatch):
    monkeypatch.setitem(ForkingPickler._extra_reducers, Frames, reduced_frames)
    frames = Frames({"x": torch.ones(2)})
    (got,) = passed_on([Holder(frames=frames)])
    assert_same(got.frames, {"x": torch.ones(2)})


class Wrapper(TwoTensor):
    """Has slots beside its tensors, and its tensors beside other attributes."""

    __slots__ = ("note",)


def test_a_wrapper_with_slots_keeps_them():
    wrapper = Wrapper(torch.arange(8)[::2], torch.arange(8)[::2])
    wrapper.note = torch.ones(2)
    (got,) = passed_on([wrapper])
    assert_same([got.a, got.b, got.note], [*(2 * [torch.arange(8)[::2]]), torch.ones(2)])
    assert type(got) is Wrapper


def test_a_sparse_tensor_keeps_its_attributes_and_that_it_requires_grad():
    sparse = torch.eye(3).to_sparse()
    sparse.word = "a"
    (got,) = passed_on([sparse])
    assert (type(got), got.word, got.requires_grad) == (torch.Tensor, "a", False)
    (got,) = passed_on([torch.eye(3).to_sparse().requires_grad_()])
    assert got.requires_grad
    assert torch.equal(got.detach().to_dense(), torch.eye(3))


def test_torch_shares_no_memory_with_the_receiver():
    import torch.multiprocessing

    tensor = torch.ones(4)
    _, memory = dump([tensor, tensor.untyped_storage(), torch.nn.Parameter(tensor)])
    assert not tensor.is_shared()
    assert bytes_of(memory) == 16


# ---- what cannot be pickled ----------------------------------------------------------------------


class Failing:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def test_an_error_names_the_path_of_what_cannot_be_pickled():
    holder = Holder(parts={"a": [1, Failing(ValueError("no"))]}, peer=None)
    holder.peer = holder
    message = (
        "data[1].parts['a'][1] cannot be pickled (ValueError: no): leave it out, or give its "
        "class a __reduce__"
    )
    with raises_exactly(TypeError, message):
        dump([torch.ones(2), holder])
    td = TensorDict({"x": torch.ones(1)})
    td["n"] = {"lock": Holder(lock=threading.Lock())}
    with pytest.raises(TypeError, match=r"^data\[0\]\['n'\].*lock.* cannot be pickled "):
        dump([td])


def test_a_handle_of_this_process_is_refused():
    """Pickle takes its number, which means another open file in the process that reads it."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer, pytest.raises(TypeError, match=r"^data\[0\]\['pipe'\] cannot .* handle"):
        dump([{"pipe": reader}])


def test_a_tensor_that_its_storage_is_too_small_for_is_named_and_left_as_it_is():
    tensor = torch.arange(6.0)
    tensor.untyped_storage().resize_(20)
    with pytest.raises(TypeError, match=r"^data\[0\]\.x cannot be pickled .*20 bytes; it needs 24"):
        dump([Holder(x=tensor)])
    assert tensor.untyped_storage().nbytes() == 20


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), MemoryError()])
def test_errors_that_are_not_about_the_value_stay_what_they_are(error):
    tensor = torch.ones(1000)
    reference = memory_reference(tensor)
    with pytest.raises(type(error)) as caught:
        dump([tensor, Failing(error)])
    assert caught.value is error
    del tensor, caught
    error.__traceback__ = None
    assert reference() is None


def test_values_too_deep_to_be_pickled_say_so():
    tree: list[Any] = []
    for _ in range(100_000):
        tree = [tree]
    with raises_exactly(RecursionError, "the tree is nested too deep to be pickled"):
        dump(tree)


@pytest.mark.parametrize("sizes", [[], [8, 8], [4]])
def test_memory_that_does_not_belong_to_the_pickle_is_refused(sizes):
    pickled, _ = dump([torch.ones(2)])
    message = f"the memory has runs of {sizes} bytes, but those of the pickle have [8]"
    with raises_exactly(ValueError, message):
        _pickled_values.load(pickled, [torch.empty(n, dtype=torch.uint8) for n in sizes])
