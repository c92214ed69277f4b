"""One container of every class that the walk descends into, and how to rebuild each by hand.

`CONTAINERS` wraps a leaf; `REBUILD` makes the expected container with the class's own constructor
and without tdcopier's code.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Move = Callable[[Any], Any]


class Pair(NamedTuple):
    left: Any
    right: Any


class Tagged(collections.namedtuple("Tagged", ["x", "y"])):  # no slots: it can have attributes
    pass


class Versioned(tuple):
    """A tuple whose `__new__` has parameters that tuple's has not."""

    def __new__(cls, version: int, *children: Any) -> Versioned:
        made = super().__new__(cls, children)
        made.version = version
        return made


class Numbered(list):
    def __init__(self, *children: Any, number: int) -> None:
        super().__init__(children)
        self.number = number


class Window(deque):
    pass


class Options(dict):
    """A dict whose items can be read as attributes, with one attribute that is not an item."""

    def __init__(self, name: str, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__["name"] = name

    def __getattr__(self, key: str) -> Any:
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


class AttributeDict(dict):
    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Defaults(defaultdict):
    pass


class Ordered(OrderedDict):
    pass


class Lowercase(UserDict):
    """A dict that changes the keys it is given."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key.lower(), value)


@dataclasses.dataclass
class Output(OrderedDict):
    """A mapping whose items are also its fields, as in some model libraries."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self[field.name] = getattr(self, field.name)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)

    def __delitem__(self, key: str) -> None:
        raise TypeError("an output loses no item")


@dataclasses.dataclass
class Sample:
    image: Any
    label: Any = "cat"


@dataclasses.dataclass(frozen=True)
class FrozenSample:
    image: Any
    label: Any = "cat"


@dataclasses.dataclass(slots=True)
class SlottedSample:
    image: Any
    label: Any = "cat"


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlottedSample:
    image: Any
    label: Any = "cat"


@dataclasses.dataclass
class Prepared:
    """A dataclass whose `__post_init__` cannot run again: its argument is not kept."""

    image: Any
    scale: dataclasses.InitVar[int]
    history: list[str] = dataclasses.field(init=False)
    never_set: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self, scale: int) -> None:
        self.history = [f"scaled by {scale}"]
        self.cache = "an attribute that is no field"


class Box:
    """Opaque unless registered with `flatten_box` and `unflatten_box`."""

    def __init__(self, *children: Any, name: str = "box") -> None:
        self.children = children
        self.name = name


class Node:
    """Registered in torch's pytrees."""

    def __init__(self, children: Any, number: int) -> None:
        self.children = children
        self.number = number


torch.utils._pytree.register_pytree_node(
    Node, lambda node: (node.children, node.number), lambda children, n: Node(list(children), n)
)


def flatten_box(box: Box) -> tuple[tuple[Any, ...], str]:
    return box.children, box.name


def unflatten_box(children: list[Any], name: str) -> Box:
    return Box(*children, name=name)


# ---- rebuilding ----------------------------------------------------------------------------------


def _attributes(made: Any, source: Any) -> Any:
    made.__dict__.update(source.__dict__)
    return made


def _prepared(source: Prepared, move: Move) -> Prepared:
    made = Prepared(move(source.image), scale=0)
    made.history = move(source.history)
    return made


def _structseq(source: Any, move: Move) -> Any:
    children = [move(child) for child in source]
    if isinstance(source, time.struct_time):
        return time.struct_time(children, {"tm_zone": source.tm_zone})
    return type(source)(children)


REBUILD: dict[type, Callable[[Any, Move], Any]] = {
    list: lambda v, move: [move(x) for x in v],
    tuple: lambda v, move: tuple([move(x) for x in v]),
    dict: lambda v, move: {k: move(x) for k, x in v.items()},
    OrderedDict: lambda v, move: OrderedDict((k, move(x)) for k, x in v.items()),
    defaultdict: lambda v, move: defaultdict(v.default_factory, {k: move(x) for k, x in v.items()}),
    Counter: lambda v, move: Counter({k: move(x) for k, x in v.items()}),
    UserDict: lambda v, move: UserDict({k: move(x) for k, x in v.items()}),
    deque: lambda v, move: deque([move(x) for x in v], v.maxlen),
    Pair: lambda v, move: Pair(move(v.left), move(v.right)),
    Tagged: lambda v, move: _attributes(Tagged(move(v.x), move(v.y)), v),
    Versioned: lambda v, move: Versioned(v.version, *[move(x) for x in v]),
    Numbered: lambda v, move: Numbered(*[move(x) for x in v], number=v.number),
    Window: lambda v, move: _attributes(Window([move(x) for x in v], v.maxlen), v),
    Options: lambda v, move: Options(v.name, **{k: move(x) for k, x in v.items()}),
    AttributeDict: lambda v, move: AttributeDict(**{k: move(x) for k, x in v.items()}),
    Defaults: lambda v, move: Defaults(v.default_factory, {k: move(x) for k, x in v.items()}),
    Ordered: lambda v, move: Ordered((k, move(x)) for k, x in v.items()),
    Lowercase: lambda v, move: Lowercase({k: move(x) for k, x in v.items()}),
    Output: lambda v, move: Output(move(v.logits), move(v.loss)),
    Sample: lambda v, move: Sample(move(v.image), move(v.label)),
    FrozenSample: lambda v, move: FrozenSample(move(v.image), move(v.label)),
    SlottedSample: lambda v, move: SlottedSample(move(v.image), move(v.label)),
    FrozenSlottedSample: lambda v, move: FrozenSlottedSample(move(v.image), move(v.label)),
    Prepared: _prepared,
    Box: lambda v, move: Box(*[move(x) for x in v.children], name=v.name),
    Node: lambda v, move: Node([move(x) for x in v.children], v.number),
    torch.return_types.max: _structseq,
    time.struct_time: _structseq,
}


