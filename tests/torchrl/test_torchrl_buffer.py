"""The buffer: it never waits for the device, and samples are ordered on the caller's stream."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from support import run_python
from tensordict_same import assert_same_tensordict
from thread_support import at_once

pytest.importorskip("torchrl")

from torchrl.data import (
    LazyTensorStorage,
    ListStorage,
    ReplayBuffer,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers import Sequence
from torchrl_support import (
    BATCH,
    CAPACITY,
    SAMPLERS,
    WeightedSampler,
    data,
    fill,
    two_buffers,
)

from tdcopier import _copy
from tdcopier.torchrl import (
    PackedTensorDictReplayBuffer,
    ToDevice,
    _storage,
)

WAY = pytest.mark.parametrize("way", ["ToDevice", "sample_device"])


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns the handles of all copies and gathers."""
    given: list[Any] = []

    def note(start: Any) -> Any:
        def noted(*arguments: Any, **options: Any) -> Any:
            given.append(start(*arguments, **options))
            return given[-1]

        return noted

    monkeypatch.setattr(_copy, "start_copy", note(_copy.start_copy))
    monkeypatch.setattr(_storage, "start_gather", note(_storage.start_gather))
    return given


@WAY
@pytest.mark.parametrize("sampler", ["random", "weighted", "slices"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_sample_waits_for_no_copy(stall, device, copy_stream, way, sampler, prefetch):
    theirs, ours = two_buffers(device, way, "tensor", SAMPLERS[sampler], prefetch=prefetch)
    fill((theirs, ours), 44)
    assert_same_tensordict(ours.sample(), theirs.sample())
    with stall(copy_stream):
        batches = [ours.sample() for _ in range(2)]
        assert not copy_stream.query()
    for batch in batches:
        assert_same_tensordict(batch, theirs.sample())


@WAY
@pytest.mark.parametrize("sampler", ["weighted", "slices"])
def test_index_and_weights_travel_with_the_batch(device, handles, way, sampler):
    _, ours = two_buffers(device, way, "tensor", SAMPLERS[sampler])
    fill((ours,), 44)
    handles.clear()
    batch = ours.sample()
    assert {leaf.device for leaf in batch.values(True, True)} == {torch.device(device)}
    stats = handles[-1].stats
    leaves = list(batch.values(True, True))
    assert stats.packed_leaves + stats.alone_leaves >= len(leaves)  # a slice also has its info
    assert stats.delegated_leaves == 0
    moving = [handle.stats for handle in handles if handle.stats.transfers]
    assert [stats.transfers for stats in moving] == [stats.chunks]  # one copy, one chunk per dtype


def test_index_and_weights_follow_a_batch_that_moved_otherwise(device, handles):
    _, ours = two_buffers(device, "host", "tensor", WeightedSampler)
    ours.append_transform(lambda batch: batch.to(device))
    fill((ours,), 44)
    handles.clear()
    batch = ours.sample()
    assert batch["priority_weight"].device == torch.device(device)
    moving = [handle.stats for handle in handles if handle.stats.transfers]
    assert [stats.packed_leaves for stats in moving] == [4]


def test_where_the_last_of_several_transforms_goes_there_go_index_and_weights(device, handles):
    theirs, ours = two_buffers(device, "ToDevice", "tensor", WeightedSampler)
    ours.append_transform(ToDevice("cpu"))
    theirs.append_transform(lambda batch: batch.to("cpu"))
    fill((theirs, ours), 44)
    for _ in range(2):
        got, expected = ours.sample(), theirs.sample()
        for key in expected.keys(True, True):
            assert torch.equal(got[key], expected[key]), key
        assert got["priority_weight"].device == got.device == torch.device("cpu")


def test_without_device_index_and_weights_stay_where_they_were_made(device):
    theirs, ours = two_buffers(device, "ToDevice", "tensor", WeightedSampler)
    for buffer in (theirs, ours):
        buffer.append_transform(lambda batch: batch.clear_device_())
    fill((theirs, ours), 44)
    assert_same_tensordict(ours.sample(), theirs.sample())


def test_info_is_torchrls(device):
    pair = two_buffers(device, "ToDevice", "tensor", WeightedSampler)
    fill(pair, 44)
    (_, expected), (_, info) = (buffer.sample(return_info=True) for buffer in pair)
    assert list(info) == list(expected) == ["priority_weight", "flat", "beta", "index"]
    assert torch.equal(info["index"], expected["index"])
    assert info["index"].device == torch.device("cpu")


def test_a_locked_batch_stays_locked(device):
    for buffer in two_buffers(device, "ToDevice", "tensor", WeightedSampler):
        buffer.append_transform(lambda batch: batch.lock_())
        fill((buffer,), 44)
        assert buffer.sample().is_locked


def test_other_storages_of_torchrls_do_as_well(device):
    buffer = PackedTensorDictReplayBuffer(storage=ListStorage(20), batch_size=4)
    buffer.append_transform(ToDevice(device))
    buffer.extend(data(20))
    batch = buffer.sample()
    assert batch.device == torch.device(device)
    assert batch["index"].shape == (4,)


def test_what_a_transform_reads_from_the_storage_stays_on_the_host(device):
    _, ours = two_buffers(device, "sample_device", "tensor", SAMPLERS["random"])
    fill((ours,), 44)
    seen = []
    ours.append_transform(lambda batch: seen.append(ours.storage.get([1, 2])) or batch)
    assert ours.sample().device == torch.device(device)
    assert seen[0].device == torch.device("cpu")


@pytest.mark.parametrize("way", ["host", "ToDevice"])
def test_what_a_transform_reads_from_another_storage_stays_on_the_host(device, way):
    _, ours = two_buffers(device, way, "tensor", WeightedSampler)
    _, another = two_buffers(device, "sample_device", "tensor", SAMPLERS["random"])
    fill((ours, another), 44)
    seen = []
    ours.append_transform(lambda batch: seen.append(another.storage.get([1, 2])) or batch)
    where = ours.sample().device
    assert where == torch.device("cpu" if way == "host" else device)
    assert seen[0].device == torch.device("cpu")


# ---- order ---------------------------------------------------------------------------------------


@WAY
@pytest.mark.parametrize("prefetch", [0, 1])
def test_another_stream_than_the_one_that_transforms_sees_the_transformed_batch(
    stall, device, accelerator, copy_stream, way, prefetch
):
    _, ours = two_buffers(device, way, "tensor", SAMPLERS["random"], prefetch=prefetch)
    ours.append_transform(lambda batch: batch.set("again", batch["observation"].clone()))
    fill((ours,), 44)
    ours.sample()
    side = accelerator.Stream(device)
    with stall(accelerator.default_stream(device)), stall(copy_stream), accelerator.stream(side):
        # The first was drawn before; the second is drawn while none of its work can have run.
        for _ in range(2):
            batch = ours.sample()
        seen = batch["again"].clone()
        rows = batch["observation"].clone()
        index = batch["index"].clone()
    accelerator.synchronize()
    stored = ours.storage[:]["observation"][index.cpu()]
    assert torch.equal(rows.cpu(), stored)
    assert torch.equal(seen.cpu(), stored)


@pytest.mark.sim
@pytest.mark.hazardous  # it has no hazard, but its own detector
@WAY
@pytest.mark.parametrize("prefetch", [0, 1])
def test_memory_that_a_side_stream_still_reads_is_not_given_away(
    sim, device, accelerator, way, prefetch
):
    _, ours = two_buffers(device, way, "tensor", SAMPLERS["random"], prefetch=prefetch)
    ours.append_transform(lambda batch: batch.set("again", batch["observation"].clone()))
    fill((ours,), 44)
    side = accelerator.Stream(device)
    with sim.detect():
        for _ in range(6):
            with accelerator.stream(side), sim.hold(side):
                batch = ours.sample()
                seen = [leaf.clone() for leaf in batch.values(True, True)]
                del batch
                ours.sample()  # which would take the memory
            del seen
            accelerator.synchronize()  # otherwise copies would wait for hand-overs on a held stream


# ---- torchrl's own features ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "drawn",
    [lambda self, size: (data(size), {"index": 0}), lambda self, size: data(size)],
    ids=["another info", "no info"],
)
def test_a_torchrl_that_draws_otherwise_is_refused(monkeypatch, drawn):
    buffer = PackedTensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=BATCH)
    buffer.extend(data(44))
    monkeypatch.setattr(TensorDictReplayBuffer, "_sample", drawn)
    with pytest.raises(RuntimeError, match=r"does not know .*: use TensorDictReplayBuffer"):
        buffer.sample()


