"""Runs of small leaves in one pinned storage: one transfer each, nothing staged."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import are_released, assert_same, oracle

import tdcopier
from tdcopier import _C

ROW = 1024  # floats: 4 KiB
ROWS = 100  # more than 256 KiB together


def pinned_rows(rows: int = ROWS, row: int = ROW) -> torch.Tensor:
    return torch.arange(float(rows * row)).reshape(rows, row).pin_memory()


def times_asked(copy: Callable[[], Any]) -> int:
    """Returns how often the simulated device was asked whether memory is pinned."""
    from tdcopier import _sim

    before = _sim.pinned_queries()
    copy()
    return _sim.pinned_queries() - before


def test_rows_of_a_pinned_tensor_are_one_transfer_of_the_call_itself(device):
    base = pinned_rows()
    handle = tdcopier.start_copy(list(base.unbind()), device)
    assert_same(handle.get(), list(base.to(device).unbind()))
    stats = handle.stats
    assert (stats.packed_leaves, stats.alone_leaves) == (ROWS, 0)
    assert (stats.chunks, stats.transfers, stats.transfer_bytes) == (1, 1, base.nbytes)
    assert not stats.background


@pytest.mark.sim
def test_nothing_of_them_goes_through_staging_buffers(sim, device, copy_stream):
    base = pinned_rows()
    expected = list(base.to(device).unbind())
    tdcopier.limits.set_staging_bytes(_C.STAGING_BUFFER_BYTES)
    assert tdcopier.pinned.staging_bytes(device) <= _C.STAGING_BUFFER_BYTES  # releases the others
    with sim.hold(copy_stream):
        tdcopier.start_copy([torch.ones(2)], device)  # occupies the only one
        tdcopier.limits.set_staging_bytes(_C.DEFAULT_STAGING_LIMIT_BYTES)
        sim.reset_counts()
        with sim.fail_pinned_allocation(1) as fault:
            handle = tdcopier.start_copy(list(base.unbind()), device, use_background_thread=False)
            assert not fault.fired
    assert_same(handle.get(), expected)
    assert sim.counts().h2d == (1, base.nbytes)


def test_they_lie_on_the_target_as_they_did(device):
    base = torch.zeros(1 << 20, dtype=torch.uint8).pin_memory()
    sizes = [4096, 4090, 4096, 10, 300, 65_536, 1, 200_000]  # each begins at a multiple of 16
    source, at = [], 0
    for size in sizes:
        source.append(base[at : at + size].fill_(len(source) + 1))
        at += -(-size // 16) * 16
    base[4096 + 4090 : 4096 + 4096] = 77  # between leaves
    handle = tdcopier.start_copy(source, device)
    moved = handle.get()
    assert_same(moved, oracle(source, device))
    assert (handle.stats.chunks, handle.stats.transfers) == (1, 1)
    addresses = [leaf.data_ptr() - moved[0].data_ptr() for leaf in moved]
    assert addresses == [leaf.data_ptr() - source[0].data_ptr() for leaf in source]
    assert handle.stats.transfer_bytes == addresses[-1] + sizes[-1]


def every_other_row(base: torch.Tensor) -> list[torch.Tensor]:
    return list(base[::2].unbind())


def overlapping(base: torch.Tensor) -> list[torch.Tensor]:
    return [base.view(-1)[i * ROW : i * ROW + 2 * ROW] for i in range(ROWS - 1)]


def descending(base: torch.Tensor) -> list[torch.Tensor]:
    return list(reversed(base.unbind()))


def repeated(base: torch.Tensor) -> list[torch.Tensor]:
    return [base[0]] * ROWS


def strided(base: torch.Tensor) -> list[torch.Tensor]:
    return list(base.t().unbind())


def strided_in_step(base: torch.Tensor) -> list[torch.Tensor]:
    """Returns leaves that each end where the next begins, but every other one has gaps."""
    flat, steps = base.repeat(2, 1).pin_memory().view(-1), [2, 1] * (ROWS - 1)
    return [flat[i * ROW : (i + step) * ROW : step] for i, step in enumerate(steps)]


def with_gaps(base: torch.Tensor) -> list[torch.Tensor]:
    return [row[: ROW - 4] for row in base]  # sixteen bytes, too much for padding


def too_few(base: torch.Tensor) -> list[torch.Tensor]:
    return list(base[:64].unbind())  # 256 KiB, the size of a leaf that is still packed


def unaligned(base: torch.Tensor) -> list[torch.Tensor]:
    return list(base.view(-1)[: ROWS * (ROW - 1)].view(ROWS, ROW - 1).unbind())


def of_pageable_memory(base: torch.Tensor) -> list[torch.Tensor]:
    return list(base.clone().unbind())


def of_many_storages(base: torch.Tensor) -> list[torch.Tensor]:
    return [row.clone().pin_memory() for row in base]


def of_storages_that_adjoin(base: torch.Tensor) -> list[torch.Tensor]:
    return [*base[:50].unbind(), *torch.from_numpy(base[50:].numpy()).unbind()]


def as_arrays(base: torch.Tensor) -> list[Any]:
    return [row.numpy() for row in base.unbind()]


STAGED = [
    every_other_row, overlapping, descending, repeated, strided, strided_in_step, with_gaps,
    too_few, unaligned, of_pageable_memory, of_many_storages, of_storages_that_adjoin, as_arrays,
]  # fmt: skip


@pytest.mark.parametrize("leaves", STAGED)
def test_what_is_no_such_row_of_leaves_is_staged(device, leaves):
    source = leaves(pinned_rows())
    with tdcopier.stats.time_steps():
        handle = tdcopier.start_copy(source, device)
        moved = handle.get()
    assert_same(moved, [torch.as_tensor(leaf).to(device) for leaf in source])
    assert handle.stats.packed_leaves == len(source)
    assert handle.stats.transfer_bytes - sum(leaf.nbytes for leaf in source) < 16 * len(source)
    assert handle.stats.steps.stage_us > 0


@pytest.mark.parametrize("alignment", [1, 16, 24, 64, 512, 4096, 8192])
def test_the_alignment_that_was_asked_for_is_kept(device, alignment):
    source = list(pinned_rows().unbind())
    handle = tdcopier.start_copy(source, device, min_packed_alignment_bytes=alignment)
    moved = handle.get()
    assert_same(moved, oracle(source, device))
    first = min(leaf.data_ptr() for leaf in moved)
    assert first % (alignment & -alignment) == 0
    assert all((leaf.data_ptr() - first) % alignment == 0 for leaf in moved)
    in_place = 4096 % alignment == 0
    assert (handle.stats.transfer_bytes == ROWS * ROW * 4) == in_place


def test_a_chunk_that_would_be_too_large_is_cut(device):
    source = list(pinned_rows(200).unbind())
    largest = 75 * 4096
    handle = tdcopier.start_copy(source, device, max_packed_chunk_bytes=largest)
    assert_same(handle.get(), oracle(source, device))
    # Two runs of 75 rows are read in place. The rest is no larger than a leaf that is packed.
    assert (handle.stats.chunks, handle.stats.packed_leaves) == (3, 200)
    assert handle.stats.transfers == 3


@pytest.mark.parametrize("options", [
    {"pack_cpu_tensors": False},
    {"max_packed_chunk_bytes": 10_000},
    {"max_packed_chunk_bytes": 256 * 1024},
    {"use_pinned_staging": False},
    {"use_background_thread": False},
    {"min_packed_alignment_bytes": 1},
    {"min_packed_alignment_bytes": 1 << 14},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("shape", [(100, 1024), (100, 1023), (1100, 64), (12, 60_000)], ids=str)
def test_any_options_give_what_to_gives(device, options, shape):
    source = list(pinned_rows(*shape).unbind())
    source += [source[0][:0], *source]
    assert_same(tdcopier.copy(source, device, **options), oracle(source, device))


def mixture() -> dict[str, Any]:
    rows, other, large = pinned_rows(), pinned_rows(90), pinned_rows(4, 1 << 17)
    parts = rows.view(-1).split([ROW] * 20 + [0] + [2 * ROW] * 30 + [0, 20 * ROW])
    return {
        "scattered": [torch.full((n,), float(n)) for n in range(20)],
        "rows": parts,
        "between": rows[0],
        "array": rows[3].numpy(),
        "others": {"a": list(other[:10]), "empty": torch.empty(0, 3), "b": list(other[10:])},
        "large": list(large),
        "strided": rows[:, ::2],
        "bytes": list(rows.view(torch.uint8)[:90].unbind()),
        "doubles": list(other.view(torch.float64).unbind()),
        "transposed": rows[:90].view(30, 3, ROW).transpose(1, 2)[:, :5],
        "gradient": torch.ones(3, requires_grad=True),
        "none": None,
    }


@pytest.mark.parametrize("options", [
    {},
    {"pack_cpu_tensors": False},
    {"use_pinned_staging": False},
    {"use_background_thread": False},
    {"min_packed_alignment_bytes": 4096},
    {"max_packed_chunk_bytes": 300_000},
], ids=str)  # fmt: skip
def test_a_mixture_of_all_kinds_gives_what_to_gives(device, options):
    source = mixture()
    handle = tdcopier.start_copy(source, device, **options)
    expected = oracle({k: v for k, v in source.items() if k != "array"}, device)
    moved = handle.get()
    assert_same(moved.pop("array"), torch.from_numpy(source["array"]).to(device))
    assert_same(moved, expected)
    if not options:
        assert handle.stats.alone_leaves == 4
        # Four runs of rows, four large leaves, and the staged ones.
        assert handle.stats.chunks == handle.stats.transfers == 4 + 4 + 1


def test_empty_leaves_between_change_nothing(device):
    base = pinned_rows()
    source = [leaf for row in base for leaf in (row, row[:0], torch.empty(0, 2))]
    handle = tdcopier.start_copy(source, device)
    assert_same(handle.get(), oracle(source, device))
    assert (handle.stats.packed_leaves, handle.stats.transfers) == (3 * ROWS, 1)
    assert handle.stats.transfer_bytes == base.nbytes


@pytest.mark.parametrize("nested", [False, True])
def test_the_parts_of_a_consolidated_tensordict_are_one_transfer(device, nested):
    tensordict = pytest.importorskip("tensordict")
    batch = tensordict.TensorDict({str(i): torch.rand(4, 64 + 4 * i) for i in range(100)}, [4])
    if nested:
        batch = tensordict.TensorDict({"first": batch, "second": batch.clone()}, [4])
    # At the root of a tree it would be delegated to its own `.to`.
    batch = tensordict.TensorDict({"inner": batch.consolidate(pin_memory=True)}, [4])
    handle = tdcopier.async_to(batch, device)
    moved = handle.wait()
    assert all(torch.equal(moved[key].cpu(), batch[key]) for key in batch.keys(True, True))
    assert (handle.stats.packed_leaves, handle.stats.transfers) == (200 if nested else 100, 1)
    assert not handle.stats.background


@pytest.mark.sim
def test_many_small_tensors_of_their_own_are_not_asked_whether_they_are_pinned(device):
    source = [torch.ones(72) for _ in range(528)]
    assert times_asked(lambda: tdcopier.copy(source, device)) == 0
    few = list(pinned_rows()[:64].unbind())
    assert times_asked(lambda: tdcopier.copy(few, device)) == 0


@pytest.mark.sim
@pytest.mark.parametrize("pinned", [True, False])
def test_a_storage_is_asked_once(device, pinned):
    base = pinned_rows(600) if pinned else torch.ones(600, ROW)
    leaves = [*base[:200].unbind(), base[200:400], base[400:500], *base[500:].unbind()]
    assert times_asked(lambda: tdcopier.start_copy(leaves, device).get()) == 1


def test_wait_staged_lasts_until_the_device_has_read_them(stall, device, copy_stream):
    base = pinned_rows()
    expected = base.clone()
    staged = threading.Event()
    with stall(copy_stream):
        handle = tdcopier.start_copy([*base.unbind(), torch.ones(3)], device)

        def overwrite() -> None:
            handle.wait_staged()
            base.fill_(2)
            staged.set()

        writer = threading.Thread(target=overwrite)
        writer.start()
        assert not staged.wait(0.05)  # it cannot end: the device has not begun
    writer.join()
    assert torch.equal(torch.stack(handle.get()[:-1]).cpu(), expected)


@pytest.mark.parametrize("keep_handle", [True, False])
def test_they_are_kept_until_the_device_has_read_them(stall, device, copy_stream, keep_handle):
    base = pinned_rows()
    expected = base.clone()
    rows = list(base.unbind())
    references = [weakref.ref(row) for row in rows]
    handle = None
    with stall(copy_stream):
        started = tdcopier.start_copy(rows, device)
        if keep_handle:
            handle = started
        del base, rows, started
        scratch = torch.zeros(10_000)
        for _ in range(100):  # long enough for work that waits for the main thread
            scratch.add_(1)
        assert all(reference() is not None for reference in references)
        others = [pinned_rows().fill_(5) for _ in range(3)]
    if handle is not None:
        assert torch.equal(torch.stack(handle.get()).cpu(), expected)
    assert are_released(references)
    assert all(other.eq(5).all() for other in others)


@pytest.mark.sim
def test_a_copy_that_fails_keeps_what_the_device_reads(sim, device):
    rows = list(pinned_rows().unbind())
    references = [weakref.ref(row) for row in rows]
    with sim.hold(_C.copy_stream(device)):
        with sim.fail_transfer(2):
            handle = tdcopier.start_copy(
                [rows, torch.full((1 << 20,), 2.0)], device, use_background_thread=False
            )
        with pytest.raises(RuntimeError):
            handle.get()
        del rows, handle
        scratch = torch.zeros(10_000)
        for _ in range(100):
            scratch.add_(1)
        assert all(reference() is not None for reference in references)
    assert are_released(references)


def test_what_has_arrived_may_be_filled_by_another_copy(device):
    base = torch.zeros(ROWS, ROW + 4, dtype=torch.float32).pin_memory()
    source = [row[: ROW + 1] for row in base]  # twelve bytes between neighbours
    handle = tdcopier.start_copy(source, device)
    moved = handle.get()
    assert handle.stats.transfers == 1
    fresh = [torch.full((ROW + 1,), float(i)) for i in range(ROWS)]
    filling = tdcopier.start_copy_into(fresh, moved)
    filling.get()
    assert_same(moved, oracle(fresh, device))
    assert filling.stats.transfers == 1
    part = tdcopier.start_copy_into([leaf[:5] * 0 for leaf in fresh], [leaf[:5] for leaf in moved])
    part.get()
    assert all(leaf[:5].eq(0).all() and leaf[5:].eq(i).all() for i, leaf in enumerate(moved))


def test_an_output_that_grows_or_is_written_leaves_the_source_alone(device):
    base = pinned_rows()
    expected = base.clone()
    for leaf in tdcopier.copy(list(base.unbind()), device):
        leaf.fill_(-1)
    assert torch.equal(base, expected)


@pytest.mark.parametrize("pinned_example", [True, False])
def test_a_prepared_copy_looks_anew_at_where_each_batch_lies(device, pinned_example):
    base = pinned_rows()
    other = torch.ones(3)  # a run has its own chunk, apart from this leaf's
    batches = {True: [*base.unbind(), other], False: [*(row.clone() for row in base), other]}
    plan = tdcopier.prepare(batches[pinned_example], device)
    for pinned in (True, False, True):
        handle = plan.start_copy(batches[pinned])
        assert_same(handle.get(), [*base.to(device).unbind(), other.to(device)])
        assert handle.stats.transfers == (2 if pinned else 1)
    assert (plan.fits, plan.misfits) == (3, 0)
