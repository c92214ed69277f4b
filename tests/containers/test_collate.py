"""`collate` returns what torch's own function does, in few chunks, and names differing samples."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
import pytest
import torch
from collate_support import (
    CONTAINERS,
    LEAVES,
    RAGGED,
    Nested,
    Pair,
    assert_like,
    assert_one_chunk_per_dtype,
    collate_as_a_worker,
    leaves_of,
)
from each_case import together
from hypothesis import given, settings
from hypothesis import strategies as st
from support import raises_exactly, run_python
from thread_support import at_once
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import tdcopier


@st.composite
def samplers(draw: st.DrawFn, depth: int = 3) -> Any:
    """Draws a function from the index of a sample to the sample."""
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        return LEAVES[draw(st.sampled_from([name for name in LEAVES if "device" not in name]))]
    make = CONTAINERS[draw(st.sampled_from(list(CONTAINERS)))]
    children = draw(st.lists(samplers(depth - 1), min_size=1, max_size=4))
    return lambda i: make([child(i) for child in children])


@settings(max_examples=200, deadline=None)
@given(sampler=samplers(), count=st.integers(1, 5))
def test_any_nesting_becomes_what_torch_makes_of_it(sampler, count):
    samples = [sampler(i) for i in range(count)]
    assert_like(tdcopier.collate(samples), default_collate(samples))


@together("name", [name for name in LEAVES if "device" not in name])
def test_each_kind_of_leaf_becomes_what_torch_makes_of_it(name):
    samples = [LEAVES[name](i) for i in range(3)]
    assert_like(tdcopier.collate(samples), default_collate(samples))


@pytest.mark.parametrize("name", CONTAINERS)
def test_each_kind_of_container_becomes_what_torch_makes_of_it(name):
    samples = [CONTAINERS[name]([i, f"{i}", torch.tensor(i)]) for i in range(3)]
    assert_like(tdcopier.collate(samples), default_collate(samples))


@pytest.mark.parametrize("name", ["on another device", "with a gradient"])
def test_what_is_not_plain_is_left_to_torch(name):
    got = tdcopier.collate([{"plain": torch.ones(2), "other": LEAVES[name](i)} for i in range(2)])
    expected = default_collate([LEAVES[name](i) for i in range(2)])
    assert got["other"].device == expected.device
    assert got["other"].requires_grad == expected.requires_grad
    assert got["other"].shape == expected.shape
    assert got["plain"].tolist() == [[1, 1], [1, 1]]


def test_a_gradient_flows_back_through_the_batch():
    leaf = torch.ones(3, requires_grad=True)
    tdcopier.collate([leaf, leaf * 2]).sum().backward()
    assert leaf.grad.tolist() == [3, 3, 3]


def test_a_gradient_of_a_later_sample_is_kept_too():
    leaf = torch.ones(3, requires_grad=True)
    tdcopier.collate([torch.ones(3), leaf]).sum().backward()
    assert leaf.grad.tolist() == [1, 1, 1]


def test_under_a_transform_the_result_is_what_torch_makes_of_it():
    def of(collate: Any) -> torch.Tensor:
        return torch.vmap(lambda x: collate([{"a": x}, {"a": x * 2}])["a"])(torch.ones(3, 2))

    assert_like(of(tdcopier.collate), of(default_collate))


@settings(max_examples=50, deadline=None)
@given(sampler=samplers())
def test_in_a_worker_leaves_lie_in_one_chunk_per_dtype_in_the_order_of_the_batch(sampler):
    batch = collate_as_a_worker([{"a": torch.ones(3), "rest": sampler(i)} for i in range(3)])
    assert_one_chunk_per_dtype([leaf for leaf in leaves_of(batch) if not leaf.requires_grad])


def test_a_leaf_is_no_view_of_its_neighbours():
    batch = collate_as_a_worker([{"a": torch.ones(3), "b": torch.ones(3)} for _ in range(2)])
    assert batch["a"]._base is None
    version = batch["b"]._version
    batch["a"].add_(1)
    assert batch["b"]._version == version
    assert batch["b"].tolist() == [[1] * 3] * 2


def test_to_grow_a_leaf_without_elements_leaves_its_neighbours_alone():
    batch = collate_as_a_worker([{"a": torch.ones(3), "none": torch.empty(0)} for _ in range(2)])
    batch["none"].resize_(100).fill_(7)
    assert batch["a"].tolist() == [[1] * 3] * 2


def test_a_batch_of_strings_needs_no_chunk():
    assert tdcopier.collate([("a", b"b"), ("c", b"d")]) == [("a", "c"), (b"b", b"d")]


def test_one_copy_to_the_device_packs_the_batch(device):
    dataset = Nested(300)
    batch = tdcopier.collate([dataset[i] for i in range(4)])
    handle = tdcopier.start_copy(batch, device)
    moved = handle.get()
    assert (handle.stats.delegated_leaves, handle.stats.transfers) == (0, handle.stats.chunks)
    assert handle.stats.chunks == len({leaf.dtype for leaf in leaves_of(batch)})
    for leaf, arrived in zip(leaves_of(batch), leaves_of(moved), strict=True):
        assert torch.equal(arrived.cpu(), leaf)


# ---- functions that users add --------------------------------------------------------------------


class Odd:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


def test_a_function_of_the_users_sees_values_and_its_result_is_kept(monkeypatch):
    def collate_odd(batch: list[Odd], *, collate_fn_map: Any) -> torch.Tensor:
        function = collate_fn_map[torch.Tensor]
        return function([each.value for each in batch], collate_fn_map=collate_fn_map) + 1

    monkeypatch.setitem(default_collate_fn_map, Odd, collate_odd)
    samples = [[Odd(torch.full((2,), float(i))), i] for i in range(3)]
    assert_like(tdcopier.collate(samples), default_collate(samples))


def test_what_a_function_of_the_users_returns_is_that_object(monkeypatch):
    made = torch.ones(3)
    monkeypatch.setitem(default_collate_fn_map, Odd, lambda batch, *, collate_fn_map: made)
    assert tdcopier.collate([(Odd(made), 1)] * 2)[0] is made


# ---- mistakes ------------------------------------------------------------------------------------

MISTAKES = {
    "ragged": ([{"a": [torch.ones(3)]}, {"a": [torch.ones(4)]}], "sample['a'][0]: " + RAGGED),
    "ragged in a named tuple": (
        [Pair(1, np.ones(3)), Pair(2, np.ones(4))],
        "sample.right: " + RAGGED,
    ),
    "ragged at the root": ([torch.ones(3), torch.ones(4)], "sample: " + RAGGED),
    "lists of two lengths": (
        [{"a": [1]}, {"a": [1, 2]}],
        "sample['a']: each element in list of batch should be of equal size; found sizes [1, 2]",
    ),
    "key that is missing": (
        [{"a": {"b": 1}}, {"a": {"c": 1}}],
        "sample['a']['b'] is in the first sample, and not in every other",
    ),
    "unknown class": ([("a", object()), ("b", object())], None),
    "array of strings": ([[np.array(["x"])], [np.array(["y"])]], None),
    "sparse": ([torch.ones(2).to_sparse(), torch.ones(2).to_sparse()], None),
    "no samples": ([], "there are no samples to make a batch of: give at least one"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_what_torch_raises_and_names_the_place(name):
    samples, message = MISTAKES[name]
    with pytest.raises(Exception) as torchs:  # noqa: PT011  # any error
        default_collate(samples)
    with pytest.raises(torchs.type) as ours:
        tdcopier.collate(samples)
    assert ours.type is torchs.type
    if message is not None:
        remedy = "; to keep samples of several sizes apart, use collate_fn=list or tdcopier.pack"
        is_size = "stack expects" in message
        assert ours.value.args == (message + remedy if is_size else message,)


@pytest.mark.parametrize(
    ("samples", "start"),
    [
        ([("a", object())], "sample[1]: found <class 'object'>; samples must contain tensors"),
        ([{"k": np.array(["x"])}], "sample['k']: default_collate: batch must contain"),
        ([[torch.ones(2).to_sparse()]], "sample[0]: Batches of sparse tensors"),
    ],
)
def test_what_cannot_be_stacked_is_named_by_its_place(samples, start):
    with pytest.raises((TypeError, RuntimeError)) as caught:
        tdcopier.collate(samples)
    assert str(caught.value).startswith(start)


class Unreadable(Exception):
    def __init__(self, code: int, reason: str) -> None:
        super().__init__(code, reason)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_an_error_of_another_class_is_raised_as_it_is_with_a_note():
    class Bad(dict):  # type: ignore[type-arg]
        def __getitem__(self, key: str) -> Any:
            raise Unreadable(3, "disk")

    with pytest.raises(Unreadable) as caught:
        tdcopier.collate([{"a": Bad(b=1)}])
    assert caught.value.args == (3, "disk")
    assert caught.value.__notes__ == ["while sample['a']['b'] was collated"]


@pytest.mark.parametrize("limit", [1000, 10**6])
def test_a_sample_that_holds_itself_is_a_recursion_error(limit):
    sample: list[Any] = []
    sample.append(sample)
    before = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(limit)
        with pytest.raises(RecursionError, match=r"from sample\[0\]\[0\].* contain itself"):
            tdcopier.collate([sample, sample])
    finally:
        sys.setrecursionlimit(before)


def test_without_tensordicts_their_package_is_not_imported():
    code = """
        import sys, torch, tdcopier
        tdcopier.collate([{"a": torch.ones(3), "b": [1, "x"]}] * 2)
        assert "tensordict" not in sys.modules
    """
    assert run_python(code) == ""


def test_threads_do_not_share_anything():
    """Each thread has a walk of its own."""
    order = random.Random(0)
    values = [order.randrange(100) for _ in range(8)]

    def work(index: int) -> torch.Tensor:
        return tdcopier.collate([{"a": torch.full((100,), values[index])}] * 4)["a"]

    assert [int(result.max()) for result in at_once(len(values), work)] == values


def test_under_fake_tensors_the_result_is_fake():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        got = tdcopier.collate([{"a": torch.ones(3), "b": 1.5}] * 2)
    assert type(got["a"]).__name__ == "FakeTensor"
    assert got["a"].shape == (2, 3)


class SharingDict(MutableMapping[str, Any]):
    """Its shallow copy has the same items, not only equal ones."""

    def __init__(self, items: dict[str, Any]) -> None:
        self.items_of_mine = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self.items_of_mine[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of_mine[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of_mine[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of_mine)

    def __len__(self) -> int:
        return len(self.items_of_mine)


class ItselfDict(dict[str, Any]):
    def __copy__(self) -> ItselfDict:
        return self


class ItselfList(list[Any]):
    def __copy__(self) -> ItselfList:
        return self


@pytest.mark.parametrize("cls", [SharingDict, ItselfDict])
def test_a_sample_whose_copy_shares_its_items_keeps_them(cls):
    """Torch's function writes the batch into the first sample, which a dataset may keep."""
    samples = [cls({"x": torch.full((2,), float(i)), "y": i}) for i in range(3)]
    kept = dict(samples[0])
    batch = tdcopier.collate(samples)
    assert type(batch) is cls
    assert torch.equal(batch["x"], torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))
    assert torch.equal(batch["y"], torch.tensor([0, 1, 2]))
    assert all(samples[0][key] is value for key, value in kept.items())


