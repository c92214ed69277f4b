"""Containers that refuse to have items set, by how they are rebuilt."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.immutable_collections import immutable_dict, immutable_list


def refuses(self: Any, *_: Any, **__: Any) -> Any:
    raise TypeError(f"a {type(self).__name__} does not change")


class FrozenDict(dict):
    """Its copy is itself, and it keeps its hash in a slot, as frozendict does."""

    __slots__ = ("_hash",)
    __setitem__ = update = pop = clear = refuses
    __copy__ = lambda self: self  # noqa: E731

    def __hash__(self) -> int:
        if not hasattr(self, "_hash"):
            self._hash = hash(frozenset(self.items()))
        return self._hash


class FrozenList(list):
    __setitem__ = append = extend = refuses

    def __reduce__(self) -> Any:
        return type(self), (tuple(self),)


class FrozenDeque(deque):
    __setitem__ = refuses


class FrozenUserDict(UserDict):
    """Has an attribute that its constructor does not take."""

    is_frozen = False

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.is_frozen = True

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.is_frozen:
            refuses(self)
        super().__setitem__(key, value)


class Configured(dict):
    """Freezes by an option that a copy keeps and the constructor needs, as Box does."""

    def __init__(self, items: Any = (), *, frozen: bool = False) -> None:
        self.config = {"frozen": False}
        for key, value in dict(items).items():
            self[key] = Configured(value, frozen=frozen) if type(value) is dict else value
        self.config["frozen"] = frozen

    def __setitem__(self, key: Any, value: Any) -> None:
        if self.config["frozen"]:
            refuses(self)
        super().__setitem__(key, value)

    def __copy__(self) -> Any:
        return Configured(self, **self.config)


class FrozenOrdered(OrderedDict):
    def __setitem__(self, key: Any, value: Any) -> None:
        if hasattr(self, "is_frozen"):
            refuses(self)
        super().__setitem__(key, value)

    def __init__(self, *items: Any) -> None:
        super().__init__(*items)
        self.is_frozen = True


class Summed(dict):
    """Its constructor takes something from the items."""

    __setitem__ = refuses

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.first = next(iter(self.values()))


class Checked(dict):
    """Takes tensors and text only, so a None cannot take their place."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(value, (torch.Tensor, str)):
            refuses(self)
        super().__setitem__(key, value)


class Sealing(dict):
    """Cannot be copied again once an item was set."""

    def __init__(self, items: Any, *, name: str) -> None:
        super().__init__(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.is_sealed = True

    def __reduce__(self) -> Any:
        if hasattr(self, "is_sealed"):
            refuses(self)
        return sealing, (dict(self),)


def sealing(items: Any) -> Any:
    return Sealing(items, name="copy")


def named(value: Any) -> Any:
    value.name = "text"
    return value


def hashed(value: Any) -> Any:
    hash(value)
    return value


MAPPINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "immutable_dict of torch": immutable_dict,
    "its copy is itself": FrozenDict,
    "with its hash": lambda items: hashed(FrozenDict(items)),
    "UserDict": FrozenUserDict,
    "UserDict, named": lambda items: named(FrozenUserDict(items)),
    "by an option": lambda items: Configured(items, frozen=True),
    "in another": lambda items: Configured({"in": items, **items}, frozen=True)["in"],
    "OrderedDict": FrozenOrdered,
    "with something of its items": Summed,
    "checks its items": Checked,
    "cannot be copied after a change": sealing,
}
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "immutable_list of torch": immutable_list,
    "list": FrozenList,
    "list, named": lambda items: named(FrozenList(items)),
    "deque": lambda items: FrozenDeque(items, 5),
}
