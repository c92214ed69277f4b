"""Tests TensorDict's own calls under the switch: on, off, nested, and in several threads.

The results stay the same, and tensordict itself runs the calls that the engine does not support.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from catalogue import ramp
from each_case import together
from tensordict import TensorDict
from tensordict_backend_support import methods, outcome
from tensordict_cases import CASES, TO_META, kind_and_ends, moved_by_itself, state_of
from tensordict_classes import Frames
from tensordict_kinds import TD_KINDS
from tensordict_kinds_of_leaves import flat
from tensordict_same import assert_same_tensordict
from thread_support import at_once, in_a_thread

import tdcopier

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning"),
]


# ---- the same results ----------------------------------------------------------------------------


@together(("name", "direction"), CASES, by="direction")
def test_to_gives_the_same_under_the_switch(device, name, direction):
    kind, source, target = kind_and_ends(name, direction, device)
    with kind.within():
        td = kind.make(target if kind.on_target else source)
        expected = moved_by_itself(td, target)
        before = state_of(td)
        with tdcopier.tensordict.backend() as use:
            got = moved_by_itself(td, target)
        assert_same_tensordict(got, expected)
        assert state_of(td) == before
        assert (got is td) == (expected is td)
    counts = None if direction == TO_META else kind.counts(direction)
    if counts is not None and counts.packed + counts.alone > 0:
        assert use.by_engine > 0


def _everything(device: str) -> TensorDict:
    data = {
        "a": ramp(device, 2, 3),
        "half": ramp(device, 2).half(),
        "inner": {"image": ramp(device, 2, 3, 4, 5), "text": "word"},
        "count": torch.arange(2).to(device),
    }
    return TensorDict(data, [2], device=device)


ARGUMENTS: dict[str, tuple[tuple[Any, ...], dict[str, Any], bool]] = {
    "device": (("{device}",), {}, True),
    "device by name": ((), {"device": "{device}"}, True),
    "`torch.device`": (("{torch.device}",), {}, True),
    "not blocking": (("{device}",), {"non_blocking": True}, True),
    "blocking": (("{device}",), {"non_blocking": False}, True),
    "blocking or not, no word": (("{device}",), {"non_blocking": None}, True),
    "blocking by position": (("{device}", torch.float64, False), {}, False),
    "dtype": ((torch.float64,), {}, False),
    "device and dtype": (("{device}", torch.float64), {}, False),
    "device and dtype by name": ((), {"device": "{device}", "dtype": torch.float16}, False),
    "a tensor": (("{tensor}",), {}, False),
    "another TensorDict": ((), {"other": "{td}"}, False),
    "memory format": (("{device}",), {"memory_format": torch.channels_last}, False),
    "batch size": ((), {"batch_size": [2, 1]}, False),
    "device and batch size": (("{device}",), {"batch_size": []}, False),
    "in place": (("{device}",), {"inplace": True}, False),
    "not in place": (("{device}",), {"inplace": False}, False),
    "pinned first": (("{device}",), {"non_blocking_pin": True}, False),
    "pinned first, by threads": (
        ("{device}",), {"non_blocking_pin": True, "num_threads": 2}, False
    ),
    "no arguments": ((), {}, False),
    "`None`": ((None,), {}, False),
    "no such device": (("nonsense",), {}, False),
    "no device of that number": (("{type}:99",), {}, False),
    "no argument of that name": (("{device}",), {"nonsense": 1}, False),
    "too many arguments": (("{device}", None, None, None, None), {}, False),
    "a list": (([1, 2],), {}, False),
    "a flag": ((True,), {}, False),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::FutureWarning")  # tensordict warns about arguments
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", ARGUMENTS)
def test_arguments_do_what_they_did_and_others_than_a_device_are_left_to_tensordict(device, what):
    positional, named, is_taken = ARGUMENTS[what]
    meant = {
        "{device}": device,
        "{type}": device.split(":")[0],
        "{type}:99": device.split(":")[0] + ":99",
        "{torch.device}": torch.device(device),
        "{tensor}": ramp(device, 1).double(),
        "{td}": TensorDict({"x": ramp(device, 1)}, device=device),
    }

    def mean(value: Any) -> Any:
        return meant.get(value, value) if isinstance(value, str) else value

    args, kwargs = [mean(each) for each in positional], {k: mean(v) for k, v in named.items()}

    def moved() -> Any:
        td = _everything("cpu")
        result = td.to(*args, **kwargs)
        torch.get_device_module(device).synchronize()
        return [result, result is td, td]

    expected = outcome(moved)
    with tdcopier.tensordict.backend() as use:
        got = outcome(moved)
    if isinstance(expected, tuple):
        assert got == expected
    else:
        assert got[1] == expected[1]
        assert_same_tensordict(_without_text(got[0]), _without_text(expected[0]), "result")
        assert_same_tensordict(_without_text(got[2]), _without_text(expected[2]), "source")
        assert got[0]["inner", "text"] == expected[0]["inner", "text"]
    assert (use.by_engine > 0) == is_taken


def _without_text(td: TensorDict) -> TensorDict:
    return td.exclude(("inner", "text"))


def test_a_device_without_index_is_the_current_one(device, accelerator):
    """As with tensordict on CUDA; elsewhere tensordict sets the device without its index."""
    with tdcopier.tensordict.backend() as use:
        moved = flat("cpu").to(device.split(":")[0])
    assert moved.device == moved["a"].device == torch.device(device)
    assert moved.to(device) is moved
    assert use.by_engine == 1


def test_the_methods_that_name_a_device_go_through_the_engine_too(device):
    td = flat(device)
    expected = td.cpu()
    with tdcopier.tensordict.backend() as use:
        got = td.cpu()
    assert_same_tensordict(got, expected)
    assert (use.by_engine, use.by_tensordict) == (1, 0)


@pytest.mark.cuda
def test_cuda_goes_through_the_engine_too(device):
    td = flat("cpu")
    for arguments in ((), (0,)):  # before 0.15, it takes no names
        expected = td.cuda(*arguments)
        with tdcopier.tensordict.backend() as use:
            got = td.cuda(*arguments)
        assert_same_tensordict(got, expected)
        assert use.by_engine == 1


# ---- the constructor -----------------------------------------------------------------------------

_SOURCES: dict[str, Callable[[str], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "dict": lambda d: (({"a": ramp("cpu", 2), "b": ramp("cpu", 2, 3)}, [2]), {"device": d}),
    "by position": lambda d: (({"a": ramp("cpu", 2)}, [2], d), {}),
    "dict of dicts": lambda d: (
        ({"z": ramp("cpu", 2), "x": {"y": {"b": ramp("cpu", 2)}}, "a": ramp("cpu", 2)}, [2]),
        {"device": d},
    ),
    "keys of several parts": lambda d: (
        ({("x", "b"): ramp("cpu", 2), ("x", "a"): ramp("cpu", 2), "c": {"d": ramp("cpu", 2)}}, [2]),
        {"device": d},
    ),
    "keywords": lambda d: ((), {"a": ramp("cpu", 2), "b": {"c": ramp("cpu", 2)}, "device": d}),
    "by name": lambda d: ((), {"source": {"a": ramp("cpu", 2)}, "batch_size": [2], "device": d}),
    "values of all sorts": lambda d: (
        ({"n": 3, "text": "word", "array": np.arange(3.0), "list": [1, 2], "t": ramp("cpu", 2),
          "none": None},),
        {"device": d},
    ),
    "TensorDict": lambda d: ((flat("cpu"), [2]), {"device": d}),
    "dict with a TensorDict": lambda d: (
        ({"td": flat("cpu"), "a": ramp("cpu", 2), "f": Frames(ramp("cpu", 2), batch_size=[2])},
         [2]), {"device": d},
    ),
    "on the device already": lambda d: (({"a": ramp(d, 2)}, [2]), {"device": d}),
    "names, locked": lambda d: (
        ({"a": ramp("cpu", 2), "x": {"b": ramp("cpu", 2)}}, [2]),
        {"device": d, "names": ["time"], "lock": True},
    ),
    "not blocking": lambda d: (({"a": ramp("cpu", 2)},), {"device": d, "non_blocking": True}),
    "blocking": lambda d: (({"a": ramp("cpu", 2)},), {"device": d, "non_blocking": False}),
    "requires grad": lambda d: (({"a": ramp("cpu", 2).requires_grad_()},), {"device": d}),
    "parameter": lambda d: (({"a": torch.nn.Parameter(ramp("cpu", 2))},), {"device": d}),
    "no device": lambda d: (({"a": ramp("cpu", 2), "b": ramp(d, 2)},), {}),
    "nothing": lambda d: (({},), {"device": d}),
    "no such device": lambda d: (({"a": ramp("cpu", 2)},), {"device": "nonsense"}),
    "shape that does not fit": lambda d: (({"a": ramp("cpu", 3)}, [2]), {"device": d}),
    "both dict and keywords": lambda d: (({"a": ramp("cpu", 3)},), {"b": 1, "device": d}),
    "key that is no text": lambda d: (({1: ramp("cpu", 2)},), {"device": d}),
}  # fmt: skip


@pytest.mark.parametrize("cls", [TensorDict, TD_KINDS["subclass"].make("cpu").__class__])
@pytest.mark.parametrize("what", _SOURCES)
def test_a_constructor_with_a_device_makes_the_same_and_leaves_its_source_alone(device, what, cls):
    args, kwargs = _SOURCES[what](device)

    def shape_of(tree: Any) -> Any:
        is_tree = type(tree) is dict
        return [(k, shape_of(v)) for k, v in tree.items()] if is_tree else id(tree)

    before = [shape_of(each) for each in (*args, kwargs)]
    expected = outcome(lambda: cls(*args, **kwargs))
    with tdcopier.tensordict.backend():
        got = outcome(lambda: cls(*args, **kwargs))
    torch.get_device_module(device).synchronize()
    assert [shape_of(each) for each in (*args, kwargs)] == before
    if isinstance(expected, tuple):
        assert got == expected
        return
    text = [key for key in expected.keys() if key in ("text", "none")]  # noqa: SIM118
    assert list(got.keys()) == list(expected.keys())
    for key in text:
        assert got[key] == expected[key]
    was_locked = expected.is_locked
    assert got.is_locked == was_locked
    if text:
        got, expected = got.exclude(*text), expected.exclude(*text)
    assert_same_tensordict(got, expected)


# ---- on and off ----------------------------------------------------------------------------------


def test_switches_nest_and_each_counts_its_own_block(device):
    with tdcopier.tensordict.backend() as outer:
        flat("cpu").to(device)
        with tdcopier.tensordict.backend() as inner:
            flat("cpu").to(device)
        flat("cpu").to(device, torch.float64)
    before = (outer.by_engine, inner.by_engine, inner.by_tensordict)
    flat("cpu").to(device)
    assert before == (outer.by_engine, inner.by_engine, inner.by_tensordict)
    assert (outer.by_engine, outer.by_tensordict) == (2, 1)
    assert (inner.by_engine, inner.by_tensordict) == (1, 0)


def test_an_error_in_the_block_switches_off_too(device):
    own = methods()

    def fail() -> None:
        with tdcopier.tensordict.backend():
            flat("cpu").to(device)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert methods() == own


def test_an_installation_holds_until_it_is_removed_as_often(device):
    own = methods()
    first = tdcopier.tensordict.install_backend()
    try:
        second = tdcopier.tensordict.install_backend()
        assert second is first
        with tdcopier.tensordict.backend() as block:
            flat("cpu").to(device)
        tdcopier.tensordict.remove_backend()
        assert methods() != own
        flat("cpu").to(device)
    finally:
        tdcopier.tensordict.remove_backend()
    assert methods() == own
    flat("cpu").to(device)
    assert (block.by_engine, first.by_engine) == (1, 2)
    with pytest.raises(RuntimeError, match="not installed"):
        tdcopier.tensordict.remove_backend()


def test_a_block_is_for_its_own_thread_and_an_installation_for_all(device):
    with tdcopier.tensordict.backend() as block:
        in_a_thread(lambda: flat("cpu").to(device))
        assert (block.by_engine, block.by_tensordict) == (0, 0)
        flat("cpu").to(device)
    assert block.by_engine == 1
    everywhere = tdcopier.tensordict.install_backend()
    try:
        moved = in_a_thread(lambda: flat("cpu").to(device))
    finally:
        tdcopier.tensordict.remove_backend()
    assert_same_tensordict(moved, flat("cpu").to(device))
    assert everywhere.by_engine == 1


def test_eight_threads_switch_and_move_at_once(device):
    own = methods()

    def work(seed: int) -> None:
        for i in range(30):
            td = TensorDict({"a": torch.full((5,), seed + i / 100), "x": flat("cpu")}, [])
            is_on = (seed + i) % 3 > 0
            with tdcopier.tensordict.backend() if is_on else contextlib.nullcontext() as use:
                moved = td.to(device)
            back = moved.to("cpu")
            torch.get_device_module(device).synchronize()
            assert torch.equal(back["a"], td["a"]), (seed, i)
            assert moved.device == torch.device(device), (seed, i)
            assert not is_on or (use.by_engine, use.by_tensordict) == (1, 0), (seed, i, use)

    at_once(8, work)
    assert methods() == own
