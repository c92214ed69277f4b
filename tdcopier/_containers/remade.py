"""Makes derived mappings and sequences anew that refuse to have their items set, as frozen ones do.

`by_bases.py` asks here only if a shallow copy of the value cannot be filled.
"""

from __future__ import annotations

import collections
import copy
import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tdcopier._containers import pytree
from tdcopier._containers.attributes import (
    attributes_of,
    class_attribute,
    drop_caches,
    put_in_slot,
    slots_of,
    without_caches,
)
from tdcopier._containers.unknown import is_plain_value

Make = Callable[[list[Any]], Any]
"""Returns a new container with these children, in the order of the stored ones."""

Way = tuple[Make, dict[str, Any]]
"""The first two fields of `Remade`."""


def stored_items(value: Any) -> dict[Any, Any]:
    """Return the stored items of a mapping, without calling methods that a subclass overrides."""
    if isinstance(value, dict):
        base: Any = collections.OrderedDict if isinstance(value, collections.OrderedDict) else dict
        return dict(base.items(value))
    stored: dict[Any, Any] = dict(value.data)
    return stored


def stored_children(value: Any) -> list[Any]:
    """Return the stored items of a list or deque, without calling methods of a subclass."""
    base: Any = list if isinstance(value, list) else collections.deque
    return list(base.__iter__(value))


class Remade(NamedTuple):
    """A way to make a container like another one of moved children."""

    make: Make
    carried: dict[str, Any]
    """Attributes of the other one that `make` sets to the same objects."""
    cls: type
    keys: list[Any] | None

    def __call__(self, children: list[Any]) -> Any:
        """Make the container, and check that the class has kept each child."""
        made = self.make(children)
        fault = _misplaced(made, self.cls, self.keys, children)
        if fault:
            raise TypeError(
                f"a {self.cls.__name__} was rebuilt from its moved children, but {fault}: register "
                "the class with tdcopier.containers.register"
            )
        return made


def way_to_remake(value: Any, keys: list[Any] | None) -> Remade | None:
    """Return a way to make a container like this one, or None.

    Three ways are tried: the functions that torch's pytrees have for the class, its constructor,
    and a shallow copy whose items are stored past the class's own methods. A way counts only if it
    makes an equal container of the value's own children.

    Args:
        value: a subclass of a dict, `UserDict`, list or deque.
        keys: the stored keys of a mapping; None for a sequence.
    """
    children = children_of(value)
    for find in (_by_pytree, _by_constructor, _by_copy):
        try:
            found = find(value, keys, children)
            if found is None or _fault(found[0](children), value, keys, children):
                continue
            apart = _told_apart(children)
            if not _misplaced(found[0](apart), type(value), keys, apart):
                return Remade(*found, type(value), keys)
        except Exception:  # from code of the class, which is not made for this way
            continue
    return None


def _told_apart(children: list[Any]) -> list[Any]:
    """Return the children with another object for each that comes again, as in the result.

    Otherwise a constructor that changes the order of two equal children would seem right.
    """
    met: set[int] = set()
    apart = []
    for child in children:
        apart.append(_another(child) if id(child) in met else child)
        met.add(id(child))
    return apart


def _another(child: Any) -> Any:
    """Return another object like this one, or plain data itself, which a result has again."""
    if is_plain_value(child):
        return child
    other = child.detach() if isinstance(child, torch.Tensor) else copy.copy(child)
    return object() if other is child else other  # some classes return the object itself


def children_of(value: Any) -> list[Any]:
    """Return the stored items or values."""
    is_mapping = isinstance(value, (dict, collections.UserDict))
    return list(stored_items(value).values()) if is_mapping else stored_children(value)


def _fault(made: Any, value: Any, keys: list[Any] | None, children: list[Any]) -> str:
    """Return what is wrong with a container that was made of the value's own children, or ""."""
    if made is value and children:  # a frozen class may have one empty object only
        return "it is the same object"
    fault = _misplaced(made, type(value), keys, children)
    if fault:
        return fault
    if (len(made) if keys is None else list(made)) != (len(value) if keys is None else list(value)):
        return "it has other keys"
    if options_of(made) != options_of(value):
        return "it has another factory or maximum length"
    wanted = _attributes(value) | slots_of(value)
    differing = wanted.keys() ^ (_attributes(made) | slots_of(made)).keys()
    if all(name in wanted and _is_hash_of(value, wanted[name]) for name in differing):
        return ""
    return "it has other attributes"


def options_of(value: Any) -> Any:
    """Return the factory of a defaultdict, or the maximum length of a deque."""
    if isinstance(value, collections.defaultdict):
        return id(value.default_factory)
    return value.maxlen if isinstance(value, collections.deque) else None


