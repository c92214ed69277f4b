"""Memory that is pinned in place while its tensors get other memory, or other calls use it."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_same

import tdcopier

LARGE = 1 << 20  # elements: such a leaf has pages of its own


def large(value: float = 0.0) -> torch.Tensor:
    return torch.full((LARGE,), float(value))


def resized(data: torch.Tensor) -> None:
    data.resize_(2 * LARGE)[LARGE:] = 1


def with_other_data(data: torch.Tensor) -> None:
    data.data = large(1)


def with_another_storage(data: torch.Tensor) -> None:
    data.set_(large(1).untyped_storage())


def shared(data: torch.Tensor) -> None:
    data.share_memory_()


def sent_to_another_process(data: torch.Tensor) -> None:
    ForkingPickler.dumps(data)


CHANGES = [resized, with_other_data, with_another_storage, shared, sent_to_another_process]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_tensor_that_gets_other_memory_leaves_the_pinned_one(device, change):
    data = large(1)
    begin = data.data_ptr()
    other = large(2)
    pinned = tdcopier.pin_memory_({"x": data, "other": other}, device)
    change(data)
    assert data.data_ptr() != begin
    assert not data.is_pinned()
    assert_same(tdcopier.copy(data, device), data.to(device))
    assert data.eq(1).all()
    # No other tensor gets the memory while it is pinned.
    assert all(large().data_ptr() != begin for _ in range(5))
    assert other.is_pinned()
    pinned.close()
    assert not other.is_pinned()
    resized(other)


def test_parameters_of_a_model_that_is_converted(device):
    model = torch.nn.Linear(700, 600)
    with tdcopier.pin_memory_(list(model.parameters()), device):
        model.half()
        assert not model.weight.is_pinned()
        assert_same(tdcopier.copy(model.weight.detach(), device), model.weight.detach().to(device))


def test_lazy_clones_get_memory_of_their_own_when_they_are_written(device):
    data = large(1)
    clone = torch._lazy_clone(data)
    with tdcopier.pin_memory_([clone], device):
        clone.fill_(2)
        assert clone.is_pinned()
        assert_same(tdcopier.copy(clone, device), clone.to(device))
    assert data.eq(1).all()


def test_two_handles_and_a_storage_that_takes_the_others_place(device):
    first, second = large(1), large(2)
    a, b = tdcopier.pin_memory_(first, device), tdcopier.pin_memory_(second, device)
    first.set_(second)
    a.close()
    assert second.is_pinned()
    resized(second)
    b.close()
    assert not second.is_pinned()


def test_an_array_over_pinned_memory_stays_valid(device):
    data = large(1)
    pinned = tdcopier.pin_memory_(data, device)
    array = data.numpy()
    pinned.close()
    with pytest.raises(RuntimeError, match="resiz"):  # as of any tensor that has an array
        data.resize_(4 * LARGE)
    assert (array == 1).all()


def test_a_tensor_that_keeps_its_own_handle_is_collected(device):
    data = large(1)
    data.handle = tdcopier.pin_memory_(data, device)
    view = torch.empty(0).set_(data.untyped_storage())
    assert view.is_pinned()
    del data
    gc.collect()
    assert not view.is_pinned()


@pytest.mark.parametrize("pin_one", [False, True])
def test_of_a_packed_result_the_whole_chunk_is_pinned(device, pin_one):
    tree = {f"{i}": torch.full((40_000,), float(i)) for i in range(6)}
    here = tdcopier.copy(tdcopier.copy(tree, device), "cpu", use_pinned_staging=False)
    with tdcopier.pin_memory_(here["1"] if pin_one else here, device):
        assert all(leaf.is_pinned() for leaf in here.values())
        assert_same(tdcopier.copy(here, device), {k: v.to(device) for k, v in tree.items()})
    assert not here["3"].is_pinned()


def test_an_array_over_a_tensor_pins_the_whole_tensor(device):
    table = torch.arange(1000 * 512.0).view(1000, 512)
    with tdcopier.pin_memory_([table[:10].numpy()], device) as pinned:
        assert pinned.nbytes == table.nbytes
        assert table[900:].is_pinned()
        assert_same(tdcopier.copy(table, device), table.to(device))


def test_memory_of_which_the_beginning_is_pinned_is_staged(device):
    array = np.arange(1000 * 512.0, dtype=np.float32).reshape(1000, 512)
    whole, begin = torch.from_numpy(array), torch.from_numpy(array[:10])
    index = torch.arange(0, 1000, 7)
    on_device = whole.to(device)
    with tdcopier.pin_memory_(begin, device):
        assert_same(tdcopier.copy(whole, device), on_device)
        assert_same(tdcopier.copy([array], device), [on_device])
        handle = tdcopier.start_gather({"t": whole}, index, device)
        assert_same(handle.get(), {"t": on_device[index.to(device)]})
        assert handle.stats.rows_in_place == 0
        tdcopier.copy_into(on_device + 1, whole)
        assert whole.eq(on_device.cpu() + 1).all()


def test_pinned_arrays_are_read_in_place(device):
    array = np.full(LARGE, 3.0, np.float32)
    with tdcopier.pin_memory_([array], device):
        handle = tdcopier.start_copy([array], device)
        assert_same(handle.get(), [torch.from_numpy(array).to(device)])
        assert handle.stats.transfers == 1


def test_files_are_refused_however_they_were_mapped(device, tmp_path):
    path = tmp_path / "numbers"
    torch.save({"a": large()}, tmp_path / "saved")
    mapped = np.memmap(path, np.float32, "w+", shape=(LARGE,))
    for bad in (
        torch.from_numpy(mapped),
        torch.frombuffer(mapped, dtype=torch.float32),
        torch.load(tmp_path / "saved", mmap=True)["a"],
    ):
        with pytest.raises(ValueError, match="data is mapped from a file"):
            tdcopier.pin_memory_(bad, device)


def test_leaves_that_need_no_pinning(device):
    with tdcopier.pin_memory_([np.empty((0, 3)), torch.empty(0), "text"], device) as pinned:
        assert pinned.nbytes == 0
    with pytest.raises(ValueError, match="data has no tensor or array"):
        tdcopier.pin_memory_("text", device)


def test_the_last_of_several_holders_unpins(device):
    data = large(1)
    whole = tdcopier.pin_memory_(data, device)
    parts = [torch.from_numpy(data.numpy()[at : at + 1000]) for at in (0, 5000)]
    several = tdcopier.pin_memory_(parts, device)
    whole.close()
    assert data.is_pinned()
    handle = tdcopier.start_gather({"t": data.view(1024, 1024)}, torch.arange(8), device)
    assert handle.get()["t"].cpu().eq(1).all()
    several.close()
    assert not data.is_pinned()


def in_threads(*functions: Callable[[], Any]) -> None:
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_that_pin_the_same_memory_all_hold_it(device):
    data = torch.zeros(1000)
    held: list[int] = []
    together = threading.Barrier(2)

    def pin() -> None:
        for _ in range(200):
            together.wait()
            pinned = tdcopier.pin_memory_(data, device)
            held.append(pinned.nbytes)
            assert data.is_pinned()
            together.wait()
            pinned.close()

    in_threads(pin, pin)
    assert held == [data.nbytes] * 400
    assert not data.is_pinned()


@pytest.mark.sim
@pytest.mark.parametrize("seed", range(12))
def test_memory_may_be_unpinned_while_copies_have_not_begun(sim, device, seed):
    pinned, others = large(7), [large(1) for _ in range(4)]
    table, beside = torch.arange(1000 * 64.0).view(1000, 64), [torch.zeros(1000, 64)] * 2
    index = torch.randint(0, 1000, (500,))
    expected = table[index]
    with sim.detect(), sim.schedule(seed):
        memory = tdcopier.pin_memory_([pinned, table], device)
        copy = tdcopier.start_copy([*others, pinned], device)
        rows = tdcopier.start_gather({"t": table, "beside": beside}, index, device)
        memory.close()
        assert copy.get()[-1].cpu().eq(7).all()
        assert_same(rows.get()["t"].cpu(), expected)


@pytest.mark.sim
def test_a_failure_of_the_device_leaves_the_memory_pinned_and_in_use(sim, device):
    data = torch.arange(1000 * 64.0).view(1000, 64)
    memory = tdcopier.pin_memory_(data, device)
    with sim.fail_transfer(1, when="execution"):
        data.to(device, non_blocking=True)
        with pytest.raises(RuntimeError, match="transfer"):
            memory.close()
    assert not memory.closed
    handle = tdcopier.start_gather({"t": data}, torch.arange(8), device)
    assert_same(handle.get()["t"].cpu(), data[:8])
    assert handle.stats.rows_in_place == 1
    memory.close()
    assert not data.is_pinned()


@pytest.mark.parametrize("call", ["gather", "scatter"])
def test_rows_beyond_the_pinned_part_of_a_table_are_staged(device, call):
    base = np.arange(400.0).reshape(100, 4)
    table, index = torch.from_numpy(base)[10:], torch.tensor([0, 60])
    with tdcopier.pin_memory_(torch.from_numpy(base[10:20]), device):
        if call == "gather":
            handle = tdcopier.start_gather([table], index, device)
            assert_same(handle.get(), [table[index].to(device)])
        else:
            batch = torch.zeros(2, 4, dtype=torch.float64, device=device)
            handle = tdcopier.start_scatter([batch], [table], index)
            handle.get()
            assert not base[[10, 70]].any()
        assert handle.stats.rows_in_place == 0


@pytest.mark.parametrize("call", ["new", "out", "scatter"])
def test_rows_of_memory_that_is_unpinned_during_the_call_are_staged(device, call):
    table, other = torch.arange(50.0), torch.zeros(3, 50).t()
    pinned = tdcopier.pin_memory_(table, device)

    class Closing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if "item" in getattr(function, "__name__", ""):
                pinned.close()
            return super().__torch_function__(function, types, args, kwargs or {})

    storage = [table, other.as_subclass(Closing)]  # its rows have gaps, so its own code moves them
    index = torch.tensor([1, 2])
    batch = [torch.ones(2, device=device), torch.ones(2, 3, device=device)]
    if call == "new":
        result = tdcopier.gather(storage, index, device)
    elif call == "out":
        result = tdcopier.gather(storage, index, out=batch)
    else:
        tdcopier.scatter(batch, storage, index)
        result = [batch[0], table[index].to(device)]
    assert not table.is_pinned()
    assert torch.equal(result[0].cpu(), table[index])


@pytest.mark.sim
def test_threads_that_close_beside_gathers_wait_for_no_one_that_is_gone(sim, device):
    index = torch.tensor([1, 2])
    for seed in range(100):
        tables = [torch.arange(50) for _ in range(3)]
        with tdcopier.pin_memory_(tables[2], device), sim.schedule(seed) as schedule:
            handles = [tdcopier.pin_memory_(table, device) for table in tables[:2]]

            def gather(storage: list[torch.Tensor]) -> None:
                for _ in range(3):
                    tdcopier.start_gather(storage, index, device).wait()

            threads = [schedule.thread(functools.partial(gather, tables[2:])) for _ in range(2)]
            threads += [schedule.thread(handle.close) for handle in handles]
            for thread in threads:
                thread.join()


def test_a_lazy_clone_stays_lazy(device):
    clone = torch._lazy_clone(torch.arange(150.0).view(50, 3))
    tdcopier.gather([clone], torch.tensor([1]), device)
    assert torch._C._is_cow_tensor(clone)
