"""The tensors of a state while it is parked, and the handle."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings

import pytest
import torch
from park_support import LARGE, Model, assert_values, trained, values_of

import tdcopier
from tdcopier import _C, _checking

# ---- the tensors --------------------------------------------------------------------------------


needs_raising_storages = pytest.mark.skipif(
    not _C.EMPTY_STORAGES_RAISE, reason="this torch cannot make a storage raise"
)


@needs_raising_storages
@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: model.large + 1,
        lambda model, optimizer: print(model.large),
        lambda model, optimizer: repr(model.head.weight),
        lambda model, optimizer: model.head(torch.ones(2, 6, device=model.large.device)),
        lambda model, optimizer: model(torch.arange(8, device=model.large.device)),
        lambda model, optimizer: model.table.t()[3].contiguous(),
        lambda model, optimizer: model.lower.sum(),
        lambda model, optimizer: pickle.dumps(model.large),
        lambda model, optimizer: torch.save(model.state_dict(), io.BytesIO()),
        lambda model, optimizer: model.large.cpu(),
        lambda model, optimizer: model.large.data_ptr(),
        lambda model, optimizer: model.table.fill_(0),
        lambda model, optimizer: optimizer.step(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
        lambda model, optimizer: copy.deepcopy(model),
        lambda model, optimizer: model.load_state_dict(Model().state_dict()),
    ],
)
def test_the_use_of_a_parked_tensor_raises_and_says_why(device, use):
    model, optimizer = trained(device)
    expected = values_of(model)  # `optimizer.step` counts on the host before it raises
    parked = tdcopier.park([model, optimizer])
    with pytest.raises(RuntimeError, match=r"parked.*resume\(\)"):
        use(model, optimizer)
    parked.resume()
    assert_values(expected, model)


def test_a_copy_of_a_parked_tensor_is_refused_with_its_path(device):
    state = {"a": torch.ones(5, device=device)}
    with tdcopier.parked(state), pytest.raises((ValueError, RuntimeError), match=r"\['a'\]|parked"):
        tdcopier.copy(state, "cpu")


@needs_raising_storages
def test_a_view_made_meanwhile_is_resumed_too(device):
    tensor = torch.arange(float(LARGE), device=device)
    with tdcopier.parked(tensor):
        view = tensor[10:].view(-1, 2).t()
        with pytest.raises(RuntimeError, match=r"parked.*resume\(\)"):
            view.sum()
    assert view[0, :3].tolist() == [10, 12, 14]


@pytest.mark.parametrize("is_checked", [False, True])
@pytest.mark.parametrize("elements", [5, LARGE])
def test_every_call_refuses_a_parked_tensor(device, monkeypatch, elements, is_checked):
    monkeypatch.setattr(_checking, "enabled", is_checked)
    tensor = torch.ones(elements, device=device)
    there, here = torch.zeros(elements, device=device), torch.zeros(elements)
    plan = tdcopier.prepare([torch.ones(elements, device=device)], "cpu")
    told = "parked" if _C.EMPTY_STORAGES_RAISE else "parked|setStorage"  # scatter may ask torch
    with tdcopier.parked(tensor):
        for call in (
            lambda: tdcopier.copy([tensor], "cpu"),
            lambda: tdcopier.copy_into([tensor], [here]),
            lambda: tdcopier.copy_into([tensor], [there]),
            lambda: tdcopier.copy_into([here], [tensor]),
            lambda: tdcopier.copy_into([there], [tensor]),
            lambda: tdcopier.gather([tensor], [1, 2], "cpu"),
            lambda: tdcopier.scatter([torch.ones(1)], [tensor], [1]),
            lambda: plan.start_copy([tensor]).get(),
            lambda: tdcopier.snapshot([tensor]),
            lambda: tdcopier.park([tensor]),
        ):
            with pytest.raises((ValueError, RuntimeError), match=told):
                call()
    assert tensor.eq(1).all()
    assert not here.any()
    assert not there.any()


def test_what_changes_in_between_is_left_alone(device):
    model, optimizer = trained(device)
    expected = model.large.detach().cpu()
    parked = tdcopier.park([model, optimizer])
    optimizer.zero_grad(set_to_none=True)
    model.norm.weight = torch.nn.Parameter(torch.full((6,), 5.0, device=device))
    model.extra = torch.nn.Parameter(torch.ones(3, device=device))
    parked.resume()
    assert model.norm.weight.eq(5).all()
    assert model.extra.eq(1).all()
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(model.large.detach().cpu(), expected)


def test_a_tensor_that_got_other_memory_meanwhile_keeps_it(device):
    kept, other = (torch.ones(LARGE, device=device) for _ in range(2))
    parked = tdcopier.park([kept, other])
    kept.data = torch.full((LARGE,), 2.0, device=device)
    parked.resume()
    assert kept.eq(2).all()
    assert other.eq(1).all()


def test_tensors_that_are_gone_get_no_memory(device, monkeypatch):
    state = [torch.ones(LARGE, device=device) for _ in range(3)]
    parked = tdcopier.park(state)
    parked.wait_parked()
    del state[0]
    made = []
    of_torch = torch.empty

    def empty(*arguments, **options):
        made.append(arguments)
        return of_torch(*arguments, **options)

    monkeypatch.setattr(torch, "empty", empty)
    _C.testing.settle()
    parked.resume()
    assert len(made) == 2


# ---- the handle ----------------------------------------------------------------------------------


def test_resume_may_be_called_again_and_does_nothing(device):
    tensor = torch.ones(LARGE, device=device)
    parked = tdcopier.park([tensor])
    parked.resume()
    with torch.no_grad():
        tensor.fill_(2)
    parked.resume()
    parked.wait_parked()
    assert parked.ready()
    assert tensor.eq(2).all()


def test_a_block_resumes_after_an_error_too(device):
    tensor = torch.ones(LARGE, device=device)
    with pytest.raises(KeyError), tdcopier.parked(tensor):
        raise KeyError
    assert tensor.eq(1).all()


def test_a_dropped_handle_resumes_its_tensors_and_warns(device):
    model, optimizer = trained(device)
    expected = values_of(model, optimizer)
    parked = tdcopier.park([model, optimizer])
    with pytest.warns(RuntimeWarning, match=r"dropped while its tensors were parked"):
        del parked
    assert_values(expected, model, optimizer)


def test_a_dropped_handle_of_tensors_that_are_gone_says_nothing(device):
    state = [torch.ones(LARGE, device=device)]
    parked = tdcopier.park(state)
    parked.wait_parked()
    _C.testing.settle()
    del state
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del parked


def test_a_handle_may_be_resumed_by_another_thread(device):
    tensor = torch.ones(LARGE, device=device)
    parked = tdcopier.park([tensor])
    failures = []

    def resume():
        try:
            parked.resume()
            torch.get_device_module(device).synchronize()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=resume) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert tensor.eq(1).all()


def test_the_handle_is_a_context_too(device):
    tensor = torch.full((LARGE,), 3.0, device=device)
    parked = tdcopier.park([tensor])
    assert repr(parked) == f"<tdcopier.Parked: {4 * LARGE} bytes, parked>"
    with pytest.raises(ZeroDivisionError), parked:
        _ = 1 / 0
    assert tensor.eq(3).all()
    assert repr(parked) == f"<tdcopier.Parked: {4 * LARGE} bytes, resumed>"


def test_an_interrupt_at_the_end_of_a_block_is_raised_once_the_state_is_resumed(
    device, monkeypatch
):
    tensor = torch.full((LARGE,), 3.0, device=device)
    resume, calls = tdcopier.Parked.resume, []

    def interrupted(self):
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        resume(self)

    monkeypatch.setattr(tdcopier.Parked, "resume", interrupted)
    with pytest.raises(KeyboardInterrupt), tdcopier.parked([tensor]):
        pass
    assert tensor.eq(3).all()


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("call", [tdcopier.park, tdcopier.snapshot])
def test_a_handle_cannot_be_copied(device, make, call):
    handle = call([torch.full((LARGE,), 3.0, device=device)])
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        make(handle)
    if call is tdcopier.park:
        assert handle.is_parked
        handle.resume()
    else:
        assert handle.get()[0].eq(3).all()
        assert repr(handle) == f"<tdcopier.Snapshot: {4 * LARGE} bytes, arrived>"
