"""The memory beside a pickle of values: shared as it was, where it arrives, and never too much."""

from __future__ import annotations

import gc
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from pickled_support import HOST, Holder, assert_same, bytes_of, dump, passed_on
from support import memory_reference
from tensordict import TensorDict
from torch.testing._internal.two_tensor import TwoTensor

from tdcopier import _pickled_memory, _pickled_values
from tdcopier._pickled_memory import Views


class Labelled(torch.Tensor):
    """A subclass that adds nothing."""


def test_only_the_bytes_that_views_show_are_in_the_memory():
    large = torch.arange(1 << 24)
    values = [
        Holder(a=large[1000:1512]),
        large[5000:5512].as_subclass(Labelled),
        Holder(array=large.numpy()[9000:9512]),
        torch.nn.Parameter(large[20000:20512].double()),
    ]
    pickled, memory = dump(values)
    assert len(pickled) < 2048
    assert [run.numel() for run in memory] == [4096] * 4
    got = passed_on(values)
    assert_same([got[0].a, *got[1:2], got[3]], [values[0].a, *values[1:2], values[3]])
    assert np.array_equal(got[2].array, values[2].array)


def test_the_memory_is_a_view_of_the_values_where_it_is_one_run():
    tensor, array = torch.zeros(4), np.zeros(4, np.float32)
    pickled, memory = dump([tensor[1:3], array[::-1][:2], tensor.t()[3:]])
    tensor[:], array[:] = 1, 2
    got = _pickled_values.load(pickled, memory)
    assert [each.tolist() for each in got] == [[1, 1], [0, 0], [1]]  # a reversed array was copied
    got[0][0] = 5
    assert tensor.tolist() == [1, 5, 1, 1]


# ---- sharing -------------------------------------------------------------------------------------


def test_views_that_overlap_share_memory_again():
    base = torch.arange(16.0)
    values = [base[2:10], Holder(ints=base.view(torch.int32)[4:12]), base.numpy()[5:14:2]]
    _, memory = dump(values)
    assert [run.numel() for run in memory] == [12 * 4]
    got, held, array = passed_on(values)
    got[3] = 2.0
    assert held.ints[1] == torch.tensor(2.0).view(torch.int32)
    assert array[0] == 2.0


def test_storages_share_memory_with_their_tensors_again():
    base = torch.arange(4.0)
    values = [base[1:3], base.untyped_storage(), Holder(typed=base._typed_storage())]
    assert bytes_of(dump(values)[1]) == 16
    tensor, untyped, held = passed_on(values)
    tensor[0] = 7
    assert untyped.nbytes() == 16
    assert torch.empty(0).set_(untyped).tolist() == [0, 7, 2, 3]
    assert held.typed._untyped_storage.data_ptr() == untyped.data_ptr()


def test_a_part_of_a_storage_shares_memory_with_the_whole_again(device):
    storage = torch.arange(8, dtype=torch.uint8).to(device).untyped_storage()
    values = [torch.empty(0, dtype=torch.uint8, device=device).set_(storage[:3]) for _ in "ab"]
    values.append(torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[2:])
    got = passed_on(values, torch.device(device))
    assert [each.tolist() for each in got] == [[0, 1, 2], [0, 1, 2], [2, 3, 4, 5, 6, 7]]
    got[0][2] = 9
    assert [each.tolist() for each in got] == [[0, 1, 9], [0, 1, 9], [9, 3, 4, 5, 6, 7]]


def test_columns_of_a_wide_table_come_without_those_between_them():
    table = torch.arange(4000.0).view(4, 1000)
    columns = [table[:, 3], Holder(x=table[:, 8:10], y=table[:, 9]), table.numpy()[::-1, 20]]
    first, held, array = passed_on(columns)
    assert bytes_of(dump(columns)[1]) <= 16 + 4 * 3008 + 16
    assert (first.stride(), held.x.stride()) == ((1,), (1000, 1))
    held.x[2] = -1
    assert held.y.tolist() == [9, 1009, -1, 3009]
    assert first.tolist() == [3, 1003, 2003, 3003]
    assert array.tolist() == [3020, 2020, 1020, 20]


