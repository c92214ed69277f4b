"""The option `on_unknown`: opaque values whose class is not known to be plain data."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import gc
import pathlib
import re
import sys
import threading
import types
import uuid
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from each_case import together

import tdcopier
from tdcopier._containers import unknown

pytestmark = pytest.mark.usefixtures("nothing_is_told")


class Colour(enum.Enum):
    RED = 1


class Meters(float):
    """A subclass of a plain class is plain too."""


class Text(str):
    __slots__ = ()


PLAIN = [
    None, 3, 2.5, 1j, True, "text", b"bytes", bytearray(b"x"), Meters(2), Text("x"), Colour.RED,
    datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), datetime.timedelta(1),
    datetime.timezone.utc, decimal.Decimal("1.5"), fractions.Fraction(1, 3),
    pathlib.Path("a"), uuid.UUID(int=3), re.compile("a"), range(3), slice(1), ...,
    torch.device("cpu"), torch.float32, torch.strided, torch.contiguous_format, torch.Size([2]),
    torch.Generator(), torch.finfo(torch.float32), print, len, unknown.is_plain, "x".upper,
    dict, Colour, torch.nn.Linear, sys, sys.version_info, sys.flags,
    np.float32(1.5), np.str_("a"), np.dtype("f4"), np.array([None, "a", {"x": [1]}], object),
    slice(1, None, 2), np.array(["a"]),
    np.array(["2020"], "datetime64[D]"), np.zeros(2, [("x", float)]), np.random.default_rng(),
]  # fmt: skip


class Unknown:
    """Has no rule, and may hold tensors."""

    def __init__(self, leaf: Any = None) -> None:
        self.leaf = leaf


def objects(*values: Any) -> np.ndarray:
    made = np.empty(len(values), object)
    made[:] = values
    return made


def unhashable() -> Any:
    class Meta(type):
        __hash__ = None

    class Unhashable(metaclass=Meta):
        pass

    return Unhashable()


UNKNOWN = {
    "set": (lambda leaf: {leaf}, "a set, whose values have no order"),
    "frozenset": (lambda leaf: frozenset([leaf]), "a frozenset, whose values have no order"),
    "generator": (lambda leaf: (x for x in [leaf]), "an iterator (generator), which can be read"),
    "iterator": (lambda leaf: iter([leaf]), "an iterator (list_iterator), which can be read"),
    "map": (lambda leaf: map(abs, [leaf]), "an iterator (map), which can be read only once"),
    "zip": (
        lambda leaf: zip([leaf], strict=True),
        "an iterator (zip), which can be read only once",
    ),
    "array": (
        lambda leaf: objects(leaf, 1),
        "a numpy.ndarray of objects that has tensors in it, or values that may",
    ),
    "array of lists": (
        lambda leaf: objects("a", {"x": [leaf]}),
        "a numpy.ndarray of objects that has tensors in it, or values that may",
    ),
    "array in an array": (
        lambda leaf: objects(objects(leaf)),
        "a numpy.ndarray of objects that has tensors in it, or values that may",
    ),
    "array of objects": (
        lambda leaf: objects("a", [Unknown(leaf)]),
        "a numpy.ndarray of objects that has tensors in it, or values that may",
    ),
    "slice": (lambda leaf: slice(0, leaf), "a slice that has tensors in it, or values that may"),
    "values": (lambda leaf: {"a": leaf}.values(), "a view of a dict (dict_values)"),
    "keys": (lambda leaf: {"a": leaf}.keys(), "a view of a dict (dict_keys)"),
    "items": (lambda leaf: {"a": leaf}.items(), "a view of a dict (dict_items)"),
    "object": (Unknown, "test_on_unknown.Unknown, a class that tdcopier does not know"),
    "unhashable class": (lambda _: unhashable(), "Unhashable, a class that tdcopier does not know"),
    "ChainMap": (lambda leaf: collections.ChainMap({"a": leaf}), "a collections.ChainMap, a class"),
    "namespace": (lambda leaf: types.SimpleNamespace(a=leaf), "a types.SimpleNamespace, a class"),
}


def leaf() -> torch.Tensor:
    return torch.ones(2)


# ---- which values are unknown --------------------------------------------------------------------


@together("value", PLAIN, ids=[type(value).__name__ for value in PLAIN])
def test_plain_data_passes_anywhere_whatever_the_option(device, value):
    for option in (None, "ignore", "warn", "raise"):
        assert tdcopier.copy(value, device, on_unknown=option) is value
        moved = tdcopier.copy({"x": [value, leaf()]}, device, on_unknown=option)
        assert moved["x"][0] is value


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_root_is_refused_because_nothing_would_be_copied(device, name):
    make, found = UNKNOWN[name]
    for option in ({}, {"on_unknown": None}, {"on_unknown": "raise"}):
        with pytest.raises(TypeError) as caught:
            tdcopier.start_copy(make(leaf()), device, **option)
        message = str(caught.value)
        assert message.startswith("data is ")
        assert found in message
        assert "nothing would be copied" in message
        assert 'on_unknown="ignore"' in message
        assert "tdcopier.explain()" in message
    value = make(leaf())
    assert tdcopier.copy(value, device, on_unknown="ignore") is value


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_root_is_refused_by_calls_that_fill_memory_too(name):
    make, found = UNKNOWN[name]
    index = torch.zeros(1, dtype=torch.int64)
    for call, root in (
        (lambda one, other: tdcopier.copy_into(one, other), "source"),
        (lambda one, other: tdcopier.copy_into(one, other, copy_opaque=True), "source"),
        (lambda one, other: tdcopier.scatter(one, other, index), "batch"),
    ):
        with pytest.raises(TypeError, match="nothing would be copied") as caught:
            call(make(leaf()), make(leaf()))
        assert str(caught.value).startswith(f"{root} is ")
        assert found in str(caught.value)
        assert "on_unknown=" not in str(caught.value)  # not an option of theirs
    with pytest.raises(TypeError, match=r"^destination is .*: nothing would be copied"):
        tdcopier.copy_into(None, make(leaf()))
    assert tdcopier.copy_into(3, 4) == 4  # plain data


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_value_in_a_container_passes_by_default(device, name):
    value = UNKNOWN[name][0](leaf())
    for option in ({}, {"on_unknown": None}, {"on_unknown": "ignore"}):
        moved = tdcopier.copy({"x": [value, leaf()]}, device, **option)
        assert moved["x"][0] is value
        assert moved["x"][1].device == torch.device(device)


@pytest.mark.parametrize("name", UNKNOWN)
def test_raise_names_the_path_of_the_first(device, name):
    make, found = UNKNOWN[name]
    tree = {"a": "text", "x": [leaf(), make(leaf())], "y": make(leaf())}
    with pytest.raises(TypeError) as caught:
        tdcopier.start_copy(tree, device, on_unknown="raise")
    assert str(caught.value).startswith("data['x'][1] is ")
    assert found in str(caught.value)
    assert "tensors in it would not be copied" in str(caught.value)


def test_the_remedy_fits_the_value(device):
    remedies = {
        "set": "Pass list(...) of it.", "values": "Pass list(...) of it.",
        "generator": "Pass list(...) of it.", "object": "tdcopier.containers.register",
        "ChainMap": "Pass dict(...) of it.",
    }  # fmt: skip
    for name, remedy in remedies.items():
        with pytest.raises(TypeError) as caught:
            tdcopier.start_copy(UNKNOWN[name][0](leaf()), device)
        assert remedy in str(caught.value), name


# ---- warnings ------------------------------------------------------------------------------------


def warned(tree: Any, device: str, call: Any = tdcopier.copy) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(tree, device, on_unknown="warn")
    return caught


@pytest.mark.parametrize("name", UNKNOWN)
def test_warn_names_the_path_once_for_each_class(device, name):
    make, found = UNKNOWN[name]
    value = make(leaf())
    (first,) = warned({"x": [leaf(), value], "y": value}, device)
    assert first.category is tdcopier.containers.UnknownTypeWarning
    assert str(first.message).startswith("data['x'][1] is ")
    assert found in str(first.message)
    assert warned([value], device) == []
    assert warned(value, device) == []


def test_each_class_is_warned_of_on_its_own(device):
    messages = [str(each.message) for each in warned([{1}, Unknown(), iter([]), {2}], device)]
    assert [message.split(" is ")[0] for message in messages] == ["data[0]", "data[1]", "data[2]"]


def test_a_class_that_takes_the_place_of_a_dropped_one_is_warned_of(device):
    for _ in range(5):
        value = type("Passing", (), {})()
        assert len(warned([value], device)) == 1
        assert len(unknown._told) == 1
        del value
        gc.collect()
        assert unknown._told == {}


@pytest.mark.parametrize("call", [tdcopier.copy, tdcopier.start_copy, tdcopier.async_to])
def test_the_warning_points_at_the_caller(device, call):
    (warning,) = warned([Unknown()], device, call)
    assert warning.filename == __file__


def test_a_warning_that_is_an_error_comes_before_anything_is_copied_each_time(device):
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(tdcopier.containers.UnknownTypeWarning, match=r"data\[1\] is a set"):
                tdcopier.start_copy([leaf(), {1}], device, on_unknown="warn")
    assert len(warned([{1}], device)) == 1


# ---- other calls ---------------------------------------------------------------------------------


def test_a_prepared_copy_checks_its_example_and_each_batch(device):
    with pytest.raises(TypeError, match=r"data\[1\] is a set"):
        tdcopier.prepare([leaf(), {1}], device, on_unknown="raise")
    with pytest.raises(TypeError, match="data is a set"):
        tdcopier.prepare({1}, device)
    plan = tdcopier.prepare([leaf(), "plain"], device, on_unknown="raise")
    with pytest.raises(TypeError, match=r"data\[1\] is a set"):
        plan.start_copy([leaf(), {1}])
    assert plan.start_copy([leaf(), "text"]).get()[1] == "text"


@pytest.mark.parametrize("threaded", [True, False])
def test_prefetch_raises_for_the_batch(device, threaded):
    batches = [[leaf()], [leaf(), {1}], [leaf()]]
    with tdcopier.prefetch(batches, device, threaded=threaded, on_unknown="raise") as source:
        assert next(source)[0].tolist() == [1, 1]
        with pytest.raises(TypeError, match=r"data\[1\] is a set"):
            next(source)


def test_a_gather_checks_the_storage(device):
    storage = {"x": torch.ones(4, 2), "meta": {1}}
    assert tdcopier.start_gather(storage, [0], device).get()["meta"] == {1}
    for target in (device, "meta"):
        with pytest.raises(TypeError, match=r"data\['meta'\] is a set"):
            tdcopier.start_gather(storage, [0], target, on_unknown="raise")


def test_values_of_a_tensordict_are_plain(device):
    from tensordict import TensorDict

    td = TensorDict({"a": torch.ones(2), "words": ["x", "y"], "text": "z"}, [2])
    assert tdcopier.to(td, device, on_unknown="raise").device == torch.device(device)


@pytest.mark.parametrize(("value", "error"), [("never", ValueError), (True, TypeError)])
def test_a_wrong_option_is_refused(device, value, error):
    with pytest.raises(error, match=r'on_unknown must be "ignore", "warn", "raise" or None; got'):
        tdcopier.start_copy([leaf()], device, on_unknown=value)


def test_threads_share_what_has_been_told(device):
    count = []

    def work() -> None:
        tdcopier.copy([Unknown()], device, on_unknown="warn")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
            thread.join()
        count.append(len(caught))
    assert count == [1]
