"""Pinned memory from the pool: what is leased, and when it comes back."""

from __future__ import annotations

import gc
import io
import os
import pickle
import random
import threading

import pytest
import torch
from pinned_pool_support import MIB, used, used_when_idle
from pinned_pool_support import all_comes_back as all_comes_back
from support import run_python

import tdcopier
from tdcopier import _C
from tdcopier._pinned_pool import lease

PAGE = os.sysconf("SC_PAGE_SIZE")

pytestmark = pytest.mark.usefixtures("all_comes_back")


# ---- what is leased ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [0, 0, 5, 0],
        [1],
        [PAGE, PAGE + 1, 3],
        [7 * i for i in range(300)],
        [16 * MIB, 3, 5, 17 * MIB + 1, 20 * MIB],
        [8 * MIB] * 12,
    ],
    ids=lambda sizes: f"{len(sizes)} of {sum(sizes)}",
)
def test_a_lease_yields_pinned_bytes_of_each_size_in_order(device, sizes):
    leased = list(lease(sizes))
    assert [tensor.numel() for tensor in leased] == sizes
    for number, tensor in enumerate(leased):
        assert tensor.dtype == torch.uint8
        assert tensor.untyped_storage().nbytes() == tensor.numel()
        assert tensor.data_ptr() % 64 == 0
        assert tensor.numel() < 16 * MIB or tensor.data_ptr() % PAGE == 0
        assert tensor.numel() == 0 or tensor.is_pinned()
        tensor.fill_(number % 256)
    assert all(bool(tensor.eq(i % 256).all()) for i, tensor in enumerate(leased))


def test_large_sizes_take_their_exact_size(device):
    leased = list(lease([16 * MIB + 1, 33 * MIB]))
    assert used_when_idle() == (16 * MIB + PAGE + 33 * MIB, 0)
    del leased


def test_sizes_come_from_any_iterable_and_are_checked(device):
    assert [t.numel() for t in lease(iter((3, 4)))] == [3, 4]
    for bad in ([-1], [3, 1 << 61], [1 << 59] * 3):
        with pytest.raises(ValueError, match="sizes_bytes must not be negative"):
            lease(bad)
    with pytest.raises(TypeError):
        lease([1.5])


def test_leased_tensors_are_plain_tensors_also_in_inference_mode(device):
    with torch.inference_mode():
        (leased,) = lease([100])
    assert not leased.is_inference()
    assert leased.view(torch.float32).shape == (25,)


@pytest.mark.parametrize("size", [5 * MIB, 16 * MIB])
def test_copies_read_and_write_leased_memory_in_one_transfer(device, size):
    """Staged, they would take one for each staging buffer."""
    (leased,) = lease([size])
    leased.random_(0, 256)
    sent = tdcopier.start_copy([leased], device)
    assert sent.get()[0].cpu().equal(leased)
    assert sent.stats.transfers == 1
    (arrived,) = lease([size])
    received = tdcopier.start_copy_into(sent.get(), [arrived])
    received.get()
    assert arrived.equal(leased)
    assert received.stats.transfers == 1


def test_a_lease_within_a_shared_piece_is_transferred_too(device):
    leased = list(lease([3 * MIB + 5] * 10))
    for number, tensor in enumerate(leased):
        tensor.fill_(number)
    for number, tensor in enumerate(tdcopier.copy(leased, device)):
        assert tensor.cpu().eq(number).all()


def test_a_leased_tensor_is_saved_pickled_shared_and_grown_alone(device):
    first, second = lease([1000, 1000])
    first.fill_(1)
    second.fill_(2)
    file = io.BytesIO()
    torch.save(first, file)
    assert len(file.getvalue()) < 4000
    assert torch.load(io.BytesIO(file.getvalue())).equal(first)
    assert pickle.loads(pickle.dumps(first)).equal(first)
    first.resize_(5000)
    assert first[:1000].eq(1).all()
    assert not first.is_pinned()
    assert second.eq(2).all()
    second.share_memory_()
    assert second.eq(2).all()
    gc.collect()
    assert used_when_idle()[0] == 0


# ---- when memory comes back ----------------------------------------------------------------------


