"""The stager in a real `async_save` of torch.distributed.checkpoint, without a process group."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from park_support import step, trained
from torch.distributed.checkpoint.staging import AsyncStager

import tdcopier
from tdcopier import _C

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(params=["with the optimizer", "without"])
def with_optimizer(request):
    return request.param == "with the optimizer"


def test_async_save_writes_the_state_of_the_call(
    device, tmp_path, with_optimizer, stall, reading_stream
):
    model, optimizer = trained(device)
    sevens = torch.full_like(model.large, 7)
    stager = tdcopier.checkpoint.SnapshotStager(optimizer=optimizer if with_optimizer else None)
    assert isinstance(stager, AsyncStager)
    for number in range(3):
        state = {"model": model.state_dict(), "step": number}
        expected = {name: value.cpu().clone() for name, value in state["model"].items()}
        with stall(reading_stream):
            saved = dcp.async_save(
                state, checkpoint_id=tmp_path / str(number), async_stager=stager, no_dist=True
            )
            if not with_optimizer:
                overwrite(model, sevens)
        step(model, optimizer, number)
        getattr(saved, "upload_completion", saved).result()
        stager.synchronize_staging()
        found = {"model": {name: torch.zeros_like(v) for name, v in expected.items()}, "step": -1}
        dcp.load(found, checkpoint_id=tmp_path / str(number), no_dist=True)
        assert found["step"] == number
        for name, value in expected.items():
            assert torch.equal(found["model"][name], value), name
    stager.close()


@torch.no_grad()
def overwrite(model, value):
    model.large.copy_(value)


def test_an_update_by_hand_waits_after_before_update(device, stall, reading_stream):
    model, optimizer = trained(device)
    expected = model.large.detach().cpu().clone()
    sevens = torch.full_like(model.large, 7)
    stager = tdcopier.checkpoint.SnapshotStager(optimizer=optimizer)
    stager.before_update()  # there is no state yet
    with stall(reading_stream):
        staged = stager.stage(model.state_dict())
        stager.before_update()
        overwrite(model, sevens)
    assert torch.equal(staged.result()["large"], expected)
    stager.before_update()
    stager.close()


def test_modules_and_optimizers_can_be_given_to_async_save(device, tmp_path):
    model, optimizer = trained(device)
    expected = model.large.detach().cpu().clone()
    stager = tdcopier.checkpoint.SnapshotStager(optimizer=optimizer)
    saved = dcp.async_save(
        {"model": model, "optimizer": optimizer},
        checkpoint_id=tmp_path,
        async_stager=stager,
        no_dist=True,
    )
    step(model, optimizer, 0)
    getattr(saved, "upload_completion", saved).result()
    found = {"model": {"large": torch.zeros_like(expected)}}
    dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(found["model"]["large"], expected)
    stager.close()


def test_a_state_that_cannot_be_staged_is_refused_in_the_call(device, tmp_path):
    stager = tdcopier.checkpoint.SnapshotStager()
    with pytest.raises(ValueError, match="is of layout"):
        stager.stage({"s": torch.eye(3).to_sparse()})
    stager.synchronize_staging()
    stager.close()


@pytest.mark.parametrize("with_callers", [False, True])
def test_a_stager_keeps_no_result_that_has_arrived(device, with_callers):
    """A limit on pinned memory that is enough for one state is enough for all, one by one."""
    state = {"x": torch.ones(20 << 18, device=device)}
    tdcopier.snapshot(state).get()
    _C.testing.settle()
    tdcopier.pinned.trim()
    before = tdcopier.pinned.usage()
    tdcopier.limits.set_pinned_bytes(before.leased_bytes + before.free_bytes + (30 << 20))
    stager = tdcopier.checkpoint.SnapshotStager()
    try:
        for _ in range(3):
            staged = stager.stage(state)
            if with_callers:
                assert staged.result()["x"].eq(1).all()
            del staged
            stager.synchronize_staging()
    finally:
        stager.close()
        tdcopier.limits.set_pinned_bytes(before.limit_bytes)


@pytest.mark.sim
def test_the_error_of_the_last_snapshot_is_raised_by_synchronize_staging(sim):
    stager = tdcopier.checkpoint.SnapshotStager()
    with sim.fail_transfer(direction="d2h", when="execution"):
        with sim.hold(_C.copy_stream("sim:0", "from_device")):
            stager.stage({"x": torch.ones(1 << 20, device="sim")})
        for _ in range(2):
            with pytest.raises(torch.AcceleratorError):
                stager.synchronize_staging()
    stager.close()


def test_a_stager_is_closed_by_its_context(device):
    with tdcopier.checkpoint.SnapshotStager() as stager:
        staged = stager.stage({"x": torch.ones(3, device=device)})
    assert staged.result()["x"].eq(1).all()
    with pytest.raises(RuntimeError, match="the stager is closed"):
        stager.stage({"x": torch.ones(3, device=device)})
    stager.close()


def test_a_callback_of_a_staged_result_may_stage_the_next_state(device):
    with tdcopier.checkpoint.SnapshotStager() as stager:
        chained, done = [], threading.Event()

        def again(_: Any) -> None:
            chained.append(stager.stage({"x": torch.full((3,), 2.0, device=device)}))
            done.set()

        stager.stage({"x": torch.ones(3, device=device)}).add_done_callback(again)
        assert done.wait(30)
        assert chained[0].result()["x"].eq(2).all()
