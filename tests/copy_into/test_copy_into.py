"""Filling an existing tree: values, counts, versions, and shared memory."""

from __future__ import annotations

import collections
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from support import same_bytes

import tdcopier
from tdcopier import _C, workloads


def batch(device: str, seed: int = 0) -> Any:
    tree = workloads.detection_batch(samples=3, seed=1)
    return workloads.map_tensors(tree, lambda leaf: changed(leaf, seed).to(device))


def changed(leaf: torch.Tensor, seed: int) -> torch.Tensor:
    if leaf.dtype == torch.bool:
        return leaf ^ bool(seed % 2)
    return leaf + seed


def assert_filled(destination: Any, source: Any) -> None:
    got, wanted = workloads.leaves(destination), workloads.leaves(source)
    assert len(got) == len(wanted)
    for leaf, other in zip(got, wanted, strict=True):
        assert leaf.dtype == other.dtype
        assert same_bytes(leaf, other)


def total(stats: tdcopier.stats.CopyStats) -> int:
    return sum(stats[:4])


def test_a_batch_fills_another_in_every_direction(way):
    source, destination = batch(way[0], seed=5), batch(way[1])
    leaves = workloads.leaves(destination)
    addresses = [leaf.data_ptr() for leaf in leaves]
    handle = tdcopier.start_copy_into(source, destination)
    assert handle.get() is destination
    assert handle.wait() is destination
    assert handle.ready()
    assert_filled(destination, source)
    assert [leaf.data_ptr() for leaf in leaves] == addresses
    assert handle.stats.packed_leaves == total(handle.stats) == len(leaves)


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("background", [True, False])
def test_large_leaves_arrive_with_every_option(way, pinned, background):
    source = [torch.randn(1500, 1000).to(way[0]), torch.randn(70_000).to(way[0])]
    destination = [torch.zeros_like(leaf, device=way[1]) for leaf in source]
    handle = tdcopier.start_copy_into(
        source, destination, use_pinned_staging=pinned, use_background_thread=background
    )
    handle.get()
    assert_filled(destination, source)
    assert handle.stats.alone_leaves == total(handle.stats) == 2


def test_views_with_gaps_are_filled_and_what_lies_between_is_left(way):
    whole = torch.full((3, 40, 50), 7.0, device=way[1])
    destination = [whole[0, 3:20, 5:17], whole[1, ::2, ::3], whole[2].t()[:, 1:5]]
    shapes = [leaf.shape for leaf in destination]
    source = [torch.randn(shape).to(way[0]) for shape in shapes]
    tdcopier.start_copy_into(source, destination).get()
    expected = torch.full((3, 40, 50), 7.0)
    beside = [expected[0, 3:20, 5:17], expected[1, ::2, ::3], expected[2].t()[:, 1:5]]
    for leaf, values in zip(beside, source, strict=True):
        leaf.copy_(values)
    assert same_bytes(whole, expected)


def test_large_views_with_gaps_are_filled(way):
    whole = torch.full((700, 302), 7.0, device=way[1])
    source = torch.randn(300, 700).to(way[0])
    tdcopier.start_copy_into([source], [whole.t()[1:301]]).get()
    assert same_bytes(whole[:, 1:301], source.t())
    assert whole[:, 0].cpu().tolist() == whole[:, 301].cpu().tolist() == [7.0] * 700


def test_sources_with_gaps_repeats_and_another_order_of_dimensions_arrive(way):
    base = torch.arange(480, dtype=torch.int64).to(way[0]).view(2, 3, 8, 10)
    source = [
        base[:, :, ::2, 1:4],
        base[:1].expand(4, 3, 8, 10),
        base.contiguous(memory_format=torch.channels_last),
        base.permute(3, 1, 0, 2),
    ]
    destination = [torch.zeros(leaf.shape, dtype=leaf.dtype, device=way[1]) for leaf in source[:3]]
    destination.append(
        torch.zeros(8, 2, 3, 10, dtype=torch.int64, device=way[1]).permute(3, 2, 1, 0)
    )
    tdcopier.start_copy_into(source, destination).get()
    assert_filled(destination, source)


