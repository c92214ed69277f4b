"""Samplers whose index, or whose priorities, are on the device: the host waits for neither."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tensordict_same import assert_same_tensordict

pytest.importorskip("torchrl")

from priority_trees import use_trees_in_python
from torchrl.data import (
    LazyTensorStorage,
    PrioritizedSampler,
    RandomSampler,
    TensorDictReplayBuffer,
    TensorDictRoundRobinWriter,
)
from torchrl_support import BATCH, CAPACITY, data

from tdcopier.torchrl import (
    DeviceRandomSampler,
    PackedLazyTensorStorage,
    PackedPrioritizedSampler,
    PackedTensorDictReplayBuffer,
)
from tdcopier.torchrl._samplers import MOST_LATE, _own

pytestmark = pytest.mark.usefixtures("no_collections")


def pinned_buffer(device: str, sampler: Any, **options: Any) -> PackedTensorDictReplayBuffer:
    storage = PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True)
    return PackedTensorDictReplayBuffer(
        storage=storage, batch_size=BATCH, sampler=sampler, **options
    )


# ---- an index on the device ----------------------------------------------------------------------


class FixedSampler(RandomSampler):
    """Returns one index, and notes that it was asked."""

    def __init__(self, index: torch.Tensor) -> None:
        self.index = index

    def sample(self, storage: Any, batch_size: int) -> tuple[Any, dict[str, Any]]:
        return self.index, {}


@pytest.mark.parametrize("rows", [44, CAPACITY])
@pytest.mark.parametrize("prefetch", [None, 2])
def test_rows_are_those_that_the_device_has_drawn(device, prefetch, rows):
    buffer = pinned_buffer(device, DeviceRandomSampler(device), prefetch=prefetch)
    buffer.extend(data(rows))
    stored = buffer.storage[:]
    seen = set()
    for _ in range(20):
        batch = buffer.sample()
        assert batch["index"].device == torch.device(device)
        index = batch["index"].cpu()
        seen |= set(index.tolist())
        for key in ("pixels", "observation", ("next", "reward")):
            assert torch.equal(batch[key].cpu(), stored[index][key])
    assert max(seen) < rows
    assert len(seen) > rows / 2
    assert buffer.storage.read_stats.moved_indices == 0


def test_the_batch_has_the_tensor_that_the_sampler_made(device):
    index = torch.tensor([3, -1, 7, 7]).to(device)
    buffer = pinned_buffer(device, FixedSampler(index))
    buffer.extend(data(44))
    batch, info = buffer.sample(return_info=True)
    assert batch["index"] is index
    assert info["index"].tolist() == [3, -1, 7, 7]
    assert info["index"].device == torch.device("cpu")  # as torchrl's
    assert batch["episode"].tolist() == [0, 4, 0, 0]  # -1 is the last row in use


@pytest.mark.parametrize("rows", [44, CAPACITY])
def test_a_sample_does_not_wait_for_its_index(stall, device, rows):
    index = torch.zeros(BATCH, dtype=torch.int64, device=device)
    numbers = torch.arange(BATCH).pin_memory()
    buffer = pinned_buffer(device, FixedSampler(index))
    buffer.extend(data(rows))
    buffer.sample()
    torch.accelerator.synchronize()
    stream = torch.accelerator.current_stream()
    with stall(stream):
        index.copy_(numbers, non_blocking=True)
        batch = buffer.sample()
        assert not stream.query()
    assert torch.equal(batch["episode"].cpu(), torch.arange(BATCH) // 10)


@pytest.mark.parametrize("bad", [44, -45, 59])
def test_a_row_that_is_not_in_use_is_reported(device, bad):
    index = torch.tensor([0, bad]).to(device)
    buffer = pinned_buffer(device, FixedSampler(index))
    buffer.extend(data(44))
    buffer.sample()
    torch.accelerator.synchronize()
    with pytest.raises(IndexError, match=rf"index {bad} is out of bounds: there are 44 rows"):
        buffer.sample()
    buffer.sampler.index = torch.tensor([1]).to(device)
    torch.accelerator.synchronize()
    for _ in range(2):  # the first may report the second index, which was read
        try:
            batch = buffer.sample()
        except IndexError:
            continue
    assert batch["index"].tolist() == [1]


def test_a_writer_with_generations_works(device):
    writer = TensorDictRoundRobinWriter(track_generations=True)
    buffer = pinned_buffer(device, DeviceRandomSampler(device), writer=writer)
    buffer.extend(data(44))
    batch = buffer.sample()
    assert torch.equal(batch["index_generation"].cpu(), torch.zeros(BATCH, dtype=torch.int64))
    assert torch.equal(
        batch["episode"], buffer.storage[:]["episode"][batch["index"].cpu()].to(device)
    )


def test_an_index_is_moved_and_counted_if_the_device_cannot_read_the_rows(device):
    buffer = pinned_buffer(device, FixedSampler(torch.tensor([5, 36]).to(device)))
    buffer.extend(data(44))
    buffer.storage._storage["observation"].requires_grad_()
    batch = buffer.sample()
    assert batch["episode"].tolist() == [0, 3]
    assert batch["index"].tolist() == [5, 36]
    assert buffer.storage.read_stats.moved_indices == 1


def test_a_device_sampler_refuses_what_it_cannot_sample(device):
    buffer = pinned_buffer(device, DeviceRandomSampler(device))
    with pytest.raises(RuntimeError, match="Cannot sample from an empty storage"):
        buffer.sample()
    storage = PackedLazyTensorStorage(CAPACITY, ndim=2, sample_device=device, pinned=True)
    buffer = PackedTensorDictReplayBuffer(
        storage=storage, batch_size=BATCH, sampler=DeviceRandomSampler(device)
    )
    buffer.extend(data(CAPACITY, ndim=2))
    with pytest.raises(ValueError, match="needs a storage of one dimension; this one has 2"):
        buffer.sample()


def test_a_generator_on_the_device_repeats_the_draws(device):
    drawn = []
    for _ in range(2):
        generator = torch.Generator(device).manual_seed(3)
        buffer = pinned_buffer(device, DeviceRandomSampler(device), generator=generator)
        buffer.extend(data(CAPACITY))
        drawn.append([buffer.sample()["index"].tolist() for _ in range(3)])
    assert drawn[0] == drawn[1]


def test_a_device_sampler_works_with_torchrls_own_classes(device):
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), batch_size=BATCH, sampler=DeviceRandomSampler(device)
    )
    buffer.extend(data(44))
    batch = buffer.sample()
    assert torch.equal(batch["episode"], buffer.storage[:]["episode"][batch["index"].cpu()])


# ---- priorities from the device ------------------------------------------------------------------

PRIORITIZED = pytest.mark.usefixtures("trees_in_python")


@pytest.fixture
def trees_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    use_trees_in_python(monkeypatch)


def prioritized(device: str, ours: bool, **options: Any) -> TensorDictReplayBuffer:
    made: Any = PackedPrioritizedSampler if ours else PrioritizedSampler
    sampler = made(CAPACITY, 0.7, 0.5, **options)
    buffer = pinned_buffer(device, sampler, generator=torch.Generator().manual_seed(5))
    buffer.extend(data(CAPACITY))
    return buffer


def td_error(batch: Any, step: int) -> torch.Tensor:
    return (batch["episode"].cpu() + 1.0) * (step + 1)


def train(buffer: Any, steps: int, extend: Callable[[Any, int], Any] | None = None) -> list[Any]:
    """Samples, gives priorities from the device, and extends; returns the batches."""
    batches = []
    for step in range(steps):
        batch = buffer.sample()
        batches.append(batch.cpu())
        batch["td_error"] = td_error(batch, step).to(batch.device)
        buffer.update_tensordict_priority(batch)
        if extend is not None:
            extend(buffer, step)
    return batches


EXTENSIONS: dict[str, Any] = {
    "none": None,
    "host": lambda buffer, step: buffer.extend(data(7, start=7 * step)),
    "device": lambda buffer, step: buffer.extend(
        data(7, start=7 * step).to(buffer.storage.sample_device)
    ),
    "one row": lambda buffer, step: buffer.add(data(1, start=step)[0]),
    "priorities of its own": lambda buffer, step: buffer.extend(
        data(7).set("td_error", torch.full((7,), step + 20.0))
    ),
}


@PRIORITIZED
@pytest.mark.parametrize("extend", EXTENSIONS.values(), ids=list(EXTENSIONS))
@pytest.mark.parametrize("within", [False, True])
def test_samples_are_those_of_torchrls_sampler(device, extend, within):
    buffers = [
        prioritized(device, ours, max_priority_within_buffer=within) for ours in (True, False)
    ]
    got, expected = (train(buffer, 12, extend) for buffer in buffers)
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_tensordict(ours.exclude("observation"), theirs.exclude("observation"))
    ours, theirs = (buffer.sampler.state_dict() for buffer in buffers)
    for tree in ("_sum_tree", "_min_tree"):
        assert torch.equal(ours[tree].values, theirs[tree].values)
    assert buffers[0].sampler.priority_stats.late >= 12
    # torchrl forgets the maximum for each CUDA index, which it does not look into.
    forgets = within and torch.device(device).type == "cuda" and extend is EXTENSIONS["device"]
    if not forgets:
        assert buffers[0].sampler.default_priority == buffers[1].sampler.default_priority


@PRIORITIZED
def test_an_update_does_not_wait_for_its_priorities(stall, device):
    buffer = prioritized(device, ours=True, priority_delay=1)
    static = torch.zeros(BATCH, device=device)
    values = [torch.full((BATCH,), 100.0 * (step + 1)).pin_memory() for step in range(3)]
    index = [torch.arange(12 * step, 12 * step + 12).to(device) for step in range(3)]
    stream = torch.accelerator.current_stream()
    buffer.sample()
    torch.accelerator.synchronize()
    with stall(stream):
        for step in range(2):  # a graph writes the same tensor again in each step
            static.copy_(values[step], non_blocking=True)
            buffer.update_priority(index[step], static)
        static.copy_(values[2], non_blocking=True)
        assert not stream.query()
        assert buffer.sampler._sum_tree[torch.arange(24)].eq(1).all()
    buffer.sample()  # applies the first, and leaves the second
    priorities = buffer.sampler._sum_tree[torch.arange(36)]
    assert priorities[:12].allclose(torch.tensor(100.0**0.7))
    assert priorities[12:].eq(1).all()
    state = buffer.sampler.state_dict()["_sum_tree"]
    assert state[torch.arange(12, 24)].allclose(torch.tensor(200.0**0.7))
    assert state[torch.arange(24, 36)].eq(1).all()


@pytest.mark.sim
@PRIORITIZED
def test_the_stream_may_overwrite_priorities_after_an_update(sim, device):
    buffer = prioritized(device, ours=True)
    index, priority = torch.arange(12).to(device), torch.ones(12, device=device)
    with sim.detect():
        for step in range(4):
            priority.fill_(step + 1.0)
            buffer.update_priority(index, priority)
            priority.fill_(-1.0)
        torch.accelerator.synchronize()
    state = buffer.sampler.state_dict()["_sum_tree"]
    assert state[torch.arange(12)].allclose(torch.tensor(4.0**0.7))


@PRIORITIZED
@pytest.mark.parametrize("delay", [0, 1, 3])
def test_a_sample_leaves_out_as_many_updates_as_it_may(stall, device, delay):
    """Whether they have arrived or not, so that time decides nothing."""
    buffer = prioritized(device, ours=True, priority_delay=delay)
    buffer.sample()
    for step in range(5):
        index = torch.tensor([step]).to(device)
        buffer.update_priority(index, torch.tensor([50.0]).to(device))
        torch.accelerator.synchronize()
        buffer.sample()
        applied = int(buffer.sampler._sum_tree[torch.arange(5)].gt(1).sum())
        assert applied == max(0, step + 1 - delay)


@PRIORITIZED
def test_with_a_delay_a_sample_does_not_wait_for_the_latest_update(stall, device, reading_stream):
    buffer = prioritized(device, ours=True, priority_delay=1)
    buffer.sample()
    index, priority = torch.arange(12).to(device), torch.rand(12).to(device)
    torch.accelerator.synchronize()
    with stall(reading_stream):
        buffer.update_priority(index, priority)
        buffer.sample()
        assert not reading_stream.query()
    assert buffer.sampler.priority_stats == (1, 0)


@PRIORITIZED
def test_index_and_priorities_travel_together(sim, device):
    buffer = prioritized(device, ours=True)
    index, priority = torch.arange(12).to(device), torch.rand(12).to(device)
    buffer.sample()
    torch.accelerator.synchronize()
    sim.reset_counts()
    buffer.update_priority(index, priority)
    torch.accelerator.synchronize()
    assert sim.counts().d2h.transfers <= 2  # one for each dtype
    assert sim.counts().d2h.nbytes == 12 * 8 + 12 * 4


@PRIORITIZED
def test_priorities_on_the_host_are_applied_at_once_and_after_those_before(device):
    buffer = prioritized(device, ours=True)
    buffer.update_priority(torch.tensor([1]), torch.tensor([9.0]))
    assert buffer.sampler.priority_stats.late == 0
    buffer.update_priority(torch.tensor([1]).to(device), torch.tensor([5.0]).to(device))
    mine = torch.tensor([7.0])
    buffer.update_priority(torch.tensor([1]), mine)
    mine.fill_(1)  # the caller may
    assert buffer.sampler.priority_stats.late == 2
    buffer.sample()
    assert buffer.sampler._sum_tree[torch.tensor([1])].allclose(torch.tensor([7.0**0.7]))


@PRIORITIZED
@pytest.mark.parametrize(("delay", "updates", "adds"), [(40, 40, 1), (1, 1, 200)])
def test_other_calls_between_do_not_apply_updates_early(device, delay, updates, adds):
    buffer = prioritized(device, ours=True, priority_delay=delay)
    buffer.sample()
    for step in range(updates):
        index = torch.tensor([step % 50]).to(device)
        buffer.update_priority(index, torch.tensor([50.0]).to(device))
        for _ in range(adds):
            buffer.sampler.extend(torch.tensor([55]).to(device))
    buffer.sample()
    assert buffer.sampler._sum_tree[torch.arange(50)].le(1).all()


@PRIORITIZED
def test_calls_after_an_update_are_bounded_too(device, monkeypatch):
    monkeypatch.setattr("tdcopier.torchrl._samplers.MOST_CALLS", 100)
    buffer = prioritized(device, ours=True, priority_delay=1)
    buffer.update_priority(torch.tensor([1]).to(device), torch.ones(1).to(device))
    for _ in range(300):
        buffer.sampler.extend(torch.tensor([55]).to(device))
        assert len(buffer.sampler._late.calls) <= 100


@PRIORITIZED
def test_arrays_of_a_late_call_may_be_changed_at_once(device):
    buffer = prioritized(device, ours=True)
    buffer.update_priority(torch.tensor([1]).to(device), torch.tensor([5.0]).to(device))
    index, priority = np.array([2]), np.array([7.0], np.float32)
    buffer.sampler.update_priority(index, priority)
    index[:], priority[:] = 3, 1
    buffer.sample()
    assert buffer.sampler._sum_tree[torch.tensor([2])].allclose(torch.tensor([7.0**0.7]))


def test_all_parts_of_a_late_index_are_copied():
    parts = torch.tensor([1, 2]), np.array([3, 4])
    index, priority = _own((parts, 2.0))
    parts[0].zero_()
    parts[1][:] = 0
    assert [part.tolist() for part in index] == [[1, 2], [3, 4]]
    assert priority == 2.0


@PRIORITIZED
@pytest.mark.parametrize("delay", [0, 1])
def test_a_batch_on_the_device_is_stored_without_a_wait(stall, device, reading_stream, delay):
    sampler = PackedPrioritizedSampler(CAPACITY, 0.7, 0.5, priority_delay=delay)
    buffer = pinned_buffer(device, sampler)
    buffer.extend(data(CAPACITY))
    buffer.sample()
    new = data(8).to(device)
    torch.accelerator.synchronize()
    with stall(reading_stream):
        buffer.extend(new)  # hangs if the host waits for its row numbers
    assert sampler.priority_stats.waits == 0
    buffer.sample()


@PRIORITIZED
def test_late_updates_are_bounded(device):
    buffer = prioritized(device, ours=True)
    for step in range(3 * MOST_LATE):
        buffer.update_priority(torch.tensor([step % 9]).to(device), torch.ones(1).to(device))
        assert len(buffer.sampler._late.calls) <= MOST_LATE


@PRIORITIZED
@pytest.mark.parametrize(
    "look",
    [
        lambda sampler, path: pickle.loads(pickle.dumps(sampler))._sum_tree,
        lambda sampler, path: sampler.state_dict()["_sum_tree"],
        lambda sampler, path: setattr(sampler, "alpha", 1.0) or sampler._sum_tree,
        lambda sampler, path: sampler.default_priority and sampler._sum_tree,
    ],
    ids=["pickle", "state_dict", "alpha", "default_priority"],
)
def test_whatever_depends_on_priorities_sees_all(device, look, tmp_path):
    buffer = prioritized(device, ours=True)
    buffer.update_priority(torch.tensor([4]).to(device), torch.tensor([50.0]).to(device))
    power = 1.0 if "alpha" in look.__code__.co_consts else 0.7
    assert look(buffer.sampler, tmp_path)[torch.tensor([4])].allclose(torch.tensor(50.0**power))


@PRIORITIZED
def test_a_loaded_or_emptied_sampler_forgets_what_was_late(device):
    buffer, other = (prioritized(device, ours=True) for _ in range(2))
    for clear in (lambda: buffer.sampler.load_state_dict(other.sampler.state_dict()), buffer.empty):
        buffer.update_priority(torch.tensor([4]).to(device), torch.tensor([50.0]).to(device))
        clear()
        assert buffer.sampler._sum_tree[torch.tensor([4])].item() <= 1
        assert not buffer.sampler._late.calls


@PRIORITIZED
def test_an_error_of_a_late_update_is_raised_once(device):
    buffer = prioritized(device, ours=True)
    buffer.update_priority(torch.tensor([4, 5]).to(device), torch.ones(3).to(device))
    with pytest.raises(RuntimeError, match="priority should be a number or an iterable"):
        buffer.sample()
    buffer.sample()


@PRIORITIZED
@pytest.mark.parametrize("delay", [-1, MOST_LATE + 1])
def test_a_delay_out_of_range_is_refused(delay):
    with pytest.raises(ValueError, match=f"must be from 0 to {MOST_LATE}, got {delay}"):
        PackedPrioritizedSampler(CAPACITY, 0.7, 0.5, priority_delay=delay)
