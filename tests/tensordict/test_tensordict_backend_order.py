"""Tests TensorDict's own calls under the switch: when sources may be overwritten, and ordering.

Calls are passed on to torch while it traces, fakes or batches.
"""

from __future__ import annotations

import threading

import pytest
import torch
from filled_leaves import values_of
from sim_support import becomes
from tensordict import TensorDict
from tensordict_backend_support import outcome
from tensordict_backend_support import restored as restored
from tensordict_kinds_of_leaves import flat
from tensordict_same import assert_same_tensordict

import tdcopier
from tdcopier import _C

LARGE = 3 << 20  # four-byte elements: three staging buffers


def _filled(value: float, elements: int, device: str, *, pin: bool = False) -> TensorDict:
    leaves = {"a": torch.full((elements,), value), "b": torch.full((3,), value)}
    td = TensorDict({"x": leaves, "c": torch.full((2,), value)}).to(device)
    return td.pin_memory() if pin else td


def _values(td: TensorDict) -> set[float]:
    return values_of([*td.values(True, True)])


@pytest.mark.parametrize("non_blocking", [None, False, True])
@pytest.mark.parametrize("pin", [False, True], ids=["pageable", "pinned"])
@pytest.mark.parametrize("elements", [10, LARGE], ids=["small", "large"])
def test_a_source_may_be_written_as_soon_as_the_call_has_returned(
    device, elements, pin, non_blocking
):
    with tdcopier.tensordict.backend() as use:
        for value in range(3):
            td = _filled(value, elements, "cpu", pin=pin)
            moved = td.to(device, non_blocking=non_blocking)
            for leaf in td.values(True, True):
                leaf.fill_(-1)
            assert _values(moved) == {value}
    assert use.by_engine >= 3


def test_a_source_on_another_device_may_be_written_by_its_stream_while_the_copy_is_late(
    stall, device, other_device, accelerator
):
    td, fives = _filled(3, 10, other_device), _filled(5, 10, other_device)
    with tdcopier.tensordict.backend() as use, stall(_C.copy_stream(other_device, "from_device")):
        moved = td.to(device)
        built = TensorDict(dict(td["x"].items()), device=device)
        for leaf, five in zip(td.values(True, True), fives.values(True, True), strict=True):
            leaf.copy_(five, non_blocking=True)
    accelerator.synchronize(other_device)
    assert (_values(moved), _values(built), _values(td)) == ({3}, {3}, {5})
    assert use.by_engine == 2


def test_a_constructors_source_may_be_written_as_soon_as_it_has_returned(device):
    leaf = torch.ones(LARGE)
    with tdcopier.tensordict.backend():
        td = TensorDict({"a": leaf, "b": torch.ones(3)}, device=device)
        leaf.fill_(-1)
    assert _values(td) == {1}


def test_a_copy_to_a_device_is_ordered_on_the_current_stream_and_the_host_goes_on(
    stall, device, accelerator, copy_stream
):
    """The copy is late; the stream's later work still comes after it."""
    consumer = accelerator.Stream(device=device)
    with tdcopier.tensordict.backend(), accelerator.stream(consumer):
        with stall(copy_stream):
            moved = _filled(7, 10, "cpu").to(device)  # hangs if it waits for the copy
            doubled = torch.empty(10, device=device)
            doubled.copy_(moved["x", "a"], non_blocking=True)
            assert not consumer.query()
        consumer.synchronize()
    assert doubled.tolist() == [7] * 10


def test_a_copy_to_a_device_returns_while_the_current_stream_is_busy(stall, device, accelerator):
    consumer = accelerator.Stream(device=device)
    with tdcopier.tensordict.backend(), accelerator.stream(consumer):
        with stall(consumer):
            moved = _filled(7, 10, "cpu").to(device)
            built = TensorDict({"a": torch.full((4,), 7.0)}, device=device)
            assert not consumer.query()
        consumer.synchronize()
    assert _values(moved) == _values(built) == {7}


@pytest.mark.sim
@pytest.mark.parametrize("non_blocking", [None, False, True])
@pytest.mark.parametrize("elements", [10, 1 << 20], ids=["small", "large"])
def test_a_copy_to_the_host_has_arrived_and_comes_after_what_writes_its_source(
    sim, device, accelerator, elements, non_blocking
):
    """The source's stream is held: the call must wait until another thread releases it."""
    td, fives = _filled(1, elements, device), _filled(5, elements, device)
    tdcopier.to(td, "cpu")
    accelerator.synchronize()
    hold = sim.hold(accelerator.current_stream())
    for leaf, five in zip(td.values(True, True), fives.values(True, True), strict=True):
        leaf.copy_(five, non_blocking=True)
    order = []
    called = threading.Event()

    def let_go() -> None:
        called.wait()
        order.append("let go")
        hold.release()

    thread = threading.Thread(target=let_go)
    thread.start()
    with tdcopier.tensordict.backend():
        called.set()
        moved = td.to("cpu", non_blocking=non_blocking)
        order.append("returned")
    assert _values(moved) == {5}
    assert order == ["let go", "returned"]
    thread.join()


