"""Small leaves that are pinned each for itself, which a kernel of the device reads together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from sim_support import becomes
from support import assert_same

import tdcopier
from tdcopier import _C

LEAVES = 40  # of 16 KiB: more than the 512 KiB from which on a kernel is quicker
SIZE = 4096


def leaf(value: float, size: int = SIZE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(size).add(value).to(dtype)


def pinned_leaf(value: float, size: int = SIZE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return leaf(value, size, dtype).pin_memory()


def on(device: torch.device, tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(device) for name, value in tree.items()}


def batch(count: int = LEAVES, size: int = SIZE) -> dict[str, torch.Tensor]:
    return {f"{i}": pinned_leaf(i, size) for i in range(count)}


@pytest.mark.parametrize("registered", [False, True])
def test_one_kernel_reads_them_all(device, registered):
    tree = {f"{i}": leaf(i) for i in range(LEAVES)} if registered else batch()
    dtypes = [torch.float64, torch.int16, torch.uint8, torch.bool, torch.complex64]
    for dtype in dtypes:
        one = leaf(0, 20_001, dtype)
        tree[str(dtype)] = one if registered else one.pin_memory()
    pin = tdcopier.pin_memory_(tree if registered else [], device)
    with pin:
        handle = tdcopier.start_copy(tree, device)
        assert_same(handle.get(), on(device, tree))
    assert handle.stats.rows_in_place == handle.stats.packed_leaves == LEAVES + len(dtypes)
    assert handle.stats.transfers == 1
    assert handle.stats.transfer_bytes == sum(value.nbytes for value in tree.values())
    assert not handle.stats.background


def test_other_leaves_are_staged_beside_them(device):
    tree: dict[str, Any] = batch()
    tree |= {
        "large": pinned_leaf(1, 100_000),
        "tiny": pinned_leaf(2, 100),
        "gaps": torch.arange(20_000.0).pin_memory()[::2],
        "transposed": torch.arange(9000.0).pin_memory().view(90, 100).t(),
        "text": "as it is",
        "pageable": torch.arange(5000.0),
    }
    handle = tdcopier.start_copy(tree, device)
    expected = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in tree.items()}
    assert_same(handle.get(), expected)
    assert handle.stats.rows_in_place == LEAVES + 1  # the transposed one has no gaps


@pytest.mark.parametrize(
    "make",
    [
        lambda: batch(4),
        lambda: batch(31),
        lambda: batch(1000, 200),
        lambda: {f"{i}": leaf(i) for i in range(LEAVES)},
        lambda: {"mixed": leaf(1, 5000), **batch(31)},
    ],
    ids=["few", "not quite enough", "tiny", "pageable", "first pageable"],
)
def test_where_staging_is_quicker_they_are_staged(device, make):
    tree = make()
    handle = tdcopier.start_copy(tree, device)
    assert_same(handle.get(), on(device, tree))
    assert handle.stats.rows_in_place == 0
    assert handle.stats.packed_leaves == len(tree)


def test_a_series_in_one_allocation_is_one_transfer(device):
    rows = torch.arange(100 * SIZE * 1.0).view(100, SIZE).pin_memory()
    handle = tdcopier.start_copy(list(rows.unbind()), device)
    assert_same(torch.stack(handle.get()), rows.to(device))
    assert (handle.stats.rows_in_place, handle.stats.transfers) == (0, 1)


@pytest.mark.parametrize("options", [{"use_pinned_staging": False}, {"pack_cpu_tensors": False}])
def test_options_apply_to_them(device, options):
    tree = batch()
    handle = tdcopier.start_copy(tree, device, **options)
    assert_same(handle.get(), on(device, tree))
    in_place = handle.stats.rows_in_place
    assert in_place == (0 if "use_pinned_staging" in options else LEAVES)
    if not in_place:
        assert handle.stats.packed_leaves == LEAVES
    else:
        assert handle.stats.alone_leaves == LEAVES


def test_more_leaves_than_a_kernel_has_room_for_take_several(device):
    tree = {f"{i}": leaf(i) for i in range(1700)}
    with tdcopier.pin_memory_(tree, device):
        handle = tdcopier.start_copy(tree, device)
        assert_same(handle.get(), on(device, tree))
    assert handle.stats.rows_in_place == 1700
    assert handle.stats.transfers == 3  # 817 each


def test_explain_tells_it(device):
    tree = [*batch().values(), torch.ones(3)]
    explanation = tdcopier.explain(tree, device)
    handle = tdcopier.start_copy(tree, device)
    handle.get()
    assert [row.in_place for row in explanation] == [*[True] * LEAVES, False]
    assert "a kernel of the device reads it in place" in explanation.rows[0].reason
    assert explanation.counts.transfers == handle.stats.transfers == 2
    assert explanation.counts.transfer_bytes == handle.stats.transfer_bytes
    assert explanation.counts.chunks == handle.stats.chunks


@pytest.mark.parametrize("call", ["wait", "wait_staged"])
def test_they_may_be_overwritten_when_the_call_has_returned(stall, device, copy_stream, call):
    tree = batch()
    expected = on(device, tree)
    overwritten = threading.Event()
    with stall(copy_stream):
        handle = tdcopier.start_copy(tree, device)

        def overwrite() -> None:
            getattr(handle, call)()
            for value in tree.values():
                value.fill_(-1)
            overwritten.set()

        writer = threading.Thread(target=overwrite)
        writer.start()
        assert not overwritten.wait(0.05)  # it cannot end: the device has not begun
    writer.join()
    assert_same(handle.get(), expected)
    assert handle.stats.rows_in_place == LEAVES


@pytest.mark.sim
def test_the_sources_live_until_the_device_has_read_them(sim, device, copy_stream):
    with sim.hold(copy_stream):
        handle = tdcopier.start_copy(batch(), device)
        again = batch()  # would get the memory of the first batch, if that were free
        for value in again.values():
            value.fill_(-1)
    assert_same(handle.get(), on(device, batch()))


def test_when_they_are_unpinned_meanwhile_the_values_are_right(device):
    tree = {f"{i}": leaf(i) for i in range(LEAVES)}
    expected = on(device, tree)
    stop = threading.Event()

    def pin_again_and_again() -> None:
        while not stop.is_set():
            with tdcopier.pin_memory_(tree, device):
                pass

    pinner = threading.Thread(target=pin_again_and_again)
    pinner.start()
    try:
        for _ in range(20):
            assert_same(tdcopier.copy(tree, device), expected)
    finally:
        stop.set()
        pinner.join()


def test_when_they_are_unpinned_while_the_call_waits_they_are_staged(sim, device):
    """The leaf before them is one that the kernel could read if it needed no gradient."""
    registered = {f"{i}": leaf(i) for i in range(LEAVES)}
    tree = {"first": pinned_leaf(0).requires_grad_(), **registered}
    pinned = tdcopier.pin_memory_(registered, device)
    moved: list[Any] = []
    gate = sim.Gate()
    with torch.sim.stream(torch.sim.Stream()):
        sim.busy(gate)
        for _ in range(4):  # until there is no room for more
            tdcopier.start_copy(torch.zeros(4), device).wait()
    caller = threading.Thread(target=lambda: moved.append(tdcopier.start_copy(tree, device)))
    closer = threading.Thread(target=pinned.close)
    try:
        caller.start()
        assert not becomes(lambda: bool(moved), within=0.2)
        closer.start()
        closer.join(0.2)  # it unpins at once, and waits for earlier work
    finally:
        gate.open()
        caller.join()
        closer.join()
    assert moved[0].stats.rows_in_place == 0
    assert_same(moved[0].get(), on(device, tree))


def test_a_prepared_copy_plans_them_once(device):
    prepared = tdcopier.prepare(batch(), device, reuse_outputs=True)
    for i in range(3):
        tree = {k: v + i for k, v in batch().items()}
        tree = {k: v.pin_memory() for k, v in tree.items()}
        handle = prepared.start_copy(tree)
        assert_same(handle.get(), on(device, tree))
        assert handle.stats.rows_in_place == LEAVES
    assert (prepared.fits, prepared.misfits) == (3, 0)


def test_without_the_kernel_they_are_staged(device):
    _C.testing.use_row_kernels(False)
    try:
        handle = tdcopier.start_copy(batch(), device)
        assert_same(handle.get(), on(device, batch()))
    finally:
        _C.testing.use_row_kernels(True)
    assert handle.stats.rows_in_place == 0


@pytest.mark.sim
@pytest.mark.parametrize("fault", ["fail_device_allocation", "fail_transfer"])
def test_after_a_failure_the_next_copy_works(sim, device, fault):
    tree = batch()
    with getattr(sim, fault)(1), pytest.raises(RuntimeError, match=r"made to fail|out of memory"):
        tdcopier.copy(tree, device)
    handle = tdcopier.start_copy(tree, device)
    assert_same(handle.get(), on(device, tree))
    assert handle.stats.rows_in_place == LEAVES