def _misplaced(made: Any, cls: type, keys: list[Any] | None, children: list[Any]) -> str:
    """Return what is wrong with the class or the stored children of a new container, or ""."""
    if type(made) is not cls:
        return f"it became a {type(made).__name__}"
    if keys is not None and list(stored_items(made)) != keys:
        return "it has other keys"
    found = children_of(made)
    if len(found) != len(children):
        return "it has another length"
    for index, (child, wanted) in enumerate(zip(found, children, strict=True)):
        if child is not wanted:
            return f"it has another object at {(index if keys is None else keys[index])!r}"
    return ""


def _by_pytree(value: Any, keys: list[Any] | None, children: list[Any]) -> Way | None:
    if not pytree.is_node(type(value)):
        return None
    found, context, _ = pytree.PYTREE.flatten(value)
    if len(found) != len(children) or not all(map(operator.is_, found, children)):
        return None
    return lambda moved: pytree.PYTREE.unflatten(moved, context), {}


def _by_constructor(value: Any, keys: list[Any] | None, children: list[Any]) -> Way | None:
    """Return a function that calls the class, and sets the attributes that this does not set."""
    cls: Any = type(value)
    others = (value.maxlen,) if isinstance(value, collections.deque) else ()

    def construct(moved: list[Any]) -> Any:
        return cls(moved if keys is None else dict(zip(keys, moved, strict=True)), *others)

    made = construct(children)
    if type(made) is not cls or made is value:
        return construct, {}
    missing = _to_be_set(value, _attributes(value), _attributes(made))
    missing_slots = _to_be_set(value, slots_of(value), slots_of(made))
    if missing is None or missing_slots is None:
        return None

    def construct_and_set(moved: list[Any]) -> Any:
        new = construct(moved)
        attributes_of(new).update(missing)
        for name, attribute in missing_slots.items():
            put_in_slot(new, name, attribute)
        return new

    return construct_and_set, missing | missing_slots


def item_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of a mapping or sequence, other than the one that has the items."""
    attributes = dict(attributes_of(value))
    if isinstance(value, collections.UserDict):
        del attributes["data"]
    return attributes


def _attributes(value: Any) -> dict[str, Any]:
    return without_caches(type(value), item_attributes(value))


def _to_be_set(value: Any, wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, Any] | None:
    """Return the attributes that the constructor sets to other plain data, or not at all.

    None if it sets one to something else that may depend on the items.
    """
    to_be_set = {}
    for name, attribute in wanted.items():
        if _is_hash_of(value, attribute) or (name in found and found[name] is attribute):
            continue
        if name in found and not is_plain_value(attribute):
            return None
        to_be_set[name] = attribute
    return to_be_set


def _is_hash_of(value: Any, attribute: Any) -> bool:
    """Return whether an attribute keeps the object's hash, which that of moved items replaces."""
    if type(attribute) is not int or type(value).__hash__ is None:
        return False
    try:
        return hash(value) == attribute
    except TypeError:  # an item has no hash
        return False


def _by_copy(value: Any, keys: list[Any] | None, children: list[Any]) -> Way | None:
    """Return a function that stores the items in a shallow copy, with the methods of the base."""
    shell = shallow_copy(value)
    if type(shell) is not type(value) or _holder(shell) is _holder(value):
        return None
    if keys is not None and list(stored_items(shell)) != keys:
        return None
    drop_caches(shell, value)
    _store(shell, keys, [None] * len(children))

    def fill_copy(moved: list[Any]) -> Any:
        new = shallow_copy(shell)
        _store(new, keys, moved)
        return new

    return fill_copy, _attributes(value) | slots_of(value)


def shallow_copy(value: Any) -> Any:
    """Return `copy.copy` of the value, with the attributes and slots that this loses."""
    made = copy.copy(value)
    attributes, slots = getattr(value, "__dict__", None), slots_of(value)
    if attributes is value:  # a dict that is its own __dict__
        made.__dict__ = made
    if type(made) is not type(value) or not (attributes or slots):
        return made
    copier = class_attribute(type(value), "__copy__")
    # These call the class, which knows its own attributes at most, and lose slots.
    is_lossy = copier is collections.UserDict.__copy__ or (
        copier is not None and not isinstance(copier, types.FunctionType)
    )
    if is_lossy or not (item_attributes(made) or slots_of(made)):
        attributes_of(made).update(item_attributes(value))
        for name, slot in slots.items():
            put_in_slot(made, name, slot)
    return made


def _holder(value: Any) -> Any:
    """Return the object that has the items."""
    return value.data if isinstance(value, collections.UserDict) else value


def _store(container: Any, keys: list[Any] | None, children: list[Any]) -> None:
    holder = _holder(container)
    base = next(each for each in (dict, list, collections.deque) if isinstance(holder, each))
    for key, child in zip(range(len(children)) if keys is None else keys, children, strict=True):
        base.__setitem__(holder, key, child)
