"""`containers.register`: the classes it accepts, and what a user's functions may do."""

from __future__ import annotations

import gc
import re
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import ramp
from container_classes import Box, Pair, flatten_box, unflatten_box
from sim_support import becomes
from support import raises_exactly
from thread_support import at_once

import tdcopier

pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture(params=[3, 1 << 19], ids=["inline", "background"])
def leaf(request) -> torch.Tensor:
    return torch.ones(request.param)


def assert_next_copy_works(device: str) -> None:
    assert tdcopier.copy([torch.ones(2)], device)[0].tolist() == [1, 1]


# ---- effects -------------------------------------------------------------------------------------


def test_a_registered_class_is_taken_apart_and_put_together_again(device, leaf):
    tdcopier.containers.register(Box, flatten_box, unflatten_box)
    moved = tdcopier.copy({"box": Box(leaf, [leaf], "text", name="n")}, device)["box"]
    assert type(moved) is Box
    assert moved.name == "n"
    assert moved.children[0].device == moved.children[1][0].device == torch.device(device)
    assert moved.children[2] == "text"


def test_the_children_are_handed_over_as_a_list_and_the_context_as_it_is(device, leaf):
    context = object()
    seen = []

    def unflatten(children: list[Any], given: Any) -> Box:
        seen.append((type(children), given))
        return Box(*children)

    tdcopier.containers.register(Box, lambda box: (iter(box.children), context), unflatten)
    tdcopier.copy(Box(leaf), device)
    assert seen == [(list, context)]


def test_subclasses_of_a_registered_class_are_not_included(device, leaf):
    class SmallBox(Box):
        pass

    tdcopier.containers.register(Box, flatten_box, unflatten_box)
    small = SmallBox(leaf)
    assert tdcopier.copy(small, device, on_unknown="ignore") is small


def test_a_class_that_was_opaque_before_is_taken_apart_from_then_on(device, leaf):
    box = Box(leaf)
    assert tdcopier.copy(box, device, on_unknown="ignore") is box
    tdcopier.containers.register(Box, flatten_box, unflatten_box)
    assert tdcopier.copy(box, device).children[0].device == torch.device(device)


@pytest.mark.parametrize("cls", [Pair, OrderedDict])
def test_a_registration_replaces_what_is_known_of_a_class(device, leaf, cls):
    tdcopier.containers.register(cls, lambda value: ([leaf], value), lambda children, _: children)
    value = Pair(1, 2) if cls is Pair else OrderedDict(a=1)
    (moved,) = tdcopier.copy(value, device)
    assert moved.device == torch.device(device)


def test_a_registered_container_without_children_is_rebuilt_too(device):
    tdcopier.containers.register(Box, flatten_box, unflatten_box)
    empty = Box(name="empty")
    moved = tdcopier.copy(empty, device)
    assert moved is not empty
    assert (moved.children, moved.name) == ((), "empty")


def make_box_class() -> Any:
    """Does what a notebook cell would: registers a class with functions that refer to it."""

    class Box:
        def __init__(self, child: Any) -> None:
            self.child = child

        def parts(self) -> tuple[list[Any], Any]:
            return [self.child], type(self)

        @classmethod
        def made(cls, children: list[Any], context: Any) -> Any:
            return context(*children)

    tdcopier.containers.register(Box, Box.parts, Box.made, subclasses=True)
    return Box


def test_subclasses_are_included_on_request_and_keep_their_class(device, leaf):
    cls = make_box_class()
    late = type("Late", (type("Middle", (cls,), {}),), {})
    for each in (late, cls):
        moved = tdcopier.copy(each(leaf), device)
        assert type(moved) is each
        assert moved.child.device == torch.device(device)


def test_of_several_registered_base_classes_the_nearest_counts(device, leaf):
    cls = make_box_class()
    near = type("Near", (cls,), {})
    tdcopier.containers.register(
        near, lambda box: ([box.child], None), lambda children, _: children[0], subclasses=True
    )
    moved = tdcopier.copy(type("Sub", (near,), {})(leaf), device)
    assert moved.device == torch.device(device)


