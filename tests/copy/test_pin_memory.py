"""Memory that exists, pinned in place: what is pinned, for how long, and what is refused."""

from __future__ import annotations

import gc
import os
import re
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support import assert_same

import tdcopier

PAGE = os.sysconf("SC_PAGE_SIZE")
LARGE = 1 << 20  # elements: such a leaf has pages of its own


def large(value: float = 0.0) -> torch.Tensor:
    return torch.full((LARGE,), float(value))


def nested() -> dict[str, Any]:
    return {
        "images": [large(1), large(2)],
        "ids": (torch.arange(5), np.arange(7.0)),
        "name": "front",
        "empty": torch.empty(0, 3),
    }


def test_leaves_are_pinned_until_the_handle_is_closed(device):
    data = nested()
    pinned = tdcopier.pin_memory_(data, device)
    assert data["images"][0].is_pinned()
    assert data["ids"][0].is_pinned()
    assert torch.from_numpy(data["ids"][1]).is_pinned()
    assert pinned.nbytes == 2 * 4 * LARGE + 5 * 8 + 7 * 8
    assert not pinned.closed
    pinned.close()
    assert pinned.closed
    assert pinned.nbytes == 0
    assert not data["images"][0].is_pinned()
    assert not data["ids"][0].is_pinned()
    pinned.close()


def test_the_current_accelerator_is_the_default(device):
    data = large()
    with tdcopier.pin_memory_(data) as pinned:
        assert data.is_pinned()
        assert isinstance(pinned, tdcopier.pinned.PinnedMemory)
    assert not data.is_pinned()


@pytest.mark.parametrize("place", ["data", "data[1]['it']"])
@pytest.mark.parametrize(
    "make", [lambda: torch.nn.Linear(2, 3), lambda: torch.nn.utils.rnn.pack_sequence([large()])]
)
def test_an_object_whose_tensors_are_out_of_sight_is_refused(device, make, place):
    held = make()
    beside = large()
    data = held if place == "data" else [beside, {"it": held}]
    words = re.escape(f"{place} is a {type(held).__name__}, and only")
    with pytest.raises(ValueError, match=words):
        tdcopier.pin_memory_(data, device)
    assert not beside.is_pinned()


def test_a_dropped_handle_unpins(device):
    data = large()
    pinned = tdcopier.pin_memory_(data, device)
    del pinned
    gc.collect()
    assert not data.is_pinned()


def test_a_block_that_raises_unpins(device):
    data = large()
    with pytest.raises(KeyError), tdcopier.pin_memory_(data, device):
        raise KeyError
    assert not data.is_pinned()


def test_copies_read_large_leaves_in_place(device):
    data = nested()
    with tdcopier.pin_memory_(data, device):
        assert_same(tdcopier.copy(data, device), torch_to(data, device))
        handle = tdcopier.start_copy(data, device)
        handle.wait_staged()
        data["images"][0].fill_(9)
        assert handle.get()["images"][0].cpu().eq(1).all()


def torch_to(data: Any, device: str) -> Any:
    images, ids = data["images"], data["ids"]
    return {
        "images": [leaf.to(device) for leaf in images],
        "ids": (ids[0].to(device), torch.from_numpy(ids[1]).to(device)),
        "name": data["name"],
        "empty": data["empty"].to(device),
    }


def test_results_may_arrive_in_memory_that_was_pinned_in_place(device):
    on_device, here = large(3).to(device), large()
    with tdcopier.pin_memory_(here, device):
        tdcopier.copy_into(on_device, here)
        assert here.eq(3).all()


def test_memory_that_two_handles_name_is_pinned_until_both_are_closed(device):
    data = large()
    first = tdcopier.pin_memory_({"a": data}, device)
    second = tdcopier.pin_memory_([data, data[10:20]], device)
    first.close()
    assert data.is_pinned()
    second.close()
    assert not data.is_pinned()


def test_the_handle_keeps_the_memory_alive(device):
    data = large(5)
    view = torch.from_numpy(data.numpy())
    pinned = tdcopier.pin_memory_({"a": data}, device)
    del data
    gc.collect()
    assert view.is_pinned()
    assert view.eq(5).all()
    pinned.close()


def test_memory_in_one_page_is_pinned_separately(device):
    """Registered as whole pages, it would break torch's copies of what shares a page with it."""
    page = np.zeros(2 * PAGE, np.uint8)
    first, second = (
        torch.frombuffer(page.data[at : at + PAGE], dtype=torch.uint8) for at in (0, PAGE)
    )
    with tdcopier.pin_memory_(first, device) as pinned:
        assert pinned.nbytes == PAGE
        assert first.is_pinned()
        assert not second.is_pinned()
        assert_same(second.to(device).cpu(), second)
        with tdcopier.pin_memory_(second, device):
            assert second.is_pinned()
        assert first.is_pinned()


def test_a_leaf_is_refused_that_is_pinned_in_part(device):
    page = np.zeros(2 * PAGE, np.uint8)
    both, first = (torch.frombuffer(page.data[:end], dtype=torch.uint8) for end in (2 * PAGE, PAGE))
    with tdcopier.pin_memory_(first, device):
        with pytest.raises(ValueError, match=r"data\['x'\] is pinned in part, by another call"):
            tdcopier.pin_memory_({"x": both}, device)
        assert first.is_pinned()
    with tdcopier.pin_memory_([first, both], device) as pinned:
        assert pinned.nbytes == 2 * PAGE
        assert_same(tdcopier.copy(both, device), both.to(device))


