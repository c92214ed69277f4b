"""Each way in which a result is made: what is done with it later works as with that of `.to()`."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import cloudpickle
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from catalogue import DTYPES
from tensordict import TensorDict

import tdcopier

Batch = dict[str, torch.Tensor]

ROWS = 6
SIZE_SLACK_BYTES = 1024


def batch() -> Batch:
    """Leaves of three dtypes, with odd numbers of bytes, an empty one, and one of another order."""
    return {
        "reward": torch.rand(ROWS, 3),
        "done": torch.arange(ROWS) % 2 == 0,
        "obs": torch.rand(ROWS, 5),
        "pixels": torch.randint(255, (ROWS, 3, 3, 7), dtype=torch.uint8).permute(0, 3, 1, 2),
        "none": torch.empty(ROWS, 0),
        "step": torch.arange(ROWS),
        "last": torch.ones(ROWS, dtype=torch.bool),
    }


def _placed(device: str) -> Batch:
    return {key: leaf.to(device) for key, leaf in batch().items()}


def _reused(source: Batch, target: str) -> Batch:
    prepared = tdcopier.prepare(source, target, reuse_outputs=True)
    for _ in range(3):
        result = prepared.start_copy(source).get()
    return result


def _gathered(target: str) -> Batch:
    storage = {key: leaf.contiguous() for key, leaf in batch().items() if leaf.numel()}
    return tdcopier.start_gather(storage, torch.arange(ROWS), target).get()


def _collated() -> Batch:
    samples = [{key: leaf[i] for key, leaf in batch().items()} for i in range(ROWS)]
    return tdcopier.collate(samples)


def _tensordict(source: Batch, target: str) -> Batch:
    moved = tdcopier.to(TensorDict(source, batch_size=[ROWS]), target)
    return dict(moved.items())


TO_HOST: dict[str, Callable[[str], Batch]] = {
    "copy": lambda device: tdcopier.copy(_placed(device), "cpu"),
    "pageable": lambda device: tdcopier.copy(_placed(device), "cpu", use_pinned_staging=False),
    "without threads": lambda device: tdcopier.copy(
        _placed(device), "cpu", use_background_thread=False
    ),
    "reused": lambda device: _reused(_placed(device), "cpu"),
    "TensorDict": lambda device: _tensordict(_placed(device), "cpu"),
    "gather": lambda _: _gathered("cpu"),
    "collate": lambda _: _collated(),
}
TO_DEVICE: dict[str, Callable[[str], Batch]] = {
    "copy": lambda device: tdcopier.copy(batch(), device),
    "between": lambda device: tdcopier.copy(_placed(device), f"{device[:-1]}1"),
    "reused": lambda device: _reused(batch(), device),
    "TensorDict": lambda device: _tensordict(batch(), device),
    "gather": lambda device: _gathered(device),
    "prefetch": lambda device: next(iter(tdcopier.prefetch([batch()], device))),
}
WAYS = {
    **{f"to host: {name}": way for name, way in TO_HOST.items()},
    **{f"to device: {name}": way for name, way in TO_DEVICE.items()},
}
on_host = pytest.mark.parametrize("way", TO_HOST)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def of_dtype(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Returns elements whose bytes are all 1, which is a value of every dtype."""
    elements = math.prod(shape)
    return torch.ones(elements * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(shape)


def made_by(way: str, device: str) -> Batch:
    if way.endswith("between") and torch.get_device_module(device).device_count() < 2:
        pytest.skip("needs two devices")
    return WAYS[way](device)


def assert_same(ours: Batch, theirs: Batch) -> None:
    assert ours.keys() == theirs.keys()
    for key, leaf in theirs.items():
        mine = ours[key]
        assert (mine.dtype, mine.shape, mine.stride()) == (leaf.dtype, leaf.shape, leaf.stride())
        assert torch.equal(mine.cpu(), leaf.cpu()), key


def clones(result: Batch) -> Batch:
    """The result of `.to()` has memory of its own for each leaf."""
    return {key: leaf.clone() for key, leaf in result.items()}


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data))


def _from_safetensors(result: Batch) -> Batch:
    plain = {key: leaf.contiguous() for key, leaf in result.items()}
    return safetensors.torch.load(safetensors.torch.save(plain))