def test_a_cell_that_runs_again_registers_its_new_class(device, leaf):
    first, second = make_box_class(), make_box_class()
    for cls in (first, second):  # values of the old class are still copied
        assert type(tdcopier.copy(cls(leaf), device)) is cls


def test_a_class_is_freed_although_its_registered_functions_refer_to_it(device, leaf):
    alive = []
    for _ in range(3):
        cls = make_box_class()
        sub = type("Sub", (cls,), {})
        tdcopier.copy([cls(leaf), sub(leaf)], device)
        alive += [weakref.ref(cls), weakref.ref(sub)]
        del cls, sub
    gc.collect()
    assert [ref() for ref in alive] == [None] * 6


def test_a_class_written_in_c_can_be_registered(device, leaf):
    import types

    cls = types.SimpleNamespace
    tdcopier.containers.register(
        cls, lambda value: ([value.x], None), lambda children, _: cls(x=children[0])
    )
    assert tdcopier.copy(cls(x=leaf), device).x.device == torch.device(device)
    tdcopier.containers.unregister(cls)
    value = cls(x=leaf)
    assert tdcopier.copy(value, device, on_unknown="ignore") is value


def test_a_class_pickled_by_value_leaves_its_registration_behind():
    import pickle

    cls = make_box_class()
    assert pickle.loads(pickle.dumps(vars(cls)["__tdcopier_registration__"])) is None


def test_a_class_can_be_registered_anew_once_it_was_unregistered(device, leaf):
    tdcopier.containers.register(Box, flatten_box, unflatten_box)
    handle = tdcopier.start_copy([Box(leaf)], device)
    tdcopier.containers.unregister(Box)
    assert type(handle.get()[0]) is Box
    box = Box(leaf)
    assert tdcopier.copy(box, device, on_unknown="ignore") is box
    tdcopier.containers.register(Box, flatten_box, lambda children, name: children)
    assert type(tdcopier.copy(box, device)) is list


@pytest.mark.parametrize(("cls", "name"), [(Box, "Box"), (dict, "dict")])
def test_what_is_not_registered_cannot_be_unregistered(cls, name):
    with raises_exactly(ValueError, f"{name} is not registered"):
        tdcopier.containers.unregister(cls)
    with raises_exactly(TypeError, "cls must be a class; got 3"):
        tdcopier.containers.unregister(3)


# ---- refusals ------------------------------------------------------------------------------------


class MyTensor(torch.Tensor):
    pass


class MyArray(np.ndarray):
    pass


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((3, flatten_box, unflatten_box), TypeError, "cls must be a class; got 3"),
        (
            (list[int], flatten_box, unflatten_box),
            TypeError,
            "cls must be a class; got list[int]",
        ),
        ((Box, None, unflatten_box), TypeError, "flatten must be callable; got None"),
        ((Box, flatten_box, "no"), TypeError, "unflatten must be callable; got 'no'"),
        *(
            (
                (cls, flatten_box, unflatten_box),
                TypeError,
                f"{cls.__qualname__} is known to the engine and cannot be registered",
            )
            for cls in (
                list, tuple, dict, torch.Tensor, torch.nn.Parameter, np.ndarray, MyTensor, MyArray,
                int, str, float, bool, bytes, type(None),
            )
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_registered_is_refused(device, arguments, error, message):
    with raises_exactly(error, message):
        tdcopier.containers.register(*arguments)
    assert_next_copy_works(device)


def test_a_class_cannot_be_registered_twice(device, leaf):
    tdcopier.containers.register(Box, flatten_box, unflatten_box)
    with pytest.raises(ValueError, match=r"^Box is registered already$"):
        tdcopier.containers.register(Box, lambda box: ([], None), lambda children, context: None)
    assert tdcopier.copy(Box(leaf), device).children[0].device == torch.device(device)


# ---- functions that fail -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "answer",
    [[1], (1,), None, "ab", ([], None, None), (1, 2, 3), (None, None, "ab"), (5, None)],
    ids=repr,
)
def test_a_flatten_function_that_returns_no_pair_is_named_with_its_path(device, leaf, answer):
    tdcopier.containers.register(Box, lambda box: answer, unflatten_box)
    message = (
        "data[1]['b'] is a Box, whose flatten function must return a pair (children, context); "
        f"it returned {answer!r}"
    )
    with raises_exactly(TypeError, message):
        tdcopier.start_copy([leaf, {"b": Box(leaf)}], device)
    assert_next_copy_works(device)


