"""Which objects are kept alive, by what, and for how long."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import tdcopier
from tdcopier import _C


def test_a_reference_cycle_through_a_handle_is_collected(device):
    class Owner:
        pass

    owner = Owner()
    owner.handle = tdcopier.start_copy({"owner": owner, "x": torch.ones(2)}, device)
    owner.handle.get()
    alive = weakref.ref(owner)
    del owner
    gc.collect()
    assert alive() is None


def test_an_array_dropped_right_after_the_call_is_copied_all_the_same(device):
    handles = []
    for value in range(8):
        array = np.full(1 << 20, value, np.float32)
        handles.append(tdcopier.start_copy([array], device))
        del array
    for value, handle in enumerate(handles):
        (large,) = handle.get()
        assert large.min().item() == large.max().item() == value


def test_a_cycle_through_a_handle_that_was_never_asked_is_collected(device):
    class Owner:
        pass

    for leaf in (torch.ones(2), torch.ones(1 << 20)):
        owner = Owner()
        owner.handle = tdcopier.start_copy({"owner": owner, "x": leaf}, device)
        alive = weakref.ref(owner)
        del owner
        gc.collect()
        assert alive() is None


def test_sources_are_let_go_when_the_call_is_refused(device):
    array = np.ones(3)
    alive = weakref.ref(array)
    with pytest.raises(TypeError, match=r"data\[1\] is a numpy array of dtype"):
        tdcopier.start_copy([array, np.zeros(2, np.longdouble)], device)
    del array
    assert alive() is None


@pytest.mark.parametrize("is_on", [True, False])
def test_a_large_result_is_made_without_collections_and_the_collector_stays_as_it_was(
    device, is_on
):
    leaf = torch.ones(1)
    batch = {"a": [leaf] * 5000, "b": dict.fromkeys(range(5000), leaf)}
    runs = []

    def note(phase, info):
        if phase == "start":
            runs.append(info["generation"])

    was_on = gc.isenabled()
    (gc.enable if is_on else gc.disable)()
    gc.callbacks.append(note)
    try:
        result = tdcopier.copy(batch, device)
        still_on = gc.isenabled()
    finally:
        gc.callbacks.remove(note)
        (gc.enable if was_on else gc.disable)()
    assert len(runs) <= 2 * is_on  # 14, if each allocation may run it
    assert still_on == is_on
    assert result["b"][4999].item() == 1


def test_a_to_that_gives_a_leaf_other_memory_leaves_that_of_the_copy(sim, device):
    """As `torch.nn.Module.to` does with its parameters, while their bytes are still read."""

    class Model:
        def __init__(self, parameter: torch.Tensor) -> None:
            self.parameter = parameter

        def to(self, place: torch.device) -> Model:
            self.parameter.data = torch.empty(0, device=device)
            return self

    def filled(value: float) -> torch.Tensor:
        return torch.full((1 << 20,), float(value), device=device)

    with torch.no_grad(), sim.pace("d2h", bandwidth_bytes_per_s=5e8):
        parameter = torch.nn.Parameter(filled(7))
        tree = {"before": filled(1).repeat(8), "x": parameter, "model": Model(parameter)}
        handle = tdcopier.start_copy(tree, "cpu")
        others = [filled(9) for _ in range(3)]
        assert handle.get()["x"].unique().tolist() == [7]
    assert others[0][0].item() == 9


def test_a_cycle_through_a_tensor_that_is_filled_is_collected(device):
    """The handle was asked only before the copy was done, or not at all."""
    source = torch.ones(1 << 20)
    for target in (device, "cpu"):
        destination = torch.zeros(1 << 20, device=target)
        destination.pending = tdcopier.start_copy_into(source, destination)
        destination.pending.wait()
        alive = weakref.ref(destination)
        del destination
        gc.collect()
        assert alive() is None


def test_a_handle_says_what_is_on_the_way(sim, device):
    with sim.hold(_C.copy_stream(device, "to_device")):
        handle = tdcopier.start_copy([torch.ones(2), {"x": torch.ones(3)}, "text"], device)
        assert repr(handle) == f"<tdcopier.AsyncCopyHandle: 2 leaves to {device}, on the way>"
    handle.get()
    assert repr(handle) == f"<tdcopier.AsyncCopyHandle: 2 leaves to {device}, arrived>"
    with sim.fail_transfer():
        failed = tdcopier.start_copy(torch.ones(2), device)
    assert repr(failed) == f"<tdcopier.AsyncCopyHandle: 1 leaf to {device}, failed>"
    with sim.fail_device_allocation():
        without_memory = tdcopier.start_copy(torch.ones(2), device)
    assert repr(without_memory) == f"<tdcopier.AsyncCopyHandle: to {device}, failed>"


def test_a_handle_comes_from_a_copy_only():
    """One that Python made would have no C++ object, and its methods would crash."""
    for make in (tdcopier.AsyncCopyHandle, lambda: object.__new__(tdcopier.AsyncCopyHandle)):
        with pytest.raises(TypeError, match="AsyncCopyHandle"):
            make()
