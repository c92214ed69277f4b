"""Snapshots of trees: which values become state dicts, what is copied, and what is refused."""

from __future__ import annotations

import gc
import signal
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from park_support import LARGE, Model, Overwriting, is_resident, step, trained
from tensordict import TensorDict

import tdcopier
from tdcopier import _C


class Named(NamedTuple):
    model: Any
    optimizer: Any


@dataclass
class Data:
    model: Any
    optimizer: Any


class DictClass(dict):
    pass


CONTAINERS = {
    "dict": lambda model, optimizer: {"model": model, "optimizer": optimizer},
    "OrderedDict": lambda model, optimizer: OrderedDict(model=model, optimizer=optimizer),
    "defaultdict": lambda model, optimizer: defaultdict(int, model=model, optimizer=optimizer),
    "subclass of dict": lambda model, optimizer: DictClass(model=model, optimizer=optimizer),
    "named tuple": Named,
    "dataclass": Data,
    "tuple in a list": lambda model, optimizer: [(model, optimizer)],
}


def in_container(tree):
    """Returns what is at the places of the model and the optimizer."""
    if isinstance(tree, list):
        return tree[0]
    if isinstance(tree, dict):
        return tree["model"], tree["optimizer"]
    return tree.model, tree.optimizer


@pytest.mark.parametrize("name", CONTAINERS)
def test_modules_and_optimizers_become_state_dicts_in_any_container(
    device, stall, reading_stream, name
):
    model, _ = trained(device)
    optimizer = Overwriting(model.parameters())
    expected = model.large.detach().cpu().clone()
    state = CONTAINERS[name](model, optimizer)
    with stall(reading_stream):
        taken = tdcopier.snapshot(state)
        optimizer.step()
    got = taken.get()
    assert type(got) is type(state)
    of_model, of_optimizer = in_container(got)
    assert torch.equal(of_model["large"], expected)
    assert of_optimizer == optimizer.state_dict()
    assert in_container(state) == (model, optimizer)


@pytest.mark.parametrize("name", CONTAINERS)
def test_modules_and_optimizers_are_parked_in_any_container(device, name):
    model, optimizer = trained(device)
    with tdcopier.parked(CONTAINERS[name](model, optimizer)):
        assert not is_resident(model, optimizer)
    assert is_resident(model, optimizer)


def test_the_path_of_a_value_in_a_container_is_that_of_the_container(device):
    state = {"a": Named(torch.eye(3).to_sparse(), None)}
    with pytest.raises(ValueError, match=r"^state\['a'\]\.model is of layout"):
        tdcopier.park(state)
    state = [Data(None, torch.eye(3).to_sparse())]
    with pytest.raises(ValueError, match=r"^state\[0\]\.optimizer is of layout"):
        tdcopier.snapshot(state)


def test_the_attributes_of_a_state_dict_are_copied(device):
    states = Model().to(device).state_dict()
    got = tdcopier.snapshot({"model": states}).get()["model"]
    assert got._metadata == states._metadata
    assert got._metadata is not states._metadata


def test_a_list_that_is_there_twice_is_there_twice_in_the_result(device):
    shared = [torch.ones(3, device=device)]
    got = tdcopier.snapshot({"a": shared, "b": shared}).get()
    assert got["a"] is got["b"]


def test_a_locked_tensordict_arrives_locked(device):
    assert tdcopier.snapshot(TensorDict({"a": torch.ones(3)}).to(device).lock_()).get().is_locked


def test_classes_in_a_state_stay_as_they_are(device):
    state = {"class": torch.nn.Linear, "x": torch.ones(3, device=device)}
    assert tdcopier.snapshot(state).get()["class"] is torch.nn.Linear


def test_a_module_that_is_not_initialized_is_refused_with_its_path(device):
    with pytest.raises(ValueError, match=r"^state\['weight'\] is not initialized"):
        tdcopier.snapshot(torch.nn.LazyBatchNorm1d(device=device))


@pytest.mark.parametrize("given", [[], 3, torch.nn.Linear(2, 2)], ids=["list", "int", "module"])
@pytest.mark.parametrize("device_copy", [False, True])
def test_an_optimizer_that_is_none_is_refused(device, given, device_copy):
    name = type(given).__name__
    with pytest.raises(TypeError, match=f"must be an optimizer or None; got an? {name}: "):
        tdcopier.snapshot(torch.ones(3, device=device), optimizer=given, device_copy=device_copy)
    with pytest.raises(TypeError, match="must be an optimizer or None"):
        tdcopier.checkpoint.SnapshotStager(optimizer=given)


def test_buffers_that_are_wrappers_may_change_at_once(device, stall, reading_stream):
    from torch.testing._internal.two_tensor import TwoTensor

    model, sevens = torch.nn.Module(), torch.full((LARGE,), 7.0, device=device)
    a, b = (torch.full((LARGE,), 3.0, device=device) for _ in range(2))
    model.register_buffer("two", TwoTensor(a, b))
    torch.accelerator.synchronize()
    with stall(reading_stream):
        taken = tdcopier.snapshot(model)
        model.two.a.copy_(sevens)
    assert taken.get()["two"].a.eq(3).all()


@pytest.mark.parametrize("device_copy", [False, True])
def test_dropped_snapshots_leave_no_memory_to_the_garbage_collector(device, device_copy):
    model, optimizer = trained(device)
    state = {"model": model, "optimizer": optimizer, "named": Named(model, TensorDict())}
    tdcopier.snapshot(state, device_copy=device_copy).get()
    step(model, optimizer, 0)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            tdcopier.snapshot(state, device_copy=device_copy).get()
        _C.testing.settle()
        assert tdcopier.pinned.usage().leased_bytes == 0
    finally:
        gc.enable()


@pytest.mark.sim
def test_a_signal_handler_may_call_get_while_get_waits(sim):
    tensor = torch.full((LARGE,), 3.0, device="sim")
    hold = sim.hold(_C.copy_stream("sim:0", "from_device"))
    taken = tdcopier.snapshot([tensor])
    seen = []

    def handle(*_: object) -> None:
        hold.release()
        seen.append(taken.get())

    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert taken.get()[0].eq(3).all()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen[0] is taken.get()


@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("with_device", [False, True])
def test_tensordicts_in_any_container_arrive_on_the_host(device, name, with_device):
    td = TensorDict({"a": torch.full((LARGE,), 3.0, device=device)})
    td = td.to(device) if with_device else td
    state = CONTAINERS[name](td, {"b": [td]})
    got, beside = in_container(tdcopier.snapshot(state).get())
    assert got["a"].device.type == "cpu"
    assert got["a"].eq(3).all()
    assert beside["b"][0] is got
    assert got.device == torch.device("cpu")  # as `.to("cpu")` has it


def test_a_handler_that_takes_a_snapshot_during_a_step_gets_its_own_wait(device, monkeypatch):
    parameter = torch.nn.Parameter(torch.full((LARGE,), 3.0, device=device))
    optimizer = Overwriting([parameter])
    before_update, taken = tdcopier.Snapshot.before_update, []

    def interrupted(self):
        before_update(self)
        if not taken:
            taken.append(None)
            taken[0] = tdcopier.snapshot([parameter], optimizer=optimizer)

    first = tdcopier.snapshot([parameter], optimizer=optimizer)
    waited = []
    monkeypatch.setattr(
        tdcopier.Snapshot, "before_update", lambda self: (interrupted(self), waited.append(self))
    )
    optimizer.step()
    assert waited == [first, taken[0]]
    assert taken[0].get()[0].eq(3).all()
