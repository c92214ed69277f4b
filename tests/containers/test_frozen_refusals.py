"""A frozen container whose constructor or function changes something is refused, not rebuilt."""

from __future__ import annotations

from typing import Any

import pytest
import torch.utils._pytree as pytree
from frozen_classes import FrozenDict, refuses
from support import assert_same, oracle

import tdcopier


class Renaming(dict):
    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__({key.upper(): value for key, value in dict(items).items()})


class Converting(dict):
    """Keeps other objects than it is given."""

    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__({key: value + 0 for key, value in dict(items).items()})


class Ordering(dict):
    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__(sorted(dict(items).items()))


class Reversing(list):
    """Its constructor and its copies have the opposite order."""

    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__(list(items)[::-1])

    __copy__ = refuses


class Guessing(dict):
    """Has an attribute that a constructor without the option makes another one."""

    __setitem__ = refuses

    def __init__(self, items: Any, option: Any = None) -> None:
        super().__init__(items)
        self.option = [option]


@pytest.mark.parametrize(
    "make",
    [
        lambda leaf: Renaming({"a": leaf}) and _lowered(Renaming({"a": leaf})),
        lambda leaf: Converting({"a": leaf}),
        lambda leaf: _reversed(Ordering({"a": leaf, "b": leaf})),
        lambda leaf: Guessing({"a": leaf}, option=leaf),
    ],
    ids=["other keys", "other objects", "another order", "other attributes"],
)
def test_a_constructor_that_changes_something_is_not_used(device, leaf, make):
    value = make(leaf)
    with pytest.raises(TypeError, match=r"^data\['x'\] is a \w+, a mapping that cannot be rebuilt"):
        tdcopier.copy({"x": value}, device)


def test_a_constructor_that_changes_the_order_of_equal_items_is_not_used(device, leaf):
    for items in ([leaf, leaf], [[leaf]] * 2, [FrozenDict(a=leaf)] * 2):
        with pytest.raises(TypeError, match=r"^data is a Reversing, a sequence that cannot be"):
            tdcopier.copy(Reversing(items), device)
    assert_same(tdcopier.copy(Reversing([leaf]), device)[0], oracle(leaf, device))


def _lowered(value: Any) -> Any:
    child = dict.pop(value, "A")
    dict.__setitem__(value, "a", child)
    return value


def _reversed(value: Any) -> Any:
    dict.__setitem__(value, "a", dict.pop(value, "a"))
    return value


class HostOnly(dict):
    """Keeps an item as it is on the host, and moves it there from elsewhere."""

    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__({key: value.cpu() for key, value in dict(items).items()})


def test_a_constructor_that_changes_moved_items_only_fails_the_copy(device, leaf):
    handle = tdcopier.start_copy([HostOnly({"a": leaf})], device)
    for _ in range(2):
        with pytest.raises(TypeError, match=r"HostOnly was rebuilt .* another object at 'a'"):
            handle.get()


def test_functions_of_torchs_pytrees_are_used_only_if_they_fit(device, leaf):
    class Registered(dict):
        __setitem__ = refuses
        __copy__ = refuses

        def __init__(self, name: str, items: Any) -> None:
            super().__init__(items)

    make = lambda items: Registered("x", items)  # noqa: E731
    value = make({"b": leaf, "a": leaf + 1})
    with pytest.raises(TypeError, match=r"^data is a Registered, a mapping that cannot"):
        tdcopier.copy(value, device)
    for order, works in ((sorted, False), (list, True)):
        pytree._private_register_pytree_node(
            Registered,
            lambda v, order=order: ([v[key] for key in order(v)], order(v)),
            lambda children, keys: make(dict(zip(keys, children, strict=True))),
        )
        try:
            if works:
                moved = tdcopier.copy(value, device)
                assert type(moved) is Registered
                assert list(moved) == ["b", "a"]
                assert_same(moved["a"], oracle(leaf + 1, device))
            else:
                with pytest.raises(TypeError, match="Registered, a mapping that cannot"):
                    tdcopier.copy(value, device)
        finally:
            pytree._deregister_pytree_node(Registered)
            pytree.SUPPORTED_SERIALIZED_TYPES.pop(Registered, None)
