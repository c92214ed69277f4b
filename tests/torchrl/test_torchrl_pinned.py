"""Packed storages that are pinned, so that the device reads their rows."""

from __future__ import annotations

import pickle

import pytest
import torch
from tensordict_same import assert_same_tensordict

pytest.importorskip("torchrl")

from torchrl_support import BATCH, CAPACITY, data, fill

from tdcopier.torchrl import PackedLazyTensorStorage, PackedTensorDictReplayBuffer


@pytest.mark.parametrize("prefetch", [None, 2])
def test_the_device_reads_rows_of_a_pinned_storage(device, prefetch):
    storage = PackedLazyTensorStorage(CAPACITY, sample_device=device, pinned=True)
    buffer = PackedTensorDictReplayBuffer(storage=storage, batch_size=BATCH, prefetch=prefetch)
    fill((buffer,), 44)
    for _ in range(6):
        batch = buffer.sample()
        rows = storage[batch["index"].cpu()]
        assert batch.device == torch.device(device)
        for key in rows.keys(include_nested=True, leaves_only=True):
            assert torch.equal(batch[key].cpu(), rows[key]), key
        assert storage._storage["observation"].is_pinned()
    fill((buffer,), 30)  # rows of a pinned storage are written as ever
    assert buffer.sample().device == torch.device(device)


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
