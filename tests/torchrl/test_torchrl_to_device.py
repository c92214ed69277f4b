"""The transform that moves samples: its results, its waits, and where it may not be used."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
from support import assert_same
from tensordict import TensorDict
from tensordict_same import assert_same_tensordict
from thread_support import in_a_thread

pytest.importorskip("torchrl")

from torchrl.data import LazyTensorStorage, ReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import Compose
from torchrl.testing.mocking_classes import ContinuousActionVecMockEnv

from tdcopier.torchrl import PackedTensorDictReplayBuffer, ToDevice


def batch() -> TensorDict:
    return TensorDict({"x": torch.randn(8, 3), "n": {"y": torch.arange(8)}}, [8])


def as_it_is(transform: ToDevice) -> ToDevice:
    return transform


def pickled(transform: ToDevice) -> ToDevice:
    return pickle.loads(pickle.dumps(transform))


def cloned(transform: ToDevice) -> ToDevice:
    return transform.clone()


@pytest.mark.parametrize("given", [as_it_is, pickled, copy.deepcopy, copy.copy, cloned])
@pytest.mark.parametrize("run", [lambda call: call(), in_a_thread], ids=["main", "thread"])
def test_it_gives_what_to_gives(device, given, run):
    transform = given(ToDevice(device, min_packed_alignment_bytes=64))
    td = batch()
    assert_same_tensordict(run(lambda: transform(td)), td.to(device))
    assert transform.options == {"min_packed_alignment_bytes": 64}


def test_data_that_are_no_tensordicts_move_too(device):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    buffer.append_transform(ToDevice(device))
    buffer.extend({"x": torch.randn(10, 3), "y": torch.arange(10)})
    got, info = buffer.sample(return_info=True)
    rows = {key: leaf[info["index"]].to(device) for key, leaf in buffer.storage[:].items()}
    assert_same(dict(sorted(got.items())), dict(sorted(rows.items())))


def test_what_is_stored_stays_where_it_is(device):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4, transform=ToDevice(device))
    buffer.extend(batch())
    assert buffer.storage[:].device == torch.device("cpu")
    assert buffer.sample().device == torch.device(device)


def test_a_device_without_index_is_the_one_that_is_current_when_it_is_made(
    device, other_device, accelerator
):
    with accelerator.device(1):
        transform = ToDevice(torch.device(device).type)
    assert transform(batch()).device == torch.device(other_device)
    assert in_a_thread(lambda: transform(batch())).device == torch.device(other_device)


def test_the_main_thread_does_not_wait_for_the_device(stall, device, copy_stream):
    transform = ToDevice(device)
    td = batch()
    with stall(copy_stream):
        moved = transform(td)
        assert not copy_stream.query()
    assert_same_tensordict(moved, td.to(device))


def test_in_another_thread_the_batch_has_arrived(stall, device, copy_stream):
    transform = ToDevice(device)
    arrived = threading.Event()

    def move() -> None:
        transform(batch())
        arrived.set()

    thread = threading.Thread(target=move)
    with stall(copy_stream):
        thread.start()
        assert not arrived.wait(0.03)
    thread.join(30)
    assert arrived.is_set()
    assert copy_stream.query()


@pytest.mark.sim
@pytest.mark.parametrize("where", ["alone", "in a buffer"])
def test_what_it_is_given_may_be_overwritten_when_it_returns(sim, device, where):
    """For example a pinned buffer that a loop, or an earlier transform, fills for each batch."""
    reused = TensorDict({"x": torch.ones(4, 1 << 18).pin_memory()}, [4])
    transform = ToDevice(device)

    def sample_from_a_buffer(batch: TensorDict) -> TensorDict:
        buffer = PackedTensorDictReplayBuffer(storage=LazyTensorStorage(4), batch_size=4)
        buffer.extend(TensorDict({"y": torch.zeros(4)}, [4]))
        buffer.append_transform(lambda drawn: batch)
        buffer.append_transform(transform)
        return buffer.sample()

    with sim.pace("h2d", latency_us=200_000):
        moved = transform(reused) if where == "alone" else sample_from_a_buffer(reused)
        reused["x"].fill_(-1)
    assert moved["x"].unique().tolist() == [1]


def test_mistakes_are_told_when_it_is_made(device):
    with pytest.raises(ValueError, match="max_packed_chunk_bytes"):
        ToDevice(device, max_packed_chunk_bytes=0)
    with pytest.raises(TypeError, match="non_blocking"):
        ToDevice(device, non_blocking=True)
    with pytest.raises((ValueError, RuntimeError)):
        ToDevice("nonsense")


FORMS = {
    "alone": lambda it: it,
    "composed": Compose,
    "composed twice": lambda it: Compose(Compose(it)),
    "composed often": lambda it: Compose(Compose(Compose(it))),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_a_buffer_takes_it_within_others(device, form):
    buffer = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    buffer.append_transform(form(ToDevice(device)))
    buffer.extend(batch())
    assert buffer.sample().device == torch.device(device)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_environments_are_told_to_use_another(device, form):
    with pytest.raises(TypeError, match="use torchrl's DeviceCastTransform"):
        TransformedEnv(ContinuousActionVecMockEnv(), form(ToDevice(device)))


def test_it_shows_its_device_and_options(device):
    shown = repr(ToDevice(device, use_pinned_staging=False))
    assert shown == f"ToDevice({device}, use_pinned_staging=False)"
