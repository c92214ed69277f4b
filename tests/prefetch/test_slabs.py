"""A slab is written by its worker only when no host code and no device can see its batch."""

from __future__ import annotations

import gc
import os
import signal
import threading
from typing import Any

import pytest
import torch
from sim_support import becomes
from slab_pair import SlabPair

import tdcopier
from tdcopier import _C, _slabs, pack

SIZE = 1 << 20


def becomes_free(pair: SlabPair) -> bool:
    for _ in range(2000):
        if pair.is_free():
            return True
        _C.reclaim()
        threading.Event().wait(0.002)
    return False


@pytest.fixture
def pair() -> SlabPair:
    return SlabPair()


def batch(value: float) -> dict[str, Any]:
    return {"x": torch.full((50_000,), value), "small": [torch.tensor(value), "name"]}


def assert_is(found: Any, value: float) -> None:
    assert found["x"].eq(value).all()
    assert found["small"][0] == value


def test_the_same_memory_is_packed_and_received(pair):
    parcel = pair.send(batch(3))
    assert_is(parcel.tree(), 3)
    assert pair.made.nbytes == pair.opened.nbytes >= SIZE


def test_it_is_free_when_the_last_view_is_gone(pair):
    parcel = pair.send(batch(1))
    assert not pair.is_free()
    view = parcel.tree()["x"][5:6]
    del parcel
    assert not pair.is_free()
    assert view == 1
    del view
    assert becomes_free(pair)
    assert_is(pair.send(batch(2)).tree(), 2)


def test_a_buffer_of_the_parcel_keeps_it(pair):
    parcel = pair.send(batch(1))
    buffer = memoryview(parcel)
    del parcel
    assert not pair.is_free()
    buffer.release()
    assert becomes_free(pair)


def test_a_batch_is_received_once(pair):
    parcel = pair.send(batch(1))
    with pytest.raises(RuntimeError, match="received already"):
        pair.opened.receive(parcel.nbytes)
    assert not pair.made.send()
    assert_is(parcel.tree(), 1)


def test_bytes_that_are_no_parcel_are_refused_and_the_slab_is_free_again(pair):
    memory = pair.made.take(64)
    memory.zero_()
    del memory
    pair.made.send()
    with pytest.raises(ValueError, match="no parcel"):
        pair.opened.receive(64)
    assert becomes_free(pair)
    with pytest.raises(ValueError, match="smaller"):
        pair.made.take(pair.made.nbytes + 1)
    pair.made.send()
    with pytest.raises(RuntimeError, match="smaller than its batch"):
        pair.opened.receive(pair.made.nbytes + 1)


def test_another_memory_is_not_taken_for_it(pair):
    other = _C.Slab.make(SIZE)
    path = f"/proc/{os.getpid()}/fd/{other.descriptor}"
    with pytest.raises(RuntimeError, match="another slab"):
        _C.Slab.open(path, pair.made.token)
    with pytest.raises(ValueError, match="16 bytes"):
        _C.Slab.open(path, b"short")
    number = os.memfd_create("small")
    with pytest.raises(OSError, match="Invalid argument"):
        _C.Slab.open(f"/proc/{os.getpid()}/fd/{number}", pair.made.token)
    os.ftruncate(number, 4096)
    with pytest.raises(RuntimeError, match="no slab"):
        _C.Slab.open(f"/proc/{os.getpid()}/fd/{number}", pair.made.token)
    os.close(number)
    with pytest.raises(FileNotFoundError):
        _C.Slab.open(f"/proc/{os.getpid()}/fd/99999", pair.made.token)


def test_its_packer_lets_go_only_when_no_message_is_on_its_way(pair):
    memory = pair.made.take(64)
    assert not pair.made.retire()  # it is shown
    del memory
    pair.made.send()
    assert not pair.made.retire()
    other = SlabPair()
    parcel = other.send(batch(1))
    assert other.made.retire()
    assert other.opened.is_retired
    assert other.made.take(1) is None
    assert_is(parcel.tree(), 1)
    del parcel
    assert not other.is_free()
    assert other.opened.is_retired


def test_descriptors_are_closed_once_the_batch_has_arrived(pair):
    pair.made.close_if_received()
    assert pair.made.descriptor != -1
    parcel = pair.send(batch(1))
    pair.made.close_if_received()
    assert pair.made.descriptor == -1
    assert_is(parcel.tree(), 1)


# ---- devices -------------------------------------------------------------------------------------


