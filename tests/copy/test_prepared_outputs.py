"""`prepare(reuse_outputs=True)`: tensors without other references are returned as new ones."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support import assert_same, oracle

import tdcopier
from tdcopier.workloads import detection_batch, map_tensors


@pytest.fixture
def reusing(device: str) -> tdcopier.PreparedCopy:
    return tdcopier.prepare(pair(0.0), device, reuse_outputs=True)


def pair(value: float) -> list[torch.Tensor]:
    return [torch.full((4,), value + 1), torch.full((3, 2), value)]


def ids(tree: list[torch.Tensor]) -> list[int]:
    return [id(leaf) for leaf in tree]


def test_tensors_that_nobody_has_are_those_of_the_next_result(reusing):
    got = reusing.start_copy(pair(1.0)).get()
    before = ids(got)
    del got
    for value in (2.0, 3.0):
        got = reusing.start_copy(pair(value)).get()
        assert ids(got) == before
        assert_same([leaf.cpu() for leaf in got], pair(value))
        del got


def test_results_that_are_kept_are_left_alone(reusing):
    kept = [reusing.start_copy(pair(value)).get() for value in map(float, range(10))]
    assert len({i for got in kept for i in ids(got)}) == 20
    for value, got in enumerate(kept):
        assert_same([leaf.cpu() for leaf in got], pair(float(value)))


def test_a_loop_that_has_one_result_while_it_makes_the_next_uses_two_in_turn(reusing):
    seen = set()
    others = []  # they take the addresses of freed objects
    for step in range(8):
        others += [torch.empty(0) for _ in range(20)]
        got = reusing.start_copy(pair(float(step))).get()
        assert_same([leaf.cpu() for leaf in got], pair(float(step)))
        seen.add(tuple(ids(got)))
    assert len(seen) == 2


def test_without_the_option_nothing_is_kept(device):
    plan = tdcopier.prepare(pair(0.0), device)
    got = plan.start_copy(pair(1.0)).get()
    gone = [weakref.ref(leaf) for leaf in got]
    del got
    assert [reference() for reference in gone] == [None, None]


def test_a_graph_that_saved_a_tensor_still_has_its_values(reusing, device):
    weight = torch.ones(3, 2, device=device, requires_grad=True)
    got = reusing.start_copy(pair(2.0)).get()
    loss = (weight * got[1]).sum()
    del got
    for value in (7.0, 8.0):
        assert_same([leaf.cpu() for leaf in reusing.start_copy(pair(value)).get()], pair(value))
    loss.backward()
    assert weight.grad.unique().tolist() == [2]


def test_inference_tensors_and_others_are_not_mistaken_for_one_another(reusing):
    for inference in (True, False, True, True, False, False):
        with torch.inference_mode(inference):
            got = reusing.start_copy(pair(1.0)).get()
            assert [leaf.is_inference() for leaf in got] == [inference] * 2
            if not inference:
                got[1].add_(1)
            del got


def test_memory_is_freed_with_the_plan(device, accelerator):
    batch = detection_batch()
    tdcopier.copy(batch, device)
    gc.collect()
    before = accelerator.memory_allocated(device)
    plan = tdcopier.prepare(batch, device, reuse_outputs=True)
    plan.start_copy(batch).get()
    kept = accelerator.memory_allocated(device) - before
    for _ in range(5):
        plan.start_copy(batch).get()
    assert 0 < kept == accelerator.memory_allocated(device) - before
    del plan
    assert accelerator.memory_allocated(device) == before


def test_large_batches_are_not_kept(device):
    plan = tdcopier.prepare([torch.ones(2 << 20)], device, reuse_outputs=True)
    got = plan.start_copy([torch.ones(2 << 20)]).get()
    gone = weakref.ref(got[0])
    del got
    assert gone() is None


def test_a_plan_that_its_own_tensors_refer_to_is_collected(device):
    plan = tdcopier.prepare(pair(0.0), device, reuse_outputs=True)
    got = plan.start_copy(pair(1.0)).get()
    got[1].plan = plan
    gone = weakref.ref(plan)
    del plan, got
    gc.collect()
    assert gone() is None


def test_a_handle_outlives_its_plan(device, stall, copy_stream):
    plan = tdcopier.prepare(pair(0.0), device, reuse_outputs=True)
    with stall(copy_stream):
        handle = plan.start_copy(pair(3.0))
        del plan
        gc.collect()
    assert_same([leaf.cpu() for leaf in handle.get()], pair(3.0))


def test_a_loop_over_batches_of_one_layout_reuses_every_tensor(device):
    batch = detection_batch()
    plan = tdcopier.prepare(batch, device, reuse_outputs=True)
    seen: set[int] = set()
    for step in range(6):
        other = map_tensors(batch, lambda leaf, step=step: (leaf + step).to(leaf.dtype))
        got = plan.start_copy(other).get()
        assert_same(got, oracle(other, device))
        map_tensors(got, lambda leaf: seen.add(id(leaf)))
        del got
    assert len(seen) == 528
    assert plan.fits == 6


def test_a_copy_that_is_made_while_an_old_storage_goes_takes_other_tensors(device):
    """Freeing a result's memory may run code that starts another copy."""
    inner = []
    plan = tdcopier.prepare([torch.zeros(4)], device, reuse_outputs=True)
    (first,) = plan.start_copy([torch.full((4,), 1.0)]).get()
    weakref.finalize(
        first.untyped_storage(),
        lambda: inner.append(plan.start_copy([torch.full((4,), 99.0)]).get()),
    )
    del first
    outer = plan.start_copy([torch.full((4,), 2.0)]).get()
    ((inside,),) = inner
    assert inside is not outer[0]
    assert (outer[0].tolist(), inside.tolist()) == ([2.0] * 4, [99.0] * 4)


def test_what_a_loop_does_without_is_let_go(device):
    plan = tdcopier.prepare([torch.zeros(4)], device, reuse_outputs=True)
    results = [plan.start_copy([torch.full((4,), 1.0)]).get() for _ in range(4)]
    kept = [weakref.ref(result[0].untyped_storage()) for result in results]
    del results
    for value in range(20):
        assert plan.start_copy([torch.full((4,), float(value))]).get()[0].tolist() == [value] * 4
    gc.collect()
    assert [reference() for reference in kept] == [None] * 4
