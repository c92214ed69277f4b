"""Classes that are registered in torch's pytrees: taken apart by the functions given there."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from catalogue import ramp
from libraries import library
from support import assert_same

import tdcopier


def cache_class(**methods: Any) -> Any:
    """Makes a class like those that keep the keys and values of a model's layers."""

    class Cache:
        def __init__(self, keys: list[Any], seen: Any) -> None:
            self.keys = keys
            self.seen = seen

    for name, method in methods.items():
        setattr(Cache, name, method)
    return Cache


def register(cls: Any, register_node: Any = pytree._private_register_pytree_node) -> None:
    register_node(
        cls, lambda cache: (cache.keys, cache.seen), lambda keys, seen: cls(list(keys), seen)
    )


@pytest.fixture(autouse=True)
def nodes() -> Iterator[None]:
    """Removes the test's registrations when it ends."""
    before = dict(pytree.SUPPORTED_NODES)
    yield
    pytree.SUPPORTED_NODES.clear()
    pytree.SUPPORTED_NODES.update(before)


def test_a_node_is_taken_apart_and_rebuilt(ends):
    source, target = ends
    cls = cache_class()
    register(cls)
    cache = cls([ramp(source, 3), [ramp(source, 2), "text"]], seen=7)
    handle = tdcopier.start_copy({"cache": cache}, target)
    moved = handle.get()["cache"]
    assert (type(moved), moved.seen, moved.keys[1][1]) == (cls, 7, "text")
    assert_same(moved.keys[0], ramp(source, 3).to(target))
    assert_same(moved.keys[1][0], ramp(source, 2).to(target))
    assert cache.keys[0].device == torch.device(source)
    assert handle.stats[:5] == (2, 0, 0, 0, 1)


def test_a_class_that_is_registered_later_is_taken_apart_from_then_on(device):
    cls = cache_class()
    cache = cls([ramp("cpu", 3)], seen=1)
    assert tdcopier.copy(cache, device, on_unknown="ignore") is cache
    register(cls)
    assert tdcopier.copy(cache, device).keys[0].device == torch.device(device)
    pytree._deregister_pytree_node(cls)
    assert tdcopier.copy(cache, device, on_unknown="ignore") is cache


def test_subclasses_of_a_node_are_not_nodes(device):
    cls = cache_class()
    register(cls)
    value = type("Sub", (cls,), {})([ramp("cpu", 2)], seen=1)
    assert tdcopier.copy(value, device, on_unknown="ignore") is value


def test_a_node_with_a_to_is_taken_apart_instead(device):
    cls = cache_class(to=lambda self, device: pytest.fail("called"))
    register(cls)
    handle = tdcopier.start_copy([cls([ramp("cpu", 3)], seen=1)], device)
    assert handle.get()[0].keys[0].tolist() == [0, 1, 2]
    assert handle.stats[:5] == (1, 0, 0, 0, 0)


@pytest.mark.parametrize(
    "seen",
    [torch.device("cpu"), {"device": "cpu", "n": 1}, [1, (torch.device("cpu"),)]],
    ids=["a device", "by name", "nested"],
)
def test_a_node_that_knows_its_device_is_left_to_its_to(device, seen):
    """Taken apart it would still name the device that it came from."""

    def to(self: Any, device: torch.device) -> Any:
        return type(self)([key.to(device) for key in self.keys], device)

    cls = cache_class(to=to)
    register(cls)
    handle = tdcopier.start_copy([cls([ramp("cpu", 3)], seen)], device)
    (moved,) = handle.get()
    assert moved.seen == torch.device(device)
    assert_same(moved.keys[0], ramp("cpu", 3).to(device))
    assert handle.stats[:5] == (0, 0, 1, 0, 0)


def test_existing_nodes_are_filled_whatever_they_know(device):
    cls = cache_class(to=lambda self, device: pytest.fail("called"))
    register(cls)
    static = cls([torch.zeros(3, device=device)], torch.device(device))
    handle = tdcopier.start_copy_into(cls([ramp("cpu", 3)], torch.device("cpu")), static)
    assert handle.get() is static
    assert static.keys[0].tolist() == [0, 1, 2]


def test_classes_that_torch_itself_registers_stay_what_they_are(device):
    pytree.SUPPORTED_NODES.setdefault(
        slice, pytree.NodeDef(slice, lambda s: ([s.start], None), lambda c, _: slice(*c), None)
    )
    pytree.SUPPORTED_NODES.setdefault(
        torch.Size, pytree.NodeDef(torch.Size, lambda s: (list(s), None), tuple, None)
    )
    values = [torch.Size([2, 3]), slice(1)]
    moved = tdcopier.copy(values, device)
    assert all(got is value for got, value in zip(moved, values, strict=True))


def test_our_own_registration_comes_first(registry, device):
    cls = cache_class()
    register(cls)
    tdcopier.containers.register(cls, lambda cache: (cache.keys, None), lambda keys, _: keys)
    assert type(tdcopier.copy(cls([ramp("cpu", 3)], 1), device)) is list


def test_a_node_that_is_defined_again_is_another_class_and_the_old_one_is_freed(device):
    alive = []
    for _ in range(2):  # as in a notebook cell that runs twice
        cls = cache_class()
        register(cls)
        assert tdcopier.copy(cls([ramp("cpu", 3)], 1), device).keys[0].tolist() == [0, 1, 2]
        pytree._deregister_pytree_node(cls)
        pytree.SUPPORTED_SERIALIZED_TYPES.pop(cls, None)
        alive.append(weakref.ref(cls))
        del cls
    gc.collect()
    assert [ref() for ref in alive] == [None, None]


@pytest.mark.parametrize("which", ["library", "stand-in"])
def test_a_class_that_only_the_cpp_registry_knows_is_taken_apart(device, monkeypatch, which):
    cls = cache_class()
    cache = cls([ramp("cpu", 3)], seen=5)
    if which == "library":
        library("optree")
        import torch.utils._cxx_pytree as cxx

        assert tdcopier.copy(cache, device, on_unknown="ignore") is cache
        register(cls, cxx._private_register_pytree_node)
    else:
        entry = SimpleNamespace(
            flatten_func=lambda cache: (cache.keys, cache.seen),
            unflatten_func=lambda seen, keys: cls(keys, seen),
        )
        optree = ModuleType("optree")
        optree.register_pytree_node = SimpleNamespace(
            get=lambda asked, namespace: entry if (asked, namespace) == (cls, "torch") else None
        )
        monkeypatch.setitem(sys.modules, "optree", optree)
        monkeypatch.setitem(sys.modules, "torch.utils._cxx_pytree", ModuleType("cxx"))
    handle = tdcopier.start_copy([cache], device)
    (moved,) = handle.get()
    assert (type(moved), moved.seen, moved.keys[0].tolist()) == (cls, 5, [0, 1, 2])
    assert handle.stats[:5] == (1, 0, 0, 0, 0)


def test_an_error_of_its_functions_comes_out(device):
    cls = cache_class()
    error = KeyError("mine")

    def flatten(cache: Any) -> Any:
        raise error

    pytree._private_register_pytree_node(cls, flatten, lambda keys, seen: cls(keys, seen))
    with pytest.raises(KeyError) as caught:
        tdcopier.start_copy([cls([], 1)], device)
    assert caught.value is error
