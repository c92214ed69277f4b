"""Packed storages: gathers, reads that stay views, how often they read, and other threads."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict_same import assert_same_tensordict

pytest.importorskip("torchrl")

from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    RandomSampler,
    ReplayBuffer,
    SliceSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl_support import BATCH, CAPACITY, STORAGES, data, fill, two_buffers

from tdcopier._rows import row_numbers as _row_numbers
from tdcopier.torchrl import (
    PackedLazyMemmapStorage,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
    ToDevice,
    _storage,
)

STORAGE = pytest.mark.parametrize("classes", STORAGES.values(), ids=STORAGES.keys())


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the targets of all gathers."""
    targets: list[Any] = []
    start = _storage.start_gather

    def noted(rows: Any, index: Any, device: Any) -> Any:
        targets.append(str(device))
        return start(rows, index, device)

    monkeypatch.setattr(_storage, "start_gather", noted)
    return targets


INDICES = {
    "tensor": torch.tensor([3, 0, 3]),
    "int32": torch.tensor([3, 0, 3], dtype=torch.int32),
    "negative": torch.tensor([-1, 4, -44]),
    "matrix": torch.tensor([[3, 0], [1, -2]]),
    "list": [1, 2],
    "array": torch.tensor([5, -1]).numpy(),
    "range": range(3, 9, 2),
    "in a tuple": (torch.tensor([1, 2]),),
    "empty": torch.tensor([], dtype=torch.int64),
}
LEFT = {
    "slice": slice(3, 9),
    "all": slice(None),
    "one": 4,
    "mask": torch.arange(44) % 3 == 0,
    "scalar": torch.tensor(3),
    "ellipsis": ...,
}


@STORAGE
@pytest.mark.parametrize("index", [*INDICES, *LEFT])
def test_an_index_of_any_form_gives_torchrls_rows(device, gathers, classes, index):
    theirs, ours = (cls(CAPACITY) for cls in classes)
    for storage in (theirs, ours):
        torch.manual_seed(0)
        storage.set(range(44), data(44))
    asked = (INDICES | LEFT)[index]
    for read in (lambda storage: storage.get(asked), lambda storage: storage[asked]):
        assert_same_tensordict(read(ours), read(theirs))
    assert gathers == (["cpu"] * 2 if index in INDICES else [])


@pytest.mark.parametrize("index", [*INDICES, "pair"])
def test_an_index_is_put_into_the_engines_form_once(device, monkeypatch, index):
    def again(*arguments: Any) -> None:
        raise AssertionError(f"looked at again: {arguments}")

    ndim = 2 if index == "pair" else 1
    _, ours = two_buffers(device, "host", "tensor", RandomSampler, ndim=ndim)
    fill((ours,), 44, ndim)
    storage = ours.storage
    asked = (INDICES | {"pair": (torch.tensor([1, -1]), torch.tensor([0, 2]))})[index]
    expected = storage.get(asked)
    for name in ("_as_part", "_wrap", "_of_pair", "_numbers_of"):
        monkeypatch.setattr(_row_numbers, name, again)
    assert_same_tensordict(storage.get(asked), expected)


@STORAGE
@pytest.mark.parametrize("rows", [44, CAPACITY])
@pytest.mark.parametrize("wrong", [44, CAPACITY, -45, -CAPACITY - 1])
def test_a_row_that_is_not_in_use_is_an_error_as_in_torchrl(classes, rows, wrong):
    theirs, ours = (cls(CAPACITY) for cls in classes)
    for storage in (theirs, ours):
        storage.set(range(rows), data(rows))
    asked = torch.tensor([0, wrong])
    if -rows <= wrong < rows:
        assert_same_tensordict(ours.get(asked)["episode"], theirs.get(asked)["episode"])
        return
    with pytest.raises(IndexError, match=f"{wrong}"):
        theirs.get(asked)
    with pytest.raises(IndexError, match=f"{wrong}"):
        ours.get(asked)


def test_an_empty_storage_says_what_torchrl_says():
    for cls in (LazyTensorStorage, PackedLazyTensorStorage):
        with pytest.raises(RuntimeError, match="non-initialized storage"):
            cls(10).get(torch.tensor([0]))


