"""Gathering rows of TensorDicts equals indexing and moving, including batch sizes and classes."""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np
import pytest
import torch
from each_case import together
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    UnbatchedTensor,
    lazy_stack,
    tensorclass,
)
from tensordict_same import assert_same_tensordict

import tdcopier

ROWS = 20


@tensorclass
class Transition:
    observation: torch.Tensor
    reward: torch.Tensor
    name: str


def plain() -> TensorDict:
    return TensorDict(
        {
            "observation": torch.randn(ROWS, 3, 5),
            "next": TensorDict(
                {"observation": torch.randn(ROWS, 3, 5), "done": torch.rand(ROWS, 3, 1) > 0.5},
                [ROWS, 3],
            ),
            "agents": {"a": {"reward": torch.randn(ROWS)}, "b": {"reward": torch.randn(ROWS)}},
        },
        [ROWS],
    )


def named() -> TensorDict:
    nested = TensorDict({"x": torch.randn(ROWS, 3)}, [ROWS, 3], names=["row", "time"])
    return TensorDict({"nested": nested, "y": torch.randn(ROWS, 2)}, [ROWS], names=["row"])


def with_data() -> TensorDict:
    td = plain()
    td["text"] = NonTensorData("one for all", batch_size=[ROWS])
    td["each"] = NonTensorStack(*[f"row {i}" for i in range(ROWS)])
    return td


def classed() -> Any:
    return Transition(torch.randn(ROWS, 4), torch.randn(ROWS), "a name", batch_size=[ROWS])


def with_class() -> TensorDict:
    return TensorDict({"transition": classed(), "x": torch.randn(ROWS)}, [ROWS])


def with_stack() -> TensorDict:
    members = [TensorDict({"x": torch.randn(i % 3 + 1)}, []) for i in range(ROWS)]
    return TensorDict({"ragged": lazy_stack(members), "y": torch.randn(ROWS, 2)}, [ROWS])


def stacked() -> LazyStackedTensorDict:
    return lazy_stack([TensorDict({"x": torch.randn(3)}, []) for _ in range(ROWS)])


def with_a_table() -> TensorDict:
    """Has tensors that belong to all rows together, one of them with as many rows."""
    td = plain()
    td["table"] = UnbatchedTensor(torch.randn(7, 2))
    td["next", "table"] = UnbatchedTensor(torch.randn(ROWS))
    return td


def on_cpu() -> TensorDict:
    return plain().to("cpu")


def without_a_device_within() -> TensorDict:
    td = on_cpu()
    td["text"] = NonTensorData("one for all", batch_size=[ROWS])
    td["next"].clear_device_()
    return td


def locked() -> TensorDict:
    return plain().lock_()


def strided() -> TensorDict:
    return TensorDict(
        {"columns": torch.randn(6, ROWS).t(), "x": torch.randn(ROWS, 9)[:, :4]}, [ROWS]
    )


def empty() -> TensorDict:
    return TensorDict({"nested": TensorDict({}, [ROWS])}, [ROWS])


def two_dimensions() -> TensorDict:
    return TensorDict({"x": torch.randn(ROWS, 3, 4), "n": {"y": torch.randn(ROWS, 3)}}, [ROWS, 3])


STORAGES = [
    plain, named, with_data, classed, with_class, with_stack, stacked, with_a_table, on_cpu,
    without_a_device_within, locked, strided, empty, two_dimensions,
]  # fmt: skip
NOT_BY_ENGINE = (with_data, with_stack, stacked, with_a_table, without_a_device_within, strided)
"""Storages with a part that is left to its own indexing, at least on the host."""
INDICES = {
    "tensor": torch.tensor([3, 0, -1, 3]),
    "list": [1, 2],
    "array": np.array([4, 4, 3]),
    "slice": slice(5, 12),
    "slice with a step": slice(1, None, 4),
    "mask": torch.arange(ROWS) % 3 == 0,
    "one": 7,
    "matrix": torch.randint(-ROWS, ROWS, (3, 4)),
}


