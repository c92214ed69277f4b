"""Opaque values in `start_copy_into`: which pairs differ, and the replacement of those that do.

`csrc/python/walk/pair_walk.cpp` finds the pairs.
"""

from __future__ import annotations

import contextlib
import datetime
import decimal
import itertools
from typing import Any, NamedTuple, cast

import numpy as np

from tdcopier import _C
from tdcopier._containers.by_bases import place_of_item, rebuilds_any_tuple
from tdcopier._containers.delegated_parts import is_tensor_collection
from tdcopier._containers.registry import rule_of
from tdcopier._containers.rule import Carrier, Place, Refused, Rule
from tdcopier._containers.unknown import class_name, compares_as_plain_data

# ---- which differ --------------------------------------------------------------------------------


def differ(source: Any, destination: Any) -> bool:
    """Return whether two opaque values differ.

    Plain data differ if their classes do or if ``==`` says so, except that NaN equals NaN. Other
    values differ unless they are the same object, and none of their code runs.
    """
    source, destination = _unwrapped(source), _unwrapped(destination)
    if source is destination:
        return False
    if type(source) is not type(destination) or not compares_as_plain_data(type(source)):
        return True
    return not _are_equal(source, destination)


def _unwrapped(value: Any) -> Any:
    """Return the value itself of an object in which the walk carries it."""
    return value.value if Carrier in type(value).__mro__ else value


def _are_equal(source: Any, destination: Any) -> bool:
    """Compare two values of one plain class."""
    if isinstance(source, (np.ndarray, np.generic)):
        return _are_equal_arrays(source, destination)
    if isinstance(source, decimal.Decimal) and (source.is_nan() or destination.is_nan()):
        return source.is_nan() and destination.is_nan()  # comparing a signalling NaN raises
    if isinstance(source, slice):
        parts = ((each.start, each.stop, each.step) for each in (source, destination))
        return not any(map(differ, *parts))
    if isinstance(source, (datetime.datetime, datetime.time)) and not _are_comparable(
        source.tzinfo, destination.tzinfo
    ):
        return False
    if isinstance(source, complex):
        return _are_equal(source.real, destination.real) and _are_equal(
            source.imag, destination.imag
        )
    both_nan = isinstance(source, float) and source != source and destination != destination
    return bool(both_nan or source == destination)


def _are_comparable(zone: Any, other: Any) -> bool:
    """Return whether a comparison of times in these zones runs no code but Python's own."""
    known = (type(None), datetime.timezone)
    return zone is other or (type(zone) in known and type(other) in known)


def _are_equal_arrays(source: Any, destination: Any) -> bool:
    """Compare numpy scalars, or arrays that torch cannot take."""
    if source.dtype != destination.dtype or source.shape != destination.shape:
        return False
    if source.dtype.hasobject or type(source) not in (np.ndarray, source.dtype.type):
        return False  # code of the objects or of a subclass would compare them
    if source.tobytes() == destination.tobytes():
        return True
    both_nan = (source != source) & (destination != destination)
    if source.dtype.kind == "c":
        return _are_equal_arrays(source.real, destination.real) and _are_equal_arrays(
            source.imag, destination.imag
        )
    return bool(np.all((source == destination) | both_nan))


# ---- replacement ---------------------------------------------------------------------------------


Holder = tuple[int, Any, Any, _C.Step]
"""A container of the destination on the way to a value: its number in the walk, the container, the
key, index or attribute of the next one or of the value, and the kind of this step."""


class Pair(NamedTuple):
    """Two opaque values at the same place in the source and in the destination."""

    source: Any
    destination: Any
    differ: bool
    holders: list[Holder]
    """From the innermost one to the root."""

    @property
    def path(self) -> str:
        """The steps from the root, for messages."""
        return "".join(_step(name, kind) for _, _, name, kind in reversed(self.holders))

    def refused(self, reason: str) -> ValueError:
        """Return the error that names the value."""
        return ValueError(
            f"destination{self.path} differs from source{self.path} and cannot be replaced: "
            f"{reason}"
        )


def _step(name: Any, kind: _C.Step) -> str:
    if kind is _C.Step.NESTED_KEY and name == ():
        return ""
    return f".{name}" if kind is _C.Step.ATTRIBUTE else f"[{name!r}]"


class _Tuple:
    """A tuple of the destination, and the values that the walk found in it."""

    def __init__(self, value: Any, holders: list[Holder], first: Pair) -> None:
        self.value = value
        self.holders = holders
        self.first = first
        self.found: dict[Any, Any] = {}
        """The new values, by index or attribute."""
        self.changed: Pair | None = None
        """A pair in it that differs."""

    def rebuilt(self) -> Any:
        """Return a tuple of the same class with the new values.

        Raises:
            Refused: it has other children than opaque values, or cannot be rebuilt.
        """
        rule = rule_of(type(self.value))
        if not isinstance(rule, Rule) or not rebuilds_any_tuple(rule):
            raise Refused(_unchangeable(self.value))
        children, context, names = rule.flatten_anywhere(self.value)
        for index, name in enumerate(range(len(children)) if names is None else names):
            if name in self.found:
                children[index] = self.found[name]
            elif type(children[index]) is not tuple or children[index]:
                raise Refused(
                    "it is in a tuple that has other children than opaque values, so that the "
                    "tuple cannot be replaced as a whole"
                )
        return rule.unflatten(children, context)