def test_a_dropped_tensors_memory_is_leased_again(device):
    (tensor,) = lease([20 * MIB])
    address = tensor.data_ptr()
    del tensor
    assert used_when_idle() == (0, 20 * MIB)
    (tensor,) = lease([20 * MIB - 5])
    assert tensor.data_ptr() == address
    assert used_when_idle() == (20 * MIB, 0)


def test_views_keep_the_memory(device):
    (tensor,) = lease([20 * MIB])
    view = tensor.view(torch.int64)[10:20]
    del tensor
    assert used_when_idle() == (20 * MIB, 0)
    del view
    assert used_when_idle() == (0, 20 * MIB)


def test_sizes_that_share_a_piece_come_back_with_the_last_of_them(device):
    leased = list(lease([100, 200, 300]))
    del leased[0], leased[0]
    assert used_when_idle() == (PAGE, 0)
    del leased[0]
    assert used_when_idle() == (0, PAGE)


def test_the_same_sizes_again_need_no_new_memory(device):
    sizes = [3 * MIB] * 30 + [16 * MIB, 40 * MIB, 16 * MIB, 5]
    random.Random(3).shuffle(sizes)
    list(lease(sizes))
    _, free = used_when_idle()
    for _ in range(3):
        leased = list(lease(sizes))
        assert used_when_idle() == (free, 0)
        del leased


def test_the_free_block_that_fits_best_is_taken(device):
    leased = list(lease([64 * MIB, 17 * MIB, 32 * MIB]))
    addresses = [tensor.data_ptr() for tensor in leased]
    del leased
    (fits_best,) = lease([30 * MIB])
    assert fits_best.data_ptr() == addresses[2]
    large, small = lease([60 * MIB, 2 * MIB])
    assert large.data_ptr() == addresses[0]
    assert small.data_ptr() == addresses[2] + 30 * MIB


def test_an_iterator_that_is_dropped_gives_the_rest_back(device):
    tensors = lease([MIB] * 70 + [20 * MIB] * 5)
    first = next(tensors)
    del tensors
    _C.testing.settle()  # workers have stopped
    assert used_when_idle()[0] < 90 * MIB  # the first's piece
    first.fill_(3)
    assert first.eq(3).all()
    del first
    assert used_when_idle()[0] == 0


def test_memory_is_not_leased_again_while_a_device_reads_it(device, accelerator, stall):
    size = 2 * MIB
    (tensor,) = lease([size])
    address = tensor.data_ptr()
    tensor.fill_(1)
    with stall(accelerator.current_stream()):
        copied = tensor.to(device, non_blocking=True)
        del tensor
        assert used() == (size, 0)
        (other,) = lease([size])
        assert other.data_ptr() != address
        other.fill_(9)
    assert copied.cpu().eq(1).all()
    assert used_when_idle() == (size, size)


def test_a_job_keeps_leased_sources_until_the_device_has_read_them(device, copy_stream, stall):
    size = 2 * MIB
    (tensor,) = lease([size])
    tensor.fill_(1)
    with stall(copy_stream):
        handle = tdcopier.start_copy([tensor], device)
        del tensor
        (other,) = lease([size])
        other.fill_(9)
    assert handle.get()[0].cpu().eq(1).all()
    assert other.eq(9).all()


def test_a_job_keeps_leased_destinations_until_it_is_done(device, reading_stream, stall):
    size = 2 * MIB
    (tensor,) = lease([size])
    source = torch.ones(size, dtype=torch.uint8, device=device)
    with stall(reading_stream):
        handle = tdcopier.start_copy_into([source], [tensor])
        del tensor, handle
        (other,) = lease([size])
        other.fill_(9)
    reading_stream.synchronize()
    _C.testing.settle()
    assert other.eq(9).all()


def test_pinning_leased_memory_in_place_keeps_it_leased(device):
    (tensor,) = lease([5 * MIB])
    with tdcopier.pin_memory_([tensor], device):
        del tensor
        gc.collect()
        assert used_when_idle() == (5 * MIB, 0)
    gc.collect()
    assert used_when_idle() == (0, 5 * MIB)
    (tensor,) = lease([5 * MIB])
    assert tensor.is_pinned()


