"""Rules for subclasses of `list`, `tuple` and `dict`, for `deque`, `UserDict` and dataclasses."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from tdcopier._containers.attributes import (
    attributes_of,
    class_attribute,
    drop_caches,
    put_in_slot,
    slots_of,
    without_caches,
)
from tdcopier._containers.remade import (
    Make,
    children_of,
    is_remade,
    item_attributes,
    stored_children,
    stored_items,
    way_to_remake,
)
from tdcopier._containers.rule import Flat, Place, Refused, Rule
from tdcopier._containers.unknown import is_plain_value

_NOT_INSTANTIABLE = 1 << 7  # flags of the interpreter's types
_HEAP_TYPE = 1 << 9  # a class that is not built in, such as one from a class statement


def rule_by_bases(cls: type) -> Rule | None:
    """Return the rule of a class for what it inherits from, or None if its values are opaque."""
    if cls in _EXACT_MAPPINGS:
        return _EXACT_MAPPINGS[cls]
    bases: set[type] = set(cls.__mro__)
    if bases & {dict, collections.UserDict}:
        return _MAPPINGS
    if tuple in bases:
        return _tuple_rule(cls)
    if bases & {list, collections.deque}:
        return _SEQUENCES
    if dataclasses.is_dataclass(cls) and _is_plain_object(cls):
        return _DATACLASSES
    return None


def _is_plain_object(cls: type) -> bool:
    """Return whether values of the class have attributes only, unlike for example exceptions."""
    return not _builtin_bases(cls)


def _builtin_bases(cls: type) -> set[type]:
    """Return the base classes that are written in C, except `object`."""
    return {base for base in cls.__mro__ if not base.__flags__ & _HEAP_TYPE} - {object}


def place_of_item(container: Any, name: Any) -> Place:
    """Return the place of an item of a mapping, or of a list or deque."""
    return Place(container, name, partial(operator.setitem, container, name))


# ---- mappings ------------------------------------------------------------------------------------


def _flatten_ordered(value: collections.OrderedDict[Any, Any]) -> Flat:
    """Flatten an `OrderedDict`, which may have attributes: a state dict has `_metadata`."""
    keys = list(value)
    return list(value.values()), (keys, dict(vars(value))), keys


def _unflatten_ordered(children: list[Any], context: tuple[list[Any], dict[str, Any]]) -> Any:
    keys, attributes = context
    rebuilt = collections.OrderedDict(zip(keys, children, strict=True))
    vars(rebuilt).update(attributes)
    return rebuilt


def _flatten_default(value: collections.defaultdict[Any, Any]) -> Flat:
    keys = list(value)
    return list(value.values()), (value.default_factory, keys), keys


def _unflatten_default(children: list[Any], context: tuple[Any, list[Any]]) -> Any:
    factory, keys = context
    return collections.defaultdict(factory, zip(keys, children, strict=True))


def _flatten_mapping(value: Any) -> Flat:
    """Flatten any other mapping; the context makes such a mapping of new children."""
    items = stored_items(value)
    keys = list(items)
    try:
        make: Make = partial(_fill_mapping, _mapping_shell(value, items, keys), keys)
    except Refused:
        remade = way_to_remake(value, keys)
        if remade is None:
            raise
        make = remade
    return list(items.values()), make, keys


def _mapping_shell(value: Any, items: dict[Any, Any], keys: list[Any]) -> Any:
    """Return a shallow copy without the children."""
    shell = _shell_of(value, "mapping")
    # A sorted dict has its own order, whatever that of the stored items.
    if stored_items(shell).keys() != items.keys() or list(shell) != list(value):
        raise _not_rebuildable(value, "mapping", "its copy has other keys")
    for key in keys:
        try:
            shell[key] = None  # drops the child, and tests whether it can be replaced
        except Exception as error:
            raise _not_rebuildable(value, "mapping", f"{type(error).__name__}: {error}") from error
    if hasattr(type(value), "__copy__"):  # which may read the items, and there are none yet
        _shell_of(shell, "mapping")
    return shell


def _fill_mapping(shell: Any, keys: list[Any], children: list[Any]) -> Any:
    rebuilt = _shallow_copy(shell)
    for key, child in zip(keys, children, strict=True):
        rebuilt[key] = child
    return rebuilt


def _unflatten_by(children: list[Any], make: Make) -> Any:
    return make(children)


def _place_in_mapping(container: Any, name: Any) -> Place:
    return _place_unless_remade(container, name, _flatten_mapping)


def _place_unless_remade(container: Any, name: Any, flatten: Callable[[Any], Flat]) -> Place:
    _, make, _ = flatten(container)
    if is_remade(make):
        raise Refused(f"it is in a {type(container).__qualname__}, which refuses to have items set")
    return place_of_item(container, name)


def _beside_items(value: Any, make: Make) -> dict[str, Any]:
    found = without_caches(type(value), item_attributes(value)) | slots_of(value)
    children = children_of(value) if is_remade(make) else []  # the constructor puts those in again
    return {
        name: each for name, each in found.items() if not any(each is child for child in children)
    }


_MAPPINGS = Rule(
    _flatten_mapping, _unflatten_by, "key", place=_place_in_mapping, beside=_beside_items
)
_EXACT_MAPPINGS: dict[type, Rule] = {
    collections.OrderedDict: Rule(
        _flatten_ordered,
        _unflatten_ordered,
        "key",
        place=place_of_item,
        beside=lambda value, context: context[1],
    ),
    collections.defaultdict: Rule(_flatten_default, _unflatten_default, "key", place=place_of_item),
}


# ---- sequences -----------------------------------------------------------------------------------


def _flatten_sequence(value: Any) -> Flat:
    children = stored_children(value)
    try:
        make: Make = partial(_fill_sequence, _sequence_shell(value, len(children)))
    except Refused:
        remade = way_to_remake(value, None)
        if remade is None:
            raise
        make = remade
    return children, make, None


def _sequence_shell(value: Any, count: int) -> Any:
    shell = _shell_of(value, "sequence")
    if len(shell) != count:
        raise _not_rebuildable(value, "sequence", "its copy has another length")
    for index in range(count):
        try:
            shell[index] = None
        except Exception as error:
            raise _not_rebuildable(value, "sequence", f"{type(error).__name__}: {error}") from error
    return shell


def _fill_sequence(shell: Any, children: list[Any]) -> Any:
    rebuilt = _shallow_copy(shell)
    for index, child in enumerate(children):
        rebuilt[index] = child
    return rebuilt


def _place_in_sequence(container: Any, name: Any) -> Place:
    return _place_unless_remade(container, name, _flatten_sequence)


_SEQUENCES = Rule(_flatten_sequence, _unflatten_by, place=_place_in_sequence, beside=_beside_items)


# ---- tuples --------------------------------------------------------------------------------------


def _tuple_rule(cls: type) -> Rule | None:
    if hasattr(cls, "n_sequence_fields"):  # for example torch.return_types.max
        no_more_of_them = bool(cls.__flags__ & _NOT_INSTANTIABLE)  # for example sys.version_info
        return None if no_more_of_them else _STRUCTS
    if _builtin_bases(cls) != {tuple}:
        return None  # for example torch.Size, which contains no tensors
    named = isinstance(getattr(cls, "_fields", None), tuple)
    return _NAMED_TUPLES if named else _TUPLES


def _flatten_tuple(value: tuple[Any, ...]) -> Flat:
    children = list(tuple.__iter__(value))  # the stored items: a subclass may override __iter__
    cls = type(value)
    return children, (cls, without_caches(cls, attributes_of(value))), None


def _flatten_named_tuple(value: Any) -> Flat:
    children, context, _ = _flatten_tuple(value)
    return children, context, list(value._fields) if len(value._fields) == len(children) else None


def _unflatten_tuple(children: list[Any], context: tuple[type, dict[str, Any]]) -> Any:
    cls, attributes = context
    rebuilt: Any = tuple.__new__(cls, children)  # the class's own __new__ may take other arguments
    if attributes:
        rebuilt.__dict__.update(attributes)
    return rebuilt


def _flatten_struct(value: Any) -> Flat:
    _, (_, hidden) = value.__reduce__()
    return list(value), (type(value), hidden), None


def _unflatten_struct(children: list[Any], context: tuple[Any, dict[str, Any]]) -> Any:
    cls, hidden = context
    return cls(children, hidden)


_STRUCTS = Rule(_flatten_struct, _unflatten_struct)
_TUPLES = Rule(_flatten_tuple, _unflatten_tuple, beside=lambda value, context: context[1])
_NAMED_TUPLES = _TUPLES._replace(flatten=_flatten_named_tuple, names="attribute")


def rebuilds_any_tuple(rule: Rule) -> bool:
    """Return whether a rule is of tuples that can be made of any children."""
    return rule.unflatten is _unflatten_tuple


# ---- dataclasses ---------------------------------------------------------------------------------


def _flatten_dataclass(value: Any) -> Flat:
    """Take a dataclass apart by what it stores: a field may be a property over another attribute.

    Raises:
        Refused: it is not known where a field is stored, so a rebuilt value would have the old one.
    """
    in_slots = slots_of(value)
    stored = {**in_slots, **getattr(value, "__dict__", {})}
    names, places, children = [], [], []
    for field in dataclasses.fields(value):
        name = field.name
        if not hasattr(value, name):
            continue
        child = getattr(value, name)
        in_places = [name]
        if name not in stored or stored[name] is not child:
            in_places = [other for other in stored if stored[other] is child]
            if not in_places and class_attribute(type(value), name) is child:
                in_places = [name]  # its default: the object has no value of its own
            elif not in_places and is_plain_value(child):
                continue  # what computes it will do so again
            elif not in_places:
                raise Refused(
                    f"is a {type(value).__name__}, whose field {name!r} is a property, another "
                    "descriptor or from `__getattr__`, and what it returns is no attribute of the "
                    "object: register the class with tdcopier.register_container"
                )
        names.append(name)
        places.append(in_places)
        children.append(child)
    for each in itertools.chain.from_iterable(places):
        stored.pop(each, None)
    others = without_caches(type(value), stored)
    return children, (type(value), places, others, set(in_slots)), names


def _unflatten_dataclass(
    children: list[Any], context: tuple[type, list[list[str]], dict[str, Any], Collection[str]]
) -> Any:
    """Rebuild without `__init__`, which may take other arguments and has run once already."""
    cls, places, others, in_slots = context
    rebuilt: Any = object.__new__(cls)
    attributes = getattr(rebuilt, "__dict__", {})
    for names, value in [
        *(([name], other) for name, other in others.items()),
        *zip(places, children, strict=True),
    ]:
        for name in names:
            if name in in_slots:
                put_in_slot(rebuilt, name, value)  # works for frozen dataclasses too
            else:
                attributes[name] = value  # also under the name of a property
    return rebuilt


def _place_of_field(value: Any, name: str) -> Place:
    if type(value).__dataclass_params__.frozen:
        raise Refused(f"it is in a frozen dataclass ({type(value).__qualname__})")
    return Place(value, name, partial(setattr, value, name))


_DATACLASSES = Rule(
    _flatten_dataclass,
    _unflatten_dataclass,
    "attribute",
    place=_place_of_field,
    beside=lambda value, context: context[2],
)


# ---- shallow copies ------------------------------------------------------------------------------


def _shell_of(value: Any, kind: str) -> Any:
    try:
        shell = _shallow_copy(value)
    except Exception as error:
        raise _not_rebuildable(value, kind, f"{type(error).__name__}: {error}") from error
    if type(shell) is not type(value) or shell is value:
        raise _not_rebuildable(value, kind, f"copy.copy gave a {type(shell).__name__}")
    drop_caches(shell, value)
    return shell


def _shallow_copy(value: Any) -> Any:
    made = copy.copy(value)
    attributes = getattr(value, "__dict__", None)
    if attributes is value:  # a dict that is its own __dict__
        made.__dict__ = made
    elif attributes and getattr(made, "__dict__", None) == {}:  # copying a deque loses them
        made.__dict__.update(attributes)
    return made


def _not_rebuildable(value: Any, kind: str, reason: str) -> Refused:
    return Refused(
        f"is a {type(value).__name__}, a {kind} that cannot be rebuilt ({reason}): "
        "register it with tdcopier.register_container"
    )
