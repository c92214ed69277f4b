"""Dataclasses and objects with random features, and a random choice among all such classes."""

from __future__ import annotations

import dataclasses
import functools
import random
import types
from collections.abc import Callable
from typing import Any

from random_classes import HARMLESS, Made, container_class, fails, numbers


class StoredElsewhere:
    def __init__(self, name: str) -> None:
        self.name = f"stored {name}"

    def __get__(self, owner: Any, cls: type) -> Any:
        return self if owner is None else owner.__dict__[self.name]

    def __set__(self, owner: Any, new: Any) -> None:
        owner.__dict__[self.name] = new


def _over(attribute: str) -> property:
    return property(
        lambda self: object.__getattribute__(self, attribute),
        lambda self, new: object.__setattr__(self, attribute, new),
    )


def _over_own_name(name: str) -> property:
    return property(
        lambda self: vars(self)[name], lambda self, new: vars(self).__setitem__(name, new)
    )


def _in_two_places(name: str) -> property:
    def put(self: Any, new: Any) -> None:
        vars(self).update({f"_{name}": new, f"_also_{name}": new})

    return property(lambda self: vars(self)[f"_{name}"], put)


def _made_anew(name: str) -> property:
    return property(lambda self: [vars(self)[f"_{name}"]], lambda self, new: vars(self).update(
        {f"_{name}": new}))  # fmt: skip


FIELDS: dict[str, tuple[Callable[[str], Any], Callable[[str], list[str]]]] = {
    "property": (lambda name: _over(f"_{name}"), lambda name: [f"_{name}"]),
    "property of its own name": (_over_own_name, lambda name: [name]),
    "descriptor": (StoredElsewhere, lambda name: [f"stored {name}"]),
    "in two places": (_in_two_places, lambda name: [f"_{name}", f"_also_{name}"]),
    "computed number": (
        lambda name: property(lambda self: 7, lambda self, new: None),
        lambda _: [],
    ),
    "made anew": (_made_anew, lambda _: []),
}


def _redirecting(self: Any, name: str, new: Any) -> None:
    object.__setattr__(self, f"_{name}", new)


def _redirected(self: Any, name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return object.__getattribute__(self, f"_{name}")


def dataclass_class(draw: random.Random) -> Made:
    """Returns a dataclass, or a subclass of one."""
    names = [f"f{i}" for i in range(draw.randrange(1, 5))]
    in_slots = draw.random() < 0.25
    redirects = not in_slots and draw.random() < 0.1
    options = {
        "frozen": not redirects and draw.random() < 0.3, "slots": in_slots,
        "eq": draw.random() < 0.7, "kw_only": draw.random() < 0.2, "repr": draw.random() < 0.5,
    }  # fmt: skip
    harmless = [name for name in HARMLESS if "setattr" not in name and name != "a property"]
    if redirects:
        harmless = [name for name in harmless if "getattr" not in name]
    chosen = draw.sample(harmless, draw.choice([0, 0, 1, 2]))
    body: dict[str, Any] = {"__annotations__": dict.fromkeys(names, Any)}
    for name in chosen:
        body.update(HARMLESS[name])
    if draw.random() < 0.3 and names[1:]:
        body[names[-1]] = dataclasses.field(default_factory=list)
        chosen.append("default factory")
    with_cache = not in_slots and draw.random() < 0.2
    if with_cache:
        body["cache"] = functools.cached_property(lambda self: [getattr(self, names[0])])
    if redirects:
        body.update(__setattr__=_redirecting, __getattr__=_redirected)
        chosen.append("redirects")
    cls: Any = types.new_class(f"D{next(numbers)}", (), {}, lambda ns: ns.update(body))
    cls = dataclasses.dataclass(**options)(cls)
    stored = {name: [f"_{name}" if redirects else name] for name in names}
    for name in names:
        if in_slots or redirects or draw.random() < 0.7:
            continue
        how = draw.choice(sorted(FIELDS))
        descriptor, places = FIELDS[how]
        setattr(cls, name, descriptor(name))
        stored[name] = places(name)
        chosen.append(how)
    if draw.random() < 0.2:
        cls = types.new_class(f"E{next(numbers)}", (cls,), {}, None)
        chosen.append("subclass")
    beside = draw.sample(["number", "object", "alias", "list"], draw.choice([0, 0, 1, 2]))
    if in_slots and "subclass" not in chosen:
        beside = []
    without = draw.choice(names) if draw.random() < 0.1 else None
    if without is not None and {*FIELDS, "redirects", "default factory"} & {*chosen}:
        without = None

    def make(children: list[Any]) -> Any:
        value = object.__new__(cls)
        for name, child in zip(names, [*children, *[None] * 4], strict=False):
            for place in stored[name] or ([f"_{name}"] if "made anew" in chosen else []):
                put(value, place, child)
        if without is not None:
            take(value, without)
        for name in beside:
            attribute = {
                "number": 3, "object": object(), "alias": (children or [None])[0],
                "list": [*children[:1], "text"],
            }[name]  # fmt: skip
            put(value, name, attribute)
        if with_cache and without != names[0]:
            vars(value)["cache"] = [getattr(value, names[0])]
        return value

    features = ["dataclass", *(name for name in options if options[name]), *chosen, *beside]
    features += ["cache"] * with_cache + ["a missing field"] * (without is not None)
    return Made(cls, type, features, make, stored, "made anew" in chosen)


def put(value: Any, name: str, new: Any) -> None:
    """Sets an attribute in a slot, or else in the `__dict__`."""
    for base in type(value).__mro__:
        if isinstance(vars(base).get(name), types.MemberDescriptorType):
            vars(base)[name].__set__(value, new)
            return
    object.__getattribute__(value, "__dict__")[name] = new


def take(value: Any, name: str) -> None:
    for base in type(value).__mro__:
        if isinstance(vars(base).get(name), types.MemberDescriptorType):
            vars(base)[name].__delete__(value)
            return
    del object.__getattribute__(value, "__dict__")[name]


def object_class(draw: random.Random) -> Made:
    """Returns a class that is no container for a copy, whatever it has."""
    chosen = draw.sample(["__iter__", "__getitem__", "__len__", "keys", "slots"], draw.randrange(4))
    body: dict[str, Any] = {name: fails for name in chosen if name != "slots"}
    if "slots" in chosen:
        body["__slots__"] = ("children",)
    cls = types.new_class(f"O{next(numbers)}", (), {}, lambda ns: ns.update(body))

    def make(children: list[Any]) -> Any:
        value = object.__new__(cls)
        put(value, "children", children)
        return value

    return Made(cls, object, ["object", *chosen], make)


def random_class(draw: random.Random) -> Made:
    chance = draw.random()
    if chance < 0.62:
        return container_class(draw)
    return dataclass_class(draw) if chance < 0.96 else object_class(draw)