def test_a_slice_is_a_view_that_writes_into_the_storage():
    storage = PackedLazyTensorStorage(CAPACITY)
    storage.set(range(44), data(44))
    storage[:]["observation"].zero_()
    assert storage.get(torch.tensor([3, 7]))["observation"].count_nonzero() == 0


def test_samples_lie_in_pinned_memory_that_is_sent_as_it_is(device):
    torch.zeros(1, device=device)  # so that memory can be pinned
    _, ours = two_buffers(device, "host", "tensor", lambda: SliceSampler(num_slices=4))
    fill((ours,), 44)
    rows = ours.storage.get(torch.tensor([3, 7, 3]))
    assert all(leaf.is_pinned() for leaf in rows.values(True, True))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_slices_are_sampled_in_every_mode(device, mode):
    buffers = two_buffers(device, "host", "tensor", lambda: SliceSampler(num_slices=4))
    fill(buffers, 44)
    with mode():
        sampled = []
        for buffer in buffers:
            torch.manual_seed(0)
            sampled.append(buffer.sample())
    expected, got = (rows.get("observation").cpu() for rows in sampled)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("make", [dict, tuple, list, "tensor"], ids=str)
def test_trees_of_tensors_are_gathered_too(gathers, make):
    leaves = {"a": torch.randn(10, 3), "b": torch.arange(10)}
    tree: Any = leaves if make is dict else leaves["a"]
    if make in (tuple, list):
        tree = make(leaves.values())
    theirs, ours = LazyTensorStorage(12), PackedLazyTensorStorage(12)
    for storage in (theirs, ours):
        storage.set(range(10), tuple(tree) if make is list else tree)
    asked = torch.tensor([2, -1])
    expected, got = theirs.get(asked), ours.get(asked)
    assert type(got) is type(expected)
    pairs = {"tensor": [(got, expected)]} if make == "tensor" else None
    if pairs is None:
        keys = list(expected) if make is dict else range(2)
        pairs = {"each": [(got[key], expected[key]) for key in keys]}
    for each in pairs.values():
        assert all(torch.equal(a, b) for a, b in each)
    assert gathers == ["cpu"]


def test_a_storage_without_device_gives_rows_without_device():
    storages = LazyTensorStorage(10), PackedLazyTensorStorage(10)
    for storage in storages:
        storage.set(range(10), TensorDict({"x": {"y": torch.arange(10)}}, [10]))
        storage._storage.clear_device_()
    theirs, ours = (storage.get(torch.tensor([1, 2])) for storage in storages)
    assert ours.device is None
    assert_same_tensordict(ours, theirs)


# ---- how often -----------------------------------------------------------------------------------


@STORAGE
@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("buffer_class", [TensorDictReplayBuffer, PackedTensorDictReplayBuffer])
def test_slices_are_gathered_once(device, gathers, classes, ndim, buffer_class):
    buffer = buffer_class(
        storage=classes[1](CAPACITY, ndim=ndim),
        sampler=SliceSampler(num_slices=4, traj_key="episode"),
        batch_size=BATCH,
    )
    buffer.append_transform(ToDevice(device))
    fill((buffer,), 44, ndim)
    gathers.clear()
    for count in range(1, 4):
        buffer.sample()
        assert gathers == ["cpu"] * count


def read_twice(storage: Any, between: Any = lambda rows: None) -> Any:
    """Reads twice, as a sampler of slices and its buffer do; returns what the buffer gets."""
    index = (torch.tensor([3, 7]),)
    between(storage[index])
    return storage.get(index)


@pytest.fixture
def filled() -> Any:
    storage = PackedLazyTensorStorage(CAPACITY)
    storage.set(range(44), data(44))
    return storage


def test_rows_that_somebody_else_holds_are_read_again(filled, gathers):
    kept = []
    again = read_twice(filled, lambda rows: kept.append(rows.zero_()))
    assert again["episode"].tolist() == [0, 0]
    assert again["observation"].count_nonzero() > 0
    assert gathers == ["cpu"] * 2


def test_rows_that_were_written_meanwhile_are_read_again(filled, gathers):
    zeros = data(44).zero_()
    again = read_twice(filled, lambda rows: filled.set(range(44), zeros))
    assert again["observation"].count_nonzero() == 0
    assert gathers == ["cpu"] * 2