def test_of_a_view_all_is_pinned_that_it_is_a_view_of(device):
    table, numbers = torch.zeros(100, PAGE), np.arange(2.0 * LARGE)
    views = [table[::2, 3:9], table.t(), numbers[4:][::-2]]
    with tdcopier.pin_memory_(views, device):
        assert table.is_pinned()
        assert torch.from_numpy(numbers).is_pinned()
        assert_same(tdcopier.copy(views[0], device), views[0].to(device))
        assert_same(tdcopier.copy(views[2], device), torch.tensor(views[2].copy()).to(device))
        assert_same(tdcopier.copy(numbers, device), torch.from_numpy(numbers).to(device))


def test_parameters_and_shared_memory(device):
    model = torch.nn.Linear(1000, 300)
    shared = large(4).share_memory_()
    with tdcopier.pin_memory_([list(model.parameters()), shared], device):
        assert model.weight.is_pinned()
        assert shared.is_pinned()
        assert_same(tdcopier.copy(shared, device), shared.to(device))


def test_memory_that_torch_pinned_stays_as_it_is(device):
    data = large().pin_memory()
    with tdcopier.pin_memory_([data], device) as pinned:
        assert pinned.nbytes == 0
    assert data.is_pinned()


def test_leaves_without_host_memory_are_refused_with_their_path(device, tmp_path):
    on_device = torch.ones(3, device=device)
    mapped = np.memmap(tmp_path / "a", np.float32, "w+", shape=(LARGE,))
    file = torch.from_file(str(tmp_path / "b"), shared=True, size=LARGE)
    sparse = torch.eye(3).to_sparse()
    good = large()
    for bad, why in (
        (on_device, "only host memory"),
        (mapped, "mapped from a file"),
        (file, "mapped from a file"),
        (sparse, "not a strided tensor"),
        (torch.empty(3, device="meta"), "only host memory"),
        (np.arange(4, dtype=">i4"), "cannot read in place"),
    ):
        with pytest.raises(ValueError, match=rf"data\['bad'\]\[0\] .*{why}"):
            tdcopier.pin_memory_({"good": good, "bad": [bad]}, device)
        assert not good.is_pinned()


def test_the_host_is_no_device_to_pin_for():
    with pytest.raises(ValueError, match="memory is pinned for a device; got cpu"):
        tdcopier.pin_memory_(torch.zeros(3), "cpu")


def test_tensordicts(device):
    tensordict = pytest.importorskip("tensordict")
    data = tensordict.TensorDict({"a": large(1), "b": {"c": torch.arange(10)}}, [])
    for each in (data, data.consolidate(), data.to("cpu")):
        with tdcopier.pin_memory_(each, device):
            assert each["a"].is_pinned()
            assert each["b", "c"].is_pinned()
            assert_same(tdcopier.to(each, device), each.to(device))
        assert not each["a"].is_pinned()


def test_close_waits_for_copies_that_are_on_their_way(device, slow_link):
    source = large(7)
    pinned = tdcopier.pin_memory_(source, device)
    with slow_link:
        handle = tdcopier.start_copy(source, device)
        pinned.close()
        source.fill_(0)
    assert handle.get().cpu().eq(7).all()


def test_several_threads_close_one_handle(device):
    data = large()
    pinned = tdcopier.pin_memory_(data, device)
    threads = [threading.Thread(target=pinned.close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pinned.closed
    assert not data.is_pinned()


@pytest.mark.sim
def test_a_refusal_of_the_system_leaves_nothing_pinned(sim, device):
    data = [large(), large(), large()]
    for n in (1, 2, 3):
        with (
            sim.fail_pinned_allocation(n),
            pytest.raises(ValueError, match=r"data\[\d\] cannot be pinned for sim:0: the system"),
        ):
            tdcopier.pin_memory_(data, device)
        assert not any(leaf.is_pinned() for leaf in data)
    with tdcopier.pin_memory_(data, device):
        assert all(leaf.is_pinned() for leaf in data)


@pytest.mark.sim
def test_the_detector_finds_memory_that_is_unpinned_too_early(sim, device):
    from tdcopier._sim import unpin  # below the engine, which waits first

    source = large(1)
    pinned = tdcopier.pin_memory_(source, device)

    def unpin_too_early() -> torch.Tensor:
        with sim.hold(torch.sim.current_stream(device)):
            copied = source.to(device, non_blocking=True)
            assert unpin(source.data_ptr()) == 0
        return copied

    with pytest.raises(sim.HazardError) as found, sim.detect():
        copied = unpin_too_early()
    assert [hazard.kind for hazard in found.value.hazards] == ["unpinned"]
    assert copied.cpu().eq(1).all()
    pinned.close()


@pytest.mark.timeout(60)
def test_a_forked_child_leaves_the_parents_memory_pinned(device):
    data = large(2)
    pinned = tdcopier.pin_memory_(data, device)
    child = os.fork()
    if child == 0:
        del pinned
        gc.collect()
        os._exit(0 if data[-1].item() == 2 else 1)  # no parallel work: threads are gone
    assert os.waitpid(child, 0)[1] == 0
    assert data.is_pinned()
    data.fill_(3)  # the device sees the parent's pages, not the child's
    assert tdcopier.copy(data, device).cpu().eq(3).all()
    pinned.close()


@pytest.mark.timeout(60)
def test_a_forked_child_cannot_pin(device):
    parents = large()
    with tdcopier.pin_memory_(parents, device):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                tdcopier.pin_memory_(torch.zeros(3), device)
            except RuntimeError:
                code = 0
            finally:
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0
        assert parents.is_pinned()