def test_what_flatten_yields_itself_may_fail_too(device, leaf):
    error = KeyError("mine")

    def children() -> Any:
        yield leaf
        raise error

    tdcopier.containers.register(Box, lambda box: (children(), None), unflatten_box)
    with pytest.raises(KeyError) as caught:
        tdcopier.start_copy([leaf, Box()], device)
    assert caught.value is error


@pytest.mark.parametrize("error", [KeyError("mine"), RecursionError("mine"), KeyboardInterrupt()])
def test_what_a_flatten_function_raises_comes_out_of_the_call(device, leaf, error):
    def flatten(box: Box) -> Any:
        raise error

    tdcopier.containers.register(Box, flatten, unflatten_box)
    with pytest.raises(type(error)) as caught:
        tdcopier.start_copy([leaf, Box()], device)
    assert caught.value is error
    assert_next_copy_works(device)


def test_what_an_unflatten_function_raises_comes_out_of_get_and_wait_every_time(device, leaf):
    error = KeyError("mine")

    def unflatten(children: list[Any], context: Any) -> Any:
        raise error

    tdcopier.containers.register(Box, flatten_box, unflatten)
    handle = tdcopier.start_copy([leaf, Box(leaf)], device)
    for ask in (handle.get, handle.wait, handle.get, handle.wait):
        with pytest.raises(KeyError) as caught:
            ask()
        assert caught.value is error
    assert becomes(handle.ready)
    assert_next_copy_works(device)


def test_a_flatten_function_that_works_only_once_does_not_hide_what_is_wrong_with_a_leaf(device):
    """The path of the bad leaf is found by a second walk."""
    box = Box()
    waiting = {box}

    def flatten(given: Box) -> Any:
        waiting.remove(given)  # KeyError at the second call
        return [], None

    tdcopier.containers.register(Box, flatten, unflatten_box)
    leaf = ramp("cpu", 3)
    leaf.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="reaches beyond its storage, which has only 0 bytes"):
        tdcopier.start_copy([box, leaf], device)
    assert_next_copy_works(device)


def test_an_interrupt_in_an_unflatten_function_is_raised_at_once_and_nothing_is_lost(device):
    interrupts = [KeyboardInterrupt()]

    def unflatten(children: list[Any], name: str) -> Box:
        if interrupts:
            raise interrupts.pop()
        return Box(*children, name=name)

    tdcopier.containers.register(Box, flatten_box, unflatten)
    with pytest.raises(KeyboardInterrupt):
        tdcopier.start_copy([Box(ramp("cpu", 3))], device)
    assert_next_copy_works(device)
    assert tdcopier.copy(Box(ramp("cpu", 3)), device).children[0].tolist() == [0, 1, 2]


# ---- functions that interfere --------------------------------------------------------------------


def _clear(tree: Any) -> None:
    tree.clear()


def _grow(tree: Any) -> None:
    tree.update(z=1) if isinstance(tree, dict) else tree.append(1)


def _shrink(tree: Any) -> None:
    tree.pop("c") if isinstance(tree, dict) else tree.pop()


