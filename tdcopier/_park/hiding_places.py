"""Reports the values of a state in which tensors may be that `park` and `snapshot` do not find."""

from __future__ import annotations

import itertools
import types
import weakref
from collections import deque
from collections.abc import ItemsView, Iterable, Iterator, Set, ValuesView
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from tdcopier._containers import unknown
from tdcopier._containers.delegated_parts import (
    MOST_VALUES,
    WITHOUT_TENSORS,
    children_of,
    is_tensor_collection,
    plain_parts,
)
from tdcopier._containers.visit import ATTRIBUTE
from tdcopier._options import OnUnknown
from tdcopier._park.value_paths import BOUND_TO, CAPTURED, Place, named, text_of

ACCEPTED = (
    "Give modules, optimizers, state dicts, TensorDicts, or tensors, in any nesting of containers"
)


class Reported(NamedTuple):
    """A value to report."""

    at: Place
    value: Any
    what: str
    hidden: list[Place]
    """The modules, optimizers and tensors in it that have device memory, the nearest first."""
    is_all: bool
    """Whether no tensor was found in the whole state."""


class HidingPlaces:
    """The values of a state that a walk does not take apart, or not wholly.

    Attributes:
        opaque: values that are no containers, plain data included.
        shells: modules and containers, which may have more in attributes.
        arrays: arrays of numpy.
    """

    def __init__(
        self, on_unknown: OnUnknown, is_parking: bool, owners: Iterable[tuple[Place, Any]]
    ) -> None:
        """Begin with the objects that the state has the state dicts of."""
        self.opaque: list[tuple[Place, Any]] = []
        self.shells: list[tuple[Place, Any]] = []
        self.arrays: list[tuple[Place, Any]] = []
        self._owners: set[int] = set()
        self._on_unknown = on_unknown
        self._is_parking = is_parking
        for at, value in owners:
            self.add_owner(at, value)

    def add_owner(self, at: Place, value: Any) -> None:
        """Note a module, an optimizer or the like, which may have no tensors yet."""
        self._owners.add(id(value))
        if isinstance(value, nn.Module):
            self.shells.append((at, value))

    def is_unread(self, at: Place, value: Any) -> bool:
        """Report a generator or the like, and a set or a view of a dict with tensors.

        By default too, and beside other tensors: those in it would be left without a word.
        """
        is_unread = isinstance(value, _GENERATORS) or (
            isinstance(value, Set | ValuesView | ItemsView) and any(map(_has_tensors, value))
        )
        if is_unread and self._on_unknown != "ignore":
            self.tell(Reported(at, value, unknown.found(value), [], is_all=False))
        return is_unread

    def add_own_to(self, at: Place, value: Any) -> None:
        """Report an object whose tensors only its own `.to` knows, by default too."""
        if self._on_unknown != "ignore":
            what = f"{named(value)}, and only its own `.to` knows its tensors"
            hidden = _hidden_in(value, at, self._owners)
            self.tell(Reported(at, value, what, hidden, is_all=False))

    def report(self) -> None:
        """Report the values of unknown classes, if the option asks for it."""
        if self._on_unknown in ("warn", "raise"):
            for at, value in self.opaque:
                if not unknown.is_plain_value(value):
                    hidden = _hidden_in(value, at, self._owners)
                    self.tell(Reported(at, value, unknown.found(value), hidden, is_all=False))

    def mistake(self, state: Any, containers: int) -> Reported | None:
        """Return the value that the caller takes for a state, where no tensor was found.

        None if nothing can have been forgotten: the state has only modules, optimizers and plain
        data, as an SGD, an Adam before its first step and their state dicts are, and nothing hides
        tensors. An object of an unknown class may hide them where its attributes do not show it, so
        it is a mistake, but not beside a module or an optimizer: it would be one before the first
        step only.
        """
        if self._on_unknown == "ignore":
            return None
        for at, value in self.opaque:
            if self._owners and unknown.is_plain_value(value):
                continue  # a function beside an optimizer is its schedule, or the loss
            hidden = _hidden_in(value, at, self._owners)
            if hidden:
                is_code = unknown.is_plain_value(value)
                what = f"{named(value)}, which is code" if is_code else unknown.found(value)
                return Reported(at, value, what, hidden, is_all=True)
        for at, value in self.shells:
            hidden = _hidden_in(value, at, self._owners)
            if hidden:
                has = "parameters and buffers" if isinstance(value, nn.Module) else "items"
                what = f"{named(value)}, whose {has} have no tensors, but its attributes have"
                return Reported(at, value, what, hidden, is_all=True)
        if self._owners:
            return None
        for at, value in self.opaque:
            if not unknown.is_plain_value(value):
                return Reported(at, value, unknown.found(value), [], is_all=True)
        others = self.arrays[:1] if self._is_parking else []
        if not containers:
            others.append(("state", state))
        for at, value in others:
            what = f"{named(value)}, in which no tensor was found"
            return Reported(at, value, what, [], is_all=True)
        return None

    def tell(self, reported: Reported) -> None:
        """Raise a TypeError, or warn if that is the option."""
        text = self.text_of(reported)
        if self._on_unknown == "warn":
            unknown.warn_once(type(reported.value), text)
        elif self._is_parking:
            raise TypeError(f'{text}. With on_unknown="ignore" it is left as it is')
        elif hasattr(type(reported.value), "__next__"):
            raise TypeError(text)  # `copy.deepcopy` refuses iterators
        else:
            raise TypeError(f'{text}. With on_unknown="ignore" it is copied as it is')

    def text_of(self, reported: Reported) -> str:
        """Return what is wrong with the value, and what to do."""
        path, what = text_of(reported.at), reported.what
        if self._is_parking:
            loss = "nothing is parked" if reported.is_all else "tensors in it are not parked"
        else:
            loss = "nothing is" if reported.is_all else "tensors in it are not"
            loss += " copied to the host"
        return f"{path} is {what}: {loss}. {_remedy(reported, path)}"


