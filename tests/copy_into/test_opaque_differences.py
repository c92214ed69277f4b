"""Opaque values that differ from those of the destination are counted, and left as they were."""

from __future__ import annotations

import datetime
import decimal
import enum
import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from each_case import together

import tdcopier

NAN = float("nan")


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Silent:
    """An object whose own comparison must not run."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = None  # type: ignore[assignment]


class SilentZone(datetime.tzinfo):
    """A time zone whose code must not run."""

    def utcoffset(self, when: Any) -> Any:
        raise AssertionError("compared")


UTC = datetime.timezone.utc
ZONE = SilentZone()


class SilentText(str):
    """Plain data, except that the class compares in its own way."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = str.__hash__


class SilentEnum(enum.Enum):
    A = 1
    B = 2

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = enum.Enum.__hash__


class Text(str):
    """Plain data of a user's class."""

    __slots__ = ()


class Words(np.ndarray[Any, Any]):
    """An array whose own comparison must not run."""

    def __ne__(self, other: object) -> Any:
        raise AssertionError("compared")


def differences(source: Any, destination: Any) -> int:
    """Returns the count, with the values at the root and in containers of each kind."""
    counts = {
        tdcopier.start_copy_into(wrap(source), wrap(destination)).stats.opaque_differences
        for wrap in (lambda value: value, lambda value: [value], lambda value: {"a": (value,)})
    }
    assert len(counts) == 1, counts
    return counts.pop()


def record(number: float) -> np.void:
    return np.array([(number, "a")], dtype=[("n", "f8"), ("s", "U3")])[0]


SAME: dict[str, Callable[[], Any]] = {
    "a large number": lambda: int("12345678901234567890"),
    "a float": lambda: float("0.25"),
    "text": lambda: "".join(["le", "arning rate"]),
    "bytes": lambda: b"".join([b"a", b"bcd"]),
    "NaN": lambda: float("nan"),
    "a complex number": lambda: complex("1+2j"),
    "a complex NaN": lambda: complex(float("nan"), 2),
    "a decimal": lambda: decimal.Decimal("1.5"),
    "a signalling NaN": lambda: decimal.Decimal("sNaN"),
    "a date": lambda: datetime.datetime(2026, 1, 2, 3),
    "a time in a zone": lambda: datetime.datetime(2026, 1, 2, 3, tzinfo=UTC),
    "a time in a zone of a user's class": lambda: datetime.datetime(2026, 1, 2, 3, tzinfo=ZONE),
    "a slice": lambda: slice(1000, int("2000"), None),
    "a path": lambda: pathlib.Path("/data") / "x",
    "a range": lambda: range(1000, 2000),
    "a size": lambda: torch.Size([1000, 2000]),
    "a device": lambda: torch.device("cpu"),
    "a data type": lambda: np.dtype("f4"),
    "a numpy scalar": lambda: np.float32(0.25),
    "a numpy NaN": lambda: np.float32("nan"),
    "a numpy complex NaN": lambda: np.complex64(complex(1, float("nan"))),
    "a numpy date": lambda: np.datetime64("2026-01-02"),
    "no date": lambda: np.datetime64("NaT", "D"),
    "a record": lambda: record(1.0),
    "a record with a NaN": lambda: record(float("nan")),
    "an array of text": lambda: np.array(["ab", "c"]),
    "an array of dates": lambda: np.array(["2026-01-02", "NaT"], "datetime64[D]"),
    "a method": lambda: [].append.__self__.__class__.append,
    "text of a user's class": lambda: Text("".join(["a", "bc"])),
}


@together("name", SAME)
def test_plain_data_of_equal_value_do_not_differ(name):
    assert differences(SAME[name](), SAME[name]()) == 0


OTHER: dict[str, tuple[Any, Any]] = {
    "numbers": (3, 4),
    "floats": (0.1, 0.2),
    "a number and NaN": (1.0, NAN),
    "NaN and a number": (NAN, 1.0),
    "a number and a bool": (1, True),
    "a number and a float": (1, 1.0),
    "a float and one of numpy": (1.0, np.float64(1.0)),
    "None and a number": (None, 0),
    "text": ("a", "b"),
    "text and bytes": ("a", b"a"),
    "text and that of a user's class": ("a", Text("a")),
    "text of a user's class": (Text("a"), Text("b")),
    "complex numbers": (1j, 2j),
    "complex NaNs": (complex(NAN, 1), complex(NAN, 2)),
    "numpy's complex NaNs": (np.complex64(complex(NAN, 1)), np.complex64(complex(NAN, 2))),
    "a decimal and NaN": (decimal.Decimal("sNaN"), decimal.Decimal(1)),
    "members": (Colour.RED, Colour.BLUE),
    "members that are numbers": (Level.LOW, Level.HIGH),
    "a member and its number": (Level.LOW, 1),
    "dates": (datetime.date(2026, 1, 2), datetime.date(2026, 1, 3)),
    "times in zones of a user's class": tuple(
        datetime.datetime(2026, 1, 2, tzinfo=SilentZone()) for _ in range(2)
    ),
    "a time with a zone and one without": (
        datetime.datetime(2026, 1, 2, tzinfo=ZONE),
        datetime.datetime(2026, 1, 2),
    ),
    "slices": (slice(1), slice(2)),
    "slices of tensors": (slice(torch.zeros(2)), slice(torch.zeros(2))),
    "slices of objects": (slice(Silent()), slice(Silent())),
    "paths": (pathlib.Path("a"), pathlib.Path("b")),
    "sizes": (torch.Size([1]), torch.Size([2])),
    "dtypes": (torch.float32, torch.float64),
    "devices": (torch.device("cpu"), torch.device("cuda", 0)),
    "numpy scalars": (np.float32(1), np.float32(2)),
    "numpy scalars of other classes": (np.float32(1), np.float64(1)),
    "records": (record(1.0), record(2.0)),
    "arrays of text": (np.array(["ab", "c"]), np.array(["ab", "d"])),
    "arrays of other shapes": (np.array(["a", "a"]), np.array([["a", "a"]])),
    "arrays of objects": (np.array([None, "a"]), np.array([None, "a"])),
    "arrays of a class of their own": (np.array(["a"]).view(Words), np.array(["b"]).view(Words)),
    "patterns": (re.compile("a"), re.compile("b")),
    "functions": (len, abs),
    "sets, which are not plain data": ({1}, {1}),
    "objects": (Silent(), Silent()),
    "arrays of objects that compare": (np.array([Silent(), 1]), np.array([Silent(), 1])),
    "text that compares in its own way": (SilentText("a"), SilentText("a")),
    "members that compare in their own way": (SilentEnum.A, SilentEnum.B),
    "an object and a number": (Silent(), 3),
}


