"""`packed` makes the parcel of what the collate function makes, and stacks samples within it."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from collate_support import (
    CONTAINERS,
    CONTEXTS,
    LEAVES,
    RAGGED,
    Nested,
    Ragged,
    Tensordicts,
    assert_like,
    dtypes_of,
    leaves_of,
)
from each_case import together
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

import tdcopier
from tdcopier import Parcel, pack, packed
from tdcopier._pack import SHARED_FROM_BYTES, _sent_outs

TAKES_TENSORDICTS = any(issubclass(TensorDict, cls) for cls in default_collate_fn_map)
"""Whether torch's own function does, which older versions of tensordict do not tell."""
needs_torchs = pytest.mark.skipif(
    not TAKES_TENSORDICTS, reason="torch's own function stacks no TensorDicts with this tensordict"
)

COLLATES = [
    pytest.param(tdcopier.collate, id="collate"),
    pytest.param(default_collate, id="default_collate"),
    pytest.param(list, id="list"),
]


def samples_of(dataset: Any) -> list[Any]:
    return [dataset[i] for i in range(len(dataset))]


@pytest.mark.parametrize("collate_fn", COLLATES)
@pytest.mark.parametrize("dataset", [Nested(20), Tensordicts(5)], ids=["nested", "TensorDicts"])
def test_the_parcel_is_that_of_the_batch(collate_fn, dataset):
    if collate_fn is default_collate and type(dataset) is Tensordicts and not TAKES_TENSORDICTS:
        pytest.skip("torch's own function stacks no TensorDicts with this tensordict")
    samples = samples_of(dataset)
    assert bytes(packed(collate_fn)(samples)) == bytes(pack(collate_fn(samples)))


@together("name", [name for name in LEAVES if "device" not in name])
def test_each_kind_of_leaf_is_in_the_parcel_as_in_that_of_the_batch(name):
    samples = [{"leaf": LEAVES[name](i), "plain": torch.ones(2)} for i in range(3)]
    assert_like(packed()(samples).tree(), pack(tdcopier.collate(samples)).tree())


@pytest.mark.parametrize(
    "name", [name for name in CONTAINERS if name != "mapping that cannot be changed"]
)
def test_each_kind_of_container_is_in_the_parcel_as_in_that_of_the_batch(name):
    samples = [CONTAINERS[name]([i, f"{i}", torch.tensor([i, 2 * i])]) for i in range(3)]
    assert_like(packed()(samples).tree(), tdcopier.collate(samples))


def test_a_tensordict_that_is_the_dataset_is_packed():
    rows = TensorDict({"x": torch.rand(4, 3), "n": {"y": torch.arange(4)}}, [4])
    assert (packed()(rows).tree() == rows).all()


@needs_torchs
def test_torchs_own_function_makes_lazy_stacks_of_ragged_tensordicts_here_too():
    samples = [TensorDict({"x": torch.ones(n)}) for n in (2, 3)]
    expected = default_collate(samples)
    assert type(expected) is LazyStackedTensorDict
    got = packed(default_collate)(samples).tree()
    assert type(got) is LazyStackedTensorDict
    assert [each["x"].tolist() for each in got.unbind(0)] == [[1, 1], [1, 1, 1]]


class Cropped(namedtuple("Cropped", ["x", "y"])):
    """Keeps a part of its leaf, and looks at it."""

    def __new__(cls, x: torch.Tensor, y: Any) -> Any:
        assert (x >= 0).all()
        return super().__new__(cls, x[..., :2], y)


class Summed(dict):  # type: ignore[type-arg]
    """Computes with its leaves when it is made."""

    def update(self, *arguments: Any, **items: Any) -> None:
        super().update(*arguments, **items)
        self.total = float(self["x"].sum())


@tensorclass
class Watchful:
    x: torch.Tensor

    def __post_init__(self) -> None:
        assert (self.x >= 0).all()


@pytest.mark.parametrize("collate_fn", COLLATES[:2])
def test_code_of_containers_sees_leaves_that_are_written(collate_fn):
    leaves = [torch.arange(3.0) + 10 * i for i in range(4)]
    for samples in (
        [Cropped(leaf, torch.ones(2)) for leaf in leaves],
        [[Summed(x=leaf)] for leaf in leaves],
        [{"x": Watchful(leaf, batch_size=[])} for leaf in leaves],
    ):
        is_of_class = type(samples[0]) is dict and type(samples[0].get("x")) is Watchful
        if is_of_class and collate_fn is default_collate and not TAKES_TENSORDICTS:
            continue
        # Freed memory is given again, with what is there.
        junk = [torch.full((4, 3), -1.0) for _ in range(50)]
        del junk
        assert bytes(packed(collate_fn)(samples)) == bytes(pack(collate_fn(samples)))


