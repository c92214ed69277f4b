"""Parking and resuming a state in place: identity, sharing, and what happens in between."""

from __future__ import annotations

import copy
import threading
import warnings
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
from park_support import LARGE, Model, assert_values, is_resident, step, trained, values_of
from support import are_released
from tensordict import TensorDict, TensorDictParams

import tdcopier
from tdcopier import _C
from tdcopier import _pinned_pool as pool
from tdcopier._park.tensors import tensors_in


def storages(*states: Any) -> set[int]:
    found = tensors_in(states, gradients=True)
    return {each.tensor.untyped_storage()._cdata for each in found if each.tensor.numel()}


# ---- values and identity -------------------------------------------------------------------------


def test_a_parked_state_has_no_memory_and_a_resumed_one_its_old_values(device):
    model, optimizer = trained(device)
    expected = values_of(model, optimizer)
    tensors = [each.tensor for each in tensors_in((model, optimizer), gradients=True)]
    parked = tdcopier.park([model, optimizer])
    assert parked.is_parked
    assert not is_resident(model, optimizer)
    on_device = storages(model, optimizer)
    assert parked.bytes >= 4 * LARGE * 3
    parked.resume()
    assert not parked.is_parked
    assert is_resident(model, optimizer)
    assert_values(expected, model, optimizer)
    now = [each.tensor for each in tensors_in((model, optimizer), gradients=True)]
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
def test_a_thousand_cycles_change_no_bit(sim):
    torch.manual_seed(0)
    models = [torch.nn.Linear(8, 4).to("sim") for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [torch.optim.AdamW(each.parameters()) for each in models]
    batch = torch.randn(3, 8).to("sim")
    used: list[tuple[int, int]] = []
    for cycle in range(1000):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().sum().backward()
            optimizer.step()
        with tdcopier.parked(models[0], optimizers[0]):
            pass
        if cycle in (10, 999):
            sim.synchronize()
            _C.settle()
            used.append((sim.memory_stats().allocated_bytes, sim.pinned_bytes().in_use))
    assert used[0][0] == used[1][0]
    assert used[1][1] <= used[0][1] + 2**20
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
        assert model.large.grad.untyped_storage().nbytes() == 4 * LARGE
        assert model.large.untyped_storage().nbytes() == 0
    with tdcopier.parked(model):
        assert model.large.grad.untyped_storage().nbytes() == 0


def test_an_optimizer_alone_parks_its_state_and_not_the_parameters(device):
    model, optimizer = trained(device)
    expected = values_of(model, optimizer)
    with tdcopier.parked(optimizer):
        assert is_resident(model)
        state = optimizer.state[model.large]
        assert state["exp_avg"].untyped_storage().nbytes() == 0
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
        assert base.untyped_storage().nbytes() == 0
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
        found = [each.tensor for each in tensors_in(state, gradients=False)]
        found = [t for t in found if t.device.type != "cpu" and t.numel() != 0]
        assert found
        before = values_of(state)
        parked = tdcopier.park(state)
        assert all(t.untyped_storage().nbytes() == 0 for t in found)
        parked.resume()
        assert_values(before, state)


def test_a_tensordict_of_parameters_parks_those_of_the_module(device):
    model, _ = trained(device)
    with tdcopier.parked(TensorDict.from_module(model)):
        assert model.large.untyped_storage().nbytes() == 0
    assert is_resident(model)


def test_wrapper_subclasses_are_parked_by_the_tensors_in_them(device):
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = (torch.full((LARGE,), value, device=device) for value in (1.0, 2.0))
    wrapped = TwoTensor(a, b)
    nested = torch.nested.nested_tensor(
        [torch.ones(2, 3), torch.zeros(4, 3)], layout=torch.jagged
    ).to(device)
    with tdcopier.parked({"x": wrapped, "y": nested}):
        assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes() == 0
        assert nested.values().untyped_storage().nbytes() == 0
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
    assert parked.bytes == 0
    assert [state[name].data_ptr() for name in ("host", "pinned", "shared")] == addresses
    parked.resume()
    assert not parked.is_parked


def test_an_empty_state_can_be_parked_and_resumed(device):
    for state in ([], {}, torch.nn.ReLU()):
        parked = tdcopier.park(state)
        assert parked.ready()
        parked.wait()
        parked.resume()


def test_two_devices_are_parked_together(device, other_device):
    state = [torch.full((LARGE,), n, device=d) for n, d in ((1.0, device), (2.0, other_device))]
    with tdcopier.parked(*state):
        assert all(t.untyped_storage().nbytes() == 0 for t in state)
    assert [t.device for t in state] == [torch.device(device), torch.device(other_device)]
    assert [t.mean().item() for t in state] == [1, 2]


def test_tensors_of_an_earlier_copy_which_share_a_chunk_are_parked(device):
    source = [torch.full((n,), float(n)) for n in (3, 5, LARGE)]
    made = tdcopier.copy(source, device)
    with tdcopier.parked(made[:1]):
        assert made[1].untyped_storage().nbytes() == 0
    assert [t.mean().item() for t in made] == [3, 5, LARGE]


def test_a_lazy_clone_becomes_a_real_one(device):
    source = torch.arange(float(LARGE)).to(device)
    lazy = source._lazy_clone()
    with tdcopier.parked([lazy]):
        assert torch.equal(source.cpu(), torch.arange(float(LARGE)))
    assert torch.equal(lazy.cpu(), torch.arange(float(LARGE)))


# ---- memory --------------------------------------------------------------------------------------


@pytest.mark.sim
def test_the_memory_returns_to_the_allocator_and_its_reuse_waits_for_the_copy(sim):
    tensor = torch.full((LARGE,), 3.0, device="sim")
    address = tensor.data_ptr()
    allocated = sim.memory_stats().allocated_bytes
    reading = _C.copy_stream("sim:0", "from_device")
    with sim.hold(reading):
        parked = tdcopier.park([tensor])
        assert sim.memory_stats().allocated_bytes <= allocated - 4 * LARGE
        assert not parked.ready()
        first = torch.zeros(LARGE, device="sim")
        assert first.data_ptr() != address
    parked.wait()
    assert parked.ready()
    del first
    parked.resume()
    assert tensor.eq(3).all()
    assert sim.memory_stats().allocated_bytes == allocated


def test_allocated_memory_falls_in_the_call_and_rises_with_the_resume(device, accelerator):
    accelerator.synchronize()
    before = accelerator.memory_allocated(device)
    state = [torch.full((n,), 1.0, device=device) for n in (10, 5000, LARGE, 20 * LARGE)]
    held = accelerator.memory_allocated(device) - before
    for _ in range(3):
        parked = tdcopier.park(state)
        assert accelerator.memory_allocated(device) <= before + 2**21  # packed small ones
        parked.wait()
        assert accelerator.memory_allocated(device) == before
        parked.resume()
        accelerator.synchronize()
        assert accelerator.memory_allocated(device) == before + held


@pytest.mark.cuda
def test_an_allocation_that_needs_the_memory_waits_for_the_copy(device, stall, reading_stream):
    state = [torch.full((50 * LARGE,), float(n), device=device) for n in range(4)]
    tdcopier.park(state).resume()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**22) / total)
    try:
        with stall(reading_stream):
            parked = tdcopier.park(state)
            other = [torch.full((50 * LARGE,), -1.0, device=device) for _ in range(4)]
        assert all(t.eq(-1).all() for t in other)
        with pytest.raises(torch.OutOfMemoryError):
            parked.resume()
        del other
        parked.resume()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [t.mean().item() for t in state] == [0, 1, 2, 3]


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_call_during_a_capture_is_refused(device):
    tensor = torch.full((LARGE,), 3.0, device=device)
    parked = tdcopier.park([torch.full((LARGE,), 4.0, device=device)])
    for call in (lambda: tdcopier.park([tensor]), parked.resume):
        with (
            pytest.raises(RuntimeError, match="capturing"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            call()
    parked.resume()
    assert tensor.eq(3).all()


@pytest.mark.sim
@pytest.mark.parametrize("ask", ["wait", "ready", "resume"])
def test_memory_of_another_owner_is_released_when_the_copy_is_known_to_have_arrived(sim, ask):
    """Torch's allocator cannot be told of a use of memory that is not its own."""
    owner = torch.full((LARGE,), 3.0, device="sim")
    tensor = torch.from_dlpack(torch.utils.dlpack.to_dlpack(owner))
    del owner
    allocated = sim.memory_stats().allocated_bytes
    reading = _C.copy_stream("sim:0", "from_device")
    with sim.hold(reading):
        parked = tdcopier.park([tensor])
        assert sim.memory_stats().allocated_bytes == allocated
    sim.synchronize()
    if ask == "resume":
        parked.resume()
        torch.sim.synchronize()
        assert sim.memory_stats().allocated_bytes == allocated  # new memory, and not the old
    else:
        getattr(parked, ask)()
        assert sim.memory_stats().allocated_bytes <= allocated - 4 * LARGE
        parked.resume()
    assert tensor.eq(3).all()


@pytest.mark.sim
def test_the_extra_device_memory_is_bounded(sim):
    state = [torch.zeros(60_000, device="sim") for _ in range(700)]  # 168 MB of packed storages
    torch.sim.synchronize()
    torch.sim.reset_peak_memory_stats(0)
    before = sim.memory_stats().allocated_bytes
    parked = tdcopier.park(state)
    assert sim.memory_stats().peak_allocated_bytes - before <= 64 * 1024 * 1024
    parked.wait()
    assert sim.memory_stats().allocated_bytes <= before - sum(t.numel() * 4 for t in state)
    torch.sim.reset_peak_memory_stats(0)
    parked.resume()
    torch.sim.synchronize()
    assert sim.memory_stats().peak_allocated_bytes - before <= 64 * 1024 * 1024


@pytest.mark.sim
def test_large_storages_are_transferred_from_and_to_where_they_are(sim):
    state = [torch.zeros(LARGE, device="sim") for _ in range(5)]
    torch.sim.synchronize()
    sim.reset_counts()
    parked = tdcopier.park(state)
    assert sim.counts().d2h == (5, 5 * 4 * LARGE)
    assert sim.counts().within == (0, 0)
    staging = tdcopier.staging_bytes("sim")
    parked.resume()
    assert sim.counts().h2d == (5, 5 * 4 * LARGE)
    assert sim.counts().within == (0, 0)
    assert tdcopier.staging_bytes("sim") == staging


@pytest.mark.sim
def test_small_storages_share_transfers(sim):
    state = [torch.full((100,), float(n), device="sim") for n in range(500)]
    torch.sim.synchronize()
    sim.reset_counts()
    parked = tdcopier.park(state)
    assert sim.counts().d2h.transfers <= 2
    parked.resume()
    assert sim.counts().h2d.transfers <= 2
    assert all(t.eq(n).all() for n, t in enumerate(state))


def test_the_pinned_memory_is_released_once_it_has_been_read(device, monkeypatch):
    leased = []

    def lease(sizes):
        for made in pool.lease(sizes):
            leased.append(weakref.ref(made))
            yield made

    monkeypatch.setattr("tdcopier._park.transfers.lease", lease)
    state = [torch.zeros(LARGE, device=device) for _ in range(3)]
    parked = tdcopier.park(state)
    assert len(leased) == 3
    assert all(reference() is not None for reference in leased)
    parked.resume()
    torch.get_device_module(device).synchronize()
    assert are_released(leased)
    assert not parked.is_parked


def test_the_next_call_leases_the_memory_that_the_one_before_has_released(device, accelerator):
    from tdcopier._park import pinned

    state = [torch.zeros(LARGE, device=device)]
    addresses = set()
    of_torch = pinned.lease

    def lease(sizes):
        made = of_torch(sizes)
        addresses.update(each.data_ptr() for each in made)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pinned, "lease", lease)
        for _ in range(20):
            with tdcopier.parked(state):
                pass
            accelerator.synchronize()
    assert len(addresses) == 1


def test_memory_is_leased_in_groups(device, monkeypatch):
    monkeypatch.setattr("tdcopier._park.transfers.GROUP_BYTES", 10 * LARGE)
    order: list[str] = []

    def lease(sizes):
        for made in pool.lease(sizes):
            order.append("memory")
            yield made

    def start_copy_into(*arguments):
        order.append(f"{len(arguments[0])} copies")
        return own(*arguments)

    own = _C.start_copy_into
    monkeypatch.setattr("tdcopier._park.transfers.lease", lease)
    monkeypatch.setattr(_C, "start_copy_into", start_copy_into)
    state = [torch.full((LARGE,), float(n), device=device) for n in range(5)]
    with tdcopier.parked(state):
        assert order == [*["memory", "memory", "2 copies"] * 2, "memory", "1 copies"]
    assert [t[0].item() for t in state] == [0, 1, 2, 3, 4]


def test_the_pool_has_room_for_the_next_time(device):
    state = [torch.full((LARGE,), float(n), device=device) for n in range(5)]
    held = []
    for _ in range(4):
        with tdcopier.parked(state):
            pass
        torch.get_device_module(device).synchronize()
        tdcopier.copy(torch.zeros(1), device)  # calls release what the device has read
        use = tdcopier.pinned_memory()
        held.append(use.leased_bytes + use.free_bytes)
    assert held[1:] == held[:1] * 3


def test_without_memory_to_pin_everything_is_resident(device):
    limit = tdcopier.pinned_memory().limit_bytes
    state = [torch.full((LARGE,), float(n), device=device) for n in range(5)]
    tdcopier.trim_pinned_memory()
    tdcopier.set_pinned_limit_bytes(tdcopier.pinned_memory().leased_bytes + 6 * LARGE)
    try:
        with pytest.raises(MemoryError, match="limit"):
            tdcopier.park(state)
    finally:
        tdcopier.set_pinned_limit_bytes(limit)
    assert [t[0].item() for t in state] == [0, 1, 2, 3, 4]


# ---- while parked --------------------------------------------------------------------------------


needs_raising_storages = pytest.mark.skipif(
    not _C.EMPTY_STORAGES_RAISE, reason="this torch cannot make a storage raise"
)


@needs_raising_storages
@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: model.large + 1,
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
    parked.wait()
    del state[0]
    made = []
    of_torch = torch.empty

    def empty(*arguments, **options):
        made.append(arguments)
        return of_torch(*arguments, **options)

    monkeypatch.setattr(torch, "empty", empty)
    _C.settle()
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
    parked.wait()
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
    parked.wait()
    _C.settle()
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
