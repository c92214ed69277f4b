"""Destinations beside others, in a chunk and in memory: only their own bytes are written."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import same_bytes

import tdcopier
from tdcopier import _C

SIZES = st.lists(st.integers(1, 40), min_size=2, max_size=60)
DTYPES = [torch.uint8, torch.int16, torch.float32, torch.float64]


def test_padding_between_slots_is_crossed_and_what_was_cut_off_a_leaf_is_not(device):
    """A gap up to the next multiple of the alignment may be a part of a leaf."""
    delivered = tdcopier.copy([torch.full((7,), 1, dtype=torch.int32) for _ in range(3)], device)
    whole = [torch.full((7,), 2, dtype=torch.int32) for _ in range(3)]
    assert tdcopier.start_copy_into(whole, delivered).get() is delivered
    handle = tdcopier.start_copy_into(whole, delivered)
    handle.get()
    assert handle.stats.transfers == 1
    cut = [delivered[0][:4], delivered[1][:6], delivered[2]]
    handle = tdcopier.start_copy_into([torch.full_like(leaf, 3).cpu() for leaf in cut], cut)
    handle.get()
    assert handle.stats.transfers == 3
    assert [leaf.tolist() for leaf in delivered] == [[3] * 4 + [2] * 3, [3] * 6 + [2], [3] * 7]


def test_what_a_view_of_the_whole_chunk_has_put_between_slots_stays(device):
    """Only a gap from the end of one slot to the beginning of the next is padding."""
    delivered = tdcopier.copy([torch.ones(3), torch.ones(3)], device)
    view = torch.empty(0, dtype=torch.uint8, device=device)
    view.set_(delivered[0].untyped_storage())
    view.fill_(7)
    source = [torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)]
    tdcopier.start_copy_into(source, [view[12:13], view[15:16]]).get()
    assert view[10:18].tolist() == [7, 7, 0, 7, 7, 0, 7, 7]


def test_a_chunk_whose_storage_was_moved_is_like_any_other_memory(device):
    delivered = tdcopier.copy([torch.ones(3), torch.ones(3)], device)
    delivered[0].untyped_storage().resize_(4096)
    handle = tdcopier.start_copy_into([torch.zeros(3), torch.zeros(3)], delivered)
    handle.get()
    assert handle.stats.transfers == 2
    assert [leaf.tolist() for leaf in delivered] == [[0] * 3] * 2


@pytest.mark.parametrize("count", [8, 300])
def test_neighbours_that_were_allocated_apart_arrive(device, count):
    """CUDA refuses a transfer that goes on from one of its allocations into the next."""
    source = [torch.full((4096,), float(i)) for i in range(count)]
    there = [torch.empty(4096, device=device) for _ in range(count)]
    pinned = [torch.empty(4096, pin_memory=True) for _ in range(count)]
    tdcopier.start_copy_into(source, there).get()
    tdcopier.start_copy_into(there, pinned).get()
    assert all(map(same_bytes, pinned, source))
    assert all(map(same_bytes, tdcopier.copy(pinned, device), source))


@pytest.mark.parametrize("source_on", ["host", "same device", "other device"])
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(sizes=SIZES, data=st.data())
def test_leaves_and_parts_of_a_chunk_are_filled_and_nothing_else(
    device, request, source_on, sizes, data
):
    place = {"host": "cpu", "same device": device}.get(source_on) or request.getfixturevalue(
        "other_device"
    )
    dtypes = [data.draw(st.sampled_from(DTYPES)) for _ in sizes]
    alignment = data.draw(st.sampled_from([1, 16, 64]))
    batch = [torch.full((n,), 1).to(dtype) for n, dtype in zip(sizes, dtypes, strict=True)]
    delivered = tdcopier.copy(batch, device, min_packed_alignment_bytes=alignment)
    expected = [leaf.clone() for leaf in batch]
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True, min_size=1))
    source, destination = [], []
    for index in chosen:
        begin = data.draw(st.integers(0, sizes[index] - 1))
        end = data.draw(st.integers(begin + 1, sizes[index]))
        step = data.draw(st.sampled_from([1, 1, 1, 2]))
        destination.append(delivered[index][begin:end:step])
        source.append(torch.full(destination[-1].shape, 2).to(dtypes[index]).to(place))
        expected[index][begin:end:step] = 2
    _C.testing.set_max_window_bytes(data.draw(st.sampled_from([64, 2**40])))
    try:
        tdcopier.start_copy_into(source, destination).get()
    finally:
        _C.testing.set_max_window_bytes(2**63)
    for leaf, wanted in zip(delivered, expected, strict=True):
        assert same_bytes(leaf, wanted)


def test_windows_are_large_from_the_beginning(device):
    source = torch.randint(0, 255, (9 << 20,), dtype=torch.uint8)
    target = torch.zeros_like(source, device=device)
    handle = tdcopier.start_copy_into(source, target)
    handle.get()
    assert torch.equal(target.cpu(), source)
    assert handle.stats.transfers == 5  # of up to 2 MiB


def test_large_chunks_in_many_windows_are_filled(device):
    batch = [torch.full((n,), 1.0) for n in range(1, 700)]
    delivered = tdcopier.copy(batch, device)
    _C.testing.set_max_window_bytes(4096)
    _C.testing.set_max_inline_bytes(0)
    try:
        handle = tdcopier.start_copy_into([leaf + 1 for leaf in batch], delivered)
        handle.get()
    finally:
        _C.testing.set_max_window_bytes(2**63)
        _C.testing.set_max_inline_bytes(_C.MAX_INLINE_BYTES)
    assert handle.stats.background
    assert handle.stats.transfers > 100
    assert all((leaf == 2).all() for leaf in delivered)


@pytest.mark.sim
def test_only_the_call_that_blocks_reads_pinned_sources_in_place(sim, device):
    source = torch.arange(3 << 18, dtype=torch.int32).pin_memory()  # 3 MiB
    target = torch.empty(source.shape, dtype=torch.int32, device=device)
    sim.reset_counts()
    tdcopier.start_copy_into(source, target).get()
    assert sim.counts().h2d.transfers == 2
    target.zero_()
    sim.reset_counts()
    tdcopier.copy_into(source, target)
    assert sim.counts().h2d.transfers == 1
    source.zero_()
    assert torch.equal(target.cpu(), torch.arange(3 << 18, dtype=torch.int32))


@pytest.mark.sim
def test_a_window_that_many_stage_needs_one_new_buffer(sim):
    source = torch.ones(_C.STAGING_BUFFER_BYTES // 4)
    target = torch.empty(source.shape, device="sim")
    for _ in range(20):
        _C.testing.drop_staging()
        before = _C.staging_bytes("sim")
        tdcopier.start_copy_into(source, target).get()
        assert _C.staging_bytes("sim") - before == _C.STAGING_BUFFER_BYTES