def test_one_call_fills_leaves_everywhere_from_everywhere(device, other_device):
    places = ["cpu", device, other_device]
    source = {(a, b): torch.randn(33).to(a) for a in places for b in places}
    destination = {(a, b): torch.zeros(33, device=b) for a in places for b in places}
    handle = tdcopier.start_copy_into(source, destination)
    handle.wait()
    handle.get()
    for key, leaf in destination.items():
        assert same_bytes(leaf, source[key]), key
    assert handle.stats.packed_leaves == 9


DTYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]


def test_every_width_of_element_arrives(way):
    source = [torch.arange(13).to(dtype).to(way[0]) for dtype in DTYPES]
    destination = [torch.zeros(2, 13, dtype=dtype, device=way[1]) for dtype in DTYPES]
    tdcopier.start_copy_into(source, [leaf[1] for leaf in destination]).get()
    assert_filled([leaf[1] for leaf in destination], source)
    for leaf in destination:
        assert not leaf[0].cpu().to(torch.complex128).any()


def test_scalars_and_empty_leaves_count_and_fit(way):
    source = [torch.tensor(3.0).to(way[0]), torch.zeros(0, 4).to(way[0])]
    destination = [torch.tensor(1.0, device=way[1]), torch.zeros(0, 4, device=way[1])]
    handle = tdcopier.start_copy_into(source, destination)
    handle.get()
    assert destination[0].item() == 3
    assert handle.stats.packed_leaves == total(handle.stats) == 2


def test_many_leaves_that_lie_apart_arrive_by_one_transfer_and_a_scatter(device):
    source = [torch.full((n,), float(n)) for n in range(1, 100)]
    destination = [torch.zeros(n, device=device) for n in range(1, 100)]
    handle = tdcopier.start_copy_into(source, destination)
    handle.get()
    assert_filled(destination, source)
    assert handle.stats.transfers == handle.stats.chunks == 1


@pytest.mark.sim
def test_the_chunks_of_an_earlier_copy_are_filled_by_a_transfer_each(device, sim):
    first = workloads.detection_batch()
    destination = tdcopier.copy(first, device)
    source = workloads.map_tensors(first, lambda leaf: changed(leaf, 1))
    before = sim.counts().h2d
    handle = tdcopier.start_copy_into(source, destination)
    handle.get()
    after = sim.counts().h2d
    assert (handle.stats.packed_leaves, handle.stats.transfers, handle.stats.chunks) == (528, 3, 0)
    assert after.transfers - before.transfers == 3
    assert after.nbytes - before.nbytes == handle.stats.transfer_bytes
    assert_filled(destination, source)


@pytest.mark.sim
@pytest.mark.parametrize("lies", ["apart", "in chunks", "with gaps"])
def test_stats_are_what_the_device_counts(way, sim, lies):
    source = [torch.randn(n).to(way[0]) for n in [*range(1, 40), 100_000, 1_200_000]]
    if lies == "in chunks" and way[1] != "cpu":
        destination = tdcopier.copy([leaf.cpu() for leaf in source], way[1])
    elif lies == "with gaps":
        destination = [torch.zeros(leaf.numel(), 2, device=way[1])[:, 0] for leaf in source]
    else:
        destination = [torch.zeros_like(leaf, device=way[1]) for leaf in source]
    before = sim.counts()
    handle = tdcopier.start_copy_into(source, destination)
    handle.get()
    after = sim.counts()
    names = ["h2d", "d2h", "d2d"]
    moved = [getattr(after, name).transfers - getattr(before, name).transfers for name in names]
    sent = [getattr(after, name).nbytes - getattr(before, name).nbytes for name in names]
    assert sum(moved) == handle.stats.transfers
    assert sum(sent) == handle.stats.transfer_bytes
    assert_filled(destination, source)


def test_pinned_destinations_are_filled(device):
    source = [torch.randn(300_000).to(device), torch.randn(3).to(device)]
    destination = [torch.zeros(300_000).pin_memory(), torch.zeros(3).pin_memory()]
    handle = tdcopier.start_copy_into(source, destination)
    handle.get()
    assert_filled(destination, source)
    assert handle.stats.transfers == 2


