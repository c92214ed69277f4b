"""The rule of dataclasses: taken apart by their fields, which may be stored elsewhere."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

from tdcopier import _C
from tdcopier._containers.attributes import (
    class_attribute,
    put_in_slot,
    slots_of,
    without_caches,
)
from tdcopier._containers.rule import Flat, Place, Refused, Rule
from tdcopier._containers.unknown import is_plain_value

Context = tuple[type, list[list[str]], dict[str, Any], Collection[str]]
"""Class, attributes that keep each field, all other attributes, and which are slots."""


def _flatten(value: Any) -> Flat:
    """Take a dataclass apart by what it stores: a field may be a property over another attribute.

    Raises:
        Refused: it is not known where a field is stored, so a rebuilt value would have the old one.
    """
    in_slots = slots_of(value)
    stored = {**in_slots, **getattr(value, "__dict__", {})}
    children = _fields_of(value)
    places = {name: [name] for name, child in children.items() if stored.get(name, value) is child}
    elsewhere = [name for name in children if name not in places]
    free = {name: each for name, each in stored.items() if name not in places}
    for name in elsewhere:
        child = children[name]
        found = [other for other in free if free[other] is child]
        if found:
            places[name] = found
        elif class_attribute(type(value), name) is child:
            places[name] = [name]  # its default: the object has no value of its own
        elif is_plain_value(child):
            del children[name]  # what computes it will do so again
        else:
            raise _unknown_place(value, name, "what it returns is no attribute of the object")
    _tell_apart(
        value, stored, children, {name: places[name] for name in elsewhere if name in places}
    )
    for each in itertools.chain.from_iterable(places.values()):
        stored.pop(each, None)
    others = without_caches(type(value), stored)
    names = list(children)
    context: Context = (type(value), [places[name] for name in names], others, set(in_slots))
    return list(children.values()), context, names


def _fields_of(value: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
    return {name: getattr(value, name) for name in names}


def _unknown_place(value: Any, name: str, reason: str) -> Refused:
    return Refused(
        f"is a {type(value).__name__}, whose field {name!r} is a property, another descriptor or "
        f"from `__getattr__`, and {reason}: register the class with tdcopier.containers.register"
    )


def _tell_apart(
    value: Any, stored: dict[str, Any], children: dict[str, Any], places: dict[str, list[str]]
) -> None:
    """Divide the attributes among fields that have one object in common.

    Each field moves on its own, so each needs places of its own.
    """
    sharing: dict[int, list[str]] = {}
    for name in places:
        if not is_plain_value(children[name]):
            sharing.setdefault(id(children[name]), []).append(name)
    for names in sharing.values():
        if len(names) == 1:
            continue
        together = list(places[names[0]])
        for name in names:
            places[name][:] = _places_read_by(value, name, stored, together)
        taken = list(itertools.chain.from_iterable(places[name] for name in names))
        if not all(places[name] for name in names) or len(set(taken)) != len(taken):
            raise _unknown_place(value, names[0], "another field has the same object")
        for other in [each for each in together if each not in taken]:
            # An attribute that no field reads: of the field with this name in its own, if any.
            owner = next((name for name in names if name in other), names[0])
            places[owner].append(other)


def _places_read_by(value: Any, name: str, stored: dict[str, Any], places: list[str]) -> list[str]:
    """Return which of these attributes a field is read from, by another object in each."""
    stand_ins = {place: object() for place in places}
    slots = slots_of(value)
    probe = _with_attributes(type(value), {**stored, **stand_ins}.items(), slots)
    with contextlib.suppress(Exception):  # of code that computes with what it reads
        seen = getattr(probe, name)
        return [place for place in places if stand_ins[place] is seen]
    return []


def _with_attributes(
    cls: type, attributes: Iterable[tuple[str, Any]], in_slots: Collection[str]
) -> Any:
    """Return an object without `__init__`, which may take other arguments and has run already."""
    made: Any = object.__new__(cls)
    in_dict = getattr(made, "__dict__", {})
    for name, value in attributes:
        if name in in_slots:
            put_in_slot(made, name, value)  # works for frozen dataclasses too
        else:
            in_dict[name] = value  # also under the name of a property
    return made


def _unflatten(children: list[Any], context: Context) -> Any:
    cls, places, others, in_slots = context
    moved = [(name, child) for names, child in zip(places, children, strict=True) for name in names]
    return _with_attributes(cls, [*others.items(), *moved], in_slots)


def _place(value: Any, name: str) -> Place:
    if type(value).__dataclass_params__.frozen:
        raise Refused(f"it is in a frozen dataclass ({type(value).__qualname__})")
    return Place(value, name, partial(setattr, value, name))


DATACLASSES = Rule(
    _flatten, _unflatten, _C.Step.ATTRIBUTE, place=_place, beside=lambda value, context: context[2]
)