def loaded(storage: Any, tmp_path: Any) -> None:
    storage.load_state_dict(other().state_dict())


def read_from_files(storage: Any, tmp_path: Any) -> None:
    other().dumps(tmp_path)
    storage.loads(tmp_path)


def other() -> Any:
    storage = PackedLazyTensorStorage(CAPACITY)
    storage.set(range(44), data(44).zero_())
    return storage


@pytest.mark.parametrize("change", [loaded, read_from_files])
def test_rows_that_were_changed_otherwise_are_read_again(filled, gathers, tmp_path, change):
    again = read_twice(filled, lambda rows: change(filled, tmp_path))
    assert again["observation"].count_nonzero() == 0
    assert gathers == ["cpu"] * 2


def test_rows_that_were_updated_where_present_are_read_again(gathers):
    storage = PackedLazyTensorStorage(CAPACITY)
    writer = TensorDictRoundRobinWriter(track_generations=True)
    buffer = TensorDictReplayBuffer(storage=storage, writer=writer)
    index = buffer.extend(data(44))
    patch = {"observation": torch.zeros(44, 5)}
    generation = writer.generations_of(index)

    def update(rows: Any) -> None:
        buffer.update_if_present(index=index, generation=generation, patch=patch)

    assert read_twice(storage, update)["observation"].count_nonzero() == 0
    assert gathers == ["cpu"] * 2


def test_rows_of_a_storage_that_was_emptied_are_gone(filled):
    with pytest.raises(IndexError):
        read_twice(filled, lambda rows: filled._empty())


def test_an_index_with_other_values_is_another_index(filled, gathers):
    index = (torch.tensor([3, 7]),)
    filled[index]
    index[0].fill_(20)
    assert filled.get(index)["episode"].tolist() == [2, 2]
    assert filled.get(index)["episode"].tolist() == [2, 2]
    assert gathers == ["cpu"] * 3


def test_a_leaf_that_the_sampler_keeps_is_not_the_batchs(filled, gathers):
    kept = []
    again = read_twice(filled, lambda rows: kept.append(rows["next", "reward"]))
    again["next", "reward"].fill_(-1)
    assert kept[0].flatten().tolist() == [torch.tensor(3 / 7), 1]
    assert gathers == ["cpu"]


def test_another_thread_reads_for_itself(filled, gathers):
    index = (torch.tensor([3, 7]),)
    filled[index]
    thread = threading.Thread(target=lambda: filled.get(index))
    thread.start()
    thread.join(30)
    assert gathers == ["cpu"] * 2


# ---- straight to the device ----------------------------------------------------------------------


@STORAGE
def test_rows_go_straight_to_the_device(device, gathers, classes):
    buffer = PackedTensorDictReplayBuffer(
        storage=classes[1](CAPACITY, sample_device=device), batch_size=BATCH
    )
    fill((buffer,), 44)
    assert buffer.sample().device == torch.device(device)
    assert gathers == [str(torch.device(device))]
    assert buffer[:5].device == buffer.storage[:].device == torch.device("cpu")


def test_a_writer_may_go_on_while_the_transfer_is_late(stall, device, copy_stream):
    buffer = PackedTensorDictReplayBuffer(
        storage=PackedLazyTensorStorage(CAPACITY, sample_device=device), batch_size=BATCH
    )
    fill((buffer,), CAPACITY)
    before = buffer.storage[:].clone()
    zeros = data(CAPACITY).zero_().to("cpu")  # without a device, torchrl would synchronize
    with stall(copy_stream):
        batch = buffer.sample()
        buffer.extend(zeros)
        assert not copy_stream.query()
    rows = before[batch["index"].cpu()]
    assert torch.equal(batch["observation"].cpu(), rows["observation"])


@pytest.mark.parametrize("buffer_class", [ReplayBuffer, TensorDictReplayBuffer])
def test_torchrls_buffers_cannot_take_samples_on_a_device(device, buffer_class):
    storage = PackedLazyTensorStorage(10, sample_device=device)
    name = buffer_class.__name__
    message = f"needs a PackedTensorDictReplayBuffer; in a {name}, leave it out and append ToDevice"
    with pytest.raises(TypeError, match=message):
        buffer_class(storage=storage)


