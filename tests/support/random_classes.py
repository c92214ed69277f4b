"""Classes of containers with random combinations of features, and values of them.

Values are made below the methods of their class, so that a feature may break any method. The
features, and not tdcopier's code, say what a copy has to do with each attribute.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import random
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MAPPINGS = (dict, OrderedDict, defaultdict, UserDict)
SEQUENCES = (list, deque)
numbers = itertools.count()


@dataclasses.dataclass
class Made:
    """A class, and what is known of its values."""

    cls: type
    base: type
    """A mapping, list, deque or tuple; `type` for a dataclass, `object` for a class of no kind."""
    features: list[str]
    make: Callable[[list[Any]], Any]
    """Makes a value with these children."""
    stored: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """The attributes that keep each field; none if it is computed."""
    may_be_refused: bool = False


# ---- features of any class -----------------------------------------------------------------------


def fails(*_: Any, **__: Any) -> Any:
    raise RuntimeError("this method always fails")


def raw_attributes(value: Any) -> dict[str, Any]:
    """Returns all that is in the object's slots and `__dict__`, other than the items."""
    found = {}
    for base in type(value).__mro__:
        for name, slot in vars(base).items():
            if isinstance(slot, types.MemberDescriptorType) and base is not defaultdict:
                try:
                    found[name] = slot.__get__(value)
                except AttributeError:  # an empty slot
                    continue
    try:
        found.update(object.__getattribute__(value, "__dict__"))
    except AttributeError:  # it has slots only
        return found
    if isinstance(value, UserDict):
        del found["data"]
    return found


def raw_items(value: Any) -> list[tuple[Any, Any]]:
    """Returns keys or indices, and the stored items."""
    if isinstance(value, UserDict):
        return list(object.__getattribute__(value, "__dict__")["data"].items())
    if isinstance(value, OrderedDict):
        return list(OrderedDict.items(value))
    if isinstance(value, dict):
        return list(dict.items(value))
    base = next(each for each in (list, deque, tuple) if isinstance(value, each))
    return list(enumerate(base.__iter__(value)))


def empty_like(cls: type, base: type, items: Any, factory: Any = None, limit: Any = None) -> Any:
    """Returns a value with these items, made by the methods of the base class."""
    if base is tuple:
        return tuple.__new__(cls, [child for _, child in items])
    value = base.__new__(cls)
    if base is UserDict:
        object.__getattribute__(value, "__dict__")["data"] = dict(items)
    elif base is deque:
        deque.__init__(value, [child for _, child in items], limit)
    elif base is list:
        list.extend(value, [child for _, child in items])
    elif base is defaultdict:
        defaultdict.__init__(value, factory)
        dict.update(value, items)
    else:
        for key, child in items:
            base.__setitem__(value, key, child)
    return value


def same_again(value: Any) -> Any:
    """Returns a shallow copy, as a good `__copy__` does."""
    base = next(
        each for each in (*MAPPINGS[1:], dict, *SEQUENCES, tuple) if isinstance(value, each)
    )
    made = empty_like(
        type(value), base, raw_items(value), getattr(value, "default_factory", None),
        getattr(value, "maxlen", None),
    )  # fmt: skip
    for name, attribute in raw_attributes(value).items():
        object.__setattr__(made, name, attribute)
    return made


def _restored(cls: type, base: type, items: Any, attributes: Any, more: Any) -> Any:
    made = empty_like(cls, base, items, *more)
    for name, attribute in attributes.items():
        object.__setattr__(made, name, attribute)
    return made


