"""Filling existing memory: what is still written after a failure, and failures of `copy_`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sim_support import fresh as fresh
from support import are_released, memory_reference

import tdcopier
from tdcopier import _C

pytestmark = pytest.mark.sim

ROUTES = {
    "H2D": ("cpu", "sim:0"),
    "D2H": ("sim:0", "cpu"),
    "D2D": ("sim:0", "sim:1"),
}


def trees(route: tuple[str, str], sizes: list[int], value: float) -> tuple[Any, Any]:
    source = [torch.full((n,), value).to(route[0]) for n in sizes]
    return source, [torch.zeros(n, device=route[1]) for n in sizes]


def writing_stream(way: str) -> torch.Stream:
    """Returns the engine's stream that writes the destinations of a copy_into."""
    if way == "D2H":
        return _C.copy_stream("sim:0", "from_device")
    return _C.copy_stream("sim:1" if way == "D2D" else "sim:0", "ordered")


@pytest.mark.parametrize("way", ["H2D", "D2H", "D2D"])
def test_a_failed_copy_is_not_done_while_it_still_writes(sim, way):
    """Otherwise its enqueued writes would overwrite later ones."""
    route = ROUTES[way]
    source, destination = trees(route, [300_000] * 2, 1.0)
    if way == "D2H":
        destination = [leaf.pin_memory() for leaf in destination]
    sim.synchronize()
    with sim.hold(writing_stream(way)), sim.fail_transfer(2):
        handle = tdcopier.start_copy_into(source, destination, use_background_thread=False)
        assert not handle.ready()
    for ask in (handle.get, handle.wait):
        with pytest.raises(torch.AcceleratorError):
            ask()
    assert handle.ready()
    destination[0].fill_(3)
    sim.synchronize()
    assert (destination[0] == 3).all()


@pytest.mark.parametrize("way", ["H2D", "D2H", "D2D"])
def test_a_failed_copy_that_is_dropped_keeps_what_the_device_still_writes(sim, way):
    route = ROUTES[way]
    source, destination = trees(route, [300_000] * 2, 1.0)
    if way == "D2H":
        destination = [leaf.pin_memory() for leaf in destination]
    references = [memory_reference(leaf) for leaf in destination]
    sim.synchronize()
    with sim.hold(writing_stream(way)):
        with sim.fail_transfer(2):
            handle = tdcopier.start_copy_into(source, destination, use_background_thread=False)
        del handle, destination
        scratch = torch.zeros(10_000)
        for _ in range(200):  # long enough for a release in the background
            scratch.add_(1)
        assert all(reference() is not None for reference in references)
    assert are_released(references)


def test_a_failure_is_told_when_the_other_leaves_have_arrived(sim, monkeypatch):
    """`copy_` fails in the call while the engine's transfers are in flight."""
    source = {"a": torch.ones(300_000, device="sim:0"), "b": torch.ones(2, requires_grad=True)}
    destination = {"a": torch.zeros(300_000).pin_memory(), "b": torch.zeros(2)}

    def refuse(*arguments: Any) -> None:
        raise KeyError("no")

    monkeypatch.setattr("tdcopier._into.fill", refuse)
    sim.synchronize()
    with sim.pace("d2h", latency_us=200_000):
        handle = tdcopier.start_copy_into(source, destination)
        with pytest.raises(KeyError, match="no"):
            handle.get()
        assert (destination["a"] == 1).all()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_call_writes_nothing_afterwards(stall, device, ordered_stream, interrupt):
    """There is no handle to wait for, so the destination belongs to the caller at once."""
    from torch.testing._internal.two_tensor import TwoTensor

    class Refusing(TwoTensor):  # type: ignore[misc]
        @classmethod
        def __torch_dispatch__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.ops.aten.copy_.default:
                raise interrupt
            return super().__torch_dispatch__(func, types, args, kwargs)

    source = [torch.ones(300_000), torch.ones(2)]
    destination = [torch.zeros(300_000, device=device), Refusing(torch.ones(2), torch.ones(2))]
    with stall(ordered_stream):
        with pytest.raises(interrupt):
            tdcopier.start_copy_into(source, destination)
        destination[0].fill_(3)
    tdcopier.copy([torch.ones(3)], device)
    torch.get_device_module(device).synchronize(device)
    assert destination[0].eq(3).all()


def test_a_failure_of_copy_itself_is_told_each_time_with_the_path(device, monkeypatch):
    """A destination whose `copy_` fails: the leaves that the engine copies still arrive."""
    from torch.testing._internal.two_tensor import TwoTensor

    source = {"a": torch.ones(3), "b": TwoTensor(torch.ones(2), torch.ones(2))}
    destination = {"a": torch.zeros(3, device=device), "b": torch.zeros(2, device=device)}

    def refuse(*arguments: Any) -> None:
        raise KeyError("no")

    monkeypatch.setattr("tdcopier._into.fill", refuse)
    handle = tdcopier.start_copy_into(source, destination)
    for _ in range(2):
        with pytest.raises(KeyError, match="no") as caught:
            handle.get()
    notes = getattr(caught.value, "__notes__", ["... the leaf destination['b']"])  # Python 3.11 on
    assert notes[0].endswith("the leaf destination['b']")
    assert handle.ready()