def _through_a_module(result: Batch) -> Batch:
    class Holder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for key, leaf in result.items():
                self.register_buffer(key, torch.empty_like(leaf))

    module = Holder()
    module.load_state_dict(result, assign=True)
    return loaded(saved(module.state_dict()))


def torch_saves(dtype: torch.dtype) -> bool:
    try:
        saved(of_dtype(dtype, 2))
    except KeyError:  # "dtype torch.int1 is not recognized"
        return False
    return True


ROUND_TRIPS: dict[str, Callable[[Batch], Batch]] = {
    "torch.save": lambda result: loaded(saved(result)),
    "pickle": lambda result: pickle.loads(pickle.dumps(result)),
    "cloudpickle": lambda result: pickle.loads(cloudpickle.dumps(result)),
    "deepcopy": copy.deepcopy,
    "load_state_dict": _through_a_module,
}


@pytest.mark.parametrize("use", ROUND_TRIPS)
@pytest.mark.parametrize("way", WAYS)
def test_the_whole_comes_back_the_same(device, way, use):
    result = made_by(way, device)
    assert_same(ROUND_TRIPS[use](result), result)


@pytest.mark.parametrize("use", ROUND_TRIPS)
@pytest.mark.parametrize("way", WAYS)
def test_each_leaf_alone_comes_back_the_same(device, way, use):
    result = made_by(way, device)
    for key, leaf in result.items():
        assert_same(ROUND_TRIPS[use]({key: leaf}), {key: leaf})


@on_host
def test_safetensors_keeps_the_values(device, way):
    result = TO_HOST[way](device)
    theirs = {key: leaf.contiguous() for key, leaf in result.items()}
    assert_same(_from_safetensors(result), theirs)


@on_host
def test_a_distributed_checkpoint_keeps_the_values(device, way, tmp_path):
    result = TO_HOST[way](device)
    read = {key: torch.empty_like(leaf) for key, leaf in result.items()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        dcp.save(dict(result), checkpoint_id=tmp_path)
        dcp.load(read, checkpoint_id=tmp_path)
    assert_same(read, result)


@on_host
@pytest.mark.parametrize("dump", [saved, pickle.dumps, cloudpickle.dumps])
def test_it_takes_as_much_room_as_the_result_of_to(device, way, dump):
    result = TO_HOST[way](device)
    assert len(dump(result)) <= len(dump(clones(result))) + SIZE_SLACK_BYTES
    for leaf in result.values():
        assert len(dump(leaf)) <= len(dump(leaf.clone())) + SIZE_SLACK_BYTES


def test_five_hundred_leaves_are_pickled_once_each(device):
    source = [torch.full((50,), float(i), device=device) for i in range(500)]
    result = tdcopier.copy(source, "cpu")
    assert len(pickle.dumps(result)) <= 1.05 * len(pickle.dumps([leaf.cpu() for leaf in source]))


@on_host
def test_a_storage_has_the_bytes_of_its_leaf(device, way):
    for leaf in TO_HOST[way](device).values():
        assert leaf.untyped_storage().nbytes() - leaf.nbytes in range(16)
        assert leaf.storage_offset() == 0


@pytest.mark.parametrize("alignment", [16, 64, 4096])
def test_a_storage_has_no_gap_of_a_large_alignment(device, alignment):
    for sizes in ([3], [5, 1 << 17], [2, 7]):
        source = [torch.ones(size, device=device) for size in sizes]
        for leaf in tdcopier.copy(source, "cpu", min_packed_alignment_bytes=alignment):
            assert leaf.untyped_storage().nbytes() - leaf.nbytes in range(16)
            assert leaf.storage_offset() == 0


GROWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "resize_": lambda leaf: leaf.resize_(4 * leaf.numel() + 4).fill_(1),
    "out=": lambda leaf: torch.ones(4 * leaf.numel() + 4, out=leaf.resize_(0)),
    "untyped_storage().resize_": lambda leaf: leaf.untyped_storage().resize_(0),
    "set_": lambda leaf: leaf.set_(),
}