# ---- around a leaf -------------------------------------------------------------------------------


def _reordered(cls: type[OrderedDict[str, Any]], leaf: Any) -> OrderedDict[str, Any]:
    ordered = cls([("first", leaf), ("second", None)])
    ordered.move_to_end("first")
    return ordered


def _tagged(leaf: Any) -> Tagged:
    tagged = Tagged(leaf, "y")
    tagged.origin = "a file"
    return tagged


def _window(leaf: Any) -> Window:
    window = Window(["dropped", "kept", leaf], maxlen=2)
    window.stride = 5
    return window


class Container(NamedTuple):
    keeps: str
    """State besides its class and its children."""
    wrap: Callable[[Any], Any]
    opaque: int = 0
    """Opaque values beside the leaf."""


CONTAINERS: dict[str, Container] = {
    "list": Container("", lambda leaf: [leaf]),
    "tuple": Container("", lambda leaf: (None, leaf), 1),
    "dict": Container("keys, order", lambda leaf: {("a", 1): leaf, 2: "text"}, 1),
    "named tuple": Container("names", lambda leaf: Pair(leaf, 1), 1),
    "subclass of a named tuple": Container("names, attributes", _tagged, 1),
    "tuple subclass": Container(
        "attributes; its `__new__` is not called", lambda leaf: Versioned(3, leaf, None), 1
    ),
    "structseq, such as `torch.return_types.max`": Container(
        "names", lambda leaf: torch.return_types.max((leaf, "indices")), 1
    ),
    "structseq with hidden fields": Container(
        "hidden fields", lambda leaf: time.struct_time([leaf, *range(8)], {"tm_zone": "UTC"}), 8
    ),
    "list subclass": Container("attributes", lambda leaf: Numbered(leaf, "x", number=7), 1),
    "deque": Container("", lambda leaf: deque([leaf])),
    "deque with a maximum length": Container(
        "the maximum length", lambda leaf: deque([0, leaf], maxlen=3), 1
    ),
    "deque subclass": Container("the maximum length, attributes", _window, 1),
    "`OrderedDict`": Container(
        "keys, order, attributes", lambda leaf: _reordered(OrderedDict, leaf), 1
    ),
    "`OrderedDict` subclass": Container(
        "keys, order, attributes", lambda leaf: _reordered(Ordered, leaf), 1
    ),
    "`defaultdict`": Container("keys, order, factory", lambda leaf: defaultdict(list, a=leaf)),
    "`defaultdict` subclass": Container(
        "keys, order, factory, attributes", lambda leaf: Defaults(list, a=leaf)
    ),
    "`Counter`": Container("keys, order", lambda leaf: Counter({"a": leaf, "b": 2}), 1),
    "dict subclass": Container("keys, order, attributes", lambda leaf: Options("o", a=leaf)),
    "dict whose attributes are its items": Container(
        "keys, order", lambda leaf: AttributeDict(a=leaf)
    ),
    "mapping whose items are its fields": Container(
        "keys, order; fields and items agree", lambda leaf: Output(leaf, 0.5), 1
    ),
    "`UserDict`": Container("keys, order", lambda leaf: UserDict(a=leaf)),
    "`UserDict` subclass": Container(
        "keys, order, attributes", lambda leaf: Lowercase({"A": leaf})
    ),
    "dataclass": Container("fields", lambda leaf: Sample(leaf), 1),
    "frozen dataclass": Container("fields", lambda leaf: FrozenSample(leaf), 1),
    "dataclass with slots": Container("fields", lambda leaf: SlottedSample(leaf), 1),
    "frozen dataclass with slots": Container("fields", lambda leaf: FrozenSlottedSample(leaf), 1),
    "dataclass with fields that `__init__` does not take": Container(
        "fields, attributes; `__post_init__` is not called",
        lambda leaf: Prepared(leaf, scale=2),
        1,
    ),
    "class that is registered": Container(
        "what `flatten` gives as context", lambda leaf: Box(leaf, "opaque"), 1
    ),
    "class that is registered in torch's pytrees": Container(
        "what its own function gives as context", lambda leaf: Node([leaf, "opaque"], 3), 1
    ),
}


def _every_one_in_another(leaf: Any) -> Any:
    tree = leaf
    for container in CONTAINERS.values():
        tree = container.wrap(tree)
    return tree


EVERY_CONTAINER_IN_ANOTHER = Container(
    "", _every_one_in_another, sum(container.opaque for container in CONTAINERS.values())
)
