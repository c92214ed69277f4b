"""Tests results of TensorDict's own calls under the switch: later use, memory and errors."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from catalogue import ramp
from tensordict import TensorDict, lazy_stack
from tensordict_backend_support import outcome
from tensordict_backend_support import restored as restored
from tensordict_classes import Frames, Labelled
from tensordict_kinds import TD_KINDS
from tensordict_kinds_of_leaves import flat
from tensordict_same import assert_same_tensordict

import tdcopier
from tdcopier import _C

# ---- later use of results ------------------------------------------------------------------------

PICKLED = (
    "nested, batch sizes of their own", "locked", "lazy stack", "names", "text",
    "tensorclass by base class", "subclass", "TypedTensorDict, inherited, nested",
    "leaf that requires grad", "NonTensorStack", "same leaf and same node twice",
)  # fmt: skip


@pytest.mark.parametrize("name", PICKLED)
def test_results_are_pickled_and_saved_as_ever(device, tmp_path, name):
    td = TD_KINDS[name].make(device)
    expected = td.to("cpu")
    with tdcopier.tensordict.backend():
        got = td.to("cpu")
    torch.get_device_module(device).synchronize()
    loaded = []
    for each in (got, expected):
        torch.save(each, tmp_path / "saved")
        loaded.append(torch.load(tmp_path / "saved", weights_only=False))
        loaded.append(pickle.loads(pickle.dumps(each)))
    for each, wanted in zip(loaded[:2], loaded[2:], strict=True):
        _assert_same_to_read(each, wanted)


def _assert_same_to_read(got: Any, expected: Any) -> None:
    """Equal Python values need not be the same object."""
    got, expected = got.to_dict(), expected.to_dict()

    def plain(tree: Any) -> Any:
        if isinstance(tree, dict):
            return [(key, plain(value)) for key, value in tree.items()]
        if isinstance(tree, list):
            return [plain(value) for value in tree]
        is_tensor = isinstance(tree, torch.Tensor)
        return (tree.dtype, tree.requires_grad, tree.tolist()) if is_tensor else tree

    assert plain(got) == plain(expected)


def test_keys_of_a_locked_result_are_right_however_often_they_are_asked_for(device):
    td = TD_KINDS["locked, keys in its cache"].make("cpu")
    with tdcopier.tensordict.backend():
        moved = td.to(device)
    for _ in range(3):
        assert list(moved.keys(True, True)) == list(td.keys(True, True))
        assert {leaf.device for leaf in moved.values(True, True)} == {torch.device(device)}
        assert {leaf.device for leaf in td.values(True, True)} == {torch.device("cpu")}
        assert moved.flatten_keys(".").device == torch.device(device)
    moved.unlock_()["later"] = ramp("cpu", 2)
    assert moved["later"].device == torch.device(device)
    assert "later" in moved.keys()  # noqa: SIM118
    assert td.is_locked


# ---- in a `with` statement -----------------------------------------------------------------------


def _write(td: Any) -> None:
    td["a"] = td["a"] + 1


def _add(td: Any) -> None:
    td["new"] = td["a"] * 2
    td["deep", "new"] = td["a"]


def _remove(td: Any) -> None:
    del td["b"]


def _fail(td: Any) -> None:
    td["a"] = td["a"] + 1
    raise KeyError("in the block")


IN_THE_BLOCK = {"nothing": lambda _: None, "write": _write, "add": _add, "remove": _remove,
                "fail": _fail}  # fmt: skip

USED_IN_WITH: dict[str, Callable[[], Any]] = {
    "flat": lambda: flat("cpu"),
    "device None": lambda: TensorDict({"a": ramp("cpu", 2), "b": ramp("cpu", 2)}, [2]),
    "locked": lambda: flat("cpu").lock_(),
    "lazy stack": lambda: lazy_stack([flat("cpu"), flat("cpu")]),
    "tensorclass": lambda: Frames(ramp("cpu", 2), batch_size=[2], device="cpu"),
    "names": lambda: TensorDict(flat("cpu"), [2], names=["t"], device="cpu"),
}


@pytest.mark.parametrize("act", IN_THE_BLOCK)
@pytest.mark.parametrize("name", USED_IN_WITH)
def test_a_with_statement_writes_back_what_it_did(device, name, act):
    def used() -> Any:
        td = USED_IN_WITH[name]()
        error = None
        try:
            with td.to(device) as moved:
                assert moved.device == torch.device(device)
                IN_THE_BLOCK[act](moved)
        except Exception as caught:
            error = type(caught)
        torch.get_device_module(device).synchronize()
        return td, error

    expected, expected_error = used()
    with tdcopier.tensordict.backend() as use:
        got, got_error = used()
    assert got_error == expected_error
    assert_same_tensordict(got, expected)
    assert use.by_engine > 0


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [10, 1 << 20], ids=["small", "large"])
def test_sources_and_results_are_given_back(device, accelerator, elements):
    def use_once() -> list[weakref.ref[Any]]:
        td = TensorDict({"a": torch.ones(elements), "x": {"b": torch.ones(3)}}, device="cpu")
        with td.to(device) as moved:
            moved["a"].add_(1)
        moved = td.to(device)
        back = moved.to("cpu")
        return [weakref.ref(each) for each in (td, td["a"], moved, moved["a"], back)]

    with tdcopier.tensordict.backend():
        use_once()
        gc.collect()
        accelerator.synchronize()
        before = accelerator.memory_allocated()
        for _ in range(5):
            references = use_once()
            gc.collect()
            accelerator.synchronize()
            _C.testing.settle()  # sources are released in the background
            torch.zeros(10_000).add_(1)  # lets the interpreter's pending calls run
            assert [reference() for reference in references] == [None] * 5
    assert accelerator.memory_allocated() == before


def test_a_result_knows_its_source_by_a_weak_reference_only(device):
    td = flat("cpu")
    alive = weakref.ref(td)
    with tdcopier.tensordict.backend():
        moved = td.to(device)
    del td
    assert alive() is None
    assert moved["a"].sum().item() == 15


# ---- errors --------------------------------------------------------------------------------------


class Failing(Labelled):
    """Its `.to` raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.to:
            raise OSError("cannot move")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("call", ["to", "with", "constructor"])