def test_a_batch_goes_to_the_device_straight_from_the_slab(device):
    pair = SlabPair()
    parcel = pair.send(batch(4))
    assert pair.opened.pin(device) is None
    assert parcel.is_pinned()
    before = tdcopier.pinned.usage()
    assert before.slab_bytes >= SIZE
    handle = tdcopier.start_copy(parcel, device)
    assert_is(handle.get(), 4)
    assert handle.stats.transfers == handle.stats.chunks == 2
    assert tdcopier.pinned.usage().staging_bytes == before.staging_bytes
    del pair, parcel
    gc.collect()

    def is_unpinned() -> bool:
        _C.reclaim()
        return tdcopier.pinned.usage().slab_bytes <= before.slab_bytes - (SIZE + 4096)

    assert becomes(is_unpinned)


def test_it_is_not_free_until_the_device_has_read_it(stall, pair, device, copy_stream):
    parcel = pair.send(batch(5))
    assert pair.opened.pin(device) is None
    with stall(copy_stream):
        handle = tdcopier.start_copy(parcel, device)
        del parcel
        _C.reclaim()
        assert not pair.is_free()
    assert_is(handle.get(), 5)
    assert becomes_free(pair)


def test_nor_if_the_copy_is_dropped(stall, pair, device, copy_stream):
    parcel = pair.send(batch(5))
    assert pair.opened.pin(device) is None
    with stall(copy_stream):
        tdcopier.start_copy(parcel, device)
        del parcel
        _C.reclaim()
        assert not pair.is_free()
    assert becomes_free(pair)


def test_what_torch_copies_from_its_buffer_is_waited_for(stall, pair, device):
    parcel = pair.send(batch(6))
    assert pair.opened.pin(device) is None
    wanted = bytes(parcel)
    with stall(torch.accelerator.current_stream(device)):
        shown = torch.frombuffer(parcel, dtype=torch.uint8)
        copied = shown.to(device, non_blocking=True)
        del parcel, shown
        assert not pair.is_free()
    assert bytes(copied.cpu().numpy()) == wanted
    assert becomes_free(pair)


def test_the_tree_of_a_pinned_slab_is_a_copy_of_which_torch_knows_the_streams(stall, pair, device):
    parcel = pair.send(batch(6))
    assert pair.opened.pin(device) is None
    tree = parcel.tree()
    assert tree["x"].is_pinned()
    assert (
        not torch.frombuffer(parcel, dtype=torch.uint8).data_ptr()
        <= tree["x"].data_ptr()
        < (torch.frombuffer(parcel, dtype=torch.uint8).data_ptr() + parcel.nbytes)
    )
    del parcel
    assert becomes_free(pair)
    side = torch.Stream(device=device)
    with stall(side):
        with side:
            copied = tree["x"].to(device, non_blocking=True)
        del tree
        torch.empty(50_000, pin_memory=True).fill_(-1)
    side.synchronize()
    assert copied.eq(6).all()


def test_a_slab_that_tensors_show_is_not_pinned(pair, device):
    parcel = pair.send(batch(6))
    tree = parcel.tree()
    assert "tensors show" in pair.opened.pin(device)
    assert parcel.pin_memory() is not parcel
    assert parcel.pin_memory().is_pinned()
    del tree, parcel
    gc.collect()
    assert pair.opened.pin(device) is None


def test_only_the_receiver_pins(pair, device):
    assert "packs into" in pair.made.pin(device)


def test_a_batch_for_the_host_keeps_its_slab(pair):
    kept = tdcopier.start_copy(pair.send(batch(7)), "cpu").get()
    assert not pair.is_free()
    assert_is(kept, 7)
    del kept
    assert becomes_free(pair)


def test_over_the_limit_it_is_not_pinned_and_says_so(pair, device):
    parcel = pair.send(batch(8))
    tdcopier.limits.set_slab_bytes(SIZE)
    try:
        assert "limits.set_slab_bytes" in pair.opened.pin(device)
        assert not parcel.is_pinned()
        assert_is(tdcopier.copy(parcel, device), 8)
        tdcopier.limits.set_slab_bytes(2 << 30)
        assert pair.opened.pin(device) is None
    finally:
        tdcopier.limits.set_slab_bytes(2 << 30)
    with pytest.raises(ValueError, match="negative"):
        tdcopier.limits.set_slab_bytes(-1)


@pytest.mark.sim
def test_a_driver_that_refuses_is_asked_once(sim, pair, device, monkeypatch):
    parcel = pair.send(batch(9))
    with sim.fail_pinned_allocation(1):
        why = pair.opened.pin(device)
    assert "a slab cannot be pinned" in why
    assert pair.opened.pin(device) == why
    assert_is(tdcopier.copy(parcel, device), 9)


def test_a_parcel_in_a_slab_is_pinned_in_place(pair, device):
    parcel = pair.send(batch(1))
    assert parcel.pin_memory() is parcel
    assert parcel.is_pinned()


