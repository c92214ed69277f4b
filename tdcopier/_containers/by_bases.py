"""Rules for subclasses of `list`, `tuple` and `dict`, for `deque` and `UserDict`.

That of dataclasses is in `dataclass_fields.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from tdcopier import _C
from tdcopier._containers.attributes import (
    attributes_of,
    drop_caches,
    slots_of,
    without_caches,
)
from tdcopier._containers.dataclass_fields import DATACLASSES
from tdcopier._containers.remade import (
    Make,
    Remade,
    item_attributes,
    options_of,
    shallow_copy,
    stored_children,
    stored_items,
    way_to_remake,
)
from tdcopier._containers.rule import Flat, Place, Refused, Rule

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
        return DATACLASSES
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
        make: Make | Remade | None = partial(
            _fill_mapping, _mapping_shell(value, items, keys), keys
        )
    except Refused:
        make = way_to_remake(value, keys)
        if make is None:
            raise
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
    _shell_of(shell, "mapping")  # its copies are made later: the class may not make one of a copy
    return shell


def _fill_mapping(shell: Any, keys: list[Any], children: list[Any]) -> Any:
    rebuilt = shallow_copy(shell)
    for key, child in zip(keys, children, strict=True):
        rebuilt[key] = child
    return rebuilt


def _unflatten_by(children: list[Any], make: Make) -> Any:
    return make(children)


def _place_in_mapping(container: Any, name: Any) -> Place:
    return _place_unless_remade(container, name, _flatten_mapping)


def _place_unless_remade(container: Any, name: Any, flatten: Callable[[Any], Flat]) -> Place:
    _, make, _ = flatten(container)
    if isinstance(make, Remade):
        raise Refused(f"it is in a {type(container).__qualname__}, which refuses to have items set")
    return place_of_item(container, name)


def _beside_items(value: Any, make: Make | Remade) -> dict[str, Any]:
    if isinstance(make, Remade):
        return make.carried
    return without_caches(type(value), item_attributes(value)) | slots_of(value)


_MAPPINGS = Rule(
    _flatten_mapping, _unflatten_by, _C.Step.KEY, place=_place_in_mapping, beside=_beside_items
)
_EXACT_MAPPINGS: dict[type, Rule] = {
    collections.OrderedDict: Rule(
        _flatten_ordered,
        _unflatten_ordered,
        _C.Step.KEY,
        place=place_of_item,
        beside=lambda value, context: context[1],
    ),
    collections.defaultdict: Rule(
        _flatten_default, _unflatten_default, _C.Step.KEY, place=place_of_item
    ),
}


# ---- sequences -----------------------------------------------------------------------------------


def _flatten_sequence(value: Any) -> Flat:
    children = stored_children(value)
    try:
        make: Make | Remade | None = partial(_fill_sequence, _sequence_shell(value, len(children)))
    except Refused:
        make = way_to_remake(value, None)
        if make is None:
            raise
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
    _shell_of(shell, "sequence")
    return shell


def _fill_sequence(shell: Any, children: list[Any]) -> Any:
    rebuilt = shallow_copy(shell)
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
    return _NAMED_TUPLES if named else TUPLES


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
TUPLES = Rule(_flatten_tuple, _unflatten_tuple, beside=lambda value, context: context[1])
_NAMED_TUPLES = TUPLES._replace(flatten=_flatten_named_tuple, step=_C.Step.ATTRIBUTE)


def rebuilds_any_tuple(rule: Rule) -> bool:
    """Return whether a rule is of tuples that can be made of any children."""
    return rule.unflatten is _unflatten_tuple


# ---- shallow copies ------------------------------------------------------------------------------


def _shell_of(value: Any, kind: str) -> Any:
    try:
        shell = shallow_copy(value)
    except Exception as error:
        raise _not_rebuildable(value, kind, f"{type(error).__name__}: {error}") from error
    if shell is value:
        raise _not_rebuildable(value, kind, "copy.copy of it gives the same object, not a new one")
    if type(shell) is not type(value):
        name = type(shell).__name__
        raise _not_rebuildable(value, kind, f"copy.copy of it gives another class, {name}")
    if options_of(shell) != options_of(value):
        raise _not_rebuildable(value, kind, "its copy has another factory or maximum length")
    drop_caches(shell, value)
    return shell


def _not_rebuildable(value: Any, kind: str, reason: str) -> Refused:
    return Refused(
        f"is a {type(value).__name__}, a {kind} that cannot be rebuilt ({reason}): "
        "register it with tdcopier.containers.register"
    )
