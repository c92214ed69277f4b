"""Tensor subclasses over plain memory: packed, and wrapped again with all that `.to` keeps."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from catalogue import ramp
from collate_support import assert_like
from library_stand_ins import LIBRARY_OR_STAND_IN, tv_tensors
from sim_support import becomes
from support import assert_same, raises_exactly

import tdcopier
from tdcopier import _checking


@pytest.fixture(params=LIBRARY_OR_STAND_IN)
def tv(request, monkeypatch, registry) -> Any:
    return tv_tensors(request.param, monkeypatch)


def sample(tv: Any, device: str, boxes: int = 5) -> dict[str, Any]:
    return {
        "image": tv.Image(torch.rand(3, 8, 6)).to(device),
        "boxes": tv.BoundingBoxes(
            torch.rand(boxes, 4), format="XYXY", canvas_size=(8, 6), clamping_mode="hard"
        ).to(device),
        "masks": tv.Mask(torch.randint(0, 2, (boxes, 8, 6), dtype=torch.uint8)).to(device),
        "clip": tv.Video(torch.rand(2, 3, 4, 4).permute(1, 0, 2, 3)).to(device),
        "labels": torch.arange(boxes).to(device),
    }


def assert_as_by_to(got: dict[str, Any], source: dict[str, Any], target: str) -> None:
    assert list(got) == list(source)
    for key, leaf in source.items():
        expected = leaf.to(target)
        assert_same(got[key], expected, key)
        assert got[key].__dict__ == expected.__dict__, key


@pytest.fixture
def checking(monkeypatch) -> None:
    monkeypatch.setattr(_checking, "enabled", True)


# ---- torchvision.tv_tensors ----------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_tv_tensors_are_packed_and_arrive_as_by_to(ends, tv, background):
    source, target = ends
    tree = [sample(tv, source, boxes) for boxes in (5, 1, 0)]
    handle = tdcopier.start_copy(tree, target, use_background_thread=background)
    for got, expected in zip(handle.get(), tree, strict=True):
        assert_as_by_to(got, expected, target)
    assert handle.stats[:5] == (15, 0, 0, 0, 0)


def test_a_large_one_travels_alone(ends, tv):
    source, target = ends
    image = tv.Image(torch.rand(3, 200, 200)).to(source)
    handle = tdcopier.start_copy([image], target)
    assert_same(handle.get(), [image.to(target)])
    assert handle.stats[:5] == (0, 1, 0, 0, 0)


def test_one_on_the_target_is_the_same_object(device, tv):
    tree = sample(tv, device)
    handle = tdcopier.start_copy(tree, device)
    assert all(handle.get()[key] is leaf for key, leaf in tree.items())
    assert handle.stats[:5] == (0, 0, 0, 5, 0)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
def test_one_that_needs_a_gradient_is_delegated_and_keeps_its_class(ends, tv):
    source, target = ends
    boxes = sample(tv, source)["boxes"].requires_grad_()
    handle = tdcopier.start_copy([boxes], target)
    (moved,) = handle.get()
    assert type(moved) is tv.BoundingBoxes
    assert moved.canvas_size == (8, 6)
    moved.as_subclass(torch.Tensor).sum().backward()
    assert boxes.grad.shape == (5, 4)
    assert handle.stats.delegated_leaves == 1


def test_under_a_torch_mode_they_are_left_to_it(device, tv):
    from torch.overrides import TorchFunctionMode

    class Pass(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    tree = sample(tv, "cpu")
    with Pass():
        handle = tdcopier.start_copy(tree, device)
        assert_as_by_to(handle.get(), tree, device)
    assert handle.stats[:5] == (0, 0, 5, 0, 0)


def test_the_same_one_twice_becomes_two(device, tv):
    boxes = sample(tv, "cpu")["boxes"]
    first, second = tdcopier.copy([boxes, boxes], device)
    assert first is not second
    first.as_subclass(torch.Tensor).zero_()
    assert_same(second, boxes.to(device))


def test_metadata_changed_after_the_call_does_not_reach_the_result(sim, device, tv, copy_stream):
    boxes = sample(tv, "cpu", boxes=100_000)["boxes"]
    with sim.hold(copy_stream):
        handle = tdcopier.start_copy([boxes], device)
        handle.wait_staged()
        boxes.canvas_size = (1, 1)
    assert handle.get()[0].canvas_size == (8, 6)


def test_a_copy_does_not_keep_the_source(device, tv):
    boxes = sample(tv, "cpu", boxes=100_000)["boxes"]  # get() builds the result
    alive = weakref.ref(boxes)
    handle = tdcopier.start_copy([boxes], device)
    del boxes
    handle.wait_staged()
    gc.collect()
    assert alive() is None
    assert handle.get()[0].canvas_size == (8, 6)


def test_a_class_of_ones_own_moves_as_by_to(ends, tv):
    class Named(tv.TVTensor):
        @classmethod
        def _wrap_output(cls, output, args=(), kwargs=None):
            made = super()._wrap_output(output, args, kwargs)
            made.title = args[0].title
            return made

    source, target = ends
    leaf = Named(torch.ones(3)).as_subclass(Named)
    leaf.title = "front"
    leaf = leaf.to(source)
    handle = tdcopier.start_copy([leaf], target)
    (moved,) = handle.get()
    assert_same(moved, leaf.to(target))
    assert moved.title == "front"
    assert handle.stats.packed_leaves == 1


def test_a_class_that_overrides_torch_function_is_left_to_its_own_to(device, tv):
    class Doubling(tv.Image):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            made = super().__torch_function__(func, types, args, kwargs)
            return made.as_subclass(torch.Tensor) * 2 if func is torch.Tensor.to else made

    handle = tdcopier.start_copy([torch.ones(2).as_subclass(Doubling)], device)
    assert handle.get()[0].tolist() == [2, 2]
    assert handle.stats.delegated_leaves == 1


def test_the_path_of_one_that_cannot_be_read_is_its_own(device, tv):
    boxes = sample(tv, "cpu")["boxes"]
    boxes.as_subclass(torch.Tensor).untyped_storage().resize_(8)
    with pytest.raises(ValueError, match=r"^data\[0\]\['boxes'\] reaches beyond its storage"):
        tdcopier.start_copy([{"boxes": boxes, "a": torch.ones(2)}], device)


def test_a_prepared_plan_fits_them(ends, tv):
    source, target = ends
    plan = tdcopier.prepare(sample(tv, source), target, reuse_outputs=True)
    for _ in range(4):
        batch = sample(tv, source)
        got = plan.start_copy(batch).get()
        assert_as_by_to(got, batch, target)
        del got
    other = sample(tv, source, boxes=2)
    assert_as_by_to(plan.start_copy(other).get(), other, target)
    assert (plan.fits, plan.misfits) == (4, 1)
    assert "data['boxes'] is (2, 4) float32" in plan.why_not(other)


def test_results_that_are_kept_are_not_filled_by_the_next_prepared_copy(device, tv):
    plan = tdcopier.prepare(sample(tv, "cpu"), device, reuse_outputs=True)
    batches = [sample(tv, "cpu") for _ in range(6)]
    with torch.no_grad():
        kept = [plan.start_copy(batch).get() for batch in batches]
    for got, batch in zip(kept, batches, strict=True):
        assert_as_by_to(got, batch, device)


def test_existing_memory_is_filled_and_keeps_its_metadata(ends, tv):
    source, target = ends
    batch = sample(tv, source)
    static = {key: leaf.to(target) for key, leaf in sample(tv, "cpu").items()}
    static["boxes"].canvas_size = (1, 1)
    addresses = [leaf.data_ptr() for leaf in static.values()]
    handle = tdcopier.start_copy_into(batch, static)
    assert handle.get() is static
    assert [leaf.data_ptr() for leaf in static.values()] == addresses
    for key, leaf in static.items():
        assert type(leaf) is type(batch[key])
        assert torch.equal(leaf.cpu(), batch[key].cpu()), key
    assert static["boxes"].canvas_size == (1, 1)
    assert handle.stats[:5] == (5, 0, 0, 0, 0)


def test_prefetched_batches_have_them(device, tv):
    batches = [[sample(tv, "cpu"), sample(tv, "cpu", 2)] for _ in range(4)]
    with tdcopier.prefetch(batches, device) as loader:
        for batch, moved in zip(batches, loader, strict=True):
            for source, got in zip(batch, moved, strict=True):
                assert_as_by_to(got, source, device)


def test_check_mode_finds_one_that_is_modified(sim, device, tv, checking, copy_stream):
    batch = sample(tv, "cpu")
    with sim.hold(copy_stream):
        handle = tdcopier.start_copy([batch], device)
        batch["masks"].as_subclass(torch.Tensor).add_(1)
    with pytest.raises(tdcopier.SourceModifiedError, match=r"^data\[0\]\['masks'\] was modified"):
        handle.get()
    del handle
    assert _checking.without_class(batch["masks"]).data_ptr() == batch["masks"].data_ptr()


def test_a_collated_batch_is_that_of_default_collate(tv):
    samples = [{key: each[key] for key in ("image", "labels")} for each in _samples(tv)]
    expected = torch.utils.data.default_collate(samples)
    assert_like(tdcopier.collate(samples), expected)


def _samples(tv: Any) -> list[dict[str, Any]]:
    return [sample(tv, "cpu") for _ in range(3)]


def test_a_tensordict_of_them_keeps_their_classes(device, tv):
    from tensordict import TensorDict

    td = TensorDict({"masks": sample(tv, "cpu")["masks"], "x": torch.ones(5)}, batch_size=5)
    handle = tdcopier.async_to(td, device)
    assert_same(handle.get(), td.to(device))
    assert handle.stats[:5] == (2, 0, 0, 0, 0)


def test_torchvision_is_not_imported(device, monkeypatch):
    import sys

    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    tdcopier.copy([ramp("cpu", 3).as_subclass(Labelled)], device)
    assert "torchvision" not in sys.modules


# ---- registered classes --------------------------------------------------------------------------


class Labelled(torch.Tensor):
    pass


class Moved(torch.Tensor):
    """Its `.to` keeps the attribute `unit`."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        made = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.to:
            made.unit = args[0].unit
        return made


