"""Containers that a parcel writes by the name of their class, so that reading them needs no pickle.

Bytes of any origin may name a class. So they get only what can do no harm: named tuples and
dataclasses of modules that are imported already, made without `__init__`, with attributes that are
numbers, texts and tuples of these. No code of the class runs, not even when it is freed.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import sys
import types
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from tdcopier._containers import by_bases, dataclass_fields
from tdcopier._containers.attributes import class_attribute, slots_of_class
from tdcopier._containers.registry import rule_of
from tdcopier._containers.rule import Rule

_Form = tuple[str, str, Any]
"""Module, qualified name, and the rest of the context, of which no part can be changed."""


def packed_form(unflatten: Callable[..., Any], context: Any, children: int) -> _Form | None:
    """Return what stands for a container's rebuild function and context; None: only a pickle can.

    A container that lacks a field is for a pickle, so that bytes cannot make such ones.

    The native writer asks for a pickle too if the third part is no plain value.
    """
    if unflatten is by_bases.TUPLES.unflatten:
        cls: type
        cls, attributes = context
        rest: Any = attributes or None  # a dict is no plain value
        why_not = _why_no_tuple(cls, children)
    elif unflatten is dataclass_fields.DATACLASSES.unflatten:
        cls, places, others, in_slots = context
        rest = (_tuples(places), tuple(others.items()), tuple(sorted(in_slots)))
        why_not = _why_no_dataclass(cls, *rest)
    else:
        return None
    module, name = cls.__module__, cls.__qualname__
    is_found = why_not is None and _is_harmless(cls) and _class_named(module, name) is cls
    return (module, name, rest) if is_found else None


def from_packed_form(
    module: Any, name: Any, rest: Any, children: int, may_import: bool
) -> tuple[type, Callable[..., Any], Any]:
    """Return the class, the rebuild function and the context that such bytes mean.

    Raises:
        ValueError: they mean none.
    """
    if may_import and isinstance(module, str) and module and module not in sys.modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ValueError(f"the parcel has a class of a module that is missing: {error}") from (
                error
            )
    found = _class_named(module, name)
    if found is None or not _is_harmless(found):
        raise ValueError(
            f"the parcel has a class that this process does not know: {module}.{name}. Import its "
            "module first"
        )
    cls: Any = found
    rule = rule_of(cls)
    unflatten = rule.unflatten if isinstance(rule, Rule) else None
    why_not: str | None = None
    if unflatten is by_bases.TUPLES.unflatten and rest is None:
        why_not = _why_no_tuple(cls, children)
        if why_not is None:
            return cls, unflatten, (cls, {})
    elif unflatten is dataclass_fields.DATACLASSES.unflatten and _is_dataclass_form(rest, children):
        places, others, in_slots = rest
        why_not = _why_no_dataclass(cls, *rest)
        if why_not is None:
            return cls, unflatten, (cls, [list(names) for names in places], dict(others), in_slots)
    raise ValueError(
        f"the parcel has a {cls.__qualname__} that cannot be rebuilt"
        + (f": {why_not}" if why_not else "")
    )


def are_current(classes: Sequence[tuple[str, str, type]]) -> bool:
    """Return whether the names still mean these classes: a notebook may define one again."""
    return all(_class_named(module, name) is cls for module, name, cls in classes)


def _class_named(module: Any, name: Any) -> type | None:
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):  # runs no code of what is found
        if type(found) is types.ModuleType:
            names: Any = types.ModuleType.__getattribute__(found, "__dict__")
        elif issubclass(type(found), type):
            names = type.__getattribute__(found, "__dict__")
        else:
            return None
        found = names.get(part)
    return found if issubclass(type(found), type) else None


def _is_harmless(cls: Any) -> bool:
    if hasattr(cls, "__del__"):
        return False
    if issubclass(cls, tuple):
        return True
    return dataclasses.is_dataclass(cls) and _can_be_made(cls)


def _can_be_made(cls: Any) -> bool:
    """Return whether it is not abstract, and has no base that is made in its own way, as `int`."""
    try:
        object.__new__(cls)
    except TypeError:
        return False
    return True


def _why_no_tuple(cls: Any, children: int) -> str | None:
    """Return why there is no such tuple, or None if there is."""
    names = class_attribute(cls, "_fields")
    if not isinstance(names, tuple) or len(names) == children:
        return None
    return f"it has {children} items for {len(names)} fields"


class _Names(NamedTuple):
    """Of the attributes of a dataclass."""

    slots: frozenset[str]
    wanted: frozenset[str]
    """Fields that each object has to store: the class has no default, nor a property."""


_names: weakref.WeakKeyDictionary[type, _Names] = weakref.WeakKeyDictionary()


def _names_of(cls: Any) -> _Names:
    names = _names.get(cls)
    if names is None:
        slots = frozenset(name for _, name in slots_of_class(cls))
        of_the_class = {name for base in cls.__mro__ for name in vars(base)} - slots
        fields = {field.name for field in dataclasses.fields(cls)}
        names = _names[cls] = _Names(slots, frozenset(fields - of_the_class))
    return names


def _why_no_dataclass(
    cls: Any,
    places: Sequence[Sequence[str]],
    others: Sequence[tuple[str, Any]],
    in_slots: Collection[str],
) -> str | None:
    """Return why there is no such dataclass, or None if there is."""
    given = {*itertools.chain.from_iterable(places), *(name for name, _ in others)}
    slots, wanted = _names_of(cls)
    if not given >= wanted:
        return f"it has no {', '.join(sorted(wanted - given))}"
    if given & slots != set(in_slots) or (not cls.__dictoffset__ and not given <= slots):
        return "the class has other slots"
    return None if all(places) else "a child has no place"


def _tuples(rows: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(row) for row in rows)


def _is_dataclass_form(rest: Any, children: int) -> bool:
    """Return whether these are (places of each child, other attributes, names of slots)."""
    if not isinstance(rest, tuple) or len(rest) != 3:
        return False
    places, others, in_slots = rest
    if not all(isinstance(part, tuple) for part in rest) or len(places) != children:
        return False
    pairs = all(isinstance(pair, tuple) and len(pair) == 2 for pair in others)
    names = [name for row in places if isinstance(row, tuple) for name in row]
    return (
        pairs
        and all(isinstance(row, tuple) for row in places)
        and all(isinstance(name, str) for name in [*names, *in_slots])
        and all(isinstance(pair[0], str) for pair in others)
    )
