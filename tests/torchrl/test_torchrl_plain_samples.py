"""Samples that are drawn and read in one go are those of the usual way."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict_same import assert_same_tensordict

pytest.importorskip("torchrl")

from torchrl.data import RandomSampler, TensorDictRoundRobinWriter
from torchrl.data.replay_buffers import SampleUnit
from torchrl_support import BATCH, CAPACITY, data

import tdcopier
from tdcopier.torchrl import (
    DeviceRandomSampler,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
)
from tdcopier.torchrl._plain_read import PlainRead

pytestmark = pytest.mark.usefixtures("no_collections")

Buffer = PackedTensorDictReplayBuffer


def made(device: str, cls: type[Buffer] = Buffer, rows: int = 44, **options: Any) -> Buffer:
    storage = PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True)
    options = {"sampler": DeviceRandomSampler(device), "batch_size": BATCH, **options}
    buffer = cls(storage=storage, **options)
    buffer.extend(data(rows))
    return buffer


@pytest.fixture
def plain_reads(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The indices of the samples that were read in one go."""
    seen: list[torch.Tensor] = []
    start = PlainRead.start

    def noted(self: PlainRead, index: torch.Tensor) -> Any:
        seen.append(index)
        return start(self, index)

    monkeypatch.setattr(PlainRead, "start", noted)
    return seen


class Usual(Buffer):
    """Draws each sample in the usual way."""

    def _sample_plainly(self, batch_size: int | None) -> Any:
        return None


ROWS: dict[str, Callable[[int], TensorDict]] = {
    "nested": data,
    "flat": lambda count: TensorDict({"a": torch.arange(count), "b": torch.rand(count, 2)}, count),
    "of two dimensions": lambda count: TensorDict(
        {"a": torch.arange(6 * count).view(count, 2, 3)}, (count, 2)
    ),
    "named": lambda count: TensorDict({"a": torch.arange(count)}, count, names=["time"]),
    "with an index": lambda count: TensorDict({"index": torch.rand(count)}, count),
    "empty leaves": lambda count: TensorDict({"a": torch.zeros(count, 0)}, count),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("rows", [44, CAPACITY])
def test_samples_are_those_of_the_usual_way(device, plain_reads, name, rows):
    buffers = []
    for cls in (Buffer, Usual):
        storage = PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True)
        sampler = DeviceRandomSampler(device)
        buffers.append(cls(storage=storage, sampler=sampler, batch_size=BATCH))
    found: list[list[Any]] = []
    for buffer in buffers:
        torch.manual_seed(3)
        buffer.extend(ROWS[name](rows))
        found.append([buffer.sample() for _ in range(3)])
        buffer.extend(ROWS[name](10))
        found[-1] += [buffer.sample(BATCH), buffer.sample()]
    for ours, theirs in zip(*found, strict=True):
        assert_same_tensordict(ours, theirs)
    assert len(plain_reads) == 5
    assert buffers[0].storage.read_stats == buffers[1].storage.read_stats


class Sevens(SampleUnit):
    def expand(self, index: Any, info: Any, storage: Any) -> Any:
        return torch.full_like(index, 7), info


class Doubled(Buffer):
    def _sample(self, batch_size: int) -> Any:
        batch, info = super()._sample(batch_size)
        batch["observation"] *= 2
        return batch, info


WITH_MORE_TO_DO: dict[str, Callable[[str], tuple[Buffer, Callable[[Buffer], Any]]]] = {
    "a transform": lambda device: (
        made(device).append_transform(lambda batch: batch.set("x", batch["episode"] + 1)),
        lambda buffer: buffer.sample(),
    ),
    "a sample unit": lambda device: (
        made(device, sample_unit=Sevens()),
        lambda buffer: buffer.sample(),
    ),
    "prefetch": lambda device: (made(device, prefetch=2), lambda buffer: buffer.sample()),
    "another sampler": lambda device: (
        made(device, sampler=RandomSampler()),
        lambda buffer: buffer.sample(),
    ),
    "generations": lambda device: (
        made(device, writer=TensorDictRoundRobinWriter(track_generations=True)),
        lambda buffer: buffer.sample(),
    ),
    "a derived buffer": lambda device: (made(device, Doubled), lambda buffer: buffer.sample()),
    "another size": lambda device: (made(device), lambda buffer: buffer.sample(BATCH + 1)),
    "info": lambda device: (made(device), lambda buffer: buffer.sample(return_info=True)[0]),
}


