"""Ctrl-C while a buffer is written to or sampled: the next sample is as without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interrupts import Interrupt, Interrupter, in_time, interrupted_everywhere
from tensordict_same import assert_same_tensordict

pytest.importorskip("torchrl")

from torchrl.data import RandomSampler
from torchrl_support import SAMPLERS, data, fill, two_buffers

from tdcopier.torchrl import (
    DeviceRandomSampler,
    PackedLazyTensorStorage,
    PackedTensorDictReplayBuffer,
)
from tdcopier.torchrl._current_sample import current

# Torchrl's own code is not interrupted, nor are single lines: ending a sample only sets an
# attribute, and no signal comes between a call and that.
KIND = "calls"


def rows_of(storage: Any) -> Any:
    return storage.get(torch.tensor([3, 1, -1]))


@pytest.mark.parametrize("way", ["ToDevice", "sample_device"])
@pytest.mark.parametrize("sampler", ["random", "weighted", "slices"])
def test_after_an_interrupted_sample_the_next_one_is_right(device, way, sampler):
    _, ours = two_buffers(device, way, "tensor", SAMPLERS[sampler])
    fill((ours,), 44)
    expected = rows_of(ours.storage)
    everything = ours.storage[:]

    def scene(interrupter: Interrupter) -> None:
        with interrupter:
            try:
                ours.sample()
            except RuntimeError as error:  # tensordict's, if its `with` was interrupted
                if not isinstance(error.__context__, Interrupt):
                    raise
        assert current.sampling is None
        assert_same_tensordict(rows_of(ours.storage), expected)  # on the host, as usual
        batch, info = in_time(lambda: ours.sample(return_info=True))
        assert batch.device == torch.device(device)
        drawn = everything[info["index"]]
        assert torch.equal(batch["pixels"].cpu(), drawn["pixels"])
        assert torch.equal(batch["index"].cpu().reshape(-1), torch.as_tensor(drawn_index(info)))

    assert interrupted_everywhere(KIND, scene) > 20


def drawn_index(info: dict[Any, Any]) -> torch.Tensor:
    index = info["index"]
    return (torch.stack(index, -1) if isinstance(index, tuple) else index).reshape(-1)


@pytest.mark.sim
@pytest.mark.parametrize("sampler", [RandomSampler, lambda: DeviceRandomSampler("sim:0")])
def test_after_an_interrupted_sample_of_pinned_rows_writes_wait_for_the_device(
    sim, device, copy_stream, sampler
):
    storage = PackedLazyTensorStorage(60, sample_device=device, pinned=True)
    buffer = PackedTensorDictReplayBuffer(storage=storage, batch_size=12, sampler=sampler())
    buffer.extend(data(60))
    view = storage[:]["episode"]
    buffer.sample()

    def scene(interrupter: Interrupter) -> None:
        view.fill_(1)
        sim.synchronize(device)
        with sim.detect():
            sim.busy(0.001, copy_stream)
            with interrupter:
                buffer.sample()
            with storage.writing():  # a row that is read later is found
                view.fill_(2)
            sim.synchronize(device)
        assert bool((in_time(buffer.sample)["episode"] == 2).all())

    assert interrupted_everywhere(KIND, scene) > 20


@pytest.mark.sim
def test_after_an_interrupted_write_by_the_device_reads_wait_for_it(sim, device, reading_stream):
    storage = PackedLazyTensorStorage(60, sample_device=device, pinned=True)
    buffer = PackedTensorDictReplayBuffer(storage=storage, batch_size=12)
    buffer.extend(data(60))
    new = data(60, start=1000).set("index", torch.arange(60)).to(device)
    buffer.sample()

    def scene(interrupter: Interrupter) -> None:
        storage.set(torch.arange(60), data(60).set("index", torch.arange(60)))
        sim.synchronize(device)
        sim.busy(0.001, reading_stream)
        with interrupter:
            storage.set(new["index"], new)
        found = storage[:]["episode"].clone()
        sim.synchronize(device)
        assert torch.equal(found, storage[:]["episode"])  # and not parts of both
        assert bool((found < 100).all()) or bool((found >= 100).all())
        assert in_time(buffer.sample).device == torch.device(device)

    assert interrupted_everywhere(KIND, scene) > 10


@pytest.mark.parametrize("way", ["ToDevice", "sample_device"])
def test_after_an_interrupted_extend_the_buffer_is_as_before_or_after_it(device, way):
    def scene(interrupter: Interrupter) -> None:
        _, ours = two_buffers(device, way, "tensor", SAMPLERS["random"])
        fill((ours,), 44)
        before = rows_of(ours.storage)
        with interrupter:
            ours.extend(data(3, start=44))
        found = rows_of(ours.storage)
        assert_same_tensordict(found[:2], before[:2])
        assert in_time(ours.sample).device == torch.device(device)

    interrupted_everywhere(KIND, scene)