def test_a_torchrl_that_does_not_call_the_method_is_refused(monkeypatch):
    buffer = PackedTensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=BATCH)
    buffer.extend(data(44))
    monkeypatch.setattr(ReplayBuffer, "sample", lambda *_, **__: (data(4), {"index": 0}))
    with pytest.raises(RuntimeError, match=r"sample\(\) does not call _sample\(\)"):
        buffer.sample()


def test_data_that_are_no_tensordicts_are_refused():
    buffer = PackedTensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), batch_size=BATCH)
    buffer.storage.set(range(20), torch.arange(20))
    with pytest.raises(RuntimeError, match="the batch is a Tensor, which cannot hold index"):
        buffer.sample()


@pytest.mark.parametrize(
    "change",
    [lambda batch: batch[:5], lambda batch: batch.reshape(4, 3)],
    ids=["fewer rows", "more dimensions"],
)
def test_a_transform_that_changes_the_shape_is_named(device, change):
    _, ours = two_buffers(device, "ToDevice", "tensor", WeightedSampler)
    ours.append_transform(change)
    fill((ours,), 44)
    with pytest.raises(RuntimeError, match=r"'priority_weight' of shape \(12,\) does not fit"):
        ours.sample()


def test_the_sample_unit_passes_for_what_it_was():
    unit = Sequence(length=2)
    buffer = PackedTensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), batch_size=BATCH, sample_unit=unit
    )
    assert isinstance(buffer._sample_unit, Sequence)
    assert buffer._sample_unit.length == 2
    again = pickle.loads(pickle.dumps(buffer._sample_unit))
    assert isinstance(again, Sequence)
    assert again.length == 2


