"""Mistakes with handles, sizes and options: each is told what was found and what to do."""

from __future__ import annotations

import dataclasses
import io
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from park_support import LARGE, trained

import tdcopier
from tdcopier import _C
from tdcopier._pinned_pool import lease

# ---- handles -------------------------------------------------------------------------------------


@pytest.fixture
def parked(device):
    handle = tdcopier.park([torch.ones(LARGE, device=device)])
    yield handle
    handle.resume()


@pytest.fixture
def taken(device):
    return tdcopier.snapshot([torch.ones(LARGE, device=device)])


USES = {
    "item": lambda handle: handle["model"],
    "number": lambda handle: handle[0],
    "loop": lambda handle: list(handle),
    "cpu": lambda handle: handle.cpu(),
    "state_dict": lambda handle: handle.state_dict(),
    "result": lambda handle: handle.result(),
}


@pytest.mark.parametrize("use", USES)
def test_a_parked_handle_that_is_used_as_the_state_says_resume(parked, use):
    with pytest.raises(
        (TypeError, AttributeError),
        match=r"^a handle of park\(\) .*: call its resume\(\), and use the state itself$",
    ):
        USES[use](parked)


@pytest.mark.parametrize("use", USES)
def test_a_snapshot_that_is_used_as_the_state_says_get(taken, use):
    with pytest.raises(
        (TypeError, AttributeError), match=r"^a handle of snapshot\(\) .*: use what its get\(\) ret"
    ):
        USES[use](taken)


def test_handles_have_no_other_attributes(parked, taken):
    for handle in (parked, taken):
        assert not hasattr(handle, "__len__")
        assert not hasattr(handle, "state_dict")
        assert getattr(handle, "shape", 3) == 3
        assert handle
    with pytest.raises(TypeError, match=r"take its get\(\)"):
        torch.save(taken, io.BytesIO())


def test_a_parked_handle_is_made_by_park_alone():
    with pytest.raises(TypeError, match=r"^park\(\) makes handles; got a Linear"):
        tdcopier.Parked(torch.nn.Linear(2, 2))


def test_the_text_of_a_snapshot_says_its_size_and_whether_it_has_arrived(taken):
    taken.get()
    assert repr(taken) == f"<tdcopier.Snapshot: {4 * LARGE} bytes, arrived>"


@pytest.mark.sim
def test_the_text_of_a_snapshot_on_its_way_says_so(sim):
    state = [torch.ones(LARGE, device="sim")]
    with sim.hold(_C.copy_stream("sim:0", "from_device")):
        taken = tdcopier.snapshot(state)
        assert repr(taken) == f"<tdcopier.Snapshot: {4 * LARGE} bytes, on its way>"
    taken.get()


def test_the_text_of_a_stager_says_what_it_does(device):
    model, optimizer = trained(device)
    with tdcopier.checkpoint.SnapshotStager(optimizer=optimizer) as stager:
        assert repr(stager) == "<tdcopier.checkpoint.SnapshotStager: idle, waits in step of AdamW>"
        stager.stage({"model": model}).result()
    assert repr(stager) == "<tdcopier.checkpoint.SnapshotStager: closed, waits in step of AdamW>"
    with tdcopier.checkpoint.SnapshotStager() as stager:
        assert repr(stager) == "<tdcopier.checkpoint.SnapshotStager: idle>"


# ---- sizes and options ---------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [1e9, "1GB", None], ids=str)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        (tdcopier.pinned.reserve, "nbytes"),
        (tdcopier.limits.set_pinned_bytes, "limit_bytes"),
        (tdcopier.limits.set_staging_bytes, "limit_bytes"),
        (tdcopier.limits.set_run_ahead, "batches"),
        (lambda size: lease([3, size]), "each of sizes_bytes"),
    ],
)
def test_a_number_that_is_none_is_refused_with_what_was_found(device, call, name, wrong):
    found = {1e9: "the float 1000000000.0", "1GB": "the str '1GB'", None: "the NoneType None"}
    with pytest.raises(TypeError, match=rf"^{name} must be an integer; got {found[wrong]}$"):
        call(wrong)


def test_integers_of_other_classes_are_accepted(device):
    assert tdcopier.pinned.reserve(np.int64(0)) == 0
    assert [each.numel() for each in lease([np.int64(3), torch.tensor(4)])] == [3, 4]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda state: tdcopier.park(state, gradients="no"), "gradients"),
        (lambda state: tdcopier.parked(state, gradients=0.0).__enter__(), "gradients"),
        (lambda state: tdcopier.snapshot(state, device_copy="cpu"), "device_copy"),
        (lambda state: tdcopier.snapshot(state, defer_wait="no"), "defer_wait"),
    ],
)
def test_an_option_that_is_no_bool_is_refused(device, call, name):
    state = [torch.ones(LARGE, device=device)]
    with pytest.raises(TypeError, match=rf"^{name} must be a bool; got "):
        call(state)
    assert state[0].eq(1).all()


# ---- states --------------------------------------------------------------------------------------


def test_a_class_in_the_place_of_an_object_is_called_one():
    with pytest.raises(TypeError, match=r"^state is the class Linear, in which no tensor was"):
        tdcopier.park(torch.nn.Linear)


def test_arrays_of_numpy_are_not_parked(device):
    for state, path in ((np.ones(3), "state"), ({"a": [np.ones(3)]}, r"state\['a'\]\[0\]")):
        with pytest.raises(TypeError, match=rf"^{path} is a ndarray, in which no tensor was found"):
            tdcopier.park(state)
    with tdcopier.parked(np.ones(3), torch.ones(3, device=device)):
        pass
    assert tdcopier.snapshot({"a": np.ones(3)}).get()["a"].sum() == 3


@dataclasses.dataclass
class Options:
    lock: Any


class Config:
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("state_of", "path"),
    [
        (lambda lock: {"a": [{"lock": lock}]}, r"state\['a'\]\[0\]\['lock'\] is a lock"),
        (lambda lock: ({"config": Config()},), r"state\[0\]\['config'\] is a Config"),
        (lambda lock: {"module": torch}, r"state\['module'\] is a module"),
        (lambda lock: {("k", lock): 3}, r"state \(a key\) is a tuple"),
        (lambda lock: {"o": Options(lock)}, r"state\['o'\]\.lock is a lock"),
        (lambda lock: {"o": defaultdict(list, a=lock)}, r"state\['o'\]\['a'\] is a lock"),
    ],
)
def test_a_value_that_cannot_be_copied_is_named_with_its_path(device, state_of, path):
    state = [torch.ones(3, device=device)]
    values: Any = state_of(threading.Lock())
    values = {**values, "x": state} if isinstance(values, dict) else (*values, state)
    with pytest.raises(TypeError, match=rf"^{path}, which copy\.deepcopy cannot copy: .*leave it"):
        tdcopier.snapshot(values)


def test_a_handle_within_a_state_is_named_with_its_path(device, taken):
    with pytest.raises(TypeError, match=r"^state\['h'\] is a Snapshot, .* give what its get\(\)"):
        tdcopier.snapshot({"x": torch.ones(3, device=device), "h": taken})