def test_a_forked_child_frees_nothing(pair):
    parcel = pair.send(batch(1))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            del parcel
            gc.collect()
            code = 0 if pair.made.take(1) is None else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not pair.is_free()
    assert_is(parcel.tree(), 1)


def test_what_a_forked_child_may_see_is_not_written_again(pair):
    parcel = pair.send(batch(1))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(writing)
            os.read(reading, 1)  # until the parent has written, or ended
            code = 0 if parcel.tree()["x"].eq(1).all() else 2
        finally:
            os._exit(code)
    del parcel
    gc.collect()
    pair.scribble()
    os.close(writing)
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pair.opened.is_retired
    assert pair.made.retire()


@pytest.mark.sim
def test_it_is_kept_for_good_if_the_work_on_its_views_is_unknown(sim, stall, device):
    pair, before = SlabPair(), tdcopier.pinned.usage().slab_bytes
    parcel = pair.send(batch(1))
    assert pair.opened.pin(device) is None
    with stall(torch.accelerator.current_stream(device)), sim.fail_event_record(1):
        shown = torch.frombuffer(parcel, dtype=torch.uint8)
        copied = shown.to(device, non_blocking=True)
        del parcel, shown
    assert bytes(copied.cpu()[:8].numpy()) == b"TDPARCEL"
    assert not pair.is_free()
    assert pair.made.retire()
    del pair
    gc.collect()
    assert tdcopier.pinned.usage().slab_bytes > before  # the device could still read it


@pytest.mark.sim
def test_slabs_are_unpinned_without_the_gil(sim, device):
    pair = SlabPair()
    assert pair.opened.pin(device) is None
    slabs, before = [pair.opened], tdcopier.pinned.usage().slab_bytes
    del pair
    _C.drop_slabs(slabs)
    assert slabs == []
    assert tdcopier.pinned.usage().slab_bytes < before


def test_why_a_batch_is_not_read_in_place_is_said(pair, device):
    def why(parcel: tdcopier.Parcel) -> str | None:
        return _slabs.why_not_in_place(parcel)

    assert "less than 16384 bytes" in why(pack(torch.ones(3)))
    assert "did not pack it" in why(pack(torch.ones(9_000)))
    assert "copied it to pinned memory" in why(pack(torch.ones(9_000)).pin_memory())
    parcel = pair.send(batch(1))
    tdcopier.limits.set_slab_bytes(SIZE)
    assert "exceed their limit" in why(parcel)  # the limit is restored after each test
    tdcopier.limits.set_slab_bytes(2 << 30)
    assert why(parcel) is None


# ---- the ring of a worker ------------------------------------------------------------------------


def test_a_new_slab_has_room_for_a_little_more():
    for nbytes in (16 * 1024, 150_000, 64_000_000, 10**9 + 1):
        room = _slabs.with_room(nbytes)
        assert nbytes <= room <= nbytes * 1.26
        assert room % 4096 == 0


def test_a_ring_uses_one_slab_as_long_as_that_is_free():
    ring = _slabs._Ring()
    seen = {ring.memory(100_000 + i).data_ptr() for i in range(20)}
    assert len(seen) == len(ring._slabs) == 1
    held = [ring.memory(100_000) for _ in range(3)]
    assert len({memory.data_ptr() for memory in held}) == len(ring._slabs) == 3
    large = ring.memory(10_000_000)
    assert len(ring._slabs) == 4
    del held, large


def test_a_ring_lets_go_of_slabs_that_it_no_longer_uses():
    ring = _slabs._Ring()
    held = [ring.memory(100_000) for _ in range(5)]
    del held
    for _ in range(_slabs._BATCHES_UNUSED + 1):
        ring.memory(100_000)
    assert len(ring._slabs) == 1


def test_slabs_of_an_ended_process_are_dropped_once_their_batches_are_gone():
    reading, writing = os.pipe()
    worker = os.fork()
    if worker == 0:
        try:
            memory = _slabs._Ring().memory(100_000)
            parcel = pack(torch.arange(20_000.0), out=memory)
            message = _slabs.message_of(memory, parcel.nbytes)
            os.write(writing, repr(tuple(message)).encode())
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(1)
    os.close(writing)  # or a child that fails would be waited for
    os.waitpid(worker, os.WUNTRACED)
    message = _slabs.SlabMessage(*eval(os.read(reading, 1000)))
    parcel = _slabs.receive(message)
    assert message.token in _slabs._mapped
    _slabs.drop_ended()
    assert message.token in _slabs._mapped
    os.kill(worker, signal.SIGKILL)
    os.waitpid(worker, 0)
    _slabs.drop_ended()
    assert message.token not in _slabs._mapped
    assert parcel.tree().equal(torch.arange(20_000.0))
    with pytest.raises(RuntimeError, match="ended before its batch was read"):
        _slabs.receive(message)
    os.close(reading)