@pytest.mark.sim
@pytest.mark.parametrize("call", ["to", "constructor"])
def test_a_blocking_copy_to_a_device_has_arrived_for_every_stream(sim, device, call, copy_stream):
    """The engine's stream is held: the call must wait until another thread releases it."""
    source = _filled(3, 10, "cpu")
    hold = sim.hold(copy_stream)
    early = []
    called, returned = threading.Event(), threading.Event()

    def let_go() -> None:
        called.wait()
        early.append(becomes(returned.is_set, within=0.3))
        hold.release()

    thread = threading.Thread(target=let_go)
    thread.start()
    with tdcopier.tensordict.backend() as use:
        called.set()
        if call == "to":
            moved = source.to(device, non_blocking=False)
        else:
            moved = TensorDict({"c": source["c"]}, device=device, non_blocking=False)
        returned.set()
    thread.join()
    assert early == [False]
    assert (_values(moved), use.by_engine) == ({3}, 1)


def test_memory_of_a_result_is_not_reused_while_its_stream_can_still_read_it(
    stall, device, accelerator
):
    consumer = accelerator.Stream(device=device)
    tdcopier.limits.set_run_ahead(1000)
    kept = []
    with accelerator.stream(consumer), stall(consumer), tdcopier.tensordict.backend():
        for value in range(20):
            moved = _filled(float(value), 50, "cpu").to(device)
            late = torch.empty(50, device=device)
            late.copy_(moved["x", "a"], non_blocking=True)
            kept.append(late)
            del moved
    consumer.synchronize()
    assert [late[0].item() for late in kept] == list(range(20))


@pytest.mark.sim
def test_one_transfer_carries_all_small_leaves(sim, device):
    td = TensorDict({f"n{i}": {f"a{j}": torch.ones(3) for j in range(20)} for i in range(5)})
    with tdcopier.tensordict.backend():
        td.to(device)
        torch.sim.synchronize()
        before = sim.counts()
        moved = td.to(device)
        torch.sim.synchronize()
        assert sim.counts().h2d[0] - before.h2d[0] == 1
    assert _values(moved) == {1}


# ---- calls that are passed on to torch -----------------------------------------------------------


def test_under_a_fake_tensor_mode_results_are_fake(device):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    with tdcopier.tensordict.backend() as use, FakeTensorMode():
        moved = TensorDict({"a": torch.empty(3), "x": {"b": torch.empty(2)}}).to(device)
        built = TensorDict({"a": torch.empty(3)}, device=device)
        assert {type(moved["a"]), type(moved["x", "b"]), type(built["a"])} == {FakeTensor}
    assert moved["a"].device == torch.device(device)
    assert (use.by_engine, use.by_tensordict) == (0, 1)


def test_fake_tensors_outside_of_their_mode_stay_fake(device):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    fake = FakeTensorMode().from_tensor(torch.ones(3))
    td = TensorDict({"a": fake, "b": torch.ones(2)})
    with tdcopier.tensordict.backend():
        moved = td.to(device)
    assert type(moved["a"]) is FakeTensor
    assert moved["b"].tolist() == [1, 1]


def test_inside_vmap_the_calls_are_torchs(device):
    def there_and_back(td: TensorDict) -> TensorDict:
        return td.to(device).to("cpu")

    td = flat("cpu")
    expected = torch.vmap(there_and_back)(td)
    with tdcopier.tensordict.backend() as use:
        got = torch.vmap(there_and_back)(td)
    assert (got == expected).all()
    assert got.batch_size == expected.batch_size
    assert use.by_engine == 0


def test_under_a_function_mode_every_leaf_goes_through_it(device):
    from torch.overrides import TorchFunctionMode

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Count.calls += func is torch.Tensor.to
            return func(*args, **(kwargs or {}))

    td = flat("cpu")
    with tdcopier.tensordict.backend() as use, Count():
        td.to(device)
    assert Count.calls == 2
    assert use.by_engine == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # the compiler's
def test_compiled_code_is_traced_as_without_the_switch(device):
    """Tensordict 0.14 cannot be traced there in one piece, with or without the switch."""

    def move(td: TensorDict) -> TensorDict:
        return td.to("meta")

    def compiled() -> TensorDict:
        torch.compiler.reset()
        return torch.compile(move, backend="eager", fullgraph=True)(flat("cpu"))

    expected = outcome(compiled)
    with tdcopier.tensordict.backend() as use:
        got = outcome(compiled)
    torch.compiler.reset()
    assert use.by_engine == 0
    if isinstance(expected, tuple):
        assert got[0] is expected[0]
    else:
        assert_same_tensordict(got, expected)


def test_gradients_flow_through_a_move(device):
    leaf = torch.ones(3, requires_grad=True)
    with tdcopier.tensordict.backend():
        moved = TensorDict({"a": leaf, "b": torch.ones(2)}).to(device)
        built = TensorDict({"a": leaf, "x": {"b": torch.ones(2)}}, device=device)
    (moved["a"].sum() + 2 * built["a"].sum()).to("cpu").backward()
    assert leaf.grad.tolist() == [3, 3, 3]
    assert not moved["b"].requires_grad


# ---- a handle's copy -----------------------------------------------------------------------------


def test_the_structure_of_a_source_may_change_while_its_copy_is_late(
    stall, device, accelerator, copy_stream
):
    td = TensorDict({"a": torch.ones(3), "x": {"b": torch.ones(2)}}, names=None)
    with stall(copy_stream):
        handle = tdcopier.async_to(td, device)
        td["later"] = torch.zeros(3)
        del td["x", "b"]
        td.lock_()
    moved = handle.get()
    assert list(moved.keys(True, True)) == ["a", ("x", "b")]
    assert not moved.is_locked
    assert handle.get() is moved