@together("name", OTHER)
def test_values_that_differ_are_counted_and_left(name):
    source, destination = OTHER[name]
    assert differences([source], [destination]) == 1
    holder = [destination]
    tdcopier.start_copy_into([source], holder).get()
    assert holder[0] is destination


@together("name", OTHER)
def test_the_same_object_does_not_differ_from_itself(name):
    assert [differences([value], [value]) for value in OTHER[name]] == [0, 0]


def test_the_count_is_of_all_places_beside_leaves(device):
    source = {"x": torch.ones(3), "lr": 0.1, "steps": [1, 2, {"n": 3}], "name": "a"}
    destination = {"x": torch.zeros(3, device=device), "lr": 0.2, "steps": [1, 5, {"n": 4}]}
    destination["name"] = "a"
    handle = tdcopier.start_copy_into(source, destination)
    handle.get()
    assert (handle.stats.opaque_leaves, handle.stats.opaque_differences) == (5, 3)
    assert destination.pop("x").tolist() == [1, 1, 1]
    assert destination == {"lr": 0.2, "steps": [1, 5, {"n": 4}], "name": "a"}


def test_non_tensor_data_is_compared_with_its_like_and_with_a_value():
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    def make(name: Any, number: Any, *each: str) -> TensorDict:
        inner = TensorDict({"n": NonTensorData(number, batch_size=[2])}, [2])
        entries = {"x": torch.zeros(2), "name": name, "in": inner, "each": NonTensorStack(*each)}
        return TensorDict(entries, [2])

    first, second = make("a", 1, "u", "v"), make("b", 2, "u", "w")
    assert tdcopier.start_copy_into(first, make("a", 1, "u", "v")).stats.opaque_differences == 0
    handle = tdcopier.start_copy_into(first, second)
    assert (handle.stats.opaque_leaves, handle.stats.opaque_differences) == (4, 3)
    flat = TensorDict({"x": torch.zeros(2), "name": "a"}, [2])
    for name, wanted in [("a", 0), ("b", 1)]:
        plain = {"x": torch.zeros(2), "name": name}
        assert tdcopier.start_copy_into(flat, plain).stats.opaque_differences == wanted
        assert tdcopier.start_copy_into(plain, flat).stats.opaque_differences == wanted


def test_delegated_leaves_do_not_count_values_twice():
    source = {"x": torch.ones(2, requires_grad=True), "n": 1}
    with torch.no_grad():
        handle = tdcopier.start_copy_into(source, {"x": torch.zeros(2, requires_grad=True), "n": 2})
    handle.get()
    assert handle.stats.opaque_differences == 1


def test_a_copy_to_new_memory_has_no_differences(device):
    handle = tdcopier.start_copy({"x": torch.ones(2), "n": 1}, device)
    handle.get()
    assert (handle.stats.opaque_leaves, handle.stats.opaque_differences) == (1, 0)


def test_rows_that_are_written_leave_opaque_values_and_count_them():
    storage = {"x": torch.zeros(5, 2), "name": "kept", "n": 1}
    batch = {"x": torch.ones(2, 2), "name": "new", "n": 1}
    handle = tdcopier.start_scatter(batch, storage, [1, 3])
    handle.get()
    assert storage["x"].sum() == 4
    assert (storage["name"], handle.stats.opaque_differences) == ("kept", 1)


def test_an_array_for_an_opaque_value_is_a_difference_in_structure():
    for source, destination in [(np.zeros(2), "a"), (np.array(["a"]), np.zeros(1)), (3, [3])]:
        for one, other in [(source, destination), (destination, source)]:
            with pytest.raises(ValueError, match=r"source\[0\] is .* but destination\[0\] is"):
                tdcopier.start_copy_into([one], [other])
