"""Lifetime, for every call: memory lives until it was read and written, and no longer.

`tests/support/defects_of_memory.py` has engines that free it too early, or never.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from calls import each_call
from each_case import together
from fault_support import in_use
from filled_leaves import filled, sizes, values_of
from sim_support import BRIEFLY
from support import are_released, memory_reference
from work_of_calls import Call, Work

MANY = [*range(50, 90), 70_000]
every_size = together("elements", [[100, 50], MANY, [1 << 20]], ids=["packed", "many", "large"])


def is_late(call: Call) -> bool:
    """Whether the call returns before the engine's own streams read or write.

    Torch's allocator knows what torch does with delegated leaves.
    """
    is_of_engine = (call.is_from_device or call.is_to_device) and not call.delegated
    is_held = not call.reads_pinned and "held" in call.never
    # A stream that waits for the packing would hold what the tests do next.
    return is_of_engine and not is_held and "others" not in call.never


def is_read_by_the_device(work: Work) -> bool:
    """Whether the device reads the sources where they are: of pinned leaves, large ones."""
    if work.call.packed not in ("", "destination"):  # it reads a parcel, which only the copy has
        return False
    is_large = max(leaf.numel() for leaf in work.sources) == 1 << 20
    return work.call.is_from_device or bool(
        work.call.pinned and (work.call.tables == "source" or is_large)
    )


def others_like(leaves: list[torch.Tensor], place: str) -> list[torch.Tensor]:
    """Returns new leaves of this memory, each of these sizes and of their sum, of the value 9."""
    sizes = [sum(leaf.numel() for leaf in leaves), *(leaf.numel() for leaf in leaves)]
    made = [torch.full((size,), 9.0, device=place) for size in sizes for _ in range(3)]
    return [leaf.pin_memory() for leaf in made] if place == "cpu" else made


# ---- while the copy is under way -----------------------------------------------------------------


@sizes
@each_call()
def test_sources_that_are_dropped_right_after_the_call_are_copied_all_the_same(make, elements):
    """Otherwise their memory would be the first that the same stream reuses."""
    works = [make(value, elements) for value in range(3)]
    shapes = [torch.empty_like(leaf, device="meta") for leaf in works[0].sources]
    handles = []
    others = []
    for work in works:
        handles.append(work.start())
        work.sources.clear()
        others += others_like(shapes, work.source)
    for value, (work, handle) in enumerate(zip(works, handles, strict=True)):
        assert values_of(work.arrived(handle.get())) == {value}
    assert values_of(others) == {9}


@every_size
@each_call(is_late, "unasked")
@together("dropped", [True, False], ids=["handle dropped", "handle kept"])
def test_what_the_device_still_reads_or_writes_is_kept_and_no_longer(
    make, stall, elements, dropped
):
    """Only the engine keeps it alive: both trees are dropped, and the handle is not asked."""
    work = make(3, elements)
    read = [weakref.ref(leaf) for leaf in work.sources]
    written = [memory_reference(leaf) for leaf in work.written]
    if work.call.packed == "destination":
        written = [work.parcel_memory]  # the call makes views of its own
    held = read if is_read_by_the_device(work) else []
    shapes = [torch.empty_like(leaf, device="meta") for leaf in work.sources]
    with stall(work.reading or work.writing):
        handle = work.start()
        work.sources.clear()
        work.written.clear()
        if dropped:
            del handle  # hangs if it waits for the device
            gc.collect()
        elif work.call.is_from_device:  # polling does not release them either
            assert not handle.ready()
        kept = [*held, *written]
        assert not kept or not are_released(kept, within=BRIEFLY)
        assert all(reference() is not None for reference in kept)
        if not held and not work.call.pinned:
            assert are_released(read)  # staged, though the device has read nothing yet
        others = others_like(shapes, work.source)
    assert are_released(read)
    if not dropped:
        assert values_of(work.arrived(handle.get())) == {3}
        del handle
    assert values_of(others) == {9}
    assert are_released(written)
    again = make(4, elements)
    assert values_of(again.arrived(again.start().get())) == {4}


@every_size
@each_call(is_late)
def test_memory_that_is_dropped_is_not_given_out_before_it_was_written(
    make, accelerator, stall, elements
):
    """The transfer still writes to it, and would overwrite what reused it too early."""
    works = [make(1, elements) for _ in range(3)]
    shapes = [torch.empty_like(leaf, device="meta") for leaf in works[0].sources]
    with stall(works[0].writing):
        for work in works:
            work.start()
            work.written.clear()
        others = others_like(shapes, work.target)
    for place in work.devices:
        accelerator.synchronize(place)
    assert values_of(others) == {9}


@each_call()
def test_a_source_whose_last_reference_the_copy_holds_is_finalised_with_the_gil(make):
    """Its finalizer runs Python code; a worker that ran it would crash or deadlock."""
    finalised: list[int] = []
    alive = []
    for value in range(10):
        work = make(value, [1 << 18, 3])
        for leaf in work.sources:
            weakref.finalize(leaf, finalised.append, value)
            alive.append(weakref.ref(leaf))
        handle = work.start()
        work.sources.clear()
        del leaf
        handle.get()
    assert are_released(alive)
    assert sorted(finalised) == sorted([*range(10), *range(10)])


# ---- when it is done -----------------------------------------------------------------------------


@sizes
@each_call(lambda _: True, "unasked")
def test_both_trees_are_let_go_when_the_copy_is_done(make, elements):
    """A pending call of the interpreter releases the sources, although the handle lives."""
    work = make(3, elements)
    read, written = ([weakref.ref(leaf) for leaf in tree] for tree in (work.sources, work.written))
    handle = work.start()
    work.sources.clear()
    work.written.clear()
    assert are_released(read)
    assert values_of(work.arrived(handle.get())) == {3}
    del handle
    assert are_released(written)


@each_call()
def test_results_outlive_the_handle_and_the_sources(make):
    work = make(4, [100, 50, 70_000])
    moved = work.arrived(work.start().wait())
    work.sources.clear()
    gc.collect()
    others = [filled(9, [100, 50, 70_000], place) for place in ("cpu", *work.devices)]
    assert values_of(moved) == {4}
    last = moved.pop()
    del moved
    assert values_of([last]) == {4}
    assert len(others) > 1 or not work.devices


@each_call(lambda call: call.is_from_device or call.is_to_device)
def test_memory_is_given_back_when_the_results_go(make, accelerator):
    work = make(1, [100_000, 50])
    for _ in range(2):
        work.start().get()  # a plan may keep two results
    gc.collect()
    for place in work.devices:
        accelerator.synchronize(place)
    before = [accelerator.memory_allocated(place) for place in work.devices]
    result = work.start().get()
    if work.call.makes_device_memory and not work.call.plan:
        assert accelerator.memory_allocated(work.target) > before[work.devices.index(work.target)]
    del result
    assert [accelerator.memory_allocated(place) for place in work.devices] == before


@pytest.mark.sim
@each_call(lambda call: call.makes_host_memory)
def test_pinned_memory_is_given_back_when_the_results_go(sim, make):
    work = make(1, [100, 50, 70_000])
    for _ in range(2):
        work.start().get()  # a plan may keep two results
    gc.collect()
    before = in_use(sim)
    result = work.arrived(work.start().get())
    assert in_use(sim) > before or work.call.plan or not result[0].is_pinned()
    del result
    assert in_use(sim) == before
