"""TensorDicts as samples: `collate` returns what `torch.stack` does, dense and in few chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collate_support import (
    Tensordicts,
    assert_like,
    assert_one_chunk_per_dtype,
    collate_as_a_worker,
)
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate_fn_map

import tdcopier


def tensordicts(count: int = 3) -> dict[str, list[Any]]:
    """Returns samples of several kinds."""
    from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

    @tensorclass
    class Boxes:
        corners: torch.Tensor
        name: str

    def plain(i: int, **options: Any) -> Any:
        nested = TensorDict({"y": torch.full((2, 4), i)}, [2])
        return TensorDict({"x": torch.full((2, 3), float(i)), "n": nested}, [2], **options)

    def lazy(i: int) -> Any:
        return LazyStackedTensorDict.lazy_stack(
            [plain(i), TensorDict({"x": torch.ones(2, 5)}, [2])]
        )

    kinds = {
        "nested": plain,
        "with a device": lambda i: plain(i, device="cpu"),
        "with names": lambda i: plain(i, names=["time"]),
        "locked": lambda i: plain(i).lock_(),
        "with a string": lambda i: TensorDict({"x": torch.ones(2), "s": f"text {i}"}),
        "tensorclass": lambda i: Boxes(torch.full((4,), i), f"{i}", batch_size=[]),
        "lazy, ragged": lazy,
        "with a gradient": lambda i: TensorDict({"x": torch.ones(2, requires_grad=True)}),
        "empty": lambda i: TensorDict({}, [3]),
    }
    return {name: [make(i) for i in range(count)] for name, make in kinds.items()}


TENSORDICTS = list(tensordicts(0))


@pytest.mark.parametrize("name", TENSORDICTS)
def test_tensordicts_become_what_torch_stack_makes_of_them(name):
    samples = tensordicts()[name]
    expected = torch.stack(samples)
    got = tdcopier.collate([{"td": sample, "i": 1} for sample in samples])["td"]
    assert type(got) is type(expected)
    for one in ("batch_size", "device", "names", "is_locked"):
        assert getattr(got, one) == getattr(expected, one), one
    assert str(got) == str(expected)
    assert_same_entries(got, expected)


def assert_same_entries(got: Any, expected: Any) -> None:
    from tensordict import LazyStackedTensorDict

    if isinstance(expected, LazyStackedTensorDict):
        for one, other in zip(got.tensordicts, expected.tensordicts, strict=True):
            assert_same_entries(one, other)
        return
    for key in expected.keys(True, True):  # iterating over it would index it
        one, other = got.get(key), expected.get(key)
        if isinstance(other, torch.Tensor):
            assert_like(one, other, str(key))
        else:
            assert one.tolist() == other.tolist()


def test_the_leaves_of_tensordicts_lie_in_the_chunks():
    dataset = Tensordicts(30)
    batch = collate_as_a_worker([dataset[i] for i in range(3)])
    leaves = [batch["td"]["many", f"x{k}"] for k in range(30)]
    assert_one_chunk_per_dtype([*leaves, batch["index"]])


@pytest.mark.parametrize(
    ("entries", "steps"),
    [
        (lambda i: {"n": {"x": torch.ones(3 + i)}}, "[('n', 'x')]"),
        (lambda i: {"n": {f"x{i}": torch.ones(3)}}, "[('n', 'x0')]"),
        (lambda i: {"x": torch.ones(3), **({"y": torch.ones(1)} if i else {})}, "['y']"),
    ],
)
def test_tensordicts_that_cannot_be_stacked_are_named_by_their_entry(entries, steps):
    from tensordict import TensorDict

    with pytest.raises(RuntimeError) as caught:
        tdcopier.collate([{"td": TensorDict(entries(i))} for i in range(2)])
    assert str(caught.value).startswith(f"sample['td']{steps}: ")


def test_a_tensordict_that_is_the_dataset_gives_batches_in_one_chunk_per_dtype():
    from tensordict import TensorDict

    dataset = TensorDict({"x": torch.arange(6.0), "n": {"y": torch.arange(6)}}, [6])
    batches = list(DataLoader(dataset, 3, collate_fn=collate_as_a_worker))
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]
    for batch in batches:
        assert_one_chunk_per_dtype([batch["x"], batch["n", "y"]])


def test_a_function_that_users_have_for_tensordicts_goes_first(monkeypatch):
    from tensordict import TensorDict

    def count(batch: list[Any], *, collate_fn_map: Any) -> int:
        return len(batch)

    monkeypatch.setitem(default_collate_fn_map, TensorDict, count)
    assert tdcopier.collate([[TensorDict({})], [TensorDict({})]]) == [2]
