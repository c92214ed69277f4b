"""Packed storages that are pinned: the device reads their rows, and writes wait for it."""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict_same import assert_same_tensordict
from thread_support import Call, at_once

pytest.importorskip("torchrl")

from torchrl_support import BATCH, CAPACITY, SAMPLERS, data, fill

from tdcopier.torchrl import PackedLazyTensorStorage, PackedTensorDictReplayBuffer
from tdcopier.torchrl._in_flight import MOST_READS

pytestmark = pytest.mark.usefixtures("no_collections")


def pinned_buffer(device: str, **options: Any) -> PackedTensorDictReplayBuffer:
    storage = PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True)
    return PackedTensorDictReplayBuffer(storage=storage, batch_size=BATCH, **options)


def assert_rows_of(batch: Any, stored: Any) -> None:
    """Asserts that a batch has the rows of its index."""
    rows = stored[batch["index"].cpu()]
    for key in rows.keys(include_nested=True, leaves_only=True):
        if key != "index":
            assert torch.equal(batch[key].cpu(), rows[key]), key


@pytest.mark.parametrize("prefetch", [None, 2])
def test_the_device_reads_rows_of_a_pinned_storage(device, prefetch):
    buffer = pinned_buffer(device, prefetch=prefetch)
    fill((buffer,), 44)
    for _ in range(6):
        batch = buffer.sample()
        assert batch.device == torch.device(device)
        assert_rows_of(batch, buffer.storage[:])
        assert buffer.storage._storage["observation"].is_pinned()
    fill((buffer,), 30)  # rows of a pinned storage are written as ever
    assert buffer.sample().device == torch.device(device)


@pytest.mark.parametrize("sampler", ["random", "weighted", "slices"])
@pytest.mark.parametrize("rows", [44, CAPACITY])
def test_samples_are_those_of_a_storage_that_is_not_pinned(device, sampler, rows):
    buffers = []
    for pinned in (False, True):
        storage = PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=pinned)
        buffers.append(
            PackedTensorDictReplayBuffer(
                storage=storage,
                batch_size=BATCH,
                sampler=SAMPLERS[sampler](),
                generator=torch.Generator().manual_seed(5),
            )
        )
    fill(tuple(buffers), rows)
    for _ in range(4):
        expected, got = (buffer.sample() for buffer in buffers)
        assert_same_tensordict(got, expected)


def test_a_pinned_storage_is_pinned_again_when_it_is_loaded(device, tmp_path):
    def make() -> PackedLazyTensorStorage:
        return PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True)

    storage, other = make(), make()
    storage.set(range(44), data(44))
    other.set(range(20), data(20))
    asked = torch.tensor([3, 7])
    expected = storage.get(asked)
    assert storage._storage["observation"].is_pinned()
    again = pickle.loads(pickle.dumps(storage))
    assert again.pinned
    assert_same_tensordict(again.get(asked), expected)
    storage.load_state_dict(other.state_dict())
    assert_same_tensordict(storage.get(asked), other.get(asked))
    assert storage._storage["observation"].is_pinned()


def test_pinned_needs_a_device_to_sample_to():
    with pytest.raises(ValueError, match="pinned=True needs sample_device="):
        PackedLazyTensorStorage(10, pinned=True)


# ---- reads in flight -----------------------------------------------------------------------------


def test_a_sample_waits_for_no_row(stall, device, accelerator, copy_stream):
    buffer = pinned_buffer(device)
    fill((buffer,), CAPACITY)
    buffer.sample()
    accelerator.synchronize()
    with stall(copy_stream):
        batches = [buffer.sample() for _ in range(2)]
        assert not copy_stream.query()
        buffer.storage[:]["observation"].sum()  # nor do reads by the host
        buffer.storage.get([1, 2])
    for batch in batches:
        assert_rows_of(batch, buffer.storage[:])


EVERY_ROW = torch.arange(CAPACITY)
WRITES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "extend": lambda buffer, new, _: buffer.extend(new),
    "add": lambda buffer, new, _: buffer.add(new[0]),
    "storage.set": lambda buffer, new, _: buffer.storage.set(EVERY_ROW, new),
    "storage[...] =": lambda buffer, new, _: buffer.storage.__setitem__(EVERY_ROW, new),
    "buffer[...] =": lambda buffer, new, _: buffer.__setitem__(slice(None), new),
    "buffer[..., :] =": lambda buffer, new, _: buffer.__setitem__((..., slice(None)), new),
    "set_at_": lambda buffer, new, _: buffer.set_at_("episode", new["episode"], EVERY_ROW),
    "set_": lambda buffer, new, _: buffer.set_("episode", new["episode"]),
    "update_": lambda buffer, new, _: buffer.update_({"episode": new["episode"]}),
    "patch": lambda buffer, new, _: buffer.storage._apply_conditional_patch(
        EVERY_ROW, {"episode": new["episode"]}
    ),
    "load_state_dict": lambda buffer, _, other: buffer.storage.load_state_dict(other),
    "loads": lambda buffer, _, other: buffer.storage.loads(other["path"]),
}