@pytest.mark.parametrize("on", ["device", "cpu"])
@together("index", INDICES.values(), ids=INDICES.keys())
@pytest.mark.parametrize("make", STORAGES, ids=lambda make: make.__name__)
def test_it_equals_indexing_and_moving(device, make, index, on):
    target = device if on == "device" else "cpu"
    storage = make()
    handle = tdcopier.start_gather(storage, index, target)
    got = handle.get()
    assert_same_tensordict(got, moved_rows(storage, index, target))
    assert handle.stats.fallbacks == 0 or make in NOT_BY_ENGINE


def moved_rows(storage: Any, index: Any, target: str) -> Any:
    rows = storage[index]
    # On the host a view stays a view, and a copy does not get a device that the source lacks.
    return rows.to(target) if target != "cpu" else rows.clone().to(target)


@pytest.mark.parametrize(
    "index",
    [
        (torch.tensor([3, -1]), torch.tensor([0, 2])),
        (torch.tensor([3, -1]), slice(1, None)),
        (slice(2, 9), torch.tensor([0, 2, 2])),
        (slice(2, 9), slice(0, 2)),
        (torch.tensor([[3], [4]]), torch.tensor([0, 2])),
        (4, torch.tensor([0, 1])),
        torch.arange(ROWS * 3).reshape(ROWS, 3) % 4 == 0,
    ],
    ids=["numbers", "numbers and slice", "slice and numbers", "slices", "grid", "one", "mask"],
)
def test_two_leading_dimensions(device, index):
    storage = two_dimensions()
    got = tdcopier.start_gather(storage, index, device).get()
    assert_same_tensordict(got, storage[index].to(device))


def test_no_python_runs_for_each_leaf(device):
    def calls(leaves: int) -> int:
        storage = TensorDict({f"{i}": torch.randn(ROWS, 2) for i in range(leaves)}, [ROWS])
        count = 0

        def count_calls(frame: Any, event: str, argument: Any) -> None:
            nonlocal count
            count += event in ("call", "c_call")

        gc.disable()
        sys.setprofile(count_calls)
        try:
            tdcopier.start_gather(storage, torch.tensor([1, 2]), device).get()
        finally:
            sys.setprofile(None)
            gc.enable()
        return count

    calls(10)
    assert calls(1000) < calls(10) + 100


def test_no_row(device):
    got = tdcopier.start_gather(plain(), torch.tensor([], dtype=torch.int64), device).get()
    assert got.batch_size == (0,)
    assert got["next"].batch_size == (0, 3)
    assert got["next", "done"].shape == (0, 3, 1)


def test_the_host_gets_memory_of_its_own_where_torch_would_give_a_view(device):
    for storage in (strided(), stacked(), plain()):
        for target in ("cpu", device):
            for given in (storage, storage.to(target)):
                before = given[2:4].to("cpu").clone()
                got = tdcopier.start_gather(given, slice(2, 4), target).get()
                got.zero_()
                assert_same_tensordict(given[2:4].to("cpu").clone(), before)


@pytest.mark.parametrize(
    "within",
    [lambda td: td, lambda td: {"x": td}, lambda td: TensorDict({"x": td}, [ROWS])],
    ids=["itself", "in a dict", "in a TensorDict"],
)
@pytest.mark.parametrize("on", ["device", "cpu"])
@pytest.mark.parametrize(
    "index",
    [torch.tensor([3, 3, -1]), [0, 1], torch.arange(ROWS) < 2, slice(2)],
    ids=["tensor", "list", "mask", "slice"],
)
def test_rows_of_a_lazy_stack_have_memory_of_their_own(device, on, index, within):
    place = device if on == "device" else "cpu"
    stack = lazy_stack(
        [TensorDict({"a": torch.full((2, 5), float(i))}, device=place) for i in range(ROWS)]
    )
    want = stack[index]["a"].clone()
    rows = tdcopier.start_gather(within(stack), index, place).get()
    for member in stack.tensordicts:
        member["a"].fill_(-1)
    got = rows["x"] if "x" in set(rows.keys()) else rows
    assert torch.equal(got["a"], want)