class _Value(NamedTuple):
    """A value for a place in the destination: of an opaque pair, or a tuple of such values."""

    new: Any
    old: Any
    pair: Pair
    """The pair, or one in the tuple: one that differs, if any does."""
    differ: bool


class Replacements:
    """Puts the source's opaque values into a destination, where they differ."""

    def __init__(self, pairs: list[tuple[Any, ...]]) -> None:
        """Find a place for each, and change nothing yet.

        Args:
            pairs: the fields of a `Pair` for all opaque values, in the order of the walk.

        Raises:
            ValueError: a value cannot be replaced, or its place is that of another value, too; the
                message names its path.
        """
        self._tuples: dict[int, _Tuple] = {}
        self._found: dict[tuple[int, Any], tuple[_Value, Place]] = {}
        self._lasting: set[int] = set()
        self._ran_code = False
        self._undo = contextlib.ExitStack()
        for pair in map(Pair._make, pairs):
            if pair.holders and isinstance(pair.holders[0][1], tuple):
                self._note_tuples(pair)
            old = _unwrapped(pair.destination)
            new = _unwrapped(pair.source) if pair.differ else old
            self._add(pair.holders, _Value(new, old, pair, pair.differ))
        for each in reversed(list(self._tuples.values())):  # those inside of others come first
            self._add_tuple(each)

    def _note_tuples(self, pair: Pair) -> None:
        """Note the tuple that holds a value, after the tuple that holds it, and so on."""
        tuples = list(itertools.takewhile(lambda each: isinstance(each[1], tuple), pair.holders))
        for depth in reversed(range(len(tuples))):
            number, container, *_ = tuples[depth]
            if number not in self._tuples:
                self._tuples[number] = _Tuple(container, pair.holders[depth + 1 :], pair)

    def _add_tuple(self, each: _Tuple) -> None:
        pair = each.changed
        try:
            new = each.rebuilt()
        except Refused as reason:
            if pair is not None:
                raise pair.refused(str(reason)) from None
            return
        if pair is None:
            self._add(each.holders, _Value(each.value, each.value, each.first, differ=False))
        else:
            self._add(each.holders, _Value(new, each.value, pair, differ=True))

    def _add(self, holders: list[Holder], value: _Value) -> None:
        if not holders:
            if value.differ:
                raise value.pair.refused("it is in no container that can be changed")
            return
        number, container, name, _ = holders[0]
        within = self._tuples.get(number)
        if within is not None:
            within.found[name] = value.new
            if value.differ:
                within.changed = value.pair
            return
        try:
            if value.differ:
                self._check_lasting(holders)
            place = _place_of(container, name)
        except Refused as reason:
            if value.differ:
                raise value.pair.refused(str(reason)) from None
            return
        earlier, _ = self._found.setdefault((id(place.owner), place.name), (value, place))
        if earlier is not value and _differ_anywhere(earlier.new, value.new):
            first, second = earlier.pair.path, value.pair.path
            raise ValueError(
                f"source{first} differs from source{second}, but destination{first} and "
                f"destination{second} are the same place: give the destination two containers"
            )

    def _check_lasting(self, holders: list[Holder]) -> None:
        """Raise `Refused` if a container was made for the walk, so that a value in it is lost."""
        for (number, inner, *_), (_, outer, *_) in itertools.pairwise(holders):
            if number in self._lasting:
                return
            self._lasting.add(number)
            if type(outer) in (dict, list, tuple):
                continue
            rule = cast("Rule", rule_of(type(outer)))
            if rule.by_target and not rule.own_to:  # a TensorDict keeps the entries that it has
                if is_tensor_collection(type(inner)):
                    continue
                raise Refused(
                    f"it is in the {type(inner).__name__} of non-tensor data, which other "
                    "TensorDicts may share: set the data as a whole"
                )
            self._ran_code = True
            if not any(each is inner for each in rule.flatten_anywhere(outer)[0]):
                raise Refused(
                    f"the {class_name(type(outer))} makes the {type(inner).__name__} that holds it "
                    "anew for each walk"
                )

    def write(self) -> bool:
        """Replace the values that differ: all of them, or none if that raises.

        Returns:
            Whether the code of other containers than lists and dicts ran, here or before.

        Raises:
            Exception: from such code.
        """
        with contextlib.ExitStack() as undo:
            for value, place in self._found.values():
                if value.differ:
                    self._ran_code |= type(place.owner) not in (dict, list)
                    undo.callback(place.put, value.old)
                    place.put(value.new)
            self._undo = undo.pop_all()
        return self._ran_code

    def undo(self) -> None:
        """Put the old values back."""
        self._undo.close()


def _place_of(container: Any, name: Any) -> Place:
    cls = type(container)
    if cls in (dict, list):
        return place_of_item(container, name)
    rule = rule_of(cls)
    if not isinstance(rule, Rule) or rule.place is None:
        raise Refused(_unchangeable(container))
    return rule.place(container, name)


def _unchangeable(container: Any) -> str:
    return f"tdcopier cannot change the {class_name(type(container))} that holds it"


def _differ_anywhere(one: Any, other: Any) -> bool:
    """Return whether two values differ; tuples do if values in them do."""
    if type(one) is not type(other) or not isinstance(one, tuple) or len(one) != len(other):
        return differ(one, other)
    return any(map(_differ_anywhere, one, other))