def test_an_error_of_a_leaf_is_the_calls_and_the_next_call_works(device, call):
    leaf = ramp("cpu", 2).as_subclass(Failing)
    td = TensorDict({"a": ramp("cpu", 2), "x": TensorDict({"leaf": leaf})})

    def fail() -> None:
        if call == "constructor":
            TensorDict({"a": ramp("cpu", 2), "x": {"leaf": leaf}}, device=device)
        elif call == "to":
            td.to(device)
        else:
            with td.to(device):
                pass

    with tdcopier.tensordict.backend():
        with pytest.raises(OSError, match="cannot move"):
            fail()
        assert flat("cpu").to(device)["a"].sum().item() == 15


def test_a_leaf_that_cannot_go_there_fails_as_ever(device):
    td = TensorDict({"a": torch.empty(3, device="meta"), "b": ramp("cpu", 2)})
    expected = outcome(lambda: td.to(device))
    assert expected[0] is NotImplementedError
    with tdcopier.tensordict.backend():
        assert outcome(lambda: td.to(device)) == expected
    with pytest.raises(NotImplementedError) as caught:
        tdcopier.to(td, device)
    assert str(caught.value) == expected[1]


@pytest.mark.sim
def test_memory_that_is_out_is_an_error_of_torchs_and_the_next_call_works(sim, device):
    td = TensorDict({"a": torch.ones(1 << 20), "b": torch.ones(3)})
    torch.sim.empty_cache()
    sim.set_memory_limit_bytes(0, torch.sim.memory_allocated() + (1 << 20))
    try:
        with tdcopier.tensordict.backend():
            with pytest.raises(torch.OutOfMemoryError):
                td.to(device)
            assert td.exclude("a").to(device)["b"].tolist() == [1, 1, 1]
    finally:
        sim.set_memory_limit_bytes(0, None)


def test_the_error_of_a_delegated_part_names_its_path_in_the_tree(device):
    leaf = ramp("cpu", 2).as_subclass(Failing)
    td = TensorDict({"x": TensorDict({"leaf": leaf, "a": ramp("cpu", 2)})})
    handle = tdcopier.start_copy({"batch": [td]}, device)
    for _ in range(2):
        with pytest.raises(OSError, match="cannot move") as caught:
            handle.get()
    assert any("data['batch'][0]['x']['leaf']" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("where", ["inner", "stack"])
def test_a_leaf_that_reaches_beyond_its_storage_is_refused_with_its_path(device, where):
    leaf = ramp("cpu", 6)
    leaf.untyped_storage().resize_(4)
    members = [TensorDict({"leaf": each}) for each in (ramp("cpu", 6), leaf)]
    inner = members[1] if where == "inner" else lazy_stack(members)
    td = TensorDict({"x": inner}, device=None)
    with pytest.raises(ValueError, match="leaf") as caught:
        tdcopier.async_to(td, device)
    assert "'x'" in str(caught.value)
    assert flat("cpu").to(device)["a"].sum().item() == 15
