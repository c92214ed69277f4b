"""Each option has its documented effect on addresses, allocations and transfers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from staged_windows import windows_of
from support import assert_same, oracle, raises_exactly, run_python

import tdcopier

LEAVES = [
    torch.arange(n, dtype=dtype)
    for n in (1, 3, 100)
    for dtype in (torch.uint8, torch.int16, torch.float32, torch.int64)
]


def spans(outputs: list[torch.Tensor]) -> dict[int, list[tuple[int, int]]]:
    """Returns begin and end address of each output, by chunk (its storage's address)."""
    chunks: dict[int, list[tuple[int, int]]] = {}
    for output in outputs:
        span = (output.data_ptr(), output.data_ptr() + output.nbytes)
        chunks.setdefault(output.untyped_storage().data_ptr(), []).append(span)
    return chunks


@pytest.mark.parametrize("alignment", [1, 2, 16, 24, 100, 512, 4096, 1 << 20])
def test_every_slot_is_aligned_to_the_option_and_the_element(ends, alignment):
    """Counts from the chunk's beginning, whose address is a multiple of the power of two in it."""
    source, target = ends
    leaves = oracle(LEAVES, source)
    outputs = tdcopier.copy(leaves, target, min_packed_alignment_bytes=alignment)
    assert_same(outputs, oracle(LEAVES, target))
    for output in outputs:
        element = output.element_size()
        effective = -(-max(alignment, element) // element) * element
        chunk = min(o.data_ptr() for o in outputs if o.dtype == output.dtype)
        assert (output.data_ptr() - chunk) % effective == 0
        assert output.data_ptr() % (effective & -effective) == 0


def test_slots_do_not_overlap(ends):
    source, target = ends
    outputs = tdcopier.copy(oracle(LEAVES, source), target, min_packed_alignment_bytes=1)
    for chunk in spans(outputs).values():
        for (_, end), (begin, _) in zip(sorted(chunk), sorted(chunk)[1:], strict=False):
            assert end <= begin


def test_only_leaves_of_one_dtype_share_a_chunk(ends):
    source, target = ends
    handle = tdcopier.start_copy(oracle(LEAVES, source), target)
    outputs = [output for output in handle.get() if output.nbytes]
    storages = {output.untyped_storage().data_ptr() for output in outputs}
    dtypes = {output.dtype for output in outputs}
    assert handle.stats.chunks == len(dtypes)
    assert len(storages) == len(outputs if torch.device(target).type == "cpu" else dtypes)


@pytest.mark.parametrize("limit", [1, 64, 400, 1000, 1 << 40])
def test_no_chunk_spans_more_than_its_limit(ends, limit):
    source, target = ends
    leaves = oracle(LEAVES, source)
    handle = tdcopier.start_copy(leaves, target, max_packed_chunk_bytes=limit)
    outputs = handle.get()
    assert_same(outputs, oracle(LEAVES, target))
    for chunk in spans(outputs).values():
        if len(chunk) > 1:
            assert max(end for _, end in chunk) - min(begin for begin, _ in chunk) <= limit
    assert handle.stats.alone_leaves == sum(leaf.nbytes > limit for leaf in LEAVES)


def test_without_packing_every_leaf_has_its_own_memory_and_transfer(ends):
    source, target = ends
    handle = tdcopier.start_copy(oracle(LEAVES, source), target, pack_cpu_tensors=False)
    assert len(spans(handle.get())) == len(LEAVES)
    stats = handle.stats
    assert (stats.packed_leaves, stats.alone_leaves) == (0, len(LEAVES))
    assert (stats.chunks, stats.transfers) == (len(LEAVES), len(LEAVES))


def test_without_pinned_staging_nothing_is_pinned(device):
    before = tdcopier.pinned.staging_bytes(device)
    tree = [torch.randn(70000), *LEAVES]
    for background in (False, True):
        handle = tdcopier.start_copy(
            tree, device, use_pinned_staging=False, use_background_thread=background
        )
        assert_same(handle.get(), oracle(tree, device))
        dtypes = {leaf.dtype for leaf in LEAVES if leaf.nbytes}
        assert handle.stats.transfers == 1 + len(dtypes)
    assert tdcopier.pinned.staging_bytes(device) == before


def test_large_work_goes_to_the_background_and_small_work_does_not(device):
    small, large = torch.ones(1000), torch.ones(1 << 20)
    assert not tdcopier.start_copy(small, device).stats.background
    handle = tdcopier.start_copy(large, device)
    assert handle.stats.background
    assert_same(handle.get(), large.to(device))
    assert not tdcopier.start_copy(large, device, use_background_thread=False).stats.background


def test_a_large_leaf_is_cut_into_windows_that_grow(device):
    large = torch.randint(0, 255, (9 << 20,), dtype=torch.uint8)
    handle = tdcopier.start_copy(large, device, use_background_thread=False)
    assert_same(handle.get(), large.to(device))
    assert handle.stats.transfers == len(windows_of(large.nbytes))
    assert handle.stats.transfer_bytes == large.nbytes


def test_options_are_keyword_only_with_the_documented_defaults():
    import inspect

    parameters = inspect.signature(tdcopier.start_copy).parameters
    assert {name: p.default for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY} == {
        "use_pinned_staging": True,
        "pack_cpu_tensors": True,
        "min_packed_alignment_bytes": 16,
        "max_packed_chunk_bytes": 33554432,
        "use_background_thread": True,
        "require_pinned_results": False,
        "on_unknown": None,
    }
    assert [n for n, p in parameters.items() if p.kind is not p.KEYWORD_ONLY] == ["data", "device"]


@pytest.mark.parametrize("wrong", ["0", "-1", "many", "257"])
def test_a_wrong_number_of_workers_is_an_error_of_the_import(wrong):
    code = """
    try:
        import tdcopier
    except ValueError as error:
        print(error)
    """
    told = run_python(code, TDCOPIER_WORKERS=wrong)
    assert told.strip() == f"TDCOPIER_WORKERS={wrong!r}: give a number from 1 to 256"


@pytest.mark.parametrize("wrong", ["64MiB", "-1", "1.5"])
def test_a_wrong_limit_is_an_error_of_the_import(wrong):
    code = """
    try:
        import tdcopier
    except ValueError as error:
        print(error)
    """
    told = run_python(code, TDCOPIER_STAGING_LIMIT_BYTES=wrong)
    assert told.strip() == f"TDCOPIER_STAGING_LIMIT_BYTES={wrong!r}: give a number of bytes"


def test_a_variable_that_is_empty_is_not_set():
    names = ("STAGING_LIMIT_BYTES", "PINNED_LIMIT_BYTES", "WORKERS", "GATHER", "CHECK")
    code = """
    import tdcopier
    from tdcopier import _C
    print(tdcopier.info()["limits"]["staging_limit_bytes"] == _C.DEFAULT_STAGING_LIMIT_BYTES)
    """
    assert run_python(code, **{f"TDCOPIER_{name}": "" for name in names}).strip() == "True"


@pytest.mark.parametrize(
    "option",
    [
        "use_pinned_staging",
        "pack_cpu_tensors",
        "use_background_thread",
        "require_pinned_results",
    ],
)
def test_what_is_neither_true_nor_false_is_no_switch(device, option):
    calls: list[Any] = [tdcopier.start_copy, tdcopier.prepare, tdcopier.copy]
    for call in calls:
        with raises_exactly(TypeError, f"{option} must be a bool; got 'no'"):
            call([torch.ones(2)], device, **{option: "no"})
    assert tdcopier.copy([torch.ones(2)], device, **{option: np.False_})[0].tolist() == [1, 1]
    with raises_exactly(TypeError, "copy_opaque must be a bool; got 'no'"):
        tdcopier.copy_into([torch.ones(2)], [torch.zeros(2)], copy_opaque="no")
    with raises_exactly(TypeError, "reuse_outputs must be a bool; got 'no'"):
        tdcopier.prepare([torch.ones(2)], device, reuse_outputs="no")


def test_the_number_of_workers_is_bounded_as_asked():
    code = """
    import torch
    from tdcopier import _C
    # Each device has one for what arrives from it, and one for what fills it.
    print(_C.testing.wake_workers() - 2 * torch.accelerator.device_count())
    """
    one = run_python(code, TDCOPIER_WORKERS="1")
    assert int(one) == 2  # one worker, and the reclaimer


def test_an_unknown_way_to_gather_is_an_error_of_the_import():
    code = """
    try:
        import tdcopier
    except ValueError as error:
        print(error)
    """
    told = run_python(code, TDCOPIER_GATHER="faster")
    assert told.strip() == 'TDCOPIER_GATHER=\'faster\': give "kernel" or "portable"'
    assert run_python(code, TDCOPIER_GATHER="portable") == ""