def wrap_moved(tensor: torch.Tensor, like: Any) -> Any:
    made = tensor.as_subclass(type(like))
    made.unit = like.unit
    return made


def metres(source: str, cls: type = Moved) -> Any:
    leaf = ramp(source, 2, 3).as_subclass(cls)
    leaf.unit = "m"
    return leaf


def test_a_registered_class_is_packed_and_wrapped(registry, ends):
    source, target = ends
    leaf = metres(source)
    assert tdcopier.start_copy([leaf], target).stats.delegated_leaves == 1
    tdcopier.containers.register_tensor_subclass(Moved, wrap_moved)
    transposed = leaf.t()
    transposed.unit = "km"
    handle = tdcopier.start_copy([leaf, {"x": transposed}], target)
    first, second = handle.get()
    assert_same(first, leaf.to(target))
    assert (first.unit, second["x"].unit, second["x"].shape) == ("m", "km", (3, 2))
    assert handle.stats[:5] == (2, 0, 0, 0, 0)


def test_by_default_a_class_is_wrapped_as_torch_does(registry, ends):
    source, target = ends
    tdcopier.containers.register_tensor_subclass(Labelled)
    leaf = metres(source, Labelled)
    handle = tdcopier.start_copy([leaf], target)
    (moved,) = handle.get()
    assert_same(moved, leaf.to(target))
    assert moved.__dict__ == leaf.to(target).__dict__ == {}
    assert handle.stats.packed_leaves == 1


