"""The option `on_unknown` for values in which tensors may be hidden, beside tensors."""

from __future__ import annotations

import types
import warnings
from typing import Any

import pytest
import torch
from hidden_states import CALLS, PLAIN, UNKNOWN, Said, closure
from park_support import LARGE, is_resident

import tdcopier
from tdcopier._containers import unknown

pytestmark = pytest.mark.usefixtures("nothing_is_told")


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.parametrize("call", CALLS)
def test_each_value_of_the_option_does_as_it_says_beside_tensors(device, call, name):
    make, found, remedy = UNKNOWN[name]
    state = {"ok": torch.ones(LARGE, device=device), "in": [make(device)]}
    said = Said(found, remedy, "state['in'][0]")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for option in ({}, {"on_unknown": None}, {"on_unknown": "ignore"}):
            handle = call(state, **option)
            assert f"{4 * LARGE} bytes" in repr(handle)
            getattr(handle, "resume", handle.wait_parked if call is tdcopier.park else handle.get)()
        with pytest.raises(TypeError) as refused:
            call(state, on_unknown="raise")
        with pytest.raises(
            tdcopier.containers.UnknownTypeWarning
        ):  # an error of the filter changes nothing
            call(state, on_unknown="warn")
    assert is_resident(state["ok"])
    said.check(str(refused.value))
    with pytest.warns(tdcopier.containers.UnknownTypeWarning) as caught:
        handle = call(state, on_unknown="warn")
    said.check(str(caught[0].message))
    if isinstance(handle, tdcopier.Parked):
        assert handle.is_parked
        handle.resume()


@pytest.mark.parametrize("option", [None, "ignore", "warn", "raise"])
@pytest.mark.parametrize("call", CALLS)
def test_plain_data_is_never_reported(device, call, option):
    state = [torch.ones(LARGE, device=device), *PLAIN, closure(device)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle = call(state, on_unknown=option)
    assert f"{4 * LARGE} bytes" in repr(handle)
    if isinstance(handle, tdcopier.Parked):
        handle.resume()


class OnlyItsOwnTo:
    def __init__(self, device: str) -> None:
        self.tensor = torch.ones(2, device=device)

    def to(self, device: Any) -> OnlyItsOwnTo:
        return self


READ_ONCE = {
    "generator": (lambda device: (x for x in [torch.ones(2, device=device)]), "an iterator"),
    "set": (lambda device: {torch.ones(2, device=device)}, "a set, whose values have no order"),
    "own .to": (OnlyItsOwnTo, "an OnlyItsOwnTo, and only its own `.to` knows its tensors"),
}


@pytest.mark.parametrize("name", READ_ONCE)
@pytest.mark.parametrize("call", CALLS)
def test_tensors_that_are_left_for_sure_are_refused_unless_the_option_lets_them(
    device, call, name, monkeypatch
):
    make, found = READ_ONCE[name]
    ones = torch.ones(LARGE, device=device)
    for option in (None, "raise"):
        with pytest.raises(TypeError) as caught:
            call([ones, make(device)], on_unknown=option)
        assert str(caught.value).startswith(f"state[1] is {found}")
    assert is_resident(ones)
    if name == "generator" and call is tdcopier.snapshot:
        monkeypatch.setitem(unknown._told, id(types.GeneratorType), None)
        for option in ("ignore", "warn"):
            with pytest.raises(
                TypeError, match=r"^state\[1\] is a generator, which copy\.deepcopy"
            ):
                call([ones, make(device)], on_unknown=option)
        return
    handle = call([ones, make(device)], on_unknown="ignore")
    with pytest.warns(tdcopier.containers.UnknownTypeWarning, match=r"^state\[1\] is "):
        also = call([torch.ones(LARGE, device=device), make(device)], on_unknown="warn")
    for each in (handle, also):
        if isinstance(each, tdcopier.Parked):
            each.resume()
        assert f"{4 * LARGE} bytes" in repr(each)