@on_host
@pytest.mark.parametrize("how", GROWN)
def test_a_leaf_changes_size_without_its_neighbours(device, way, how):
    result = TO_HOST[way](device)
    for key, leaf in result.items():
        others = {other: value for other, value in result.items() if other != key}
        before = clones(others)
        if how != "untyped_storage().resize_" or leaf.numel():
            GROWN[how](leaf)
        assert_same(others, before)
        result[key] = before.setdefault(key, torch.zeros(1))  # others are compared no more to it


@on_host
def test_a_leaf_that_grows_keeps_its_values(device, way):
    result = TO_HOST[way](device)
    for key in ("reward", "done", "step"):
        leaf, before = result[key], result[key].clone()
        leaf.resize_(10 * ROWS, *leaf.shape[1:])
        assert torch.equal(leaf[:ROWS], before)


@on_host
def test_memory_that_is_shared_with_other_processes_is_the_leaf_alone(device, way):
    result = TO_HOST[way](device)
    before = clones(result)
    result["obs"].share_memory_()
    assert result["obs"].is_shared()
    assert not result["reward"].is_shared()
    assert_same(result, before)


def _sums(queue: Any, back: Any) -> None:
    back.put({key: leaf.sum().item() for key, leaf in queue.get().items()})


@on_host
def test_a_queue_takes_it_to_another_process(device, way):
    result = TO_HOST[way](device)
    processes = torch.multiprocessing.get_context("fork")
    queue, back = processes.SimpleQueue(), processes.SimpleQueue()
    queue.put(result)
    child = processes.Process(target=_sums, args=(queue, back))
    child.start()
    assert back.get() == {key: leaf.sum().item() for key, leaf in result.items()}
    child.join()


@pytest.mark.parametrize("way", WAYS)
def test_changes_in_place_stay_in_one_leaf(device, way):
    result = made_by(way, device)
    before = clones(result)
    result["reward"].unsqueeze_(-1).squeeze_(-1).t_().mul_(2)
    result["obs"].add_(1)
    result["done"].logical_not_()
    before["reward"] = before["reward"].t().mul(2)
    before["obs"] += 1
    before["done"] = ~before["done"]
    assert_same(result, before)


@pytest.mark.parametrize("to_host", [False, True])
def test_two_leaves_of_any_dtypes_are_saved_together_and_alone(device, to_host):
    dtypes = [dtype for dtype in DTYPES.values() if torch_saves(dtype)]
    assert len(dtypes) > 20
    for first, second in itertools.product(dtypes, repeat=2):
        source = {"a": of_dtype(first, 5, 3), "b": of_dtype(second, 5)}
        result = tdcopier.copy(source, device)
        if to_host:
            result = tdcopier.copy(result, "cpu")
        for some in (result, {"a": result["a"]}, {"b": result["b"]}):
            again = loaded(saved(some))
            for key, leaf in some.items():
                mine, theirs = again[key].cpu(), leaf.cpu()
                assert mine.dtype == theirs.dtype
                assert mine.view(torch.uint8).equal(theirs.view(torch.uint8))


@on_host
@pytest.mark.parametrize("key", ["reward", "done", "last"])
def test_a_lazy_clone_keeps_its_values_when_all_else_is_dropped(device, way, key):
    result = TO_HOST[way](device)
    expected = result[key].clone()
    with suppress(RuntimeError):  # torch makes lazy clones of its own allocators' memory only
        expected = torch._lazy_clone(result[key])
    values = expected.tolist()
    del result
    overwriting = [torch.full((1000,), 7.0) for _ in range(50)]
    assert expected.tolist() == values
    del overwriting


@pytest.mark.sim
@on_host
def test_a_transfer_from_one_leaf_keeps_the_memory_of_all(sim, device, way):
    """The block of pinned memory is found by any leaf that a transfer reads, not only by the
    first.
    """
    result = TO_HOST[way](device)
    if not result["last"].is_pinned():
        pytest.skip("this way gives pageable memory")
    expected = result["last"].clone()
    stream = torch.Stream(device)
    with sim.poison(), sim.hold(stream), torch.get_device_module(device).stream(stream):
        moved = result["last"].to(device, non_blocking=True)
        del result
        torch.empty(1 << 10, pin_memory=True).fill_(7)
    stream.synchronize()
    assert torch.equal(moved.cpu(), expected)