# ---- beside other threads ------------------------------------------------------------------------


@STORAGE
@pytest.mark.parametrize("way", ["ToDevice", "sample_device", "ToDevice, torchrl's buffer"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_rows_are_whole_while_another_thread_extends(device, classes, way, prefetch):
    """Each row has one number in all of its leaves, even while another thread writes rows."""
    buffer_class = TensorDictReplayBuffer if "torchrl" in way else PackedTensorDictReplayBuffer
    place = {"sample_device": device} if way == "sample_device" else {}
    buffer = buffer_class(
        storage=classes[1](256, **place), batch_size=200, prefetch=prefetch or None
    )
    if not place:
        buffer.append_transform(ToDevice(device))

    def rows(number: int) -> TensorDict:
        leaves = {f"{i}": torch.full((64, 100), float(number)) for i in range(8)}
        return TensorDict(leaves, [64])

    buffer.extend(rows(0))
    stop, failures = threading.Event(), []

    def extend() -> None:
        number = 0
        try:
            while not stop.is_set():
                number += 1
                buffer.extend(rows(number))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=extend)
    thread.start()
    try:
        for _ in range(40):
            batch = buffer.sample().to("cpu")
            first = batch["0"][:, :1]
            for i in range(8):
                assert torch.equal(batch[f"{i}"], first.expand(200, 100)), i
    finally:
        stop.set()
        thread.join(30)
    assert failures == []


@pytest.mark.parametrize("straight", [False, True])
def test_a_pickled_storage_has_the_same_rows(device, straight):
    storage = PackedLazyTensorStorage(CAPACITY, **({"sample_device": device} if straight else {}))
    storage.set(range(44), data(44))
    again = pickle.loads(pickle.dumps(storage))
    asked = torch.tensor([3, 7])
    assert again.sample_device == storage.sample_device
    assert_same_tensordict(again.get(asked), storage.get(asked))


@STORAGE
def test_a_buffer_is_saved_and_loaded(device, classes, tmp_path):
    def make() -> PackedTensorDictReplayBuffer:
        return PackedTensorDictReplayBuffer(storage=classes[1](CAPACITY), batch_size=BATCH)

    buffer, again = make(), make()
    fill((buffer,), 44)
    buffer.dumps(tmp_path)
    again.loads(tmp_path)
    asked = torch.tensor([3, 43])
    assert torch.equal(again.storage.get(asked)["pixels"], buffer.storage.get(asked)["pixels"])
    assert len(again) == 44


WRITTEN = [
    (PackedLazyTensorStorage, LazyTensorStorage),
    (PackedLazyMemmapStorage, LazyMemmapStorage),
]


@pytest.mark.parametrize("classes", WRITTEN, ids=["RAM", "memmap"])
@pytest.mark.parametrize(
    ("change", "is_fallback"),
    [
        pytest.param(lambda td: td, 0, id="nothing"),
        pytest.param(lambda td: td.set("b", td["b"].t().contiguous().t()), 0, id="transposed"),
        pytest.param(lambda td: td.set("a", td["a"].requires_grad_()), 1, id="needs a gradient"),
        pytest.param(lambda td: td.exclude("b"), 1, id="no such leaf"),
    ],
)
def test_batches_on_the_host_are_written_as_torchrl_writes_them(classes, change, is_fallback):
    storages = [cls(20) for cls in classes]
    for step in range(7):  # round the end
        numbers = torch.arange(6.0) + 6 * step
        data = {"a": numbers, "b": numbers.view(-1, 1).expand(6, 3).contiguous()}
        rows = change(TensorDict(data, [6])) if step > 3 else TensorDict(data, [6])
        cursor = (torch.arange(6) + 6 * step) % 20
        with torch.no_grad():
            for storage in storages:
                storage.set(cursor, rows)
    assert_same_tensordict(storages[0][:], storages[1][:])
    assert len(storages[0]) == len(storages[1]) == 20
    assert storages[0]._last_cursor_index == storages[1]._last_cursor_index
    assert storages[0].write_stats == (0, 7, 0, 1 + 3 * is_fallback)