@pytest.mark.parametrize("origin", ["host", "device"])
def test_arrays_are_filled_and_fill(request, origin):
    place = "cpu" if origin == "host" else request.getfixturevalue("device")
    arrays = {
        "plain": np.zeros((3, 4), np.float32),
        "reversed": np.zeros((3, 4), np.float32)[::-1, ::-2],
        "fortran": np.zeros((3, 4), np.int16, order="F"),
        "other byte order": np.zeros(5, ">i4"),
        "empty": np.zeros((0, 2), np.float64),
    }
    tensors = {
        name: torch.arange(array.size).reshape(array.shape).to(_dtype_of(array)).to(place)
        for name, array in arrays.items()
    }
    tdcopier.start_copy_into(tensors, arrays).get()
    for name, array in arrays.items():
        assert array.tolist() == tensors[name].cpu().tolist(), name
    back = {name: torch.zeros_like(leaf) for name, leaf in tensors.items()}
    tdcopier.start_copy_into(arrays, back).get()
    for name, leaf in back.items():
        assert same_bytes(leaf, tensors[name]), name


def _dtype_of(array: np.ndarray[Any, Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, array.dtype.newbyteorder("="))).dtype


@pytest.mark.parametrize("how", ["numpy", "torch", "tensordict"])
def test_memory_mapped_destinations_are_on_the_disk(tmp_path, device, how):
    file = tmp_path / "values"
    values = torch.arange(100_000, dtype=torch.float32)
    if how == "numpy":
        mapped: Any = np.memmap(file, np.float32, "w+", shape=(100_000,))
    elif how == "torch":
        mapped = torch.from_file(str(file), shared=True, size=100_000)
    else:
        from tensordict import MemoryMappedTensor

        mapped = MemoryMappedTensor.zeros(100_000, dtype=torch.float32, filename=str(file))
    for source in (values, (values + 1).to(device)):
        handle = tdcopier.start_copy_into([source], [mapped])
        handle.get()
        assert np.fromfile(file, np.float32).tolist() == source.cpu().tolist()
        assert handle.stats.alone_leaves == 1


def test_containers_fit_by_how_their_children_are_reached():
    Pair = collections.namedtuple("Pair", "left right")
    one, zero = torch.ones(2), torch.zeros(2)
    for source, destination in [
        ({"a": one, "b": -one}, {"b": zero.clone(), "a": zero.clone()}),
        ({"a": one}, collections.OrderedDict(a=zero.clone())),
        (collections.defaultdict(list, a=one, b=-one), {"b": zero.clone(), "a": zero.clone()}),
        ([one, -one], (zero.clone(), zero.clone())),
        (Pair(one, -one), Pair(zero.clone(), zero.clone())),
        ([one, "name", None], [zero.clone(), "other", 3]),
    ]:
        handle = tdcopier.start_copy_into(source, destination)
        assert handle.get() is destination
        if isinstance(source, dict):
            assert all(torch.equal(destination[key], source[key]) for key in source)
        else:
            for left, right in zip(source, destination, strict=True):
                assert not isinstance(left, torch.Tensor) or torch.equal(left, right)
    assert handle.stats.opaque_leaves == 2


def test_a_single_leaf_is_a_tree():
    destination = torch.zeros(3)
    assert tdcopier.start_copy_into(torch.ones(3), destination).get() is destination
    assert destination.tolist() == [1, 1, 1]


def test_tensordicts_are_filled(way):
    from tensordict import TensorDict

    def make(place: str, value: float) -> Any:
        inner = TensorDict({"x": torch.full((4, 2), value), "n": torch.arange(4)}, [4])
        return TensorDict({"a": torch.full((4,), value), "in": inner, "name": "run"}, [4]).to(place)

    source, destination = make(way[0], 3.0), make(way[1], 0.0)
    destination.lock_()
    handle = tdcopier.start_copy_into(source, destination)
    assert handle.get() is destination
    assert destination["a"].tolist() == [3.0] * 4
    assert destination["in", "x"].tolist() == [[3.0] * 2] * 4
    assert (handle.stats.packed_leaves, handle.stats.delegated_leaves) == (3, 0)


