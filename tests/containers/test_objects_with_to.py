"""Objects that have a `.to(device)` of their own: it is called, as per-leaf code does."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
from typing import Any, NamedTuple

import pytest
import torch
from catalogue import ramp
from park_support import has_memory
from sim_support import becomes
from support import assert_same

import tdcopier


class Sample:
    """Like the samples of detection libraries: `.to` returns a new one."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def to(self, *args: Any, **kwargs: Any) -> Sample:
        return Sample(**{name: field.to(*args, **kwargs) for name, field in self.fields.items()})


class InPlace:
    """Its `.to` moves its own tensor, and returns itself."""

    __slots__ = ("__weakref__", "calls", "x")

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x
        self.calls: list[Any] = []

    def to(self, device: torch.device, non_blocking: bool = False) -> InPlace:
        self.calls.append((device, non_blocking, threading.get_ident()))
        self.x = self.x.to(device)
        return self


HOST = torch.device("cpu")


@dataclasses.dataclass
class Placed:
    obs: torch.Tensor
    device: Any = HOST

    def to(self, device: torch.device) -> Placed:
        return type(self)(self.obs.to(device), torch.device(device))


class PlacedTuple(NamedTuple):
    obs: torch.Tensor
    where: torch.device

    def to(self, device: torch.device) -> PlacedTuple:
        return type(self)(self.obs.to(device), torch.device(device))


class PlacedDict(dict):
    def __init__(self, obs: torch.Tensor, device: Any) -> None:
        super().__init__(obs=obs)
        self.device = device

    def to(self, device: torch.device) -> PlacedDict:
        return type(self)(self["obs"].to(device), torch.device(device))


PLACED: dict[str, Any] = {
    "a dataclass": lambda x: Placed(x),
    "a dataclass with a name": lambda x: Placed(x, "cpu"),
    "a named tuple": lambda x: PlacedTuple(x, torch.device("cpu")),
    "a dict with an attribute": lambda x: PlacedDict(x, torch.device("cpu")),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_container_that_names_its_device_is_moved_by_its_own_to(device, name):
    """Taken apart, it would still name the device that it came from."""
    source = PLACED[name](ramp("cpu", 3))
    handle = tdcopier.start_copy([source], device)
    (moved,) = handle.get()
    assert type(moved) is type(source)
    assert torch.device(device) in (getattr(moved, "device", None), getattr(moved, "where", None))
    obs = moved["obs"] if isinstance(moved, dict) else moved.obs
    assert_same(obs, ramp("cpu", 3).to(device))
    assert handle.stats[:5] == (0, 0, 1, 0, 0)
    assert [row.treatment for row in tdcopier.explain([source], device)] == ["delegated"]


@pytest.mark.parametrize("name", PLACED)
def test_a_container_that_names_its_device_is_filled_parked_and_read_by_rows(device, name):
    target = PLACED[name](torch.zeros(3, dtype=torch.float32, device=device))
    tdcopier.copy_into(PLACED[name](torch.ones(3)), target)
    obs = target["obs"] if isinstance(target, dict) else target.obs
    assert obs.tolist() == [1, 1, 1]
    with tdcopier.parked(target):
        assert not has_memory(obs)
    rows = tdcopier.gather(PLACED[name](torch.arange(4.0)), torch.tensor([2]), device)
    assert (rows["obs"] if isinstance(rows, dict) else rows.obs).tolist() == [2]


@pytest.mark.parametrize("background", [False, True])
def test_an_object_is_moved_by_its_own_to(ends, background):
    source, target = ends
    sample = Sample(x=ramp(source, 3), y=ramp(source, 2))
    tree = [ramp(source, 4), {"sample": sample, "name": "front"}]
    handle = tdcopier.start_copy(tree, target, use_background_thread=background)
    leaf, others = handle.get()
    assert_same(leaf, ramp(source, 4).to(target))
    assert type(others["sample"]) is Sample
    for name, field in sample.fields.items():
        assert_same(others["sample"].fields[name], field.to(target))
        assert field.device == torch.device(source)
    assert handle.stats[:5] == (1, 0, 1, 0, 1)


def test_to_is_called_once_with_the_device_alone_on_the_callers_thread(device):
    value = InPlace(ramp("cpu", 3))
    tdcopier.copy({"a": value}, device)
    assert value.calls == [(torch.device(device), False, threading.get_ident())]


def test_an_object_whose_to_works_in_place_comes_back_itself(ends):
    source, target = ends
    value = InPlace(ramp(source, 3))
    handle = tdcopier.start_copy([value], target)
    (moved,) = handle.get()
    assert moved is value
    assert_same(value.x, ramp(source, 3).to(target))
    assert handle.stats[:5] == (0, 0, 1, 0, 0)


def test_a_module_is_moved_in_place_as_by_to(ends):
    source, target = ends
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3)).to(source)
    handle = tdcopier.start_copy({"model": module, "x": ramp(source, 2)}, target)
    assert handle.get()["model"] is module
    assert {each.device for each in module.state_dict().values()} == {torch.device(target)}
    assert handle.stats[:5] == (1, 0, 1, 0, 0)