def test_views_of_smaller_and_larger_elements_are_aligned_together():
    base = torch.arange(64, dtype=torch.uint8)
    values = [base[3:5], base.view(torch.int64)[:2], base[1:].view(torch.uint8)[2:60:7]]
    got = passed_on(values)
    got[1][0] = -1
    assert got[0].tolist() == [255, 255]
    assert got[2].tolist() == [255, *range(10, 60, 7)]


def views_and_bases(rng: random.Random) -> list[Any]:
    """Returns tensors and arrays that show parts of few memories, some of them the same."""
    bases = [torch.arange(256, dtype=torch.uint8) for _ in range(rng.randrange(3))]
    bases.append(torch.from_numpy(np.arange(256, dtype=np.uint8)))
    made: list[Any] = []
    for _ in range(rng.randrange(1, 8)):
        base = rng.choice(bases)
        dtype = rng.choice([torch.uint8, torch.int16, torch.int64, torch.complex64])
        begin = rng.randrange(0, 192, dtype.itemsize)
        flat = base[begin : begin + rng.randrange(0, 256 - begin, 16)].view(dtype)
        rows = flat[: flat.numel() // 2 * 2].view(2, -1)
        column = base.view(8, 32)[:, rng.randrange(3, 6) :][:, : rng.randrange(1, 3)]
        gapped = [flat[::2], rows[:, ::3], column, column[::2]]
        view = rng.choice([flat, flat[1:], rows, rows.t(), rows[1], *gapped, *gapped])
        if rng.randrange(3) == 0:
            array = view.numpy()
            made.append(rng.choice([array, array[::-1]]))
        else:
            made.append(rng.choice([view, view, view.as_subclass(Labelled)]))
    return made


def bytes_shown(views: list[Any]) -> list[bytes]:
    arrays = [each if isinstance(each, np.ndarray) else each.numpy() for each in views]
    return [array.tobytes() for array in arrays]


def check_sharing(seed: int) -> None:
    """Writes through each view and its twin, and compares all views after each write."""
    rng = random.Random(seed)
    views = views_and_bases(rng)
    nest = [Holder(a=views[: len(views) // 2]), {"b": views[len(views) // 2 :]}]
    first, second = passed_on(nest)
    twins = [*first.a, *second["b"]]
    assert list(map(type, twins)) == list(map(type, views))
    assert bytes_of(dump(views)[1]) <= 3 * 256 + 16
    for number, (view, twin) in enumerate(zip(views, twins, strict=True)):
        assert bytes_shown(twins) == bytes_shown(views)
        assert (twin.shape, twin.dtype) == (view.shape, view.dtype)
        view[...] = twin[...] = number + 100
    assert bytes_shown(twins) == bytes_shown(views)


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_random_views_share_their_bytes_again_and_no_others(first):
    for seed in range(first, first + 100):
        check_sharing(seed)


def each_alone(views: Views) -> Any:
    return ([number] for number in range(len(views._views)))


def test_a_random_test_fails_where_views_do_not_share(monkeypatch):
    monkeypatch.setattr(Views, "_groups", each_alone)
    with pytest.raises(AssertionError):
        test_random_views_share_their_bytes_again_and_no_others(0)


def test_a_random_test_fails_where_views_that_share_bytes_are_taken_apart(monkeypatch):
    monkeypatch.setattr(_pickled_memory, "_share_bytes", lambda view, other: False)
    with pytest.raises(AssertionError):
        test_random_views_share_their_bytes_again_and_no_others(0)


def test_a_random_test_fails_where_a_run_begins_too_late(monkeypatch):
    monkeypatch.setattr(_pickled_memory, "_aligned_begin", lambda views: views[0].begin + 1)
    with pytest.raises((AssertionError, RuntimeError)):
        test_random_views_share_their_bytes_again_and_no_others(0)


# ---- where it arrives ----------------------------------------------------------------------------


def values_on(device: str) -> list[Any]:
    base = torch.arange(12.0).to(device)
    return [
        Holder(x=base[2:6], y=base[4:]),
        base[1::2].as_subclass(Labelled),
        torch.nn.Parameter(base[:2] + 1),
        TwoTensor(base * 2, base * 2),
        torch.complex(base, base).conj(),
        TensorDict({"x": base[:3], "n": {"e": torch.empty(3, 0).to(device)}}, device=device),
        TensorDict(device=device),
        torch.empty(2, 0).to(device),
    ]


def devices_of(values: list[Any]) -> set[torch.device]:
    wrapped, td = values[3], values[5]
    tensors = [values[0].x, values[0].y, *values[1:5], wrapped.a, td["x"], td["n", "e"], values[7]]
    return {each.device for each in [*tensors, td, td["n"], values[6]]}


def test_values_are_where_their_memory_is(device, other_device):
    values = values_on(device)
    for there in (device, other_device, "cpu"):
        got = passed_on(values, torch.device(device), there)
        assert devices_of(got) == {torch.device(there)}
        for each, wanted in zip(got, values_on(there), strict=True):
            if isinstance(each, torch.Tensor):
                assert_same(each, wanted.contiguous() if wanted.is_conj() else wanted)
        assert got[0].x.tolist() == [2, 3, 4, 5]
        got[0].x[2:] = -1
        assert got[0].y.tolist() == [-1, -1, *range(6, 12)]
        assert got[5]["x"].tolist() == [0, 1, 2]


def test_a_device_that_is_a_value_stays_what_it_is(device, other_device):
    (got, _) = passed_on(
        [Holder(d=torch.device(device)), values_on(device)], torch.device(device), other_device
    )
    assert got.d == torch.device(device)


def test_without_memory_the_device_is_known_too(device, other_device):
    values = [TensorDict(device=device), torch.empty(0).to(device)]
    td, empty = passed_on(values, torch.device(device), other_device)
    assert td.device == empty.device == torch.device(other_device)


def test_what_is_on_another_device_stays_there_and_in_the_pickle(device, other_device):
    for here, other in ((device, "cpu"), (device, other_device), ("cpu", device)):
        values = [torch.ones(3).to(other), Holder(x=torch.ones(3).to(here).as_subclass(Labelled))]
        _, memory = dump(values, torch.device(here))
        assert bytes_of(memory) == 12
        got = passed_on(values, torch.device(here))
        assert_same([got[0], got[1].x], [values[0], values[1].x])


def test_arrays_are_on_the_host_though_the_memory_is_on_a_device(device):
    array = np.arange(3)
    values = [Holder(array=array, x=torch.ones(2).to(device))]
    _, memory = dump(values, torch.device(device))
    assert bytes_of(memory) == 8
    (got,) = passed_on(values, torch.device(device))
    assert got.array.tolist() == [0, 1, 2]
    (got,) = passed_on([Holder(array=array)], HOST, device)
    assert got.array.tolist() == [0, 1, 2]


# ---- afterwards ----------------------------------------------------------------------------------


def test_what_arrives_is_pickled_and_saved_without_its_neighbours(tmp_path):
    values = [torch.arange(1000), Holder(x=torch.ones(3), y=torch.ones(2, dtype=torch.bool))]
    large, small = passed_on(values)
    assert len(pickle.dumps(small.x)) < 1000
    torch.save({"x": small.x, "y": small.y, "large": large}, tmp_path / "saved")
    again = torch.load(tmp_path / "saved")
    assert_same([again["x"], again["y"], again["large"]], [values[1].x, values[1].y, values[0]])
    with pytest.raises(RuntimeError, match="not resizable"):
        small.x.resize_(100)


def test_what_arrives_keeps_the_memory_and_the_memory_keeps_its_owner():
    tensor, array = torch.ones(100), np.ones(100)
    references = [memory_reference(tensor)]
    pickled, memory = dump([tensor[1:], array[1:]])
    del tensor, array
    gc.collect()
    got = _pickled_values.load(pickled, memory)
    del memory
    assert references[0]() is not None
    assert [each.tolist() for each in got] == [[1.0] * 99] * 2
    del got
    gc.collect()
    assert references[0]() is None


def test_memory_that_is_not_aligned_is_copied():
    pickled, (run,) = dump([torch.arange(4.0)])
    body = torch.zeros(17, dtype=torch.uint8)
    body[1:] = run
    (got,) = _pickled_values.load(pickled, [body[1:]])
    assert got.tolist() == [0, 1, 2, 3]
    assert got.data_ptr() % 4 == 0


def test_elements_across_each_other_arrive_with_their_values():
    data = np.arange(64, dtype=np.uint8)
    values = [torch.from_numpy(data[at : at + 32].view(np.int64)) for at in (0, 4)]
    got = passed_on(values)
    assert_same(got, values)