@pytest.mark.sim
@pytest.mark.parametrize("write", WRITES.values(), ids=list(WRITES))
def test_each_write_waits_until_the_rows_have_been_read(sim, device, copy_stream, write, tmp_path):
    buffer = pinned_buffer(device)
    fill((buffer,), CAPACITY)
    before = buffer.storage[:].clone()
    new = data(CAPACITY, start=1000).set("index", EVERY_ROW.clone())
    other = PackedLazyTensorStorage(CAPACITY)
    other.set(EVERY_ROW, new)
    other.dumps(tmp_path)
    state = {**other.state_dict(), "path": tmp_path}
    with sim.detect():
        with sim.hold(copy_stream):
            batch = buffer.sample()
            writer = Call(lambda: write(buffer, new, state))
            while buffer.storage.write_stats.waits == 0:
                assert writer.is_running()
            assert torch.equal(buffer.storage._rows["episode"], before["episode"])
        writer.join()
        assert_rows_of(batch, before)
    assert not torch.equal(buffer.storage[:]["episode"], before["episode"])
    assert buffer.storage.write_stats.waits == 1


@pytest.mark.sim
@pytest.mark.hazardous
def test_writes_through_a_view_wait_in_the_context_and_are_found_outside(sim, device, copy_stream):
    buffer = pinned_buffer(device)
    fill((buffer,), CAPACITY)
    view = buffer.storage[:]["episode"]

    def write_in_the_context() -> None:
        with buffer.storage.writing():
            view.fill_(-1)

    with sim.detect():
        with sim.hold(copy_stream):
            buffer.sample()
            writer = Call(write_in_the_context)
            while buffer.storage.write_stats.waits == 0:
                assert writer.is_running()
            assert not view.eq(-1).any()
        writer.join()

    def write_at_once() -> None:
        with sim.detect():
            with sim.hold(copy_stream):
                buffer.sample()
                view.fill_(-2)
            sim.synchronize(device)

    with pytest.raises(sim.HazardError, match="changed"):
        write_at_once()


def test_reads_that_are_done_are_forgotten(device, accelerator):
    buffer = pinned_buffer(device)
    fill((buffer,), CAPACITY)
    reads = buffer.storage._in_flight.reads
    for _ in range(3 * MOST_READS):
        buffer.sample()
        assert len(reads) <= MOST_READS
    accelerator.synchronize()
    buffer.sample()
    assert len(reads) == 1
    buffer.extend(data(5))
    assert not reads


def test_a_storage_may_be_dropped_while_the_device_reads(sim, device, copy_stream):
    buffer = pinned_buffer(device)
    fill((buffer,), CAPACITY)
    stored = buffer.storage[:].clone()
    sim.busy(0.05, copy_stream)
    batch = buffer.sample()
    del buffer
    gc.collect()
    assert_rows_of(batch, stored)


@pytest.mark.parametrize("detected", [False, pytest.param(True, marks=pytest.mark.sim)])
def test_a_thread_writes_while_others_sample(request, device, detected):
    """Every row that is sampled is one that was written, and not parts of two."""
    buffer = pinned_buffer(device)
    fill((buffer,), CAPACITY)

    def work(number: int) -> None:
        for step in range(25):
            if number == 0:
                buffer.extend(data(20, start=60 * step))
            else:
                batch = buffer.sample()
                numbers = batch["observation"].floor()[:, 0]
                episodes = batch["episode"] * 10
                assert bool(((numbers >= episodes) & (numbers < episodes + 10)).all())
                pixels = batch["pixels"][:, 0, 0].long()
                assert bool((pixels == numbers.long() % 256).all())

    if detected:
        with request.getfixturevalue("sim").detect():
            at_once(3, work)
    else:
        at_once(3, work)


@pytest.mark.sim
def test_rows_that_other_processes_may_write_have_been_read_when_sample_returns(
    sim, device, copy_stream
):
    buffer = pinned_buffer(device)
    fill((buffer,), CAPACITY)
    buffer.storage._storage.share_memory_()
    assert_rows_of(buffer.sample(), buffer.storage[:])
    with sim.hold(copy_stream):
        drawn = threading.Thread(target=buffer.sample)
        drawn.start()
        drawn.join(0.05)
        assert drawn.is_alive()
    drawn.join()
    assert not buffer.storage._in_flight.reads
    buffer.extend(data(5).to(device))  # which the host writes, before it returns
    assert buffer.storage.write_stats.by_device == 0


