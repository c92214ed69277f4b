"""Leaves that are delegated to `Tensor.to`: its attributes are kept, and its errors are raised."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from catalogue import ramp
from container_classes import FrozenSample
from sim_support import becomes
from support import assert_same, oracle, run_python

import tdcopier


class Failing(torch.Tensor):
    """Its `.to` raises the error that it is given."""

    error: BaseException = KeyError("cannot move")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.to:
            raise cls.error
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.sim
def test_all_is_delegated_where_a_backend_has_storages_of_its_own_class():
    """A result of the engine would have a plain storage."""
    run_python("""
        import ctypes
        import torch
        import tdcopier
        from tdcopier import _C, sim

        sim.enable()
        source = torch.arange(5, device="sim")
        assert tdcopier.start_copy([source], "cpu").stats.delegated_leaves == 0
        set_maker = ctypes.CDLL("libc10.so")[
            "_ZN3c1020SetStorageImplCreateENS_10DeviceTypeEPFNS_13intrusive_ptrINS_11StorageImplENS_"
            "6detail34intrusive_target_default_null_typeIS2_EEEENS2_15use_byte_size_tENS_6SymIntENS_"
            "7DataPtrEPNS_9AllocatorEbE"
        ]
        of_nothing = ctypes.CFUNCTYPE(None)(lambda: None)  # never called: no storage is made
        private_use_1 = ctypes.c_int8(20)
        set_maker(private_use_1, of_nothing)
        handle = tdcopier.start_copy([source], "cpu")
        assert handle.get()[0].tolist() == [0, 1, 2, 3, 4]
        assert handle.stats.delegated_leaves == 1
    """)


@pytest.mark.filterwarnings(
    "ignore:The AccumulateGrad node's stream does not match:UserWarning"
)  # torch warns about streams, after `.to` too
def test_gradients_flow_through_a_leaf_that_needs_them(ends):
    source, target = ends
    leaf = ramp(source, 3).requires_grad_()
    (moved,) = tdcopier.copy([leaf], target)
    (moved * 2).sum().backward()
    assert leaf.grad.tolist() == [2, 2, 2]


def test_what_another_leaf_needs_does_not_change_what_happens_to_this_one(ends):
    source, target = ends
    tree = [ramp(source, 3), ramp(source, 3).requires_grad_(), ramp(source, 3)]
    handle = tdcopier.start_copy(tree, target)
    assert_same(handle.get(), oracle(tree, target))
    assert handle.stats[:5] == (2, 0, 1, 0, 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own decompositions
def test_a_forward_gradient_is_kept(ends):
    import torch.autograd.forward_ad as fwad

    source, target = ends
    with fwad.dual_level():
        dual = fwad.make_dual(ramp(source, 3), torch.ones(3, device=source))
        (moved,) = tdcopier.copy([dual], target)
        tangent = fwad.unpack_dual(moved).tangent
        assert tangent is not None
        assert tangent.tolist() == [1, 1, 1]


def test_inside_vmap_every_leaf_is_left_to_torch(ends):
    source, target = ends
    seen = []

    def body(x):
        handle = tdcopier.start_copy([x, ramp("cpu", 2).to(source)], target)
        seen.append(handle.stats)
        return handle.get()[0] + 1

    result = torch.vmap(body)(ramp(source, 3, 2))
    assert result.tolist() == (ramp("cpu", 3, 2) + 1).tolist()
    assert result.device.type == target.split(":")[0]
    assert seen[0].delegated_leaves == 2


def test_under_a_function_mode_every_leaf_goes_through_it(ends):
    from torch.overrides import TorchFunctionMode

    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Count.calls += func is torch.Tensor.to
            return func(*args, **(kwargs or {}))

    source, target = ends
    leaves = [ramp(source, 2), ramp(source, 3)]
    with Count():
        handle = tdcopier.start_copy(leaves, target)
    assert Count.calls == 2
    assert handle.stats.delegated_leaves == 2


def test_under_a_fake_tensor_mode_the_outputs_are_fake(ends):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    source, target = ends
    with FakeTensorMode():
        handle = tdcopier.start_copy([torch.empty(2, 3, device=source).t()], target)
        (moved,) = handle.get()
    assert type(moved) is FakeTensor
    assert (moved.device, moved.stride()) == (torch.device(target), (1, 3))
    assert handle.stats.delegated_leaves == 1


def test_what_a_subclass_makes_of_to_is_the_result(ends):
    class Loud(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            made = super().__torch_function__(func, types, args, kwargs or {})
            return made + 1 if func is torch.Tensor.to else made

    source, target = ends
    (moved,) = tdcopier.copy([ramp(source, 3).as_subclass(Loud)], target)
    assert type(moved) is Loud
    assert moved.tolist() == [1, 2, 3]


@pytest.mark.parametrize("ask", ["get", "wait"])
def test_a_failing_delegated_leaf_fails_the_copy_every_time_with_its_own_error(
    device, ends, ask, monkeypatch
):
    source, target = ends
    error = KeyError("cannot move")
    monkeypatch.setattr(Failing, "error", error)
    leaves = [ramp(source, 2), ramp(source, 2).as_subclass(Failing)]
    handle = tdcopier.start_copy(leaves, target)
    for _ in range(3):
        assert becomes(handle.ready)  # the other leaf may still be in flight
        with pytest.raises(KeyError) as caught:
            getattr(handle, ask)()
        assert caught.value is error
    assert tdcopier.copy([torch.ones(2)], device)[0].tolist() == [1, 1]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before 3.11")
def test_the_error_of_a_delegated_leaf_carries_one_note_with_its_path(device, monkeypatch):
    monkeypatch.setattr(Failing, "error", ValueError("no"))
    failing = ramp("cpu", 2).as_subclass(Failing)
    tree = [ramp("cpu", 2), {"samples": (FrozenSample(image=[ramp("cpu", 2), failing]),)}]
    handle = tdcopier.start_copy(tree, device)
    for _ in range(2):
        with pytest.raises(ValueError, match="no") as caught:
            handle.get()
    assert caught.value.__notes__ == [
        "tdcopier: raised by `.to` of the leaf data[1]['samples'][0].image[1]"
    ]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes before 3.11")
def test_of_several_failing_leaves_the_first_one_is_named(device, monkeypatch):
    monkeypatch.setattr(Failing, "error", ValueError("no"))
    failing = ramp("cpu", 2).as_subclass(Failing)
    handle = tdcopier.start_copy({"a": 1, "b": failing, "c": failing}, device)
    with pytest.raises(ValueError, match="no") as caught:
        handle.get()
    assert caught.value.__notes__ == ["tdcopier: raised by `.to` of the leaf data['b']"]


def test_a_delegated_leaf_that_fails_does_not_keep_the_sources_of_the_others(device, monkeypatch):
    import weakref

    monkeypatch.setattr(Failing, "error", ValueError("no"))
    source = ramp("cpu", 2)
    alive = weakref.ref(source)
    handle = tdcopier.start_copy([source, ramp("cpu", 2).as_subclass(Failing)], device)
    del source
    handle.wait_staged()
    with pytest.raises(ValueError, match="no"):
        handle.get()
    del handle
    monkeypatch.undo()  # drops the error's last reference; its traceback may refer to the call
    gc.collect()
    assert alive() is None


def test_an_interrupt_in_a_delegated_leaf_is_raised_by_the_call(device, monkeypatch):
    monkeypatch.setattr(Failing, "error", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tdcopier.start_copy([ramp("cpu", 2).as_subclass(Failing)], device)
    assert tdcopier.copy([torch.ones(2)], device)[0].tolist() == [1, 1]
