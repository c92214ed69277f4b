"""`prepare(reuse_outputs=True)`: tensors without other references are returned as new ones."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import assert_same, oracle

import tdcopier
from tdcopier.workloads import detection_batch, map_tensors


class Subclass(torch.Tensor):
    pass


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


def test_an_empty_tensor_has_a_storage_of_its_own_each_time(device):
    plan = tdcopier.prepare([torch.ones(2), torch.ones(0)], device, reuse_outputs=True)
    for _ in range(3):
        got = plan.start_copy([torch.ones(2), torch.ones(0)]).get()
        assert got[1].untyped_storage().nbytes() == 0
        assert got[1].shape == (0,)
        del got
    got = plan.start_copy([torch.ones(2), torch.ones(0)]).get()
    got[1].resize_(5).fill_(7)
    assert got[0].tolist() == [1, 1]


def test_without_the_option_nothing_is_kept(device):
    plan = tdcopier.prepare(pair(0.0), device)
    got = plan.start_copy(pair(1.0)).get()
    gone = [weakref.ref(leaf) for leaf in got]
    del got
    assert [reference() for reference in gone] == [None, None]


def _attribute(leaf: torch.Tensor) -> Any:
    leaf.note = "mine"


def _gradient(leaf: torch.Tensor) -> Any:
    leaf.requires_grad_()


def _gradient_on_and_off(leaf: torch.Tensor) -> Any:
    leaf.requires_grad_().requires_grad_(False)


def _changed(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], None]:
    """Wraps the change so that its return value is dropped."""

    def touch(leaf: torch.Tensor) -> None:
        change(leaf)

    return touch


def _swapped(leaf: torch.Tensor) -> Any:
    torch.utils.swap_tensors(leaf, torch.zeros(7))


def _given_gradient(leaf: torch.Tensor) -> Any:
    leaf.grad = torch.zeros_like(leaf)


TOUCHED = {
    "a reference": lambda leaf: leaf,
    "a weak reference": weakref.ref,
    "a weak reference of torch's own": torch._C._WeakTensorRef,
    "an attribute": _attribute,
    "its attributes": vars,
    "a gradient": _gradient,
    "a gradient, no more": _gradient_on_and_off,
    "a gradient that was given": _given_gradient,
    "another shape": _changed(lambda leaf: leaf.resize_(2)),
    "another shape, with a class": _changed(lambda leaf: leaf.unsqueeze_(0)),
    "another shape, the same strides": _changed(lambda leaf: leaf.as_strided_((2, 2), (2, 1))),
    "the same shape, other strides": _changed(lambda leaf: leaf.as_strided_((3, 2), (1, 3))),
    "other strides": _changed(lambda leaf: leaf.t_()),
    "other data": lambda leaf: setattr(leaf, "data", torch.zeros(3, 2, device=leaf.device)),
    "another dtype": lambda leaf: setattr(leaf, "data", torch.zeros(3, 2).int().to(leaf.device)),
    "another class": lambda leaf: setattr(leaf, "__class__", Subclass),
    "a swap": _swapped,
    "a value": _changed(lambda leaf: leaf.add_(1)),
    "a view": lambda leaf: leaf.view(-1),
    "a detached one": lambda leaf: leaf.detach(),
    "its data": lambda leaf: leaf.data,
    "its storage": lambda leaf: leaf.untyped_storage(),
    "the storage's size": _changed(lambda leaf: leaf.untyped_storage().resize_(0)),
}


@pytest.mark.filterwarnings("ignore:.*resize:UserWarning")
@pytest.mark.parametrize("touch", TOUCHED)
def test_whatever_was_done_to_a_tensor_the_next_result_is_as_new(reusing, device, touch):
    got = reusing.start_copy(pair(1.0)).get()
    held = TOUCHED[touch](got[1])  # the first tensor decides whether a result is in use
    held_values = held.clone() if isinstance(held, torch.Tensor) else None
    del got
    after = reusing.start_copy(pair(5.0)).get()
    assert_same(after, [leaf.to(device) for leaf in pair(5.0)])
    if isinstance(held, dict):
        held["note"] = "somebody else's"
    for leaf in after:
        assert type(leaf) is torch.Tensor
        assert not vars(leaf)
        assert leaf.grad is None
        assert leaf.grad_fn is None
        assert leaf._version == 0
        assert not leaf._is_view()
    after[1].add_(1)
    if isinstance(held, torch._C._WeakTensorRef):
        assert held.expired()
    if held_values is not None:  # with its values, and a version of its own
        assert torch.equal(held, held_values)
        assert held._version == 0
        held.sub_(3)
        assert after[1]._version == 1
    assert torch.equal(after[1].cpu(), pair(6.0)[1])


def test_a_weak_reference_to_a_tensor_never_sees_another_result(reusing):
    got = reusing.start_copy(pair(1.0)).get()
    seen = weakref.ref(got[1])
    del got
    after = reusing.start_copy(pair(2.0)).get()
    assert seen() is None
    assert_same([leaf.cpu() for leaf in after], pair(2.0))


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