@pytest.mark.parametrize("change", [_clear, _grow, _shrink])
@pytest.mark.parametrize("kind", ["list", "dict"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_container_that_changes_while_it_is_walked_is_named(device, leaf, change, kind, nested):
    inner: Any = [leaf, Box(), leaf] if kind == "list" else {"a": leaf, "b": Box(), "c": leaf}

    def flatten(box: Box) -> Any:
        change(inner)
        return [], None

    tdcopier.containers.register(Box, flatten, unflatten_box)
    path = "data['x'][0]" if nested else "data"
    message = re.escape(f"{path} changed its size while it was being walked")
    with pytest.raises(RuntimeError, match=f"^{message}$"):
        tdcopier.start_copy({"x": [inner]} if nested else inner, device)
    assert_next_copy_works(device)


def test_a_container_whose_values_are_replaced_while_it_is_walked_does_no_harm(device):
    tree: list[Any] = [Box(), torch.ones(3), [torch.ones(3)], {"k": torch.ones(3)}]
    outer = {"a": tree, "b": torch.ones(3)}

    def flatten(box: Box) -> Any:
        tree[:] = [None, torch.zeros(2), torch.zeros(2), torch.zeros(2)]
        outer["a"] = outer["b"] = None
        gc.collect()
        return [], "new"

    tdcopier.containers.register(Box, flatten, unflatten_box)
    moved = tdcopier.copy(outer, device)
    assert list(moved) == ["a", "b"]
    assert [leaf.tolist() for leaf in moved["a"][1:]] == [[0, 0]] * 3


def test_a_flatten_function_may_copy_register_and_collect(device, leaf):
    class Other:
        pass

    def flatten(box: Box) -> Any:
        tdcopier.containers.register(Other, lambda other: ([leaf], None), lambda c, _: c[0])
        gc.collect()
        return [*tdcopier.copy([leaf, leaf], device), Other()], box.name

    tdcopier.containers.register(Box, flatten, unflatten_box)
    handle = tdcopier.start_copy([leaf, Box(), leaf], device)
    first, box, last = handle.get()
    assert [first[0].item(), *(child[0].item() for child in box.children), last[0].item()] == [
        1
    ] * 5
    assert handle.stats.reused_leaves == 2


def test_an_unflatten_function_may_ask_the_handle(device):
    asked = []

    def unflatten(children: list[Any], name: str) -> Box:
        if asked:
            asked.pop().get()
        return Box(*children, name=name)

    tdcopier.containers.register(Box, flatten_box, unflatten)
    handle = tdcopier.start_copy([Box(torch.ones(1 << 22))], device)
    asked.append(handle)
    result = handle.get()
    assert handle.get() is result
    assert result[0].children[0].sum().item() == 1 << 22


def test_an_unflatten_function_may_drop_the_handle(device):
    class Owner:
        handle: Any = None

    def unflatten(children: list[Any], name: str) -> Box:
        Owner.handle = None
        gc.collect()
        return Box(*children, name=name)

    tdcopier.containers.register(Box, flatten_box, unflatten)
    Owner.handle = tdcopier.start_copy([Box(torch.ones(1 << 22)), Box(torch.ones(3))], device)
    first, second = Owner.handle.get()
    assert first.children[0].sum().item() == 1 << 22
    assert second.children[0].tolist() == [1, 1, 1]


def test_many_threads_copy_registered_containers_while_garbage_is_collected(device):
    tdcopier.containers.register(Box, flatten_box, unflatten_box)

    def work(seed: int) -> None:
        for i in range(20):
            value = float(seed * 100 + i)
            tree = Box(torch.full((300_000 if i % 7 == 0 else 5,), value), name=str(value))
            tree.children += (tree.children[0], Box(Pair(torch.full((2,), value), i)))
            moved = tdcopier.copy(tree, device)
            assert moved.children[2].children[0].left.tolist() == [value, value]
            assert moved.children[0][-1].item() == float(moved.name)

    thresholds = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        at_once(6, work)
    finally:
        gc.set_threshold(*thresholds)
