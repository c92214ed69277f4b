"""Ctrl-C in Python code of the package, prefetching aside: nothing is left half done."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
import torch
from interrupts import KINDS, Interrupter, in_time, interrupted_everywhere
from support import assert_same
from tensordict import TensorDict
from tensordict_backend_support import methods
from tensordict_kinds_of_leaves import flat

import tdcopier
from tdcopier import Parcel, _checking, pack
from tdcopier.tensordict import _backend

ROWS = torch.tensor([3, 0, 3])


def table() -> TensorDict:
    torch.manual_seed(0)
    lazy = torch.stack([TensorDict({"z": torch.rand(2)}, []) for _ in range(6)])
    own = {"x": torch.rand(6, 3), "deep": {"y": torch.arange(6)}, "text": "text", "lazy": lazy}
    return TensorDict(own, [6])


# ---- the switch for TensorDict's own calls -------------------------------------------------------


def is_off() -> bool:
    return _backend.switches_on() == (False, False)


def test_an_interrupted_block_of_the_backend_is_off_and_the_next_one_restores_all(device):
    own = methods()

    def scene(interrupter: Interrupter) -> None:
        with interrupter, tdcopier.tensordict.backend():
            pass
        assert is_off()
        with tdcopier.tensordict.backend() as use:
            flat("cpu").to(device)
        assert use.by_engine == 1
        assert is_off()
        assert methods() == own

    # Not before each line: no signal comes between the end of the block and `use._is_on = False`.
    assert interrupted_everywhere("calls", scene) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_whose_installation_was_interrupted_can_be_removed(device, kind):
    own = methods()

    def scene(interrupter: Interrupter) -> None:
        with interrupter:
            tdcopier.tensordict.install_backend()
        while _backend.switches_on()[0]:
            tdcopier.tensordict.remove_backend()
        with tdcopier.tensordict.backend():
            pass
        assert methods() == own

    assert interrupted_everywhere(kind, scene) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_after_an_interrupted_removal_the_backend_is_on_or_off(device, kind):
    own = methods()

    def scene(interrupter: Interrupter) -> None:
        tdcopier.tensordict.install_backend()
        with interrupter:
            tdcopier.tensordict.remove_backend()
        if _backend.switches_on()[0]:
            tdcopier.tensordict.remove_backend()
        with tdcopier.tensordict.backend():
            pass
        assert methods() == own

    assert interrupted_everywhere(kind, scene) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_call_that_the_engine_serves_can_be_made_again(device, kind):
    source = table()
    expected = source.to(device)

    def scene(interrupter: Interrupter) -> None:
        with tdcopier.tensordict.backend():
            with interrupter:
                source.to(device)
            assert_same(in_time(lambda: flat("cpu").to(device)), flat("cpu").to(device))
            assert_same(source.to(device)["x"], expected["x"])

    assert interrupted_everywhere(kind, scene) > 10


# ---- rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_gather_can_be_made_again(device, kind):
    storage = table()
    expected = storage[ROWS].to(device)

    def scene(interrupter: Interrupter) -> None:
        with interrupter:
            tdcopier.start_gather(storage, ROWS, device).wait()
        got = in_time(lambda: tdcopier.start_gather(storage, ROWS, device).get())
        assert_same(got["deep", "y"], expected["deep", "y"])
        assert_same(got["x"], expected["x"])

    assert interrupted_everywhere(kind, scene) > 10


# ---- trees ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_class_whose_registration_was_interrupted_is_registered_or_can_be(registry, device, kind):
    def scene(interrupter: Interrupter) -> None:
        class Own:
            def __init__(self, leaf: torch.Tensor) -> None:
                self.leaf = leaf

        def register() -> None:
            tdcopier.containers.register(
                Own, lambda own: ([own.leaf], None), lambda leaves, _: Own(*leaves)
            )

        value = Own(torch.ones(3))
        # opaque, and known to be
        assert tdcopier.copy(value, device, on_unknown="ignore") is value
        with interrupter:
            register()
        with suppress(ValueError):  # it is registered already
            register()
        assert tdcopier.copy(value, device).leaf.device == torch.device(device)

    assert interrupted_everywhere(kind, scene) > 5


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_whose_packing_into_a_parcel_was_interrupted_can_be_packed_again(kind):
    tree = {"x": torch.arange(5), "deep": [torch.ones(2, 3)], "td": flat("cpu"), "set": {1}}
    parcel = pack(tree)

    def scene(interrupter: Interrupter) -> None:
        with interrupter:
            pack(tree)
        with interrupter:
            Parcel.from_buffer(bytes(parcel), allow_pickle=True).tree()
        again = in_time(lambda: pack(tree))
        for each in (parcel, again):
            got = each.tree()
            assert_same([got["x"], got["deep"]], [tree["x"], tree["deep"]])

    assert interrupted_everywhere(kind, scene) > 20


# ---- check mode ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ask", ["wait", "get", "wait_staged", "ready"])
def test_what_was_modified_is_named_after_an_interrupted_call_too(
    device, accelerator, monkeypatch, ask, kind
):
    monkeypatch.setattr(_checking, "enabled", True)

    def scene(interrupter: Interrupter) -> None:
        source: dict[str, Any] = {"x": torch.ones(5), "y": torch.ones(5)}
        handle = tdcopier.start_copy(source, device)
        accelerator.synchronize()  # so that the copy is ready
        source["y"].zero_()
        told = False
        with interrupter:
            try:
                told = getattr(handle, ask)() is False
            except _checking.SourceModifiedError:
                told = True
        try:
            in_time(handle.get)
        except _checking.SourceModifiedError as error:
            told = "data['y']" in str(error)
        assert told

    assert interrupted_everywhere(kind, scene) > 3
