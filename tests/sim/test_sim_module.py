"""Enabling the simulated device, its name in torch, and how its process ends."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from sim_support import fresh as fresh
from support import run_python

pytestmark = pytest.mark.sim


def test_enabling_again_with_the_same_number_does_nothing(sim: ModuleType) -> None:
    sim.enable(devices=2)
    assert sim.is_enabled()
    assert torch.sim.device_count() == 2


def test_enabling_with_another_number_says_so(sim: ModuleType) -> None:
    with pytest.raises(RuntimeError, match=r"enabled with 2 device.* enabled with 3"):
        sim.enable(devices=3)


@pytest.mark.parametrize("devices", [0, -1, 17])
def test_a_number_of_devices_out_of_range_is_rejected(sim: ModuleType, devices: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 16, got {devices}"):
        sim.enable(devices=devices)


def test_gradients_flow_on_devices_that_autograd_did_not_know_when_it_started() -> None:
    run_python("""
        import os
        import torch
        from tdcopier import sim

        @torch.enable_grad()
        def gradient(device):
            leaf = torch.ones(2, device=device, requires_grad=True)
            (leaf * 3).sum().backward()
            return leaf.grad.tolist()

        assert gradient("cpu") == [3, 3]
        sim.enable(devices=3)
        for device in ("sim:2", "cpu", "sim:0", "sim:1"):
            assert gradient(device) == [3, 3], device

        class Nested(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, g):
                return g * gradient("sim:1")[0]

        leaf = torch.ones(2, device="sim:0", requires_grad=True)
        Nested.apply(leaf).sum().backward()
        assert leaf.grad.tolist() == [3, 3]

        class Raises(Nested):
            @staticmethod
            def backward(ctx, g):
                raise KeyError("of the program")

        try:
            Raises.apply(leaf).sum().backward()
        except KeyError as error:
            assert "of the program" in str(error)
        else:
            raise AssertionError
        os._exit(0)  # torch's thread may still hold the error: it aborts if Python ends meanwhile
    """)


def test_importing_registers_nothing() -> None:
    run_python("""
        import torch
        before = torch.accelerator.current_accelerator()
        from tdcopier import sim
        assert not sim.is_enabled()
        assert torch.accelerator.current_accelerator() == before
        assert not hasattr(torch, "sim")
        try:
            sim.hold()
        except RuntimeError as error:
            assert "not enabled" in str(error), error
        else:
            raise AssertionError("held a stream of a device that does not exist")
    """)


def test_another_backend_in_its_place_is_respected() -> None:
    run_python("""
        import torch
        torch.utils.rename_privateuse1_backend("other")
        from tdcopier import sim
        try:
            sim.enable()
        except RuntimeError as error:
            assert "'other'" in str(error), error
        else:
            raise AssertionError("two backends in one place")
        assert not sim.is_enabled()
    """)


def test_it_is_the_accelerator_of_torch() -> None:
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    assert torch.get_device_module("sim") is torch.sim


def test_devices_that_do_not_exist_are_refused_by_name() -> None:
    for use in (
        lambda: torch.empty(1, device="sim:2"),
        lambda: torch.sim.set_device(2),
        lambda: torch.Stream(device="sim:2"),
        lambda: torch.sim.current_stream(2),
        lambda: torch.accelerator.set_device_index(2),
    ):
        with pytest.raises(RuntimeError, match=r"no device sim:2; the simulation has 2"):
            use()
    with pytest.raises(ValueError, match="expected a simulated device, got cpu"):
        torch.sim.set_device("cpu")


def test_the_process_ends_with_held_streams_and_copies_in_flight() -> None:
    printed = run_python("""
        import atexit, torch
        from tdcopier import sim

        def late():  # runs after the device has been shut down
            a = torch.ones(3).to("sim") + 1
            torch.sim.synchronize()
            with sim.hold():
                assert a.tolist() == [2, 2, 2]
            print(kept.tolist(), pinned.tolist())

        atexit.register(late)
        sim.enable()
        pinned = torch.ones(4).pin_memory()
        kept = torch.zeros(4, device="sim")
        side = torch.sim.Stream()
        hold, again = sim.hold(), sim.hold(side)
        sim.busy(sim.Gate())
        sim.busy(3600)
        kept.copy_(pinned, non_blocking=True)
        event = torch.sim.Event()
        event.record()
        event.wait(side)
        with torch.sim.stream(side):
            pinned.copy_(kept, non_blocking=True)
    """)
    assert printed.strip() == "[1.0, 1.0, 1.0, 1.0] [1.0, 1.0, 1.0, 1.0]"


def test_a_forked_child_is_told_to_be_spawned() -> None:
    run_python("""
        import os, torch, warnings
        from tdcopier import sim
        warnings.simplefilter("ignore")
        sim.enable()
        a = torch.ones(3).to("sim")
        child = os.fork()
        if child == 0:
            status = 3
            try:
                a.cpu()
            except RuntimeError as error:
                del a
                status = 0 if "spawn" in str(error) else 4
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert a.tolist() == [1, 1, 1]
    """)
