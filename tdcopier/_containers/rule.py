"""Rules: how the walk takes a container class apart and rebuilds it, or refuses a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tdcopier import _C

Flat = tuple[list[Any], Any, "list[Any] | None"]
"""Children, the context needed to rebuild the container, and the children's names."""


class Refused(TypeError):
    """A container cannot be copied; the walk puts its path before the message."""


class Carrier:
    """An object in which the walk carries an opaque value that is not a child as it is."""

    __slots__ = ()

    value: Any


class OfClass:
    """A rebuild function that a user gave for a class. It may be a lambda: its class is pickled."""

    __slots__ = ("_cls", "_find", "_function")

    def __init__(
        self,
        cls: type,
        function: Callable[[list[Any], Any], Any],
        find: Callable[[type], Callable[[list[Any], Any], Any]],
    ) -> None:
        """`find` returns such a function for the class, in a process where it is unpickled."""
        self._cls = cls
        self._function = function
        self._find = find

    def __call__(self, children: list[Any], context: Any) -> Any:
        return self._function(children, context)

    def __reduce__(self) -> Any:
        return self._find, (self._cls,)


class Place(NamedTuple):
    """Where a container keeps an opaque child."""

    owner: Any
    """The object that has the child: the container, or one that the container consists of."""
    name: Any
    """Key, index or attribute of the child in the owner."""
    put: Callable[[Any], object]
    """Replaces the child."""


class Rule(NamedTuple):
    """How values of a class are taken apart and rebuilt."""

    flatten: Callable[..., Any]
    """Returns a `Flat`."""
    unflatten: Callable[[list[Any], Any], Any]
    step: _C.Step = _C.Step.INDEX
    """How error paths write the way to a child."""
    by_target: bool = False
    """Whether `flatten` also takes the target and whether names are wanted. It may then return
    None, which delegates the value to its own ``.to``."""
    own_to: bool = False
    """With `by_target`: whether this is an object with a ``.to``, rather than a TensorDict or
    another collection of tensors."""
    wraps: bool = False
    """Whether the class is a tensor subclass over plain memory. Then the value itself is the only
    child, moved as a plain tensor, and `flatten` returns only the context."""
    flatten_entry: Callable[..., Any] | None = None
    """For `TensorDict` itself, which the walk takes apart without `flatten` if this is given. Takes
    an entry that is neither a plain tensor nor such a TensorDict, the target, whether names are
    wanted, and the batch size of the TensorDict. Returns a `Flat`, or None for a tensor."""
    keeps_none: bool | None = None
    """For a tensorclass that the walk takes apart without `flatten` if the TensorDict in it is of
    exactly that class: whether a copy keeps fields that are None. None for other classes."""
    place: Callable[[Any, Any], Place] | None = None
    """Returns the place of the opaque child with this name, or raises `Refused` if the child cannot
    be replaced. None: children of such containers cannot be replaced."""

    beside: Callable[[Any, Any], dict[str, Any]] | None = None
    """Takes a value and its context, and returns the attributes that `unflatten` carries over as
    they are. None: the context is all there is."""

    def flatten_anywhere(self, value: Any) -> Flat:
        """Take a value apart wherever its leaves are."""
        flat: Flat = self.flatten(value, None, False) if self.by_target else self.flatten(value)
        return flat


def unless_placed(rule: Rule) -> Rule:
    """Return the rule for classes that also have a ``.to``.

    A value that names its device, in a child or an attribute, is delegated: taken apart, it would
    still name the device that it came from.
    """

    def flatten(value: Any, device: torch.device | None, named: bool) -> Flat | None:
        flat: Flat = rule.flatten(value)
        children, _, names = flat
        attributes = getattr(value, "__dict__", {})
        is_placed = any(map(_is_device, [*children, *attributes.values()])) or any(
            map(_is_named_device, [*(names or ()), *attributes])
        )
        return None if is_placed and device is not None else flat

    return rule._replace(flatten=flatten, by_target=True, own_to=True)


def _is_device(value: Any) -> bool:
    return type(value) is torch.device


def _is_named_device(name: Any) -> bool:
    return type(name) is str and name == "device"