def test_an_object_in_two_places_is_asked_twice(device):
    once, value = Sample(x=ramp("cpu", 3)), InPlace(ramp("cpu", 3))
    first, second, third, fourth = tdcopier.copy([once, once, value, value], device)
    assert first is not second
    assert third is fourth is value
    assert len(value.calls) == 2


def test_whatever_to_returns_is_the_result(device):
    class Forgets:
        def to(self, device: Any) -> None:
            return None

    class Turns:
        def to(self, device: Any) -> Any:
            return {"x": torch.ones(2, device=device)}

    nothing, turned = tdcopier.copy([Forgets(), Turns()], device)
    assert nothing is None
    assert_same(turned["x"], torch.ones(2, device=device))


# ---- which objects -------------------------------------------------------------------------------


def _decorated(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


class _Methods:
    def device(self, device): ...
    def short(self, dev): ...
    def annotated(self, where: torch.device | str): ...
    def non_blocking(self, where, non_blocking=False): ...
    def everything(*args): ...

    @_decorated
    def decorated(self, device=None, dtype=None): ...

    def zone(self, tz): ...
    def unit(self, other=None, *contexts, **values): ...
    def nothing(self): ...
    def by_keyword(self, *, device): ...
    def two(self, device, dtype): ...

    static = staticmethod(lambda device: None)
    of_class = classmethod(lambda cls, device: None)
    made = property(lambda self: lambda device: None)
    inner = type("to", (), {"__init__": lambda self, device: None})
    number = 3
    builtin = list.append


CALLED = ("device", "short", "annotated", "non_blocking", "everything", "decorated")
LEFT = (
    "zone", "unit", "nothing", "by_keyword", "two", "static", "of_class", "made", "inner",
    "number", "builtin",
)  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_a_method_that_takes_a_device_is_called(device, name):
    value = type("Value", (), {"to": vars(_Methods)[name]})()
    handle = tdcopier.start_copy([value], device)
    assert handle.get() == [None]
    assert handle.stats[:5] == (0, 0, 1, 0, 0)


@pytest.mark.parametrize("name", LEFT)
def test_anything_else_of_that_name_is_left_alone(device, name):
    value = type("Value", (), {"to": vars(_Methods)[name]})()
    handle = tdcopier.start_copy([value], device)
    assert handle.get()[0] is value
    assert handle.stats[:5] == (0, 0, 0, 0, 1)


def test_an_attribute_of_the_object_is_not_called(device):
    class Value:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(name)

    dynamic, instance = Value(), type("Other", (), {})()
    instance.to = lambda device: None
    values = [dynamic, instance, Sample, sys, torch.UntypedStorage(2), torch.Generator()]
    handle = tdcopier.start_copy(values, device)
    assert all(got is value for got, value in zip(handle.get(), values, strict=True))
    assert handle.stats[:5] == (0, 0, 0, 0, 6)


def test_a_container_with_a_to_of_its_own_is_taken_apart_and_left_as_it_is(device):
    from collections import UserDict

    class Encoding(UserDict):
        def to(self, device: Any) -> Any:
            raise AssertionError("not called")

    encoding = Encoding(ids=ramp("cpu", 3), text=["a"])
    handle = tdcopier.start_copy(encoding, device)
    moved = handle.get()
    assert type(moved) is Encoding
    assert_same(moved["ids"], ramp("cpu", 3).to(device))
    assert encoding["ids"].device.type == "cpu"
    assert handle.stats[:5] == (1, 0, 0, 0, 1)


# ---- errors --------------------------------------------------------------------------------------


class Failing:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def to(self, device: Any) -> Any:
        raise self.error


def test_an_error_of_to_is_raised_every_time_with_the_path(device):
    error = KeyError("no")
    handle = tdcopier.start_copy([ramp("cpu", 2), {"a": (1, Failing(error))}], device)
    for ask in (handle.get, handle.wait):
        with pytest.raises(KeyError) as caught:
            ask()
        assert caught.value is error
    if sys.version_info >= (3, 11):
        assert error.__notes__ == ["tdcopier: raised by `.to` of the leaf data[1]['a'][1]"]
    assert becomes(handle.ready)


def test_an_error_of_to_is_told_even_if_the_tree_cannot_be_walked_again_for_its_path(
    device, registry
):
    class Once:
        def __init__(self) -> None:
            self.children: Any = [torch.ones(3)]

    def take(once: Once) -> Any:
        children, once.children = once.children, None
        return None if children is None else (children, None)

    tdcopier.containers.register(Once, take, lambda children, _: children)
    handle = tdcopier.start_copy([Failing(KeyError("no")), Once()], device)
    with pytest.raises(KeyError, match="no"):
        handle.get()


def test_an_interrupt_in_to_is_raised_by_the_call(device):
    with pytest.raises(KeyboardInterrupt):
        tdcopier.start_copy([Failing(KeyboardInterrupt())], device)
    assert tdcopier.copy([torch.ones(2)], device)[0].tolist() == [1, 1]


# ---- order on the device -------------------------------------------------------------------------


class Quick(Sample):
    """Its `.to` returns before the device has read its tensors."""

    def to(self, device: Any) -> Sample:
        moved = {name: each.to(device, non_blocking=True) for name, each in self.fields.items()}
        return Quick(**moved)


class Hidden:
    """Its tensor is out of sight: in a closure."""

    def __init__(self, x: torch.Tensor) -> None:
        self.read = lambda: x

    def to(self, device: Any) -> Hidden:
        return Hidden(self.read().to(device, non_blocking=True))


@pytest.mark.parametrize("make", [lambda x: Quick(x=x), Hidden], ids=["reachable", "hidden"])
def test_another_stream_waits_for_what_to_enqueued(device, accelerator, stall, make):
    """The copy is done, and a stream may use it, only after the work of `.to`."""
    source = make(torch.ones(1000).pin_memory())
    caller, consumer = torch.Stream(device), torch.Stream(device)
    with stall(caller), caller:
        handle = tdcopier.start_copy([source], device)
        assert not handle.ready()
        (moved,) = handle.wait(consumer)
        assert not consumer.query()
    consumer.synchronize()
    x = moved.fields["x"] if isinstance(moved, Sample) else moved.read()
    assert x.sum().item() == 1000
    assert becomes(handle.ready)


def test_memory_inside_an_object_is_recorded_for_the_consumers_stream(device):
    from tdcopier._containers.delegated_parts import plain_parts

    slotted, deep = InPlace(ramp("cpu", 1)), Sample(a=ramp("cpu", 2))
    deep.others = [{"b": (slotted, {ramp("cpu", 3)})}]
    deep.itself = deep
    parts = plain_parts(deep)
    assert sorted(part.numel() for part in parts) == [1, 2, 3]
    module = torch.nn.Linear(2, 3)
    assert {part.numel() for part in plain_parts(module)} == {6, 3}


# ---- other calls ---------------------------------------------------------------------------------


def test_a_prepared_plan_fits_batches_with_objects(device):
    def batch(value: float) -> list[Any]:
        return [torch.full((3,), value), Sample(x=torch.full((2,), value))]

    plan = tdcopier.prepare(batch(0.0), device)
    for value in (1.0, 2.0):
        handle = plan.start_copy(batch(value))
        leaf, sample = handle.get()
        assert (leaf.tolist(), sample.fields["x"].tolist()) == ([value] * 3, [value] * 2)
        assert handle.stats.delegated_leaves == 1
    assert (plan.fits, plan.misfits) == (2, 0)


def test_prefetched_batches_have_moved_objects(device):
    batches = [[Sample(x=torch.full((2,), float(i))), ramp("cpu", 2)] for i in range(4)]
    with tdcopier.prefetch(batches, device) as loader:
        moved = [each[0].fields["x"].tolist() for each in loader]
    assert moved == [[float(i)] * 2 for i in range(4)]


def test_existing_memory_inside_an_object_is_not_filled(device):
    source = [ramp("cpu", 2), Sample(x=ramp("cpu", 3))]
    destination = [torch.zeros(2, device=device), Sample(x=torch.zeros(3, device=device))]
    message = r"^destination\[1\] is a Sample, which cannot be filled: give the tensors in it$"
    with pytest.raises(ValueError, match=message):
        tdcopier.start_copy_into(source, destination)
    assert destination[0].tolist() == [0, 0]


def test_an_object_that_both_trees_share_is_left_as_it_is(device):
    module = torch.nn.Linear(1, 1)
    static = [torch.zeros(2, device=device), module]
    handle = tdcopier.start_copy_into([ramp("cpu", 2), module], static)
    assert handle.get()[0].tolist() == [0, 1]
    assert module.weight.device.type == "cpu"
    assert handle.stats[:5] == (1, 0, 0, 0, 1)


def test_in_a_storage_of_rows_an_object_is_opaque(device):
    sample = Sample(x=ramp("cpu", 4, 2))
    storage = {"x": ramp("cpu", 4, 2), "sample": sample}
    moved = tdcopier.start_gather(storage, torch.tensor([2, 0]), device).get()
    assert moved["sample"] is sample
    assert moved["x"].tolist() == [[4, 5], [0, 1]]


def test_check_mode_takes_objects(device, monkeypatch):
    monkeypatch.setattr("tdcopier._checking.enabled", True)
    moved = tdcopier.copy([Sample(x=ramp("cpu", 3)), ramp("cpu", 2)], device)
    assert moved[0].fields["x"].tolist() == [0, 1, 2]