_MOST_NAMED = 3


def _remedy(reported: Reported, path: str) -> str:
    """Return what to give instead of the value."""
    value = reported.value
    if unknown.is_without_order(value):
        return "Give a list of it"
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return "Give its tolist()"
    if not reported.hidden:
        is_class = not unknown.is_plain_value(value) and not isinstance(value, nn.Module | slice)
        return ACCEPTED + is_class * ", or register its class with tdcopier.containers.register"
    paths = [text_of(at) for at in reported.hidden[:_MOST_NAMED]]
    more = len(reported.hidden) - len(paths)
    if more:
        paths.append(f"{more} more in it")
    text = "Give " + " and ".join(filter(None, [", ".join(paths[:-1]), paths[-1]]))
    if hasattr(type(value), "state_dict") and not isinstance(value, nn.Module):
        return f"{text}, or {path}.state_dict() if that has the same tensors"
    return text


# ---- tensors in attributes -----------------------------------------------------------------------


def _hidden_in(value: Any, at: Place, known: set[int]) -> list[Place]:
    """Return where a value has modules, optimizers and tensors with device memory.

    Without those in `known`, and what can be reached through these alone.
    """
    hidden: list[Place] = []
    seen = {id(value), *known}
    waiting = deque([(at, value)])
    while waiting and len(seen) < MOST_VALUES:
        place, holder = waiting.popleft()
        for form, name, child in _parts_of(holder):
            cls = type(child)  # `isinstance` may run the code of a proxy
            if id(child) in seen or issubclass(cls, WITHOUT_TENSORS):
                continue
            seen.add(id(child))
            if _is_to_be_given(child, cls):
                hidden.append((place, form, name))
            elif not issubclass(cls, torch.Tensor):
                waiting.append(((place, form, name), child))
    return hidden


def _parts_of(value: Any) -> Iterator[tuple[str, Any, Any]]:
    cls = type(value)
    if issubclass(cls, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            if cell != types.CellType():  # it is not empty
                yield CAPTURED, name, cell.cell_contents
    elif issubclass(cls, types.MethodType):
        yield BOUND_TO, "self", value.__self__
    elif issubclass(cls, weakref.ref):
        yield "{}", "()", value()
    elif issubclass(cls, nn.Module):
        for name, child in vars(value).items():
            if name == "_modules":
                yield from ((ATTRIBUTE, each, module) for each, module in child.items())
            else:
                yield ATTRIBUTE, name, child
    else:
        yield from children_of(value)


def _is_to_be_given(value: Any, cls: type) -> bool:
    """Return whether a state may have the value in it, and it has tensors on a device."""
    parts: Iterable[Any] = ()
    if issubclass(cls, torch.Tensor):
        parts = [value]
    elif issubclass(cls, nn.Module) and "_modules" in vars(value):  # its __init__ has run
        parts = _tensors_of_modules(value)
    elif issubclass(cls, Optimizer) and hasattr(value, "param_groups"):
        groups = (group["params"] for group in value.param_groups)
        parts = itertools.chain.from_iterable(groups)
    elif is_tensor_collection(cls):
        parts = plain_parts(value)
    return any(isinstance(p, torch.Tensor) and p.device.type not in _ON_HOST for p in parts)


def _tensors_of_modules(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers, without code of a class that may override their methods."""
    left, seen = [module], {id(module)}
    while left:
        parts = vars(left.pop())
        for kind in ("_parameters", "_buffers"):
            yield from (part for part in parts.get(kind, {}).values() if part is not None)
        inner = [each for each in parts.get("_modules", {}).values() if id(each) not in seen]
        seen.update(map(id, inner))
        left += [each for each in inner if each is not None]


_ON_HOST = ("cpu", "meta")

_ITERATORS: Any = (type(iter([])), type(iter(())))
_GENERATORS: Any = (types.GeneratorType, map, filter, zip, itertools.chain, *_ITERATORS)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(map(_has_tensors, value))
    kinds = (torch.Tensor, nn.Module, Optimizer)
    return isinstance(value, kinds) or is_tensor_collection(type(value))
