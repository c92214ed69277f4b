"""`prepare`: its copies equal those of `start_copy` for every batch; it reports which ones fit."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from catalogue_cases import ARRIVING, OPTIONS, REFUSED, WRAPS, kind_and_ends, wraps_for
from each_case import together
from prepared_example import example
from support import assert_same, oracle
from tensordict import TensorDict

import tdcopier


def assert_copied_as_by_start_copy(plan: tdcopier.PreparedCopy, batch: Any, **options: Any) -> Any:
    """Asserts that the result is that of `.to` with the counts of `start_copy`, and returns it."""
    handle = plan.start_copy(batch)
    got = handle.get()
    target = str(plan.device)
    assert_same(got, oracle(batch, target))
    plain = tdcopier.start_copy(batch, target, **options)
    plain.get()
    assert handle.stats == plain.stats
    return got


# ---- the result ----------------------------------------------------------------------------------


@pytest.mark.parametrize("reuse_outputs", [False, True])
@together(("name", "direction"), ARRIVING, by="direction")
def test_every_kind_of_leaf_arrives_as_through_start_copy(
    device, registered_box, name, direction, reuse_outputs
):
    kind, source, target = kind_and_ends(name, direction, device)
    # Whether results are kept says where leaves are, and nothing of the containers around them.
    for container in wraps_for(direction, kind.large or reuse_outputs):
        with kind.within():
            plan = tdcopier.prepare(
                WRAPS[container].wrap(kind.make(target if kind.on_target else source)),
                target,
                reuse_outputs=reuse_outputs,
            )
            copies = 3 if reuse_outputs else 1  # the third has the memory of the first
            for _ in range(copies):
                tree = WRAPS[container].wrap(kind.make(target if kind.on_target else source))
                assert_copied_as_by_start_copy(plan, tree)
                assert plan.why_not(tree) is None, container
            assert (plan.fits, plan.misfits) == (copies, 0), container


@together(("name", "direction"), REFUSED, by="direction")
def test_a_leaf_that_cannot_be_read_is_refused(device, name, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    plan = tdcopier.prepare([torch.ones(4)], target)
    for call in (
        lambda: tdcopier.prepare([kind.make(source)], target),
        lambda: plan.start_copy([kind.make(source)]),
        lambda: plan.why_not([kind.make(source)]),
    ):
        with pytest.raises(kind.outcome(direction)) as caught:
            call()
        assert str(caught.value).startswith("data[0]")
    assert (plan.fits, plan.misfits) == (0, 0)


@pytest.mark.parametrize("reuse_outputs", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_of_start_copy_is_kept_to(device, options, reuse_outputs):
    plan = tdcopier.prepare(example(), device, reuse_outputs=reuse_outputs, **OPTIONS[options])
    for seed in range(1, 5):
        batch = example(seed)
        got = assert_copied_as_by_start_copy(plan, batch, **OPTIONS[options])
        addresses = [leaf.data_ptr() for leaf in (got["boxes"][0], got["label"])]
        alignment = OPTIONS[options].get("min_packed_alignment_bytes", 16)
        assert all(address % alignment == 0 for address in addresses)
    assert (plan.fits, plan.misfits) == (4, 0)


def test_trees_that_come_from_several_devices_fit(device, other_device):
    def mixed(value: float) -> list[Any]:
        on_host = torch.full((3,), value)
        return [
            on_host,
            on_host.to(other_device),
            on_host.to(device),
            (on_host + 1).to(other_device),
            (on_host + 1).requires_grad_(),
        ]

    plan = tdcopier.prepare(mixed(0.0), device)
    for value in (1.0, 2.0):
        batch = mixed(value)
        handle = plan.start_copy(batch)
        assert_same(handle.get(), oracle(batch, device))
        assert handle.get()[2] is batch[2]
        assert handle.stats[:5] == (3, 0, 1, 1, 0)
    assert (plan.fits, plan.misfits) == (2, 0)


@pytest.mark.parametrize("reuse_outputs", [False, True])
def test_tensordicts_fit(device, reuse_outputs):
    def episode(value: float) -> TensorDict:
        inner = TensorDict({"reward": torch.full((4, 1), value)}, [4])
        data = {"obs": torch.full((4, 3), value), "next": inner, "name": f"episode {value}"}
        return TensorDict(data, [4]).lock_()

    plan = tdcopier.prepare([episode(0.0)], device, reuse_outputs=reuse_outputs)
    for value in (1.0, 2.0, 3.0):
        (got,) = plan.start_copy([episode(value)]).get()
        assert_same(got, episode(value).to(device))
        assert got.is_locked
    assert (plan.fits, plan.misfits) == (3, 0)


# ---- batches that fit the plan -------------------------------------------------------------------

FITTING = {
    "a larger storage offset": lambda b: b | {"boxes": [torch.rand(9, 4)[2:], b["boxes"][1]]},
    "a tensor instead of an array": lambda b: b | {"array": torch.from_numpy(b["array"])},
    "other keys": lambda b: {f"new {key}": value for key, value in b.items()},
    "another class of container": lambda b: OrderedDict(b, boxes=tuple(b["boxes"])),
    "more values that are no leaves": lambda b: b | {"note": None, "more": [[], "text"]},
    "the same leaf twice": lambda b: b | {"boxes": [b["boxes"][0], b["boxes"][0][:5]]},
    "a parameter that needs no gradient": lambda b: (
        b | {"label": torch.nn.Parameter(b["label"], requires_grad=False)}
    ),
}


@pytest.mark.parametrize("case", [c for c in FITTING if "instead" not in c])
def test_what_is_not_a_leafs_layout_may_differ(device, case):
    plan = tdcopier.prepare(example(), device)
    batch = FITTING[case](example(1))
    assert plan.why_not(batch) is None
    assert_same(plan.start_copy(batch).get(), oracle(batch, device))
    assert (plan.fits, plan.misfits) == (1, 0)


class Subclass(torch.Tensor):
    pass


def needing_gradient(leaf: torch.Tensor) -> torch.Tensor:
    return leaf.clone().requires_grad_()


MISFITS = {
    "shape": (
        lambda b: b["boxes"].__setitem__(1, torch.ones(6, 4)),
        "data['boxes'][1] is (6, 4) float32, the example's was (5, 4) float32",
    ),
    "dtype": (
        lambda b: b["boxes"].__setitem__(1, torch.ones(5, 4, dtype=torch.int32)),
        "data['boxes'][1] is (5, 4) int32, the example's was (5, 4) float32",
    ),
    "number of dimensions": (
        lambda b: b.update(label=torch.ones(1, dtype=torch.int64)),
        "data['label'] is (1,) int64, the example's was () int64",
    ),
    "strides": (
        lambda b: b.update(image=b["image"].contiguous()),
        "data['image'] is (2, 8, 3) float32 with strides (24, 3, 1), the example's was (2, 8, 3) "
        "float32 with strides (24, 1, 8)",
    ),
    "gaps": (
        lambda b: b.update(crop=b["crop"].contiguous()),
        "data['crop'] is (4, 5) float32 with strides (5, 1), the example's was (4, 5) float32 with "
        "strides (36, 8) bytes",
    ),
    "other gaps": (
        lambda b: b.update(crop=torch.ones(9, 10)[1:5, ::2]),
        "data['crop'] is (4, 5) float32 with strides (40, 8) bytes, the example's was (4, 5) "
        "float32 with strides (36, 8) bytes",
    ),
    "an array's direction": (
        lambda b: b.update(reversed=b["reversed"][::-1]),
        "data['reversed'] is (12,) float32 with strides (1,), the example's was (12,) float32 with "
        "strides (-4,) bytes",
    ),
    "an array's order": (
        lambda b: b.update(array=np.asfortranarray(b["array"])),
        "data['array'] is (4, 6) float32 with strides (1, 4), the example's was (4, 6) float32 "
        "with strides (6, 1)",
    ),
    "a key more, behind": (
        lambda b: b.update(more=torch.ones(2)),
        "data['more'] is a leaf more than the example had",
    ),
    "a key more, before": (
        lambda b: b["boxes"].insert(0, torch.ones(2)),
        "data['boxes'][0] is (2,) float32, the example's was (7, 4) float32",
    ),
    "a key less": (
        lambda b: b.pop("image"),
        "data['crop'] is (4, 5) float32, the example's data['image'] was (2, 8, 3) float32",
    ),
    "the last key less": (
        lambda b: b.pop("label"),
        "data has no leaf that is like data['label'] of the example, () int64",
    ),
    "keys in another order": (
        lambda b: b.update(large=b.pop("large")),
        "data['empty'] is (0, 3) float32, the example's data['large'] was (70000,) float32",
    ),
    "None instead of a leaf": (
        lambda b: b.update(large=None),
        "data['empty'] is (0, 3) float32, the example's data['large'] was (70000,) float32",
    ),
    "a leaf that needs a gradient": (
        lambda b: b.update(large=needing_gradient(b["large"])),
        "data['large'] is left to its own .to, as 1 leaf or container in all; the example had 0",
    ),
    "a subclass": (
        lambda b: b.update(large=b["large"].as_subclass(Subclass)),
        "data['large'] is left to its own .to, as 1 leaf or container in all; the example had 0",
    ),
    "a conjugate view": (
        lambda b: b.update(spectrum=b["spectrum"].conj()),
        "data['spectrum'] is left to its own .to, as 1 leaf or container in all; the example had 0",
    ),
    "an array instead of a tensor": (
        lambda b: b.update(label=np.ones((4, 6), np.float32)),
        "data['label'] is (4, 6) float32, the example's data['boxes'][0] was (7, 4) float32",
    ),
}


@pytest.mark.parametrize("reuse_outputs", [False, True])
@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_copied_all_the_same_counted_and_named(device, case, reuse_outputs):
    change, why = MISFITS[case]
    plan = tdcopier.prepare(example(), device, reuse_outputs=reuse_outputs)
    plan.start_copy(example(1)).get()
    batch = example(2)
    change(batch)
    assert_copied_as_by_start_copy(plan, batch)
    assert (plan.fits, plan.misfits) == (1, 1)
    assert plan.why_not(batch) == why
    assert_copied_as_by_start_copy(plan, example(3))
    assert (plan.fits, plan.misfits) == (2, 1)


def test_leaves_on_other_devices_than_the_examples_do_not_fit(device, other_device):
    plan = tdcopier.prepare({"a": torch.ones(2), "b": torch.ones(3)}, device)
    batches = {
        f"data['a'] is on {device} already, as 1 tensor in all; the example had 0": {
            "a": torch.ones(2, device=device),
            "b": torch.ones(3),
        },
        f"data['a'] is on {other_device}, the example's data['a'] was on cpu": {
            "a": torch.ones(2, device=other_device),
            "b": torch.ones(3, device=other_device),
        },
        "data has no leaf that is like data['b'] of the example, (3,) float32": {
            "a": torch.ones(2),
            "b": torch.ones(3, device=other_device),
        },
    }
    for why, batch in batches.items():
        assert plan.why_not(batch) == why
        assert_same(plan.start_copy(batch).get(), oracle(batch, device))
    assert (plan.fits, plan.misfits) == (0, 3)


def test_modes_of_torch_leave_every_leaf_to_torch(device):
    plan = tdcopier.prepare([torch.ones(2)], device)

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    with Mode():
        handle = plan.start_copy([torch.ones(2)])
        assert plan.why_not([torch.ones(2)]).startswith("a torch mode or transform is active")
    assert handle.get()[0].tolist() == [1, 1]
    assert handle.stats[:5] == (0, 0, 1, 0, 0)
    assert (plan.fits, plan.misfits) == (0, 1)


def test_a_leaf_that_needs_a_gradient_fits_where_gradients_are_off(device):
    leaf = torch.ones(3, requires_grad=True)
    plan = tdcopier.prepare([torch.ones(3)], device)
    with torch.no_grad():
        assert_same(plan.start_copy([leaf]).get(), [leaf.to(device)])
    assert plan.start_copy([leaf]).get()[0].requires_grad
    assert (plan.fits, plan.misfits) == (1, 1)


def test_a_leaf_of_the_same_layout_that_is_shorter_in_memory_is_refused(device):
    plan = tdcopier.prepare(example(), device)
    batch = example(1)
    batch["boxes"][1].untyped_storage().resize_(8)
    with pytest.raises(ValueError, match=r"^data\['boxes'\]\[1\] reaches beyond its storage"):
        plan.start_copy(batch)
    assert (plan.fits, plan.misfits) == (0, 0)