@pytest.mark.filterwarnings("ignore:Got conflicting batch_sizes")
@pytest.mark.parametrize("what", WITH_MORE_TO_DO)
def test_what_more_there_is_to_do_is_done(device, plain_reads, what):
    buffer, sample = WITH_MORE_TO_DO[what](device)
    batch = sample(buffer)
    assert not plain_reads
    rows = buffer.storage[:][batch["index"].cpu()]
    factor = 2 if what == "a derived buffer" else 1
    assert torch.equal(batch["observation"].cpu(), rows["observation"] * factor)
    assert len(batch) == BATCH + (what == "another size")
    assert ("x" in batch) == (what == "a transform")
    assert ("index_generation" in batch) == (what == "generations")
    assert (batch["index"] == 7).all() == (what == "a sample unit")


def test_rows_with_values_that_are_no_tensors_are_read_in_the_usual_way(device, plain_reads):
    storage = PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True)
    sampler = DeviceRandomSampler(device)
    buffer = Buffer(storage=storage, sampler=sampler, batch_size=BATCH)
    rows = TensorDict({"a": torch.arange(44)}, 44)
    rows.set_non_tensor("name", "x")
    buffer.extend(rows)
    batch = buffer.sample()
    assert torch.equal(batch["a"], batch["index"])
    assert not plain_reads


def test_a_leaf_that_the_device_cannot_read_any_more_is_read_by_the_host(device, plain_reads):
    buffer = made(device)
    buffer.sample()
    buffer.storage._storage["observation"].requires_grad_()
    for _ in range(3):
        batch = buffer.sample()
        rows = buffer.storage[:][batch["index"].cpu()]
        assert torch.equal(batch["observation"].cpu(), rows["observation"])
    assert len(plain_reads) == 4
    assert buffer.storage.read_stats.moved_indices == 3
    with buffer.storage.writing():
        buffer.storage._storage["observation"] = torch.rand(CAPACITY, 5)
    batch = buffer.sample()
    assert torch.equal(batch["observation"].cpu(), buffer[:]["observation"][batch["index"].cpu()])
    assert len(plain_reads) == 5


def rename_last(rows: TensorDict) -> None:
    rows["next"].rename_key_("truncated", "cut")


def name_rows(rows: TensorDict) -> None:
    rows.names = ["time"]


def widen_batch(rows: TensorDict) -> None:
    rows["next"].batch_size = [CAPACITY, 1]


def select_in_place(rows: TensorDict) -> None:
    rows.select(*rows.keys(), inplace=True)
    rows["new"] = torch.arange(CAPACITY)


CHANGES = {change.__name__: change for change in (rename_last, name_rows, widen_batch)}
CHANGES["select_in_place"] = select_in_place
CHANGES["needs_grad"] = lambda rows: rows["observation"].requires_grad_()


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_in_place_is_seen_as_in_the_usual_way(device, name):
    found = []
    for cls in (Buffer, Usual):
        torch.manual_seed(2)
        buffer = made(device, cls, CAPACITY)
        torch.manual_seed(3)
        buffer.sample()
        with buffer.storage.writing():
            CHANGES[name](buffer.storage._storage)
        found.append([buffer.sample() for _ in range(3)])
    for ours, theirs in zip(*found, strict=True):
        assert_same_tensordict(ours, theirs)


COLLATES: dict[str, Callable[[Any], Any]] = {
    "select": lambda batch: batch.select("episode"),
    "in place": lambda batch: batch.update({"episode": batch["episode"] + 1}),
    "cast": lambda batch: batch.float(),
}


@pytest.mark.parametrize("name", COLLATES)
def test_the_index_does_not_pass_through_a_collate_function(device, plain_reads, name):
    found = []
    for cls in (Buffer, Usual):
        torch.manual_seed(2)
        buffer = made(device, cls, collate_fn=COLLATES[name])
        torch.manual_seed(3)
        found.append(buffer.sample())
    assert_same_tensordict(*found)
    assert len(plain_reads) == 1


class Zeros(PackedLazyTensorStorage):
    def get(self, index: Any) -> Any:
        return super().get(index).zero_()


def test_a_derived_storage_reads_in_its_own_way(device, plain_reads):
    storage = Zeros(CAPACITY, sample_device=device, pinned=True)
    buffer = Buffer(storage=storage, sampler=DeviceRandomSampler(device), batch_size=BATCH)
    buffer.extend(data(44))
    assert not buffer.sample()["observation"].any()
    assert not plain_reads


def test_modified_sources_are_still_found(device, plain_reads, monkeypatch):
    monkeypatch.setattr(tdcopier._checking, "enabled", True)
    buffer = made(device)
    buffer.sample()
    assert not plain_reads


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_a_copy_of_a_storage_reads_its_own_rows(device, plain_reads, copied):
    buffer = made(device)
    buffer.sample()
    other = copied(buffer.storage)
    assert other._plain is None
    other._storage["observation"].zero_()
    sampler = DeviceRandomSampler(device)
    found = Buffer(storage=other, sampler=sampler, batch_size=BATCH).sample()
    assert not found["observation"].any()
    assert buffer.sample()["observation"].any()
    assert len(plain_reads) == 3
