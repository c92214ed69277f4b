"""The stager in a real `async_save` of torch.distributed.checkpoint, without a process group."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from park_support import step, trained
from torch.distributed.checkpoint.staging import AsyncStager

import tdcopier

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(params=["with the optimizer", "without"])
def with_optimizer(request):
    return request.param == "with the optimizer"


def test_async_save_writes_the_state_of_the_call(
    device, tmp_path, with_optimizer, stall, reading_stream
):
    model, optimizer = trained(device)
    sevens = torch.full_like(model.large, 7)
    stager = tdcopier.SnapshotStager(optimizer=optimizer if with_optimizer else None)
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
    stager = tdcopier.SnapshotStager(optimizer=optimizer)
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
    stager = tdcopier.SnapshotStager(optimizer=optimizer)
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
    stager = tdcopier.SnapshotStager()
    with pytest.raises(ValueError, match="is of layout"):
        stager.stage({"s": torch.eye(3).to_sparse()})
    stager.synchronize_staging()
    stager.close()