@pytest.mark.parametrize("is_given", [True, False], ids=["memory of ours", "new memory"])
def test_samples_are_stacked_in_the_parcel(is_given):
    samples = samples_of(Nested(20))
    memory = np.zeros(pack(tdcopier.collate(samples)).nbytes + 100, np.uint8)
    seen: list[int] = []

    def stack(tensors: Any, dim: int, *, out: torch.Tensor) -> torch.Tensor:
        seen.append(out.data_ptr())
        return torch_stack(tensors, dim, out=out)

    torch_stack = torch.stack
    with patch("torch.stack", stack):
        parcel = packed()(samples, out=memory if is_given else None)
    begin = parcel._bytes.data_ptr()
    leaves = [leaf for leaf in leaves_of(parcel.tree()) if leaf.dim() > 1]
    assert (begin == memory.ctypes.data) == is_given
    assert {leaf.data_ptr() for leaf in leaves} <= set(seen)
    inside = [at for at in seen if begin <= at < begin + parcel.nbytes]
    assert len(inside) == len(seen) - 1  # the leaf without elements has no place


@pytest.mark.parametrize("others", [True, False], ids=["and others", "alone"])
def test_samples_on_a_device_are_packed_there(device, others):
    samples = [{"x": torch.full((3,), float(i), device=device)} for i in range(2)]
    if others:
        samples = [{**sample, "n": 1} for sample in samples]
        with pytest.raises(TypeError, match="and other leaves are on"):
            packed()(samples)
    else:
        parcel = packed()(samples)
        assert parcel.device == torch.device(device)
        assert tdcopier.copy(parcel, "cpu")["x"].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_memory_on_a_device_is_refused_for_samples_on_the_host_as_by_pack(device):
    out = torch.zeros(4096, dtype=torch.uint8, device=device)
    with pytest.raises((TypeError, ValueError)) as error:
        pack(torch.ones(2, 3), out=out)
    with pytest.raises(error.type):
        packed()([torch.ones(3)] * 2, out=out)
    parcel = packed()([torch.ones(3, device=device)] * 2, out=out)
    assert parcel._bytes.data_ptr() == out.data_ptr()


def test_shared_memory_that_was_given_is_sent_as_it_is():
    out = torch.empty(2_000_000, dtype=torch.uint8).share_memory_()
    parcel = packed()([torch.ones(300_000)], out=out)
    assert _sent_outs[parcel].data_ptr() == out.data_ptr()