def test_a_leaf_that_is_its_own_destination_is_reused_and_not_touched(device):
    leaf, other = torch.ones(3, device=device), torch.zeros(3, device=device)
    array = np.ones(3)
    version = leaf._version
    handle = tdcopier.start_copy_into(
        [leaf, array, leaf.view(3)], [leaf, torch.from_numpy(array), leaf]
    )
    handle.get()
    assert leaf._version == version
    assert (handle.stats.reused_leaves, handle.stats.transfers) == (3, 0)
    assert tdcopier.start_copy_into([leaf], [other]).get()[0].tolist() == [1, 1, 1]


def test_what_is_not_plain_is_left_to_copy_(way):
    from torch.testing._internal.two_tensor import TwoTensor

    source = [
        torch.ones(3).to(way[0]).requires_grad_(),
        torch.eye(3).to(way[0]).to(torch.complex64).conj(),
        TwoTensor(torch.ones(2).to(way[0]), torch.ones(2).to(way[0])),
    ]
    destination = [
        torch.zeros(3, device=way[1]),
        torch.zeros(3, 3, dtype=torch.complex64, device=way[1]),
        TwoTensor(torch.zeros(2, device=way[1]), torch.zeros(2, device=way[1])),
    ]
    handle = tdcopier.start_copy_into(source, destination)
    handle.get()
    assert handle.stats.delegated_leaves == total(handle.stats) == 3
    assert destination[0].requires_grad  # as after copy_: the gradient function is recorded
    assert same_bytes(destination[0], source[0])
    assert same_bytes(destination[1], source[1])
    assert same_bytes(destination[2].a, source[2].a)


def test_under_a_torch_mode_every_leaf_is_left_to_copy_(device):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    destination = torch.zeros(3, device=device)
    with Watch():
        handle = tdcopier.start_copy_into([torch.ones(3)], [destination])
    handle.get()
    assert handle.stats.delegated_leaves == 1
    assert "copy_.default" in seen
    assert destination.tolist() == [1, 1, 1]


def test_without_gradients_a_parameter_is_filled(device):
    parameter = torch.nn.Parameter(torch.zeros(3, device=device))
    with torch.no_grad():
        handle = tdcopier.start_copy_into([torch.ones(3)], [parameter])
    handle.get()
    assert parameter.tolist() == [1, 1, 1]
    assert handle.stats.packed_leaves == 1


def test_data_of_many_buffers_goes_through_one(device):
    """Windows wait for the only staging buffer, in both directions."""
    tdcopier.limits.set_staging_bytes(_C.STAGING_BUFFER_BYTES)
    source = torch.randn(5_000_000)
    there = torch.zeros(5_000_000, device=device)
    back = torch.zeros(5_000_000)
    tdcopier.start_copy_into([source], [there]).get()
    tdcopier.start_copy_into([there], [back]).get()
    assert torch.equal(source, back)
    assert _C.staging_bytes(device) <= _C.STAGING_BUFFER_BYTES


class Shown:
    """Shows a new view of its tensor at each access, which only the caller keeps alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_versions_move_of_tensors_that_only_the_walk_has(registry):
    """Even if code of another leaf's class runs meanwhile, which releases returned references."""
    seen: list[weakref.ref[torch.Tensor]] = []

    def flatten(shown: Shown) -> tuple[list[torch.Tensor], None]:
        view = shown.tensor.view(-1)
        seen.append(weakref.ref(view))
        return [view], None

    class Calls(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.copy_:
                tdcopier.copy([torch.ones(2)], "cpu")
                alive.append(seen[-1]() is not None)
            return super().__torch_function__(func, types, args, kwargs or {})

    alive: list[bool] = []
    tdcopier.containers.register(Shown, flatten, lambda children, _: Shown(children[0]))
    destination = [Shown(torch.zeros(4)), torch.zeros(3).as_subclass(Calls)]
    tdcopier.start_copy_into([Shown(torch.ones(4)), torch.ones(3)], destination).get()
    assert alive == [True]
    assert destination[0].tensor.tolist() == [1] * 4
    assert destination[0].tensor._version == 1
