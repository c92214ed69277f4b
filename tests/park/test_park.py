"""Parking and resuming a state in place: values, identity, sharing, kinds of trees."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from park_support import (
    LARGE,
    all_tensors,
    assert_values,
    has_memory,
    is_resident,
    step,
    trained,
    values_of,
)
from tensordict import TensorDict, TensorDictParams

import tdcopier
from tdcopier import _C
from tdcopier._park.tensors import tensors_in


def storages(*states: Any) -> set[int]:
    found = tensors_in(states, gradients=True).tensors
    return {each.untyped_storage()._cdata for each in found if each.numel()}


# ---- values and identity -------------------------------------------------------------------------


def test_a_parked_state_has_no_memory_and_a_resumed_one_its_old_values(device):
    model, optimizer = trained(device)
    expected = values_of(model, optimizer)
    tensors = all_tensors(model, optimizer)
    parked = tdcopier.park([model, optimizer])
    assert parked.is_parked
    assert not is_resident(model, optimizer)
    on_device = storages(model, optimizer)
    assert parked.nbytes >= 4 * LARGE * 3
    parked.resume()
    assert not parked.is_parked
    assert is_resident(model, optimizer)
    assert_values(expected, model, optimizer)
    now = all_tensors(model, optimizer)
    assert all(a is b for a, b in zip(now, tensors, strict=True))
    assert storages(model, optimizer) == on_device


def test_training_goes_on_as_if_nothing_had_happened(device):
    model, optimizer = trained(device)
    other, other_optimizer = trained(device)
    for number in range(5):
        expected = step(other, other_optimizer, number)
        assert step(model, optimizer, number) == expected
        with tdcopier.parked(model, optimizer):
            assert not is_resident(model, optimizer)
        assert_values(values_of(other, other_optimizer), model, optimizer)


@pytest.mark.sim
def test_hundreds_of_cycles_change_no_bit_and_keep_no_memory(sim):
    torch.manual_seed(0)
    models = [torch.nn.Linear(8, 4).to("sim") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
    batch = torch.randn(3, 8).to("sim")
    used: list[tuple[int, int]] = []
    for cycle in range(300):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        with tdcopier.parked(models[0], optimizers[0]):
            pass
        if cycle in (10, 299):
            sim.synchronize()
            _C.testing.settle()
            used.append((sim.memory_stats().allocated_bytes, sim.pinned_bytes().in_use))
    assert used[0][0] == used[1][0]
    assert used[1][1] <= used[0][1] + 2**18
    assert_values(values_of(models[1], optimizers[1]), models[0], optimizers[0])


def test_tied_weights_and_views_keep_sharing_their_memory(device):
    model, _ = trained(device)
    outside = model.table[:10]  # not in the state
    tdcopier.park(model).resume()
    assert model.head.weight is model.embed.weight
    assert model.lower.data_ptr() == model.table[150:].data_ptr()
    with torch.no_grad():
        model.table.fill_(7)
    assert outside.eq(7).all()
    assert model.lower.eq(7).all()


def test_version_counters_hooks_and_gradients_stay(device):
    model, optimizer = trained(device)
    versions = [p._version for p in model.parameters()]
    seen = []
    model.large.register_hook(lambda grad: seen.append(grad.shape))
    grad = model.large.grad
    kept = model.large.sum() * model.large.sum()  # its graph saves what comes from the parameter
    with tdcopier.parked(model, optimizer):
        assert model.large.requires_grad
    assert [p._version for p in model.parameters()] == versions
    assert model.large.grad is grad
    kept.backward()
    assert seen == [(LARGE,)]


def test_gradients_stay_on_the_device_if_asked_for(device):
    model, _ = trained(device)
    with tdcopier.parked(model, gradients=False):
        assert has_memory(model.large.grad)
        assert not has_memory(model.large)
    with tdcopier.parked(model):
        assert not has_memory(model.large.grad)


def test_an_optimizer_alone_parks_its_state_and_not_the_parameters(device):
    model, optimizer = trained(device)
    expected = values_of(model, optimizer)
    with tdcopier.parked(optimizer):
        assert is_resident(model)
        state = optimizer.state[model.large]
        assert not has_memory(state["exp_avg"])
        assert state["step"].device.type == "cpu"
        assert state["step"].item() == 1
    assert_values(expected, model, optimizer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_every_dtype_is_moved_by_its_bytes(device, dtype):
    source = (torch.randn(300, 301) * 3).to(dtype)
    tensor = source.to(device)
    with tdcopier.parked(tensor):
        pass
    assert torch.equal(tensor.cpu(), source)


def test_a_storage_is_moved_as_a_whole_with_the_offset_of_a_view(device):
    base = torch.arange(float(LARGE)).to(device)
    view = base[1000:2000:2]
    with tdcopier.parked([view]):
        assert not has_memory(base)
    assert torch.equal(base.cpu(), torch.arange(float(LARGE)))
    assert torch.equal(view.cpu(), torch.arange(1000.0, 2000.0, 2))


def test_trees_of_all_kinds_are_taken_apart(device):
    model, optimizer = trained(device)
    for state in (
        model.state_dict(),
        optimizer.state_dict(),
        list(model.parameters()),
        TensorDict.from_module(model),
        TensorDictParams(TensorDict({"a": {"b": torch.ones(LARGE, device=device)}})),
        TensorDict({"x": torch.ones(4, 3, device=device)}, batch_size=[4]),
        OrderedDict(a=(torch.ones(3, device=device), {"m": model, "n": 3, "o": optimizer})),
        torch.ones(3, device=device),
    ):
        found = [t for t in tensors_in(state, gradients=False).tensors if t.numel() != 0]
        assert found
        before = values_of(state)
        parked = tdcopier.park(state)
        assert not any(map(has_memory, found))
        parked.resume()
        assert_values(before, state)


def test_a_tensordict_of_parameters_parks_those_of_the_module(device):
    model, _ = trained(device)
    with tdcopier.parked(TensorDict.from_module(model)):
        assert not has_memory(model.large)
    assert is_resident(model)


def test_wrapper_subclasses_are_parked_by_the_tensors_in_them(device):
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = (torch.full((LARGE,), value, device=device) for value in (1.0, 2.0))
    wrapped = TwoTensor(a, b)
    nested = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.zeros(4, 3)], layout=torch.jagged
    ).to(device)
    with tdcopier.parked({"x": wrapped, "y": nested}):
        assert not has_memory(a)
        assert not has_memory(b)
        assert not has_memory(nested.values())
    assert a.eq(1).all()
    assert b.eq(2).all()
    assert nested.values().sum().item() == 6


def test_what_has_no_device_memory_stays_as_it_is(device):
    host = torch.ones(3)
    state = {
        "host": host,
        "pinned": host.pin_memory(),
        "shared": torch.ones(3).share_memory_(),
        "meta": torch.ones(3, device="meta"),
        "empty": torch.empty(0, 3, device=device),
        "number": 3,
        "none": None,
    }
    addresses = [state[name].data_ptr() for name in ("host", "pinned", "shared")]
    parked = tdcopier.park(state)
    assert parked.nbytes == 0
    assert [state[name].data_ptr() for name in ("host", "pinned", "shared")] == addresses
    parked.resume()
    assert not parked.is_parked


def test_an_empty_state_can_be_parked_and_resumed(device):
    for state in ([], {}, torch.nn.ReLU()):
        parked = tdcopier.park(state)
        assert parked.ready()
        parked.wait_parked()
        parked.resume()


def test_two_devices_are_parked_together(device, other_device):
    state = [torch.full((LARGE,), n, device=d) for n, d in ((1.0, device), (2.0, other_device))]
    with tdcopier.parked(*state):
        assert not any(map(has_memory, state))
    assert [t.device for t in state] == [torch.device(device), torch.device(other_device)]
    assert [t.mean().item() for t in state] == [1, 2]


def test_tensors_of_an_earlier_copy_which_share_a_chunk_are_parked(device):
    source = [torch.full((n,), float(n)) for n in (3, 5, LARGE)]
    made = tdcopier.copy(source, device)
    with tdcopier.parked(made[:1]):
        assert not has_memory(made[1])
    assert [t.mean().item() for t in made] == [3, 5, LARGE]


def test_a_lazy_clone_becomes_a_real_one(device):
    source = torch.arange(float(LARGE)).to(device)
    lazy = source._lazy_clone()
    with tdcopier.parked([lazy]):
        assert torch.equal(source.cpu(), torch.arange(float(LARGE)))
    assert torch.equal(lazy.cpu(), torch.arange(float(LARGE)))
