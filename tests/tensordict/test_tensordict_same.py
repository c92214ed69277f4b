"""The comparison of TensorDicts detects each difference, and names where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from each_case import together
from tensordict import NonTensorData, TensorDict, lazy_stack
from tensordict_classes import Episode, Frames
from tensordict_kinds import TD_KINDS
from tensordict_same import assert_same_tensordict, leaves_of, nodes_of

BEGINNINGS = {name for name, kind in TD_KINDS.items() if kind.why_missing("cpu") is None}


def made(name: str) -> Any:
    kind = TD_KINDS[name]
    with kind.within():
        return kind.make("cpu")


def _with(name: str, change: Callable[[Any], Any]) -> Any:
    """Makes a kind and changes it: in place, or by what the change returns."""
    td = made(name)
    changed = change(td)
    return td if changed is None else changed


def _unlocked_within(td: Any) -> None:
    td.get("inner")._is_locked = False


def _forget_parents(td: Any) -> None:
    td.get("inner").__dict__["__lock_parents_weakrefs"] = []


def _set_data(td: Any, name: str, value: Any) -> None:
    td._tensordict[name] = value


def _other_value(td: Any) -> None:
    td.get(("inner", "deep", "b")).view(-1)[5] += 1


def _other_value_in_a_stack(td: Any) -> None:
    td.tensordicts[1]["a"].add_(1)


def _forget_parameter(td: Any) -> None:
    del td._parameters["w"]


def _other_consolidated(td: Any) -> None:
    td._consolidated["storage"] = td._consolidated["storage"].clone()


NESTED = "nested, batch sizes of their own"
BREAKS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "class of the root": ("subclass", lambda td: TensorDict(dict(td), [2], device="cpu"), "data: "),
    "class of a node": (
        "flat",
        lambda td: _set_data(td, "b", Episode({}, [2])),
        r"data\['b'\]: tensordict_classes.Episode is not torch.Tensor",
    ),
    "device of the root": ("flat", lambda td: td.clear_device_(), "data: device is None, not"),
    "device of a node": (
        NESTED,
        lambda td: setattr(td.get("inner"), "_device", None),
        r"data\['inner'\]: device is None, not",
    ),
    "batch size": (
        NESTED,
        lambda td: setattr(td.get(("inner", "deep")), "batch_size", [2]),
        r"data\['inner'\]\['deep'\]: batch_size is",
    ),
    "names": ("names", lambda td: setattr(td, "names", None), "data: names is"),
    "names of a node": (
        "names",
        lambda td: setattr(td.get("inner"), "names", ["time", "y"]),
        r"data\['inner'\]: names is",
    ),
    "lock of the root": (NESTED, lambda td: td.lock_(), "data: is_locked is True, not False"),
    "lock of a node": ("locked", _unlocked_within, r"data\['inner'\]: is_locked is False"),
    "who holds the lock": ("locked", _forget_parents, r"data\['inner'\]: locked by 0 nodes"),
    "a key more": ("flat", lambda td: _set_data(td, "c", torch.ones(2)), "data: holds"),
    "a key less": ("flat", lambda td: td.del_("a"), "data: holds"),
    "order of keys": (
        "flat",
        lambda td: TensorDict({"b": td["b"], "a": td["a"]}, [2], device="cpu"),
        "data: holds",
    ),
    "a value deep below": (NESTED, _other_value, r"data\['inner'\]\['deep'\]\['b'\]: values"),
    "dtype": (
        "flat",
        lambda td: _set_data(td, "b", td["b"].double()),
        r"data\['b'\]: dtype is torch.float64, not torch.float32",
    ),
    "strides": (
        "strided leaves",
        lambda td: _set_data(td, "transposed", td["transposed"].contiguous()),
        r"data\['transposed'\]: strides are",
    ),
    "gradient": (
        "flat",
        lambda td: _set_data(td, "b", td["b"].requires_grad_()),
        r"data\['b'\]: requires_grad is True",
    ),
    "parameter": (
        "parameter without gradient",
        lambda td: _set_data(td.get("inner"), "leaf", td["inner", "leaf"].data),
        r"\['leaf'\]: torch.Tensor is not torch.nn.parameter.Parameter",
    ),
    "members of a stack": (
        "lazy stack",
        lambda td: lazy_stack(td.tensordicts[:2]),
        "data: batch_size is",
    ),
    "dimension of a stack": (
        "lazy stack of one",
        lambda td: lazy_stack([td.tensordicts[0]], 1),
        "data: (batch_size|stack_dim) is",
    ),
    "a value in a stack": (
        "lazy stack, ragged",
        _other_value_in_a_stack,
        r"data.tensordicts\[1\]\['a'\]: values differ",
    ),
    "lazy or not": (
        "lazy stack",
        lambda td: td.contiguous(),
        "TensorDict is not .*LazyStackedTensorDict",
    ),
    "an object of Python": (
        "tensorclass, an object in a field",
        lambda td: _set_data(
            td._tensordict, "label", NonTensorData(data=object(), batch_size=[2], device="cpu")
        ),
        "data.*label.*is not the object",
    ),
    "class of a tensorclass": (
        "tensorclass by base class",
        lambda td: Frames._from_tensordict(td._tensordict)._tensordict,
        "is not tensordict_classes.Frames",
    ),
    "memory-mapped or not": (
        "memory-mapped",
        lambda td: setattr(td, "_is_memmap", False),
        r"data: is_memmap\(\) is False",
    ),
    "shared or not": ("flat", lambda td: setattr(td, "_is_shared", True), r"data: is_shared\(\)"),
    "consolidated or not": (
        "consolidated",
        lambda td: delattr(td, "_consolidated"),
        r"data: is_consolidated\(\) is False",
    ),
    "consolidated elsewhere": ("consolidated", _other_consolidated, "not in the consolidated"),
    "names of parameters": ("TensorDictParams", _forget_parameter, r"named_parameters\(\) are"),
    "shape of an unbatched tensor's batch": (
        "unbatched tensor",
        lambda td: setattr(td._tensordict["table"], "batch_size", [5]),
        r"data\['table'\]",
    ),
}


@together("what", BREAKS)
def test_what_differs_is_found_and_its_path_is_said(what):
    name, change, message = BREAKS[what]
    expected = made(name)
    changed = _with(name, change)
    with pytest.raises(AssertionError, match=message):
        assert_same_tensordict(changed, expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@together("name", sorted(BEGINNINGS))
def test_every_kind_is_the_same_as_itself_and_as_what_to_makes_of_it_twice(sim, name):
    kind = TD_KINDS[name]
    with kind.within():
        td = kind.make("cpu")
        assert_same_tensordict(td, td)
        for device in ("meta", "sim:0"):
            if kind.why_missing(device.split(":")[0]) is None:
                moved, again = td.to(device), td.to(device)
                sim.synchronize()
                assert_same_tensordict(again, moved)


@pytest.mark.parametrize("name", ["nested, batch sizes of their own", "lazy stack within"])
def test_two_makes_of_a_kind_hold_the_same_and_share_nothing(name):
    first, second = made(name), made(name)
    assert_same_tensordict(first, second)
    here = {leaf.data_ptr() for _, leaf in leaves_of(first)}
    assert here.isdisjoint(leaf.data_ptr() for _, leaf in leaves_of(second))
    assert {path for path, _ in nodes_of(first)} == {path for path, _ in nodes_of(second)}
