"""Rules: how the walk takes a container class apart and rebuilds it, or refuses a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

Flat = tuple[list[Any], Any, "list[Any] | None"]
"""Children, the context needed to rebuild the container, and the children's names."""


class Refused(TypeError):
    """A container cannot be copied; the walk puts its path before the message."""


class Carrier:
    """An object in which the walk carries an opaque value that is not a child as it is."""

    __slots__ = ()

    value: Any


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
    names: Literal["index", "key", "attribute"] = "index"
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
    tensorclass: Literal["keeps None", "drops None"] | None = None
    """For a tensorclass that the walk takes apart without `flatten` if the TensorDict in it is of
    exactly that class: what a copy does with fields that are None."""
    place: Callable[[Any, Any], Place] | None = None
    """Returns the place of the opaque child with this name, or raises `Refused` if the child cannot
    be replaced. None: children of such containers cannot be replaced."""
