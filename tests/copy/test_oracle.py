"""Properties of a copy's outputs that the catalogue does not describe for each kind of leaf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from catalogue import CONTAINERS, ramp
from support import assert_same, oracle, run_python

import tdcopier
from tdcopier.workloads import detection_batch


def test_outputs_have_version_counters_of_their_own(device):
    first, second = tdcopier.copy([ramp("cpu", 3), ramp("cpu", 3)], device)
    weight = torch.ones(3, device=device, requires_grad=True)
    loss = (first * weight).sum()
    second.add_(1)  # would break the backward of a shared counter
    loss.backward()
    assert weight.grad.tolist() == [0, 1, 2]


@pytest.mark.parametrize("elements", [4, 1 << 20], ids=["inline", "background"])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("to_host", [False, True], ids=["H2D", "D2H"])
def test_outputs_are_inference_tensors_if_the_call_was_in_inference_mode(
    device, elements, inside, to_host
):
    source, target = (device, "cpu") if to_host else ("cpu", device)
    leaf = torch.ones(elements, device=source)
    with torch.inference_mode(inside):
        handle = tdcopier.start_copy([leaf], target)
        expected = leaf.to(target)
    with torch.inference_mode(not inside):
        (moved,) = handle.get()
    assert moved.is_inference() == expected.is_inference() == inside


def test_the_same_tensor_twice_becomes_two_tensors_as_through_to(device):
    leaf = ramp("cpu", 3)
    first, second = tdcopier.copy([leaf, leaf], device)
    first.add_(1)
    assert second.tolist() == [0, 1, 2]


def test_an_expanded_leaf_becomes_one_whose_elements_are_its_own(device):
    (moved,) = tdcopier.copy([ramp("cpu", 3).expand(2, 3)], device)
    moved[0].add_(1)
    assert moved.tolist() == [[1, 2, 3], [0, 1, 2]]


def test_a_leaf_on_the_target_is_the_same_object(device):
    there = ramp(device, 3)
    handle = tdcopier.start_copy({"a": there, "b": ramp("cpu", 3)}, device.split(":")[0])
    assert handle.get()["a"] is there
    assert handle.stats.reused_leaves == 1
    assert handle.stats.packed_leaves == 1


def test_a_leaf_on_the_target_is_the_same_object_whatever_it_is(device):
    there = [
        ramp(device, 3).requires_grad_(), torch.nn.Parameter(ramp(device, 3)),
        ramp(device, 4)[::2], torch.complex(ramp(device, 2), ramp(device, 2)).conj(),
    ]  # fmt: skip
    handle = tdcopier.start_copy(there, device)
    assert all(got is leaf for got, leaf in zip(handle.get(), there, strict=True))
    assert handle.stats[:5] == (0, 0, 0, 4, 0)


def test_on_the_host_everything_is_the_same_object_and_reused():
    leaves = [ramp("cpu", 3), ramp("cpu", 4).requires_grad_(), torch.eye(2).to_sparse()]
    handle = tdcopier.start_copy(leaves, "cpu")
    assert all(got is leaf for got, leaf in zip(handle.get(), leaves, strict=True))
    assert handle.stats[:5] == (0, 0, 0, 3, 0)


def test_on_the_host_an_array_shares_its_memory_with_the_tensor_and_is_reused():
    array = np.arange(3.0)
    handle = tdcopier.start_copy([array], "cpu")
    (tensor,) = handle.get()
    array[0] = 7
    assert tensor[0] == 7
    assert handle.stats[:5] == (0, 0, 0, 1, 0)


def test_to_the_meta_device_every_leaf_is_left_to_torch(device):
    tree = [ramp("cpu", 2, 3).t(), {"a": ramp(device, 4), "b": np.arange(3)}]
    handle = tdcopier.start_copy(tree, "meta")
    first, rest = handle.get()
    assert first.device.type == rest["a"].device.type == rest["b"].device.type == "meta"
    assert (first.stride(), rest["a"].shape, rest["b"].dtype) == ((1, 3), (4,), torch.int64)
    assert handle.stats[:5] == (0, 0, 3, 0, 0)


def test_a_default_device_does_not_keep_leaves_from_being_packed(device):
    with torch.device(device):
        handle = tdcopier.start_copy([torch.ones(2, device="cpu")], device)
    assert handle.stats.packed_leaves == 1


def test_containers_and_opaque_values_keep_class_order_and_identity(device):
    marker = object()
    tree = {
        ("a", 1): [marker, None, "text", 2.5],
        3: ({}, [], ()),
        "t": (ramp("cpu", 2), [ramp("cpu", 1), {"x": marker}]),
    }
    handle = tdcopier.start_copy(tree, device)
    assert_same(handle.get(), oracle(tree, device))
    assert handle.stats.opaque_leaves == 5


@pytest.mark.parametrize("root", [None, 3, "text", [], {}, ()], ids=repr)
@pytest.mark.parametrize("to_host", [False, True], ids=["H2D", "D2H"])
def test_the_root_may_be_opaque_or_empty(device, root, to_host):
    assert tdcopier.copy(root, "cpu" if to_host else device) == root


def test_a_source_tree_changed_after_the_call_does_not_change_the_result(device):
    tree = {"a": [ramp("cpu", 2)], "b": ramp("cpu", 3)}
    handle = tdcopier.start_copy(tree, device)
    tree["a"].clear()
    del tree["b"]
    assert_same(handle.get(), oracle({"a": [ramp("cpu", 2)], "b": ramp("cpu", 3)}, device))


def test_a_read_only_array_is_copied_without_a_warning(device):
    array = np.arange(3.0)
    array.flags.writeable = False
    assert tdcopier.copy(array, device).tolist() == [0, 1, 2]


def test_torch_warns_of_a_read_only_array_that_is_its_own_result():
    """A write to the result of a file mapped for reading ends the process. torch warns once."""
    program = """
import numpy, tdcopier, warnings
array = numpy.arange(3.0)
array.flags.writeable = False
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    assert tdcopier.copy(array, "cpu").tolist() == [0, 1, 2]
print(told[0].category.__name__, told[0].message)
"""
    assert run_python(program).startswith("UserWarning The given NumPy array is not writable")


def test_the_detection_batch_takes_a_transfer_for_each_dtype_in_both_directions(device):
    batch = detection_batch()
    there = tdcopier.start_copy(batch, device)
    assert_same(there.get(), oracle(batch, device))
    back = tdcopier.start_copy(there.get(), "cpu")
    assert_same(back.get(), batch)
    for handle in (there, back):
        assert handle.stats.packed_leaves == 528
        assert handle.stats.chunks == 3
    assert there.stats.transfers == 3
    assert back.stats.transfers in (1, 3)  # a kernel that gathers to the host is one transfer


def test_the_catalogue_has_every_container_class_once():
    classes = [type(container.wrap(None)) for container in CONTAINERS.values()]
    repeated = {cls.__name__ for cls in classes if classes.count(cls) > 1}
    assert repeated == {"deque"}  # with and without a maximum length