def test_a_copy_of_a_storage_has_nothing_in_flight(device):
    buffer = pinned_buffer(device)
    fill((buffer,), CAPACITY)
    buffer.sample()
    again = pickle.loads(pickle.dumps(buffer.storage))
    assert not again._in_flight.reads
    assert_same_tensordict(again[:], buffer.storage[:])


# ---- code that writes to the tensors itself ------------------------------------------------------


def test_within_writing_the_buffer_can_be_used_and_other_threads_wait(device):
    """`writing` takes the locks in the buffer's order: the buffer's own, then the storage's."""
    buffer = pinned_buffer(device)
    buffer.extend(data(CAPACITY))
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            buffer.sample()

    sampling = Call(sample)
    for _ in range(100):
        with buffer.storage.writing():
            assert len(buffer) == CAPACITY
            assert buffer[:].shape == (CAPACITY,)
            buffer.sample()
            buffer.state_dict()
    stop.set()
    sampling.join()


@pytest.mark.parametrize("call", ["sample", "state_dict", "synchronize"])
def test_within_writing_prefetched_samples_are_refused(device, call):
    buffer = pinned_buffer(device, prefetch=2)
    buffer.extend(data(CAPACITY))
    buffer.sample()
    if not hasattr(buffer, call):
        pytest.skip(f"this torchrl has no {call}()")
    with buffer.storage.writing(), pytest.raises(RuntimeError, match=r"within storage\.writing"):
        getattr(buffer, call)()
    buffer.sample()


@pytest.mark.parametrize("rows", [44, CAPACITY])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_leaves_that_are_added_or_replaced_are_pinned_and_sampled(device, rows, is_replaced):
    from tdcopier.torchrl import DeviceRandomSampler

    buffer = pinned_buffer(device, sampler=DeviceRandomSampler(device))
    buffer.extend(data(rows))
    buffer.sample()
    if is_replaced:
        with buffer.storage.writing():
            buffer.storage._storage["observation"] = buffer.storage._storage["observation"] + 500
    else:
        changed = buffer[:].clone()
        changed["advantage"] = torch.arange(rows)
        buffer.write_all(changed)
    before = buffer.storage.read_stats
    for _ in range(3):
        batch = buffer.sample()
        assert_rows_of(batch, buffer.storage[:])
        assert is_replaced or torch.equal(batch["advantage"].cpu(), batch["index"].cpu())
    assert buffer.storage.read_stats.moved_indices == before.moved_indices
    leaves = buffer.storage._storage.values(include_nested=True, leaves_only=True)
    assert all(leaf.is_pinned() for leaf in leaves)


def test_rows_that_torch_moves_to_shared_memory_are_pinned_again(device):
    buffer = pinned_buffer(device)
    buffer.extend(data(CAPACITY))
    buffer.sample()
    pickle.dumps(buffer.storage)  # as sending it to a process does first
    buffer.storage._storage.apply(lambda leaf: leaf.share_memory_())
    assert_rows_of(buffer.sample(), buffer.storage[:])
    assert buffer.storage._pin.is_shared
    assert buffer.storage._storage["observation"].is_pinned()


def test_pinned_and_shared_from_the_beginning_are_refused_together(device):
    with pytest.raises(ValueError, match="exclude each other"):
        PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True, shared_init=True)


def test_a_leaf_that_is_replaced_by_another_dtype_is_sampled_so(device):
    from tdcopier.torchrl import DeviceRandomSampler

    buffer = pinned_buffer(device, sampler=DeviceRandomSampler(device))
    buffer.extend(data(44).set("number", torch.arange(44)))
    buffer.sample()
    with buffer.storage.writing():
        rows = buffer.storage._storage
        rows["number"] = rows["number"].view(torch.float64)
    assert buffer.sample()["number"].dtype == torch.float64


@pytest.mark.parametrize("call", ["state_dict", "synchronize"])
def test_within_writing_prefetched_samples_are_refused_beside_a_thread_that_samples(device, call):
    """Not only after the lock that the other thread holds while it waits for its sample."""
    buffer = pinned_buffer(device, prefetch=1)
    if not hasattr(type(buffer).__mro__[1], call):
        pytest.skip(f"this torchrl has no {call}()")
    buffer.extend(data(CAPACITY))
    buffer.sample()
    stop = threading.Event()

    def sample() -> None:
        while not stop.is_set():
            buffer.sample()

    def write() -> None:
        for _ in range(30):
            with buffer.storage.writing(), pytest.raises(RuntimeError, match="within storage"):
                getattr(buffer, call)()

    sampling = Call(sample)
    try:
        Call(write).join()
    finally:
        stop.set()
    sampling.join()
