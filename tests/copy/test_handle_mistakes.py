"""Mistakes with handles and the calls of copies: each is told what was found and what to do."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Collection, Iterable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import pytest
import torch
from support import raises_exactly

import tdcopier
from tdcopier import _checking

USES = {
    "item": lambda handle: handle["x"],
    "number": lambda handle: handle[0],
    "assignment": lambda handle: handle.__setitem__("x", 1),
    "loop": lambda handle: [*handle],
    "list": lambda handle: list(handle),
    "key": lambda handle: "x" in handle,
    "deletion": lambda handle: handle.__delitem__(0),
    "cpu": lambda handle: handle.cpu(),
    "to": lambda handle: handle.to("cpu"),
    "shape": lambda handle: handle.shape,
    "copy": copy.copy,
    "deepcopy": lambda handle: copy.deepcopy([handle]),
    "pickle": pickle.dumps,
}


def batch() -> dict[str, Any]:
    return {"x": torch.ones(4), "y": [torch.zeros(3)]}


def storage(rows: int = 10) -> dict[str, torch.Tensor]:
    return {"x": torch.arange(2.0 * rows).reshape(rows, 2)}


# ---- handles -------------------------------------------------------------------------------------


@pytest.fixture(params=["plain", "checked"])
def handle(request, device, monkeypatch):
    monkeypatch.setattr(_checking, "enabled", request.param == "checked")
    return tdcopier.start_copy(batch(), device)


@pytest.mark.parametrize("use", USES)
def test_a_handle_that_is_used_as_the_result_says_to_wait(handle, use):
    with pytest.raises(
        (TypeError, AttributeError),
        match=r"^the handle of a copy that has been started (has no|cannot be) .*"
        r": call its wait\(\) or get\(\), and use what that returns$",
    ):
        USES[use](handle)


def test_a_wrong_attribute_is_named(handle):
    with pytest.raises(AttributeError, match=r"has no attribute 'cuda': "):
        handle.cuda()


def test_a_handle_has_no_other_attributes_and_is_true(handle):
    assert not hasattr(handle, "x")
    assert not hasattr(handle, "to")
    assert getattr(handle, "shape", 3) == 3
    assert handle


def test_a_handle_is_no_container(handle):
    assert not isinstance(handle, (Iterable, Collection, Sequence, Mapping, Sized))
    assert not hasattr(type(handle), "__getitem__")
    assert np.asarray(handle, dtype=object).shape == ()


@pytest.mark.parametrize("name", ["start_copy", "copy", "async_to", "gather", "prepare"])
def test_a_handle_in_the_place_of_data_is_told(device, handle, name):
    with raises_exactly(
        TypeError,
        "data is the handle of a copy that has been started: give what its wait() or get() returns",
    ):
        getattr(tdcopier, name)(handle, *([[1]] if name == "gather" else []), device)
    for option in (None, "ignore", "warn", "raise"):
        with raises_exactly(
            TypeError,
            "data['x'][0] is the handle of a copy that has been started: give what its wait() or "
            "get() returns",
        ):
            tdcopier.copy({"x": [handle]}, device, on_unknown=option)


def other_objects(device: str) -> dict[str, Any]:
    return {
        "plan": tdcopier.prepare(batch(), device),
        "prefetcher": tdcopier.prefetch([batch()], device),
        "pinned memory": tdcopier.pin_memory_(batch(), device),
        "snapshot": tdcopier.snapshot(batch()),
    }


@pytest.mark.parametrize("name", ["plan", "prefetcher", "pinned memory", "snapshot"])
def test_what_the_package_returns_is_no_batch(device, name):
    value = other_objects(device)[name]
    for data, path in ((value, "data"), ({"x": [value]}, "data['x'][0]")):
        with pytest.raises(TypeError, match=rf"^{re.escape(path)} is (a|the) .*: give "):
            tdcopier.copy(data, device)


@pytest.mark.parametrize("use", USES)
def test_pinned_memory_that_is_used_as_the_tree_says_so(device, use):
    with (
        tdcopier.pin_memory_(batch(), device) as pinned,
        pytest.raises(
            (TypeError, AttributeError),
            match=r"^the handle of pin_memory_\(\) (has no|cannot be) .*: use the tree that you ",
        ),
    ):
        USES[use](pinned)


def test_a_plan_is_made_by_prepare_and_not_copied(device):
    wrong: Any = batch()
    with raises_exactly(TypeError, "prepare() makes plans: call prepare(example, device)"):
        tdcopier.PreparedCopy(wrong, wrong)
    plan = tdcopier.prepare(batch(), device)
    for use in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError, match=r"^a plan of prepare\(\) cannot be copied or pickled: "
        ):
            use(plan)


def test_the_text_of_pinned_memory_says_how_much_and_whether_it_is_closed(device):
    pinned = tdcopier.pin_memory_(torch.ones(1 << 20), device)
    assert repr(pinned) == f"<tdcopier.pinned.PinnedMemory: {pinned.nbytes} bytes, pinned>"
    pinned.close()
    assert repr(pinned) == "<tdcopier.pinned.PinnedMemory: closed>"


def test_the_text_of_a_plan_counts_in_words(device):
    plan = tdcopier.prepare([torch.ones(1, dtype=torch.uint8)], device)
    where = f"1 leaf, {plan._native.bytes} byte{'s' * (plan._native.bytes != 1)}, to {plan.device}"
    assert repr(plan) == f"<PreparedCopy of {where}: 0 fits, 0 misfits>"
    plan.start_copy([torch.ones(1, dtype=torch.uint8)]).get()
    plan.start_copy(torch.ones(3)).get()
    assert repr(plan) == f"<PreparedCopy of {where}: 1 fit, 1 misfit>"


def test_a_batch_with_more_delegated_leaves_counts_them_in_words(device):
    plan = tdcopier.prepare([torch.ones(3), torch.ones(3)], device)
    of_torch = torch.ones(3, requires_grad=True)
    one = plan.why_not([of_torch, torch.ones(3)])
    assert "as 1 leaf or container in all; the example had 0" in str(one)
    both = plan.why_not([of_torch, of_torch])
    assert "as 2 leaves or containers in all; the example had 0" in str(both)


# ---- a handle in the place of a tree -------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda handle: tdcopier.copy_into(handle, batch()), "source"),
        (lambda handle: tdcopier.start_copy_into(batch(), handle), "destination"),
        (lambda handle: tdcopier.copy_into(handle, handle), "source"),
        (lambda handle: tdcopier.start_scatter(handle, storage(), [1]), "batch"),
        (lambda handle: tdcopier.scatter(handle, storage(), [1]), "batch"),
    ],
)
def test_a_handle_in_the_place_of_a_tree_is_named(handle, call, name):
    with raises_exactly(
        TypeError,
        f"{name} is the handle of a copy that has been started: give what its wait() or get() "
        "returns",
    ):
        call(handle)


# ---- keywords of Tensor.to and TensorDict.to -----------------------------------------------------

BY_TO = {
    "non_blocking": r"takes no non_blocking: it (never )?blocks",
    "dtype": r"keeps dtypes: convert the result with \.to\(dtype\)$",
    "memory_format": r"keeps strides: convert the result with \.to\(memory_format=\.\.\.\)$",
    "copy": r"takes no copy: leaves that are on the device already come back .*; clone\(\) these",
    "inplace": r"returns a new tree: copy_into\(\) fills an existing one$",
    "other": r"takes no other: give its device",
    "batch_size": r"keeps batch sizes: set the batch_size of the result$",
    "non_blocking_pin": r"takes no non_blocking_pin: it stages through pinned memory by itself",
    "num_threads": r"takes no num_threads: it stages through pinned memory by itself",
    "pin_memory": r"takes no pin_memory: it stages through pinned memory by itself",
    "use_pinned": r"got an unexpected keyword argument 'use_pinned': its options are use_",
}
OF_GATHER = {
    "non_blocking": r"takes no non_blocking: .*; start_gather\(\) does not$",
    "copy": r"takes no copy: the rows are new memory always$",
    "inplace": r"returns a new tree: with out= it fills an existing one$",
}


@pytest.mark.parametrize("keyword", BY_TO)
@pytest.mark.parametrize("name", ["copy", "to", "async_to"])
def test_a_keyword_of_to_is_refused_with_what_to_do(device, name, keyword):
    with pytest.raises(TypeError, match=rf"^{name}\(\) {BY_TO[keyword]}"):
        getattr(tdcopier, name)(batch(), device, **{keyword: True})


@pytest.mark.parametrize("keyword", BY_TO)
def test_gather_refuses_a_keyword_of_to_with_what_to_do(device, keyword):
    with pytest.raises(TypeError, match=rf"^gather\(\) {(BY_TO | OF_GATHER)[keyword]}"):
        tdcopier.gather(storage(), [1], device, **{keyword: True})


@pytest.mark.parametrize("keyword", BY_TO)
@pytest.mark.parametrize(
    ("name", "said", "options"),
    [
        ("prepare", r"its start_copy\(\) does not wait for the copy", "reuse_outputs, use_"),
        ("explain", "it copies nothing", "use_pinned_staging, "),
    ],
)
def test_calls_that_do_not_copy_refuse_a_keyword_of_to_too(device, keyword, name, said, options):
    expected = BY_TO | {
        "non_blocking": f"takes no non_blocking: {said}$",
        "use_pinned": f"got an unexpected keyword argument 'use_pinned': its options are {options}",
    }
    with pytest.raises(TypeError, match=rf"^{name}\(\) {expected[keyword]}"):
        getattr(tdcopier, name)(batch(), device, **{keyword: True})


def test_what_is_said_of_copy_true_works(device):
    on_device = tdcopier.copy(batch(), device)
    assert tdcopier.copy(on_device, device)["x"] is on_device["x"]
    new = {"x": torch.empty_like(on_device["x"]), "y": [on_device["y"][0].clone()]}
    tdcopier.copy_into(on_device, new)
    assert new["x"].tolist() == [1, 1, 1, 1]


CALLS = {
    "start_copy": lambda device: (batch(), device),
    "copy": lambda device: (batch(), device),
    "to": lambda device: (batch(), device),
    "async_to": lambda device: (batch(), device),
    "start_copy_into": lambda device: (batch(), batch()),
    "copy_into": lambda device: (batch(), batch()),
    "start_gather": lambda device: (storage(), [1], device),
    "gather": lambda device: (storage(), [1], device),
    "start_scatter": lambda device: (storage(1), storage(), [1]),
    "scatter": lambda device: (storage(1), storage(), [1]),
    "prepare": lambda device: (batch(), device),
    "explain": lambda device: (batch(), device),
    "collate": lambda device: ([batch()],),
    "pin_memory_": lambda device: (batch(), device),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_unknown_keyword_is_refused_under_the_name_of_the_call(device, name):
    call = getattr(tdcopier, name)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'wrong'"):
        call(*CALLS[name](device), wrong=1)


@pytest.mark.parametrize("name", CALLS)
def test_a_missing_argument_is_told_under_the_name_of_the_call(device, name):
    call = getattr(tdcopier, name)
    arguments = CALLS[name](device)[:-1]
    if name == "pin_memory_":  # its device is optional
        arguments = ()
    with pytest.raises(TypeError, match=rf"^{name}\(\) (missing 1 required|needs a device)"):
        call(*arguments)


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "found"),
    [
        (1.5, "the float 1.5"),
        (True, "the bool True"),
        ("x", "the str 'x'"),
        (None, "NoneType"),
        (storage(), "dict"),
    ],
    ids=str,
)
def test_a_wrong_index_is_named_with_the_order_of_the_arguments(device, index, found):
    calls: list[Any] = [
        lambda: tdcopier.gather(storage(), index, device),
        lambda: tdcopier.start_gather(storage(), index, device),
        lambda: tdcopier.scatter(storage(1), storage(), index),
    ]
    for call in calls:
        with pytest.raises(TypeError) as caught:
            call()
        order = "the order is gather(storage, index, device), and scatter(batch, storage, index)"
        assert str(caught.value).endswith(f"; got {found}: {order}")


def test_numbers_that_are_no_integers_are_told_how_to_become_some(device):
    with pytest.raises(TypeError, match=r"it is of torch\.float32: give .* index\.long\(\)$"):
        tdcopier.gather(storage(), torch.tensor([0.0, 1.0]), device)


def test_rows_are_counted_in_words(device):
    one = {"x": torch.ones(1, 1, 2)}
    with raises_exactly(IndexError, "index 3 is out of bounds: there is 1 row"):
        tdcopier.gather(one, (0, 3), device)
    with raises_exactly(IndexError, "index 3 is out of bounds: there are 2 rows"):
        tdcopier.gather({"x": torch.ones(2, 2, 2)}, (0, 3), device)
    with pytest.raises(ValueError, match=r"^index counts rows by 1 dimension; "):
        tdcopier.gather({"x": torch.tensor(1.0)}, slice(1), device)


# ---- samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "found"),
    [
        (None, "NoneType"),
        (3, "int"),
        (batch(), "dict"),
        (torch.ones(3, 3), "torch.Tensor"),
        ("text", "str"),
        (iter([batch()]), "list_iterator"),
    ],
    ids=["None", "number", "dict", "tensor", "text", "iterator"],
)
def test_what_is_no_list_of_samples_is_refused_with_how_to_collate(samples, found):
    wrong: Any = samples
    with raises_exactly(
        TypeError,
        f"collate() takes a list of samples; got {found}: give the function to a loader, as in "
        "DataLoader(dataset, collate_fn=tdcopier.collate), or call collate([sample, ...])",
    ):
        tdcopier.collate(wrong)