def test_a_list_that_copies_to_itself_keeps_its_items():
    samples = [ItselfList([torch.full((2,), float(i)), i]) for i in range(3)]
    kept = list(samples[0])
    batch = tdcopier.collate(samples)
    assert type(batch) is ItselfList
    assert torch.equal(batch[0], torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))
    assert all(mine is value for mine, value in zip(samples[0], kept, strict=True))


def test_an_empty_sequence_of_samples_is_told():
    with raises_exactly(IndexError, "there are no samples to make a batch of: give at least one"):
        tdcopier.collate([])


@pytest.mark.parametrize(
    "sample",
    [
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.rand(2, 2, 2).to(memory_format=torch.contiguous_format).permute(2, 0, 1),
        torch.rand(3, 1, 2, 2).to(memory_format=torch.channels_last),
        torch.rand(4, 5).t(),
        torch.rand(2, 6)[:, ::2],
    ],
    ids=["channels last", "permuted", "one channel", "transposed", "with gaps"],
)
def test_strides_are_those_of_stack(sample):
    made = tdcopier.collate([{"x": sample}, {"x": sample}])["x"]
    expected = default_collate([{"x": sample}, {"x": sample}])["x"]
    assert made.stride() == expected.stride()
    assert made.equal(expected)


def test_samples_of_several_sizes_are_told_of_another_collate_fn():
    with pytest.raises(
        RuntimeError, match=r"^sample\['x'\]: stack expects .*; .*collate_fn=list or tdcopier.pack$"
    ):
        tdcopier.collate([{"x": torch.ones(1, 4)}, {"x": torch.ones(2, 4)}])
