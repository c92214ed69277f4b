"""What a handle says to a caller who takes it for the result.

The methods are set on the classes from here, and are in no stub: type checkers refuse such uses.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn


def say_what_to_use(cls: Any, what: str, instead: str, instead_in_a_tree: str) -> None:
    """Let the objects of a class name the call to make instead of each mistaken use.

    Objects have no other attributes, and are no container or iterable for `collections.abc`.

    Args:
        cls: the class of a handle.
        what: what its objects are, for the messages.
        instead: what to do, for the messages.
        instead_in_a_tree: what to give instead of such an object, in a batch or a state.
    """

    def refuse_attribute(self: object, name: str) -> NoReturn:
        raise AttributeError(f"{what} has no attribute {name!r}: {instead}")

    def refusal(lack: str) -> Callable[..., NoReturn]:
        def refuse(self: object, *_: object) -> NoReturn:
            raise TypeError(f"{what} {lack}: {instead}")

        return refuse

    has_no_items = _OfObjects(refusal("has no items"))  # also for loops and `in`
    methods: dict[str, object] = {
        "__getattr__": refuse_attribute,
        "__getitem__": has_no_items,
        "__setitem__": has_no_items,
        "__delitem__": has_no_items,
        "__reduce_ex__": refusal("cannot be copied or pickled"),
    }
    for name, method in methods.items():
        setattr(cls, name, method)
    cls._what_it_is = what  # these two are for `_containers/registry.py`
    cls._instead_in_a_tree = instead_in_a_tree


class _OfObjects:
    """A method that only objects have: who asks the class finds no sign of a container."""

    def __init__(self, call: Callable[..., NoReturn]) -> None:
        self._call = call

    def __get__(self, instance: object, owner: type) -> Callable[..., NoReturn]:
        if instance is None:
            raise AttributeError(f"type object {owner.__name__!r} has no such attribute")
        return partial(self._call, instance)