@pytest.mark.sim
@pytest.mark.hazardous  # detects by itself
def test_memory_is_unpinned_after_all_copies(sim, device):
    with sim.detect():
        for size in (MIB, 3 * MIB):
            (tensor,) = lease([size])
            handle = tdcopier.start_copy([tensor.fill_(1)], device)
            del tensor
            tdcopier.pinned.trim()
            tdcopier.start_copy_into(handle.get(), list(lease([size])))
            tdcopier.pinned.trim()
    assert handle.get()[0].cpu().eq(1).all()


# ---- threads, forks, the end ---------------------------------------------------------------------


def test_threads_lease_and_drop_at_the_same_time(device):
    failures: list[object] = []

    def work(number: int) -> None:
        pick = random.Random(number)
        kept: list[torch.Tensor] = []
        for _ in range(30):
            sizes = [pick.choice([1, PAGE, MIB, 17 * MIB]) for _ in range(pick.randrange(1, 4))]
            for tensor in lease(sizes):
                tensor[:1] = tensor[-1:] = number
                kept.append(tensor)
            if pick.random() < 0.3:
                tdcopier.pinned.trim()
            pick.shuffle(kept)
            failures.extend(t for t in kept if t[0] != number or t[-1] != number)
            del kept[2:]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_share_an_iterator(device):
    tensors = lease([MIB] * 100)
    got: list[torch.Tensor] = []
    threads = [threading.Thread(target=lambda: got.extend(tensors)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tensor.data_ptr() for tensor in got}) == 100


@pytest.mark.timeout(60)
def test_a_forked_child_reads_leased_memory_and_leaves_it_to_its_parent(device):
    (tensor,) = lease([2 * MIB])
    unfinished = [lease([MIB] * 3)]
    tensor.fill_(4)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert tensor[-1].item() == 4
            for call in (lambda: lease([5]), lambda: next(unfinished[0])):
                try:
                    call()
                except RuntimeError:
                    continue
                raise AssertionError
            del tensor
            unfinished.clear()
            gc.collect()
            assert used() == (0, 0)
            assert tdcopier.pinned.trim() == 0
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert used()[0] == 5 * MIB
    assert tdcopier.copy(tensor, device).cpu().eq(4).all()
    assert sum(t.numel() for t in unfinished[0]) == 3 * MIB


PROGRAM = """
import torch, tdcopier
from tdcopier import _C, sim
from tdcopier._pinned_pool import lease
sim.enable(devices=2)
"""


@pytest.mark.sim
@pytest.mark.parametrize(
    "last",
    [
        "torch.kept = list(lease([1 << 20, 1 << 25]))",
        "torch.kept = lease([1 << 25] * 3); next(torch.kept)",
        "torch.kept = tdcopier.start_copy(list(lease([1 << 25])), 'sim:0')",
        "import atexit; atexit.register(lambda: print(len(list(lease([1 << 20, 1 << 25])))))",
    ],
)
def test_the_interpreter_ends_with_leases_alive(last):
    assert run_python(PROGRAM + last).split() in ([], ["2"])


@pytest.mark.sim
def test_leases_work_where_no_thread_can_be_started():
    run_python(
        PROGRAM
        + """
faults = [sim.fail_thread(n) for n in range(1, 100)]
leased = list(lease([5, 20 << 20, 100]))
assert [tensor.numel() for tensor in leased] == [5, 20 << 20, 100]
assert all(tensor.is_pinned() for tensor in leased)
others = lease([20 << 20] * 4)
assert next(others).numel() == 20 << 20
del leased, others
assert tdcopier.pinned.usage().leased_bytes == 0
"""
    )


def test_without_an_accelerator_leases_are_refused_and_the_use_is_told():
    run_python(
        """
import torch, tdcopier
from tdcopier._pinned_pool import lease
assert tdcopier.pinned.usage().leased_bytes == 0
assert tdcopier.pinned.trim() == 0
for call in (lambda: lease([5]), lambda: tdcopier.pinned.reserve(5)):
    try:
        call()
    except RuntimeError as error:
        assert "no accelerator" in str(error) or "CUDA" in str(error), error
    else:
        raise SystemExit("no error")
""",
        CUDA_VISIBLE_DEVICES="",
    )
