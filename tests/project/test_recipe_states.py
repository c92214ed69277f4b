"""Recipes for copies of a model and its optimizer in host memory, in a file or not."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_support import recipe
from support import assert_same

# ---- checkpoints ---------------------------------------------------------------------------------


def some_model(device: str, kind: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layers = [torch.nn.Linear(32, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 1000)]
    model = torch.nn.Sequential(*layers).to(device)
    return model, kind(model.parameters(), lr=0.1)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    on_host = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda leaf: leaf.cpu().clone(), state
    )
    on_host["model"]._metadata = state["model"]._metadata
    return on_host


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_a_checkpoint_holds_the_state_before_the_step_and_is_no_larger(
    device, copies, tmp_path: Path, kind
):
    module = recipe("checkpoint")
    path = str(tmp_path / "state.pt")
    torch.manual_seed(0)
    model, optimizer = some_model(device, kind)
    inputs = torch.randn(8, 32, device=device)
    module.step_and_save(model, optimizer, inputs, path)  # makes the optimizer's state
    before = state_of(model, optimizer)
    module.step_and_save(model, optimizer, inputs, path)
    stats = copies[1].stats
    assert (stats.delegated_leaves, stats.fallbacks) == (0, 0)
    # Adam has two tensors for each parameter on the device, and a counter on the host.
    adams = kind is torch.optim.Adam
    assert stats.packed_leaves == 9 + 12 * adams
    assert stats.reused_leaves == 6 * adams
    assert stats.transfers <= 2

    saved = torch.load(path)
    changed = model[0].weight.cpu()
    assert not torch.equal(saved["model"]["0.weight"], changed)
    buffers = {name: buffer.cpu() for name, buffer in model.named_buffers()}
    assert_same(dict(saved["model"]), {**before["model"], **buffers})
    assert saved["model"]._metadata == before["model"]._metadata
    for index, values in before["optimizer"]["state"].items():
        assert_same(saved["optimizer"]["state"][index], values)
    plain = io.BytesIO()
    torch.save(before, plain)
    assert Path(path).stat().st_size <= len(plain.getvalue())

    other, its_optimizer = some_model(device, kind)
    module.restore(other, its_optimizer, path, device)
    assert_same(dict(other.state_dict()), {k: v.to(device) for k, v in saved["model"].items()})
    for index, values in before["optimizer"]["state"].items():
        assert_same(state_of(other, its_optimizer)["optimizer"]["state"][index], values)


@pytest.mark.hazardous  # it looks for hazards itself
def test_nothing_writes_what_the_copy_of_a_checkpoint_reads(sim, tmp_path: Path):
    module = recipe("checkpoint")
    model, optimizer = some_model("sim", torch.optim.Adam)
    with sim.detect(), sim.pace("d2h", latency_us=2_000):  # longer than to enqueue the gradients
        for _ in range(2):
            inputs = torch.randn(8, 32, device="sim")
            module.step_and_save(model, optimizer, inputs, str(tmp_path / "state.pt"))


def test_parameters_that_share_memory_are_saved_once_for_each_name(device, tmp_path: Path):
    module = recipe("checkpoint")
    model = torch.nn.Sequential(torch.nn.Linear(100, 100), torch.nn.Linear(100, 100)).to(device)
    optimizer = torch.optim.SGD(model.parameters())
    sizes = []
    path = tmp_path / "state.pt"
    for _ in range(2):
        module.step_and_save(model, optimizer, torch.ones(2, 100, device=device), str(path))
        sizes.append(path.stat().st_size)
        model[1].weight = model[0].weight
    assert sizes[0] == sizes[1]


# ---- the state of an optimizer -------------------------------------------------------------------


def trained(device: str, kind: str) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """Returns an optimizer, and a function that takes a step and changes the learning rate."""
    model = torch.nn.Linear(3, 2).to(device)
    if kind == "SGD":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    else:  # its scheduler changes betas too
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=20)

    def step() -> None:
        model(torch.randn(2, 3).to(device)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    return optimizer, step


def tensors_of(state: dict[str, Any]) -> list[torch.Tensor]:
    values = [value for each in state["state"].values() for value in each.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]


def assert_same_state(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert got["param_groups"] == wanted["param_groups"]
    assert got["state"].keys() == wanted["state"].keys()
    for one, other in zip(tensors_of(got), tensors_of(wanted), strict=True):
        assert torch.equal(one.cpu(), other.cpu())


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_the_state_of_an_optimizer_is_refreshed_and_restored(device, kind):
    torch.manual_seed(0)
    optimizer, step = trained(device, kind)
    step()
    host = recipe("optimizer_state").HostState(optimizer)
    assert_same_state(host.state, optimizer.state_dict())
    addresses = [leaf.data_ptr() for leaf in tensors_of(host.state)]
    for _ in range(3):
        step()
        wanted = copy.deepcopy(optimizer.state_dict())
        assert host.state["param_groups"] != wanted["param_groups"]
        handle = host.refresh()
        step()  # at once
        assert handle.get() is host.state
        assert (handle.stats.reused_leaves, handle.stats.opaque_differences) == (0, 0)
        assert_same_state(host.state, wanted)
        assert [leaf.data_ptr() for leaf in tensors_of(host.state)] == addresses
        assert not any(leaf.device.type != "cpu" for leaf in tensors_of(host.state))
        host.restore()
        assert_same_state(optimizer.state_dict(), wanted)
        step()
        assert_same_state(host.state, wanted)
        host.restore()