class Large(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((SHARED_FROM_BYTES // 8,), float(index))


class Telling:
    """A collate function that also says whether the parcel can be sent without a copy."""

    def __init__(self, collate_fn: Any) -> None:
        self.collate_fn = collate_fn

    def __call__(self, samples: list[Any]) -> Any:
        parcel = packed(self.collate_fn)(samples)
        return parcel, parcel in _sent_outs


@pytest.mark.parametrize("collate_fn", COLLATES)
@pytest.mark.parametrize("size", [1, 2])
def test_a_worker_packs_in_the_memory_that_it_sends(collate_fn, size, device):
    def loaded(dataset: Any) -> Any:
        collate = Telling(collate_fn)
        return DataLoader(
            dataset, size, num_workers=1, collate_fn=collate, multiprocessing_context="fork"
        )

    assert not any(is_shared for _, is_shared in loaded(torch.arange(4)))  # sent as bytes
    for number, (parcel, is_shared) in enumerate(loaded(Large())):
        assert is_shared
        assert_like(parcel.tree(), collate_fn([Large()[size * number + i] for i in range(size)]))
    assert not Telling(collate_fn)([Large()[0]] * 4)[1]


@pytest.mark.parametrize("collate_fn", COLLATES)
def test_a_function_is_asked_for_memory_of_the_size(collate_fn):
    samples, asked = samples_of(Nested(3)), []

    def allocate(nbytes: int, device: torch.device) -> bytearray:
        asked.append((nbytes, device, bytearray(nbytes)))
        return asked[-1][-1]

    parcel = packed(collate_fn)(samples, out=allocate)
    assert bytes(parcel) == bytes(packed(collate_fn)(samples, out=lambda nbytes, device: None))
    [(nbytes, device, memory)] = asked
    assert (nbytes, device) == (parcel.nbytes, torch.device("cpu"))
    assert bytes(memory) == bytes(parcel)
    memory[-8:] = bytes(8)
    assert bytes(memory) == bytes(parcel)  # is one memory
    with pytest.raises(ZeroDivisionError):
        packed(collate_fn)(samples, out=lambda nbytes, device: 1 // 0)
    with pytest.raises(ValueError, match="the parcel needs"):
        packed(collate_fn)(samples, out=lambda nbytes, device: bytearray(nbytes - 1))


def test_what_stands_in_the_gaps_of_the_memory_is_cleared():
    samples = samples_of(Nested(9))
    expected = bytes(pack(tdcopier.collate(samples)))
    memory = bytearray(b"\xff" * len(expected))
    assert bytes(packed()(samples, out=memory)) == bytes(memory) == expected


@pytest.mark.parametrize("collate_fn", COLLATES)
def test_memory_that_overlaps_the_samples_is_refused_and_kept(collate_fn):
    memory = torch.arange(100_000, dtype=torch.uint8)
    samples = [memory[900 + i : 1900 + i] for i in range(3)]
    before = memory.clone()
    if collate_fn is list:  # these are leaves of the tree
        with pytest.raises(ValueError, match="out overlaps a leaf of the tree"):
            packed(collate_fn)(samples, out=memory)
    else:
        with pytest.raises(ValueError, match="out overlaps a leaf of the samples"):
            packed(collate_fn)(samples, out=memory)
    assert torch.equal(memory, before)


def test_memory_that_adjoins_the_samples_is_taken():
    memory = torch.zeros(100_000, dtype=torch.uint8)
    samples = [memory[i:][-1000 - i :][:900:3] for i in range(3)]
    parcel = packed()(samples, out=memory)  # which reaches beyond the parcel, over the samples
    assert parcel.tree().tolist() == [[0] * 300] * 3


@pytest.mark.parametrize("out", ["short", "read-only", "a parcel", "a number"])
def test_memory_that_cannot_be_taken_is_refused_as_by_pack(out):
    samples = samples_of(Nested(3))
    refused: Any = {
        "short": bytearray(64),
        "read-only": bytes(100_000),
        "a parcel": pack(samples),
        "a number": 3,
    }[out]
    with pytest.raises((TypeError, ValueError)) as of_pack:
        pack(tdcopier.collate(samples), out=refused)
    with pytest.raises(of_pack.type):
        packed()(samples, out=refused)


@pytest.mark.parametrize("collate_fn", COLLATES[:2])
def test_samples_of_several_sizes_are_told_with_their_place(collate_fn):
    with pytest.raises(RuntimeError) as error:
        packed(collate_fn)(samples_of(Ragged(1)))
    assert str(error.value).startswith(f"sample['boxes'][0]: {RAGGED[:40]}")


def test_a_value_that_cannot_be_packed_is_told():
    samples = [CONTAINERS["mapping that cannot be changed"]([torch.ones(2)]) for _ in range(2)]
    with pytest.raises(TypeError, match="cannot be pickled"):
        packed()(samples)


def test_the_function_itself_in_the_place_of_what_it_returns_is_told():
    with pytest.raises(TypeError, match=r"collate_fn=tdcopier\.packed\(\)"):
        packed([torch.ones(2)])  # as a loader calls it


@pytest.mark.parametrize("collate_fn", COLLATES)
@pytest.mark.parametrize("context", CONTEXTS)
def test_workers_send_parcels(context, collate_fn, device):
    dataset = Nested(20)
    loader = DataLoader(
        dataset, 4, num_workers=2, collate_fn=packed(collate_fn), multiprocessing_context=context
    )
    for number, parcel in enumerate(loader):
        assert type(parcel) is Parcel
        expected = collate_fn([dataset[i] for i in range(4 * number, 4 * number + 4)])
        assert_like(parcel.tree(), pack(expected).tree())
    batches = [*tdcopier.prefetch(loader, device)]
    assert [type(batch) for batch in batches] == [type(expected)] * 2
    assert dtypes_of(batches[0]) == dtypes_of(pack(expected).tree())


def test_it_can_be_pickled():
    samples = samples_of(Nested(3))
    made = pickle.loads(pickle.dumps(packed(default_collate)))
    assert bytes(made(samples)) == bytes(packed()(samples))