def test_a_tensor_that_belongs_to_all_rows_is_copied_to_memory_of_its_own():
    storage = with_a_table()
    got = tdcopier.start_gather(storage, [1], "cpu").get()
    got.get("table").zero_()
    assert storage.get("table").any()


def test_a_member_without_leaves_is_another_node(device):
    storage = lazy_stack([TensorDict({}, [2], device="cpu") for _ in range(3)])
    got = tdcopier.start_gather(storage, torch.tensor([1, 0]), "cpu").get()
    got.tensordicts[0]["later"] = torch.ones(2)
    assert storage.tensordicts[1].is_empty()


def test_a_lazy_stack_that_is_the_first_leaf_tells_how_many_rows_there_are(device):
    stack = lazy_stack([TensorDict({"a": torch.full((2,), float(i))}) for i in range(ROWS)])
    storage = {"one": [1, {"lazy": stack}], "y": torch.arange(ROWS)}
    for index in (slice(3, 9), torch.arange(ROWS) > 15):
        rows = tdcopier.start_gather(storage, index, device).get()
        assert torch.equal(rows["one"][1]["lazy"]["a"].cpu(), stack["a"][index])
        assert torch.equal(rows["y"].cpu(), storage["y"][index])


def test_a_memory_mapped_storage_is_read_where_it_lies(device, tmp_path):
    storage = plain().memmap_(tmp_path)
    index = torch.tensor([3, 0, -1, 3])
    for target in (device, "cpu"):
        handle = tdcopier.start_gather(storage, index, target)
        assert_same_tensordict(handle.get(), moved_rows(storage, index, target))
        assert handle.stats.fallbacks == 0
        assert handle.stats.packed_leaves == 5


def test_a_storage_on_the_device_is_indexed_there(device):
    storage = plain().to(device)
    index = torch.tensor([3, 0, -1, 3])
    handle = tdcopier.start_gather(storage, index, device)
    assert_same_tensordict(handle.get(), storage[index.to(device)])
    assert (handle.stats.transfers, handle.stats.fallbacks) == (0, 5)
    back = tdcopier.start_gather(storage, index, "cpu").get()
    assert_same_tensordict(back, storage[index.to(device)].to("cpu"))


def test_a_batch_size_of_fewer_dimensions_than_the_index_counts(device):
    with pytest.raises(ValueError, match=r"the batch size of storage is \(20,\)"):
        tdcopier.start_gather(plain(), (0, 0), device)
    with pytest.raises(ValueError, match=r"the batch size of storage is \(\)"):
        tdcopier.start_gather(TensorDict({"x": torch.ones(3)}), slice(2), device)
    for tree in (TensorDict({"x": torch.ones(3)}), [TensorDict({"x": torch.ones(3)})]):
        with pytest.raises(ValueError, match=r"the batch size of a TensorDict in storage is \(\)"):
            tdcopier.start_gather(tree, [0], device)
    with pytest.raises(IndexError, match="index 20 is out of bounds: there are 20 rows"):
        tdcopier.start_gather(plain(), [20], device)


def test_tensordicts_within_a_tree(device):
    storage = [plain(), {"x": torch.randn(ROWS, 2)}]
    got = tdcopier.start_gather(storage, [1, 5], device).get()
    assert_same_tensordict(got[0], storage[0][[1, 5]].to(device))
    assert torch.equal(got[1]["x"].cpu(), storage[1]["x"][[1, 5]])


def test_what_is_nested_as_deep_as_its_own_indexing_goes_is_gathered(device):
    storage = TensorDict({"x": torch.arange(4)}, [4])
    for _ in range(440):
        storage = TensorDict._new_unsafe({"next": storage}, batch_size=torch.Size([4]))
    got = tdcopier.start_gather(storage, torch.tensor([3, 0]), device).get()
    while "next" in got._tensordict:
        assert got.batch_size == (2,)
        got = got._tensordict["next"]
    assert got["x"].tolist() == [3, 0]