def any_attribute(self: Any, name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    return f"no {name} here"


class Meta(type):
    """Its classes cannot be called without a keyword."""

    def __call__(cls, *args: Any, key: Any, **more: Any) -> Any:
        return super().__call__(*args, **more)


class Subclassed:
    tag = "base"

    def __init_subclass__(cls, tag: str = "sub", **more: Any) -> None:
        super().__init_subclass__(**more)
        cls.tag = tag


HARMLESS: dict[str, dict[str, Any]] = {
    "__deepcopy__ fails": {"__deepcopy__": fails},
    "__eq__ fails": {"__eq__": fails, "__hash__": object.__hash__},
    "__eq__ is always true": {"__eq__": lambda self, other: True, "__hash__": None},
    "__hash__ fails": {"__hash__": fails},
    "__bool__ fails": {"__bool__": fails},
    "__repr__ fails": {"__repr__": fails, "__str__": fails},
    "__contains__ is always false": {"__contains__": lambda self, key: False},
    "a property": {"first": property(lambda self: raw_items(self)[0][1])},
    "a property that fails": {"broken": property(fails)},
    "__setattr__ is refused": {"__setattr__": fails},
    "__setattr__ of its own": {
        "__setattr__": lambda self, name, new: object.__setattr__(self, name, new)
    },
    "__getattr__ knows any name": {"__getattr__": any_attribute},
    "__getattr__ fails": {"__getattr__": lambda self, name: (_ for _ in ()).throw(
        AttributeError(name))},
    "a .to that fails": {"to": lambda self, device: fails()},
    "__getstate__": {"__getstate__": lambda self: raw_attributes(self)},
}  # fmt: skip


# ---- containers with items -----------------------------------------------------------------------


def _good_reduce(base: type) -> Callable[..., Any]:
    def reduce(self: Any, protocol: int = 2) -> Any:
        more = getattr(self, "default_factory", None), getattr(self, "maxlen", None)
        return _restored, (type(self), base, raw_items(self), raw_attributes(self), more)

    return reduce


def _counting_setitem(base: type) -> Callable[..., Any]:
    def setitem(self: Any, key: Any, value: Any) -> None:
        raw = raw_attributes(self)
        object.__setattr__(self, "writes", raw.get("writes", 0) + 1)
        base.__setitem__(self, key, value)

    return setitem


def _checking_setitem(base: type) -> Callable[..., Any]:
    def setitem(self: Any, key: Any, value: Any) -> None:
        if value is None:
            raise ValueError("no None here")
        base.__setitem__(self, key, value)

    return setitem


def _init_with_tag(base: type) -> Callable[..., Any]:
    def init(self: Any, *args: Any, tag: Any) -> None:
        base.__init__(self, *args)
        object.__setattr__(self, "tag", tag)

    return init


def _init_with_first(base: type) -> Callable[..., Any]:
    def init(self: Any, *args: Any) -> None:
        base.__init__(self, *args)
        items = raw_items(self)
        object.__setattr__(self, "alias", items[0][1] if items else None)

    return init


def _init_that_changes(base: type) -> Callable[..., Any]:
    """Returns a method that puts the items in the opposite order."""

    def init(self: Any, items: Any = ()) -> None:
        base.__init__(self)
        if base in SEQUENCES:
            base.extend(self, list(items)[::-1])
            return
        holder = vars(self)["data"] if base is UserDict else self
        for key, child in reversed(dict(items).items()):
            (dict if base is UserDict else base).__setitem__(holder, key, child)

    return init


def _copy_by_init(self: Any) -> Any:
    made = type(self)(self)
    for name, attribute in raw_attributes(self).items():
        object.__setattr__(made, name, attribute)
    return made


def _new_with_tag(base: type) -> Callable[..., Any]:
    def new(cls: type, *args: Any, tag: Any) -> Any:
        return base.__new__(cls, *args)

    return new


def container_features(base: type) -> dict[str, tuple[dict[str, Any], bool]]:
    """Returns methods by feature, and whether a class with it may be refused."""
    found: dict[str, tuple[dict[str, Any], bool]] = {
        name: (methods, False) for name, methods in HARMLESS.items()
    }
    found["__copy__ is good"] = {"__copy__": same_again}, False
    found["__reduce__ is good"] = {
        "__reduce__": _good_reduce(base), "__reduce_ex__": _good_reduce(base)
    }, False  # fmt: skip
    found["__new__ with a tag"] = {"__new__": _new_with_tag(base)}, True
    found["__iter__ is another order"] = {
        "__iter__": lambda self: reversed([
            key if base in MAPPINGS else child for key, child in raw_items(self)
        ])
    }, True  # fmt: skip
    if base is tuple:
        return found
    found["__copy__ is itself"] = {"__copy__": lambda self: self}, True
    found["__copy__ of the base"] = {"__copy__": lambda self: dict(raw_items(self))}, True
    found["__copy__ fails"] = {"__copy__": fails}, True
    found["__copy__ has no items"] = (
        {"__copy__": lambda self: empty_like(type(self), base, [])},
        True,
    )
    found["__reduce__ fails"] = {"__reduce__": fails, "__reduce_ex__": fails}, True
    found["__setitem__ counts"] = {"__setitem__": _counting_setitem(base)}, False
    found["__setitem__ checks"] = {"__setitem__": _checking_setitem(base)}, True
    found["frozen"] = {"__setitem__": fails, "update": fails, "append": fails}, True
    found["frozen, and __init__ changes its items"] = (
        {
            "__setitem__": fails,
            "__init__": _init_that_changes(base),
            "__copy__": _copy_by_init,
        },
        True,
    )
    found["__init__ with a tag"] = {"__init__": _init_with_tag(base)}, True
    found["__init__ keeps an item"] = {"__init__": _init_with_first(base)}, False
    found["__getitem__ fails"] = {"__getitem__": fails}, base in MAPPINGS
    return found


_OWN_STATE = {"__setattr__ is refused", "__getstate__", "__getattr__ knows any name"}
"""Features with which `copy.copy` may put other values in slots, or none."""


def container_class(draw: random.Random) -> Made:
    """Returns a class with items."""
    base = draw.choice([*MAPPINGS, *SEQUENCES, tuple])
    features = container_features(base)
    chosen = draw.sample(sorted(features), draw.choice([0, 0, 1, 1, 2, 3, 4]))
    body: dict[str, Any] = {}
    for name in chosen:
        body.update(features[name][0])
    names = draw.sample(
        ["number", "object", "alias", "list", "cache"], draw.choice([0, 0, 1, 2, 4])
    )
    if draw.random() < 0.2 and base is not tuple:
        body["__slots__"] = (*(name for name in names if name != "cache"), "writes", "alias", "tag")
        names = [name for name in names if name != "cache"]
        chosen.append("slots")
    if "cache" in names:
        body["cache"] = functools.cached_property(lambda self: _first_tensor(self))
    bases: tuple[Any, ...] = (base,)
    keywords: dict[str, Any] = {}
    if draw.random() < 0.2 and "slots" not in chosen:
        bases = (Subclassed, base) if draw.random() < 0.5 else (base, Subclassed)
        keywords["tag"] = "mine"
        chosen.append("__init_subclass__")
    elif draw.random() < 0.2 and "slots" not in chosen and base is not UserDict:
        bases = (base, Generic[T])
        chosen.append("generic")
    if draw.random() < 0.15 and base is not UserDict and "generic" not in chosen:
        keywords["metaclass"] = Meta
        chosen.append("metaclass")
    if base is tuple and draw.random() < 0.5 and bases == (tuple,) and "metaclass" not in keywords:
        return named_tuple_class(draw, body, chosen, names)
    cls = types.new_class(f"C{next(numbers)}", bases, keywords, lambda ns: ns.update(body))
    factory = draw.choice([None, list, dict])
    keys = draw.choice([str, int, lambda i: ("k", i), lambda i: f"K{9 - i}"])
    limit = draw.choice([None, 9])

    def make(children: list[Any]) -> Any:
        items = [(keys(i), child) for i, child in enumerate(children)]
        value = empty_like(cls, base, items, factory, limit)
        put_attributes(value, names, children)
        return value

    # The copy of an `OrderedDict` or a deque calls the class.
    refused = "metaclass" in chosen or any(features[name][1] for name in chosen if name in features)
    # `copy.copy` puts the slots back in its own way.
    refused |= "slots" in chosen and bool(_OWN_STATE & {*chosen})
    return Made(cls, base, [base.__name__, *chosen, *names], make, may_be_refused=refused)


def named_tuple_class(
    draw: random.Random, body: dict[str, Any], chosen: list[str], names: list[str]
) -> Made:
    count = draw.randrange(1, 4)
    fields = collections.namedtuple(f"N{next(numbers)}", [f"f{i}" for i in range(count)])
    cls = types.new_class(f"C{next(numbers)}", (fields,), {}, lambda ns: ns.update(body))

    def make(children: list[Any]) -> Any:
        of_fields = [*children, None, None, None][:count]
        value = tuple.__new__(cls, of_fields)
        put_attributes(value, names, of_fields)
        return value

    return Made(cls, tuple, ["namedtuple", *chosen, *names], make)


def _first_tensor(value: Any) -> Any:
    return [child for _, child in raw_items(value)][:1]


def put_attributes(value: Any, names: list[str], children: list[Any]) -> None:
    for name in names:
        attribute = {
            "number": 3,
            "object": object(),
            "alias": children[0] if children else None,
            "list": [*children[:1], "text"],
            "cache": None,
        }[name]
        if name == "cache":
            object.__getattribute__(value, "__dict__")["cache"] = _first_tensor(value)
        else:
            object.__setattr__(value, name, attribute)