def test_subclasses_are_included_on_request_and_keep_their_class(registry, device):
    class Late(Moved):
        pass

    tdcopier.containers.register_tensor_subclass(Moved, wrap_moved)
    assert tdcopier.start_copy([metres("cpu", Late)], device).stats.delegated_leaves == 1
    tdcopier.containers.unregister(Moved)
    tdcopier.containers.register_tensor_subclass(Moved, wrap_moved, subclasses=True)
    later = type("Later", (Late,), {})  # made after the registration
    handle = tdcopier.start_copy([metres("cpu", cls) for cls in (Moved, Late, later)], device)
    assert [type(leaf) for leaf in handle.get()] == [Moved, Late, later]
    assert handle.stats.packed_leaves == 3


def test_without_its_registration_a_class_is_delegated_again(registry, device):
    tdcopier.containers.register_tensor_subclass(Moved, wrap_moved)
    handle = tdcopier.start_copy([metres("cpu")], device)
    tdcopier.containers.unregister(Moved)
    assert handle.get()[0].unit == "m"
    assert tdcopier.start_copy([metres("cpu")], device).stats.delegated_leaves == 1
    with raises_exactly(ValueError, "Moved is not registered"):
        tdcopier.containers.unregister(Moved)


def test_an_error_of_wrap_comes_out_of_get_every_time(registry, device):
    error = KeyError("mine")

    def wrap(tensor: torch.Tensor, like: Any) -> Any:
        raise error

    tdcopier.containers.register_tensor_subclass(Moved, wrap)
    handle = tdcopier.start_copy([metres("cpu")], device)
    for _ in range(2):
        with pytest.raises(KeyError) as caught:
            handle.get()
        assert caught.value is error
    assert becomes(handle.ready)


class Dispatching(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3,), TypeError, "cls must be a subclass of torch.Tensor; got 3"),
        ((dict,), TypeError, "cls must be a subclass of torch.Tensor; got <class 'dict'>"),
        ((torch.Tensor,), TypeError, "Tensor is known to the engine and cannot be registered"),
        (
            (torch.nn.Parameter,), TypeError,
            "Parameter is known to the engine and cannot be registered",
        ),
        (
            (Dispatching,), TypeError,
            "Dispatching overrides __torch_dispatch__, so its memory may not be that of a plain "
            "tensor: leave it to its own .to",
        ),
        ((Labelled, 3), TypeError, "wrap must be callable; got 3"),
    ],
)  # fmt: skip
def test_what_cannot_be_registered_is_refused(registry, arguments, error, message):
    with raises_exactly(error, message):
        tdcopier.containers.register_tensor_subclass(*arguments)


def test_a_class_cannot_be_registered_twice(registry):
    tdcopier.containers.register_tensor_subclass(Labelled)
    with raises_exactly(ValueError, "Labelled is registered already"):
        tdcopier.containers.register_tensor_subclass(Labelled, wrap_moved)
