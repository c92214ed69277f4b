"""Batches on the device that are written to a pinned storage: the device writes the rows."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict_same import assert_same_tensordict
from thread_support import Call

pytest.importorskip("torchrl")

from torchrl.data import (
    LazyTensorStorage,
    RandomSampler,
    SliceSampler,
    TensorDictReplayBuffer,
)
from torchrl_support import BATCH, CAPACITY, data

from tdcopier import _C
from tdcopier.torchrl import (
    DeviceRandomSampler,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
)

pytestmark = pytest.mark.usefixtures("no_collections")


def pinned_buffer(device: str, **options: Any) -> PackedTensorDictReplayBuffer:
    storage = PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True)
    return PackedTensorDictReplayBuffer(storage=storage, batch_size=BATCH, **options)


def torchrls_buffer() -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=BATCH)


def on(device: str, rows: TensorDict, has_device: bool = True) -> TensorDict:
    moved = rows.to(device)
    return moved if has_device else moved.clear_device_()


def _is_held(lock: Any) -> bool:
    """Returns whether another thread holds a lock."""
    free: bool = lock.acquire(blocking=False)
    if free:
        lock.release()
    return not free


class FixedSampler(RandomSampler):
    """Returns one index again and again, which was made on the device before."""

    def __init__(self, index: torch.Tensor) -> None:
        self.index = index

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        return self.index, {}


@pytest.mark.parametrize("has_device", [True, False])
def test_the_storage_has_the_rows_that_torchrls_would_have(device, has_device):
    """Over the end of the storage, for one row, and for a batch larger than the storage."""
    theirs, ours = torchrls_buffer(), pinned_buffer(device)
    for count, start in ((20, 0), (35, 20), (30, 55), (CAPACITY + 7, 200), (1, 300)):
        rows = data(count, start=start)
        moved = on(device, rows.clone(), has_device)
        expected, index = theirs.extend(rows), ours.extend(moved)
        assert torch.equal(index.cpu(), expected)
        assert_same_tensordict(ours.storage[:], theirs.storage[:])
    row = data(1, start=400)[0]
    assert theirs.add(row) == ours.add(on(device, row.clone(), has_device))
    assert_same_tensordict(ours.storage[:], theirs.storage[:])
    assert ours.storage._last_cursor_index == theirs.storage._last_cursor_index
    by_host = 0 if has_device else 1  # rows that are twice in an index on the host
    assert ours.storage.write_stats[:3] == (6 - by_host, by_host, 0)
    assert len(ours) == len(theirs)


@pytest.mark.hazardous  # the detector takes rows that the device writes for a change by the host
@pytest.mark.parametrize("on_device", [True, False])
def test_extend_and_the_next_sample_do_not_wait_for_the_write(
    stall, device, reading_stream, on_device
):
    index = torch.arange(BATCH)
    sampler = FixedSampler(index.to(device) if on_device else index)
    buffer = pinned_buffer(device, sampler=sampler)
    buffer.extend(data(CAPACITY))
    buffer.sample()
    new = on(device, data(CAPACITY, start=1000))
    other = torch.full((CAPACITY,), -1).pin_memory()
    torch.accelerator.synchronize()
    with stall(reading_stream):
        buffer.extend(new)
        new["episode"].copy_(other, non_blocking=True)  # the stream may overwrite the batch
        batch = buffer.sample()
        assert not reading_stream.query()
    assert bool((batch["episode"] >= 100).all())
    assert bool((buffer.storage[:]["episode"] >= 100).all())
    assert bool((new["episode"] == -1).all())


@pytest.mark.hazardous  # the detector takes rows that the device writes for a change by the host
@pytest.mark.parametrize("on_device", [True, False])
def test_a_sample_on_another_stream_has_the_rows_that_were_written(
    stall, device, accelerator, on_device
):
    index = torch.arange(BATCH)
    sampler = FixedSampler(index.to(device) if on_device else index)
    buffer = pinned_buffer(device, sampler=sampler)
    buffer.extend(data(CAPACITY))
    buffer.sample()
    every_row = torch.arange(CAPACITY).to(device)
    new = on(device, data(CAPACITY, start=1000))
    later = on(device, data(CAPACITY, start=2000))
    new["index"] = later["index"] = every_row
    side = accelerator.Stream(device)
    accelerator.synchronize()
    with accelerator.stream(side):
        writing_stream = _C.copy_stream(device, "from_device")
        buffer.storage.set(every_row, later)  # makes the stream
    accelerator.synchronize()
    with stall(writing_stream):
        with accelerator.stream(side):
            buffer.storage.set(every_row, new)
        batch = buffer.sample()
        assert not writing_stream.query()
    assert bool((batch["episode"] >= 100).all())
    assert bool((batch["episode"] < 200).all())


@pytest.mark.hazardous  # the detector takes rows that the device writes for a change by the host
def test_of_writes_on_two_streams_the_later_one_stays(stall, device, accelerator):
    buffer = pinned_buffer(device)
    buffer.extend(data(CAPACITY))
    every_row = torch.arange(CAPACITY).to(device)
    new, later = (on(device, data(CAPACITY, start=start)) for start in (1000, 2000))
    new["index"] = later["index"] = every_row
    side = accelerator.Stream(device)
    with accelerator.stream(side):
        writing_stream = _C.copy_stream(device, "from_device")
        buffer.storage.set(every_row, later)  # makes the stream
    accelerator.synchronize()
    with stall(writing_stream):
        with accelerator.stream(side):
            buffer.storage.set(every_row, new)
        buffer.storage.set(every_row, later)
        assert not writing_stream.query()
    assert bool((buffer.storage[:]["episode"] >= 200).all())


@pytest.mark.sim
def test_the_context_for_writes_waits_until_the_device_has_written(sim, device, reading_stream):
    buffer = pinned_buffer(device)
    buffer.extend(data(CAPACITY))
    view = buffer.storage[:]["episode"]
    new = on(device, data(CAPACITY, start=1000))
    torch.accelerator.synchronize()

    def write() -> None:
        with buffer.storage.writing():
            view.fill_(-1)

    with sim.detect():
        with sim.hold(reading_stream):
            buffer.extend(new)
            writer = Call(write)
            while not _is_held(buffer.storage._in_flight.lock):
                assert writer.is_running()
            assert bool((view < 100).all())
        writer.join()
        torch.accelerator.synchronize()
    assert bool((view == -1).all())


def test_samplers_that_read_rows_on_the_host_see_those_that_were_written(device):
    sampler = SliceSampler(num_slices=4, traj_key="episode", strict_length=False)
    buffer = pinned_buffer(device, sampler=sampler)
    for step in range(4):
        buffer.extend(on(device, data(CAPACITY, start=600 * step)))
        batch = buffer.sample()
        assert bool((batch["episode"] >= 60 * step).all())


@pytest.mark.sim
def test_reads_by_the_host_wait_until_the_device_has_written(sim, device, reading_stream, tmp_path):
    reads = {
        "view": lambda storage: storage[:]["episode"],
        "row": lambda storage: storage[3]["episode"],
        "rows": lambda storage: storage.get(torch.arange(4))["episode"],
        "mask": lambda storage: storage[torch.arange(CAPACITY) < 3]["episode"],
        "state_dict": lambda storage: storage.state_dict()["_storage"]["episode"],
        "dumps": lambda storage: (storage.dumps(tmp_path), storage[0]["episode"])[1],
        "pickle": lambda storage: storage.__getstate__()["_rows"]["episode"],
    }
    for name, read in reads.items():
        buffer = pinned_buffer(device)
        buffer.extend(data(CAPACITY))
        new = on(device, data(CAPACITY, start=1000))
        with sim.detect():
            with sim.hold(reading_stream):
                buffer.extend(new)
                reader = Call(lambda buffer=buffer, read=read: read(buffer.storage).clone())
                while not _is_held(buffer.storage._in_flight.lock):
                    assert reader.is_running(), name
                assert buffer.storage._in_flight.writes
            assert bool((reader.join() >= 100).all()), name


@pytest.mark.sim
def test_the_device_writes_after_it_has_read_for_earlier_samples(sim, device, copy_stream):
    buffer = pinned_buffer(device)
    buffer.extend(data(CAPACITY))
    new = on(device, data(CAPACITY, start=1000))
    new["index"] = index = torch.arange(CAPACITY).to(device)
    torch.accelerator.synchronize()
    with sim.detect():
        with sim.hold(copy_stream):
            batch = buffer.sample()
            buffer.storage.set(index, new)  # the host waits for neither
        assert bool((batch["episode"] < 100).all())
        assert bool((buffer.sample()["episode"] >= 100).all())
    assert buffer.storage.write_stats.waits == 0


@pytest.mark.sim
def test_the_device_writes_after_it_has_read_for_samples_on_other_streams(
    sim, device, accelerator, copy_stream
):
    buffer = pinned_buffer(device)
    buffer.extend(data(CAPACITY))
    new = on(device, data(CAPACITY, start=1000))
    new["index"] = index = torch.arange(CAPACITY).to(device)
    side = accelerator.Stream(device)
    accelerator.synchronize()
    with sim.detect():
        with sim.hold(copy_stream):
            with accelerator.stream(side):
                batch = buffer.sample()
            buffer.storage.set(index, new)
            written = threading.Thread(target=buffer.storage._in_flight.writes[0].wait)
            written.start()
            written.join(0.05)
            assert written.is_alive()
        written.join()
        accelerator.synchronize()
        assert bool((batch["episode"] < 100).all())
    assert bool((buffer.storage[:]["episode"] >= 100).all())


def test_no_leaf_is_sent_on_its_own(sim, device):
    buffer = pinned_buffer(device)
    buffer.extend(on(device, data(20)))
    new = on(device, data(20, start=20))
    torch.accelerator.synchronize()
    sim.reset_counts()
    buffer.extend(new)
    sim.synchronize(device)
    assert sim.counts().d2h.transfers == 2  # one kernel, and the number of the last row


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("on_device", [True, False])
def test_no_order_of_the_streams_gives_other_rows(sim, device, seed, on_device):
    sampler = DeviceRandomSampler(device) if on_device else None
    buffer = pinned_buffer(device, sampler=sampler)
    buffer.extend(data(CAPACITY))
    with sim.detect(), sim.schedule(seed):
        for step in range(1, 4):
            rows = torch.full((CAPACITY,), step)
            new = on(device, data(CAPACITY).set("episode", rows))
            before = buffer.sample()["episode"] + 0
            buffer.extend(new)
            new["episode"].fill_(-1)
            after = buffer.sample()["episode"] + 0
            if step > 1:
                assert bool((before == step - 1).all())
            assert bool((after == step).all())


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.exclude("pixels"),
        lambda rows: rows.set("observation", rows["observation"].requires_grad_()),
        lambda rows: torch.stack(list(rows.unbind(0))),
        lambda rows: TensorDict.lazy_stack(list(rows.unbind(0))),
    ],
    ids=["fewer leaves", "gradients", "stacked", "lazy stack"],
)
def test_what_the_device_cannot_write_the_host_writes(device, change):
    theirs, ours = torchrls_buffer(), pinned_buffer(device)
    first, rows = data(CAPACITY), data(20, start=30)
    for buffer in (theirs, ours):
        buffer.extend(first.clone())
    with torch.no_grad():
        theirs.extend(change(rows.clone()))
        ours.extend(change(on(device, rows.clone())))
    assert_same_tensordict(ours.storage[:], theirs.storage[:])
    assert sum(ours.storage.write_stats[:2]) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.set("pixels", rows["pixels"].float()),
        lambda rows: rows.set("pixels", rows["pixels"][:, :2]),
    ],
    ids=["other dtype", "other shape"],
)
def test_what_torchrl_refuses_is_refused(device, change):
    first, rows = data(30), data(20, start=30)
    errors = []
    for buffer, place in ((torchrls_buffer(), "cpu"), (pinned_buffer(device), device)):
        buffer.extend(first.clone())
        with pytest.raises((RuntimeError, KeyError)) as error:
            buffer.extend(change(rows.clone().to(place)))
        errors.append(error.type)
    assert errors[0] is errors[1]


def test_leaves_with_gaps_are_written(device):
    ours, theirs = pinned_buffer(device), torchrls_buffer()
    rows = data(40)
    theirs.extend(rows[::2].clone())
    ours.extend(on(device, data(2)))
    ours.empty()
    moved = on(device, rows)
    ours.extend(moved[::2])
    assert_same_tensordict(ours.storage[:].exclude("index"), theirs.storage[:].exclude("index"))


def test_a_storage_that_is_not_pinned_is_written_as_ever(device):
    storage = PackedLazyTensorStorage(CAPACITY, sample_device=device)
    buffer = PackedTensorDictReplayBuffer(storage=storage, batch_size=BATCH)
    buffer.extend(on(device, data(20)))
    assert storage.write_stats == (0, 1, 0, 1)
    assert torch.equal(storage[:]["episode"], data(20)["episode"])


def test_a_write_is_complete_although_the_index_of_a_sample_was_out_of_range(device):
    """A writer of torchrl counts rows before they are stored: the next sample raises the error."""
    bad = pinned_buffer(device, sampler=FixedSampler(torch.tensor([0, 50]).to(device)))
    bad.extend(data(30))
    buffer = pinned_buffer(device, sampler=FixedSampler(torch.arange(30, 38)))
    buffer.extend(data(30))
    bad.sample()
    torch.accelerator.synchronize()
    new = data(8)
    buffer.extend(on(device, new))
    assert buffer.storage.write_stats.by_device == 1
    with pytest.raises(IndexError, match="index 50 is out of bounds"):
        buffer.sample()
    assert len(buffer) == 38
    assert torch.equal(buffer.sample()["observation"].cpu(), new["observation"])


@pytest.mark.parametrize("access", ["write", "read"])
def test_what_the_device_cannot_do_does_not_make_the_host_wait_for_all_its_work(
    device, monkeypatch, access
):
    buffer = pinned_buffer(device, sampler=FixedSampler(torch.arange(8).to(device)))
    buffer.extend(data(CAPACITY))
    buffer.sample()
    waits = []
    monkeypatch.setattr(torch.accelerator, "synchronize", waits.append)
    for _ in range(3):
        if access == "write":  # the storage gets a leaf more
            buffer.extend(on(device, data(5).set("more", torch.zeros(5))))
        else:
            buffer.storage._storage["observation"].requires_grad_()
            buffer.sample()
    assert not waits
    assert buffer.storage.write_stats.by_host == 1 + (access == "write")
    assert buffer.storage.read_stats.moved_indices == 3 * (access == "read")


def test_an_interrupt_does_not_lose_the_last_row_written(device):
    buffer = pinned_buffer(device)
    buffer.extend(data(20))
    buffer.storage.set(torch.arange(20, 24).to(device), on(device, data(4)))
    late = buffer.storage._late_cursor.last

    class Interrupted:
        def get(self) -> None:
            raise KeyboardInterrupt

    buffer.storage._late_cursor.last = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        _ = buffer.storage._last_cursor_index
    buffer.storage._late_cursor.last = late
    assert buffer.storage._last_cursor_index == 23
