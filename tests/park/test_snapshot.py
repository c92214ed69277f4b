"""Snapshots beside training: what is in them, what waits for them, and what they are good for."""

from __future__ import annotations

import contextlib
import io
import itertools
import threading
from collections import OrderedDict

import numpy as np
import pytest
import torch
from park_support import LARGE, Model, Overwriting, step, trained
from support import same_bytes
from tensordict import TensorDict, TensorDictParams, lazy_stack

import tdcopier
from tdcopier import _C


def assert_same_dict(got, expected, path="state"):
    """Asserts equal structure and bytes, with all tensors on the host."""
    if isinstance(expected, torch.Tensor):
        assert got.device.type == "cpu", path
        assert same_bytes(got, expected), path
    elif isinstance(expected, dict):
        assert list(got) == list(expected), path
        for key, value in expected.items():
            assert_same_dict(got[key], value, f"{path}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(got) == len(expected), path
        for number, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert_same_dict(a, b, f"{path}[{number}]")
    else:
        assert got == expected, path


def on_host(model, optimizer):
    """Returns the state dicts with clones on the host."""
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    buffer.seek(0)
    return torch.load(buffer, map_location="cpu", weights_only=False)


def test_a_snapshot_has_the_state_of_the_call_and_training_goes_on(device):
    model, optimizer = trained(device)
    other, other_optimizer = trained(device)
    for number in range(5):
        expected = on_host(model, optimizer)
        taken = tdcopier.snapshot({"model": model, "optimizer": optimizer})
        for each in range(3):
            a = step(model, optimizer, number + each)
            b = step(other, other_optimizer, number + each)
            assert a == b
        got = taken.get()
        assert_same_dict(got, expected)
        assert taken.get() is got
        assert taken.ready()


@pytest.mark.parametrize("given", ["in the state", "as an argument"])
def test_a_step_of_the_optimizer_waits_until_the_state_has_been_read(
    device, stall, reading_stream, given
):
    model, _ = trained(device)
    expected = model.large.detach().cpu().clone()
    optimizer = Overwriting(model.parameters())
    state = [model, optimizer] if given == "in the state" else [model]
    other = None if given == "in the state" else optimizer
    with stall(reading_stream):
        taken = tdcopier.snapshot(state, optimizer=other)
        optimizer.step()
        assert not taken.ready()
    assert torch.equal(taken.get()[0]["large"], expected)
    assert model.large.eq(7).all()


@pytest.mark.sim
def test_work_before_the_step_does_not_wait(sim):
    tensor = torch.full((LARGE,), 3.0, device="sim")
    optimizer = Overwriting([torch.nn.Parameter(tensor)])
    tdcopier.snapshot([tensor]).get()
    with sim.hold(_C.copy_stream("sim:0", "from_device")):
        taken = tdcopier.snapshot([tensor], optimizer=optimizer)
        assert (tensor * 2).sum().item() == 6 * LARGE  # the host would wait for ever
        assert not taken.ready()
    assert taken.get()[0].eq(3).all()


def test_an_update_by_hand_waits_after_before_update(device, stall, reading_stream):
    tensor = torch.full((LARGE,), 3.0, device=device)
    sevens = torch.full_like(tensor, 7)
    with stall(reading_stream):
        taken = tdcopier.snapshot({"ema": tensor})
        taken.before_update()
        tensor.copy_(sevens)
    assert taken.get()["ema"].eq(3).all()


def test_buffers_and_small_tensors_may_change_at_once(device, stall, reading_stream):
    model, _ = trained(device)
    small = torch.full((10,), 3.0, device=device)
    expected = {name: each.cpu() for name, each in model.state_dict().items()}
    changed = [small, model.table, model.norm.running_mean]
    sevens = [torch.full_like(each, 7) for each in changed]
    with stall(reading_stream):
        taken = tdcopier.snapshot([model, small])
        for each, new in zip(changed, sevens, strict=True):
            each.copy_(new)
    got = taken.get()
    assert got[1].eq(3).all()
    assert_same_dict(dict(got[0]), expected)


def everything(device: str) -> list[torch.Tensor]:
    base = torch.arange(3.0 * LARGE, device=device)
    return [base[7:], base.view(3, -1)[1], *(torch.full((n,), 3.0, device=device) for n in (1, 33))]


def test_with_a_copy_on_the_device_anything_may_change_at_once(device, stall, reading_stream):
    state = everything(device)
    expected = [each.cpu() for each in state]
    sevens = torch.full_like(state[0], 7)
    tdcopier.snapshot(state, device_copy=True).get()
    with stall(reading_stream):
        taken = tdcopier.snapshot(state, device_copy=True)
        for each in state:
            each.copy_(sevens[: each.numel()].view(each.shape))
        assert not taken.ready()
    got = taken.get()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert got[0].untyped_storage().data_ptr() == got[1].untyped_storage().data_ptr()
    assert [got[i].untyped_storage().nbytes() for i in (0, 2, 3)] == [12 * LARGE, 4, 132]


@pytest.mark.parametrize("device_copy", [False, True])
@pytest.mark.parametrize("by", ["a step", "before_update"])
def test_an_update_on_another_stream_waits_until_the_state_has_been_copied(
    device, accelerator, stall, device_copy, by
):
    parameter = torch.nn.Parameter(torch.full((LARGE,), 3.0, device=device))
    optimizer = Overwriting([parameter])
    tdcopier.snapshot(parameter, device_copy=device_copy).get()  # pins memory
    takes, updates = accelerator.Stream(device), accelerator.Stream(device)
    accelerator.synchronize()
    with stall(takes):
        with accelerator.stream(takes):
            taken = tdcopier.snapshot([parameter], optimizer=optimizer, device_copy=device_copy)
        with accelerator.stream(updates):
            if by == "before_update":
                taken.before_update()
                parameter.data.copy_(optimizer.sevens[0])
            else:
                optimizer.step()
        assert not updates.query()
    assert taken.get()[0].eq(3).all()
    accelerator.synchronize()
    assert parameter.eq(7).all()


@pytest.mark.sim
def test_a_copy_on_the_device_that_has_no_room_leaves_the_state(sim):
    state = everything("sim")
    expected = [each.cpu() for each in state]
    with sim.fail_device_allocation(), pytest.raises(torch.OutOfMemoryError):
        tdcopier.snapshot(state, device_copy=True)
    got = tdcopier.snapshot(state, device_copy=True).get()
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_hook_acts_once_and_holds_no_dropped_snapshot(device):
    model, optimizer = trained(device)
    for _ in range(3):
        tdcopier.snapshot(model, optimizer=optimizer)
        step(model, optimizer, 0)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    waited = []
    taken = tdcopier.snapshot(model, optimizer=optimizer)
    taken.before_update = lambda: waited.append(1)
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    assert waited == [1]


def test_the_result_is_a_state_dict_that_can_be_loaded_and_saved(device):
    model, optimizer = trained(device)
    got = tdcopier.snapshot({"model": model, "optimizer": optimizer, "epoch": 3}).get()
    assert type(got["model"]) is OrderedDict
    assert got["model"]._metadata == model.state_dict()._metadata
    assert got["epoch"] == 3
    buffer = io.BytesIO()
    torch.save(got, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer)
    fresh, other = Model().to(device), None
    fresh.load_state_dict(loaded["model"])
    other = torch.optim.AdamW(optimizer.param_groups[0]["params"], lr=1.0)
    other.load_state_dict(loaded["optimizer"])
    assert other.param_groups[0]["lr"] == 0.01
    assert torch.equal(fresh.large.cpu(), model.large.cpu())


def test_the_tensors_are_pinned_share_what_was_shared_and_need_no_gradient(device):
    model, _ = trained(device)
    got = tdcopier.snapshot(model).get()
    assert got["large"].is_pinned()
    assert not got["large"].requires_grad
    same = got["embed.weight"].untyped_storage(), got["head.weight"].untyped_storage()
    assert same[0].data_ptr() == same[1].data_ptr()
    assert got["lower"].data_ptr() == got["table"][150:].data_ptr()


def test_host_tensors_arrays_and_other_values_are_copied_in_the_call(device):
    state = {
        "host": torch.ones(3),
        "array": np.ones(3),
        "list": [1, 2],
        "parameter": torch.nn.Parameter(torch.ones(2, device=device)),
        "grown": (torch.ones(2, requires_grad=True) * 2, torch.ones(2, device=device)),
        "strided": torch.arange(12.0).to(device).reshape(3, 4).t()[1:3],
        "conj": torch.ones(3, dtype=torch.complex64, device=device).conj(),
        "empty": torch.empty(0, 4, device=device),
    }
    strided = state["strided"].cpu()
    taken = tdcopier.snapshot(state)
    state["host"].zero_()
    state["array"][:] = 0
    state["list"].append(3)
    got = taken.get()
    assert got["host"].tolist() == [1, 1, 1]
    assert got["array"].tolist() == [1, 1, 1]
    assert got["list"] == [1, 2]
    assert type(got["parameter"]) is torch.Tensor
    assert got["grown"][0].tolist() == [2, 2]
    assert torch.equal(got["strided"], strided)
    assert got["strided"].stride() == state["strided"].stride()
    assert got["conj"].is_conj()
    assert got["empty"].shape == (0, 4)


def test_tensordicts_arrive_on_the_host(device):
    nested = TensorDict(
        {"a": torch.ones(4, LARGE // 4), "b": {"c": torch.arange(4)}, "text": "x"}, [4]
    ).to(device)
    lazy = lazy_stack([TensorDict({"z": torch.ones(n + 1)}, []).to(device) for n in range(2)])
    model, _ = trained(device)
    parameters = TensorDict.from_module(model)
    got = tdcopier.snapshot([nested, lazy, parameters, TensorDictParams(nested.clone())]).get()
    assert got[0].device == torch.device("cpu")
    assert got[0].batch_size == nested.batch_size
    assert got[0]["b", "c"].tolist() == [0, 1, 2, 3]
    assert got[0]["text"] == "x"
    assert got[1][1]["z"].tolist() == [1, 1]
    assert torch.equal(got[2]["large"], model.large.detach().cpu())
    assert got[3]["a"].device.type == "cpu"


def test_wrapper_subclasses_keep_their_class(device):
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = (torch.full((LARGE,), value, device=device) for value in (1.0, 2.0))
    got = tdcopier.snapshot({"x": TwoTensor(a, b)}).get()["x"]
    assert type(got) is TwoTensor
    assert got.a.device.type == "cpu"
    assert got.a.eq(1).all()
    assert got.b.eq(2).all()


@pytest.mark.cuda  # the simulated device has no such tensors
def test_a_quantized_tensor_on_a_device_is_refused_with_its_path(device):
    state = [torch.quantize_per_tensor(torch.ones(3, device=device), 0.1, 0, torch.qint8)]
    with pytest.raises(ValueError, match=r"^state\[0\] is quantized"):
        tdcopier.snapshot(state)


@pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning")  # by torch's own deepcopy
def test_a_quantized_tensor_on_the_host_is_copied(device):
    state = [torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)]
    got = tdcopier.snapshot([torch.ones(2, device=device), *state]).get()[1]
    assert got.int_repr().eq(10).all()
    assert got.q_scale() == 0.1
    assert got.data_ptr() != state[0].data_ptr()


@pytest.mark.sim
def test_a_failed_snapshot_leaves_the_state_and_the_next_one_works(sim):
    model, optimizer = trained("sim")
    expected = on_host(model, optimizer)
    for n in itertools.count(1):
        fault = sim.fail_transfer(n, direction="d2h")
        with fault, contextlib.suppress(torch.AcceleratorError):
            tdcopier.snapshot([model, optimizer]).get()
        got = tdcopier.snapshot([model, optimizer]).get()
        assert_same_dict(got, [expected["model"], expected["optimizer"]])
        if not fault.fired:
            break
    assert n > 2


def test_a_snapshot_may_be_dropped_or_read_by_another_thread(device):
    model, _ = trained(device)
    tdcopier.snapshot(model)
    got = []
    taken = tdcopier.snapshot(model)
    thread = threading.Thread(target=lambda: got.append(taken.get()))
    thread.start()
    thread.join()
    assert torch.equal(got[0]["large"], model.large.detach().cpu())


@pytest.mark.parametrize("state", ["model", "state dicts", "wrapped optimizer"])
def test_without_a_known_optimizer_later_work_waits_for_the_snapshot(
    device, stall, reading_stream, state
):
    class Wrapper:
        def __init__(self, optimizer):
            self.state_dict = optimizer.state_dict

    model, _ = trained(device)
    optimizer = Overwriting(model.parameters())
    expected = model.large.detach().cpu().clone()
    states = {
        "model": {"m": model},
        "state dicts": {"m": model.state_dict(), "o": optimizer.state_dict()},
        "wrapped optimizer": {"m": model, "o": Wrapper(optimizer)},
    }
    tdcopier.snapshot(states[state]).get()  # pins memory
    with stall(reading_stream):
        taken = tdcopier.snapshot(states[state])
        optimizer.step()
    assert torch.equal(taken.get()["m"]["large"], expected)


@pytest.mark.sim
def test_later_work_does_not_wait_if_that_is_deferred(sim):
    tensor = torch.full((LARGE,), 3.0, device="sim")
    with sim.hold(_C.copy_stream("sim:0", "from_device")):
        taken = tdcopier.snapshot([tensor], defer_wait=True)
        tensor.clone()
        torch.sim.current_stream().synchronize()  # hangs if the work waits
    assert taken.get()[0].eq(3).all()