@pytest.mark.parametrize("buffer_class", [TensorDictReplayBuffer, PackedTensorDictReplayBuffer])
def test_what_is_no_sample_unit_is_refused_when_the_buffer_is_made(buffer_class):
    with pytest.raises(TypeError, match="must be a SampleUnit instance, got ABCMeta"):
        buffer_class(storage=LazyTensorStorage(CAPACITY), sample_unit=Sequence)


def pickled(buffer: Any, fresh: Any) -> Any:
    again = pickle.loads(pickle.dumps(buffer))
    again.set_rng(torch.Generator().manual_seed(1))  # as in the other buffer
    buffer.set_rng(torch.Generator().manual_seed(1))
    return again


def loaded(buffer: Any, fresh: Any) -> Any:
    fresh.load_state_dict(buffer.state_dict())
    return fresh


@pytest.mark.parametrize(
    ("way", "prefetch", "restored"),
    [
        ("host", 1, pickled),
        ("ToDevice", 0, pickled),
        ("sample_device", 0, pickled),
        # Pickle does not support tensors of the simulated device, and the queue holds some.
        pytest.param("ToDevice", 1, pickled, marks=pytest.mark.cuda),
        ("ToDevice", 1, loaded),
        ("sample_device", 1, loaded),
    ],
)
def test_a_restored_buffer_gives_the_samples_that_were_drawn_already(
    device, way, prefetch, restored
):
    ours, fresh = (
        two_buffers(device, way, "tensor", WeightedSampler, prefetch=prefetch)[1] for _ in range(2)
    )
    fill((ours, fresh), 44)
    ours.sample()
    again = restored(ours, fresh)
    for _ in range(1 + prefetch):
        got, expected = again.sample(), ours.sample()
        assert (got == expected).all()
        assert list(got.keys(True, True)) == list(expected.keys(True, True))


def test_threads_that_draw_at_once_do_not_mix_their_samples(device):
    _, ours = two_buffers(device, "ToDevice", "tensor", WeightedSampler)
    fill((ours,), 44)

    def draw(_: int) -> None:
        for _ in range(30):
            batch, info = ours.sample(return_info=True)
            assert torch.equal(batch["index"].cpu(), info["index"])
            assert torch.equal(batch["pixels"].cpu()[:, 0, 0].long(), info["index"] % 256)

    at_once(4, draw)


def test_importing_tdcopier_imports_no_torchrl():
    assert "[]" in run_python(
        """
        import sys, tdcopier
        print([name for name in sys.modules if name.split(".")[0] in ("torchrl", "tensordict")])
        """
    )


def test_an_unknown_option_of_the_transform_is_told_in_its_name(device):
    with pytest.raises(TypeError, match=r"^ToDevice\(\) got .* 'devicex': its options are use"):
        ToDevice(device, devicex=device)
