"""A snapshot never has values of a later step, whatever optimizer or wrapper of one makes it."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from types import MethodType
from typing import Any

import pytest
import torch
from park_support import LARGE, Overwriting

import tdcopier


class Lookahead(torch.optim.Optimizer):
    """A wrapper as published: it is an Optimizer that never calls `Optimizer.__init__`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


class Perturbing(Lookahead):
    """Changes parameters before the step of the optimizer in it, as SAM does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.copy_(self.optimizer.sevens[0])


class Derived(Overwriting):
    """Changes parameters, and then calls the `step` of its base class."""

    @functools.wraps(Overwriting.step)  # which copies torch's mark of a step with hooks
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["params"][0].copy_(self.sevens[0])
        super().step(closure)


def replaced(optimizer: Any) -> Any:
    of_class = optimizer.step

    @torch.no_grad()
    def step(closure: Any = None) -> None:
        optimizer.param_groups[0]["params"][0].copy_(optimizer.sevens[0])
        of_class(closure)

    optimizer.step = step
    return optimizer


def put_back(optimizer: Any) -> Any:
    optimizer.step = optimizer.step  # a bound method in the object
    return optimizer


def scheduled(optimizer: Any) -> Any:
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return optimizer


def compiled(optimizer: Any) -> Any:
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    return optimizer


def bound_elsewhere(optimizer: Any) -> Any:
    other = Overwriting([torch.nn.Parameter(torch.zeros(1))])
    optimizer.step = MethodType(type(other).step, other)
    return optimizer


def in_fabric(optimizer: Any) -> Any:
    pytest.importorskip("lightning.fabric", exc_type=ImportError)
    from lightning.fabric import Fabric
    from lightning.fabric.wrappers import _FabricOptimizer

    return _FabricOptimizer(optimizer, Fabric(accelerator="cpu", devices=1).strategy)


def in_lightning(optimizer: Any) -> Any:
    pytest.importorskip("lightning.pytorch", exc_type=ImportError)
    from lightning.pytorch.core.optimizer import LightningOptimizer

    class Strategy:
        """Does what those of Lightning do, without the trainer that they ask for callbacks."""

        def optimizer_step(self, optimizer: Any, closure: Any, **options: Any) -> Any:
            return optimizer.step(closure=closure, **options)

    made: Any = LightningOptimizer(optimizer)
    made._strategy = Strategy()
    return made


def in_accelerate(optimizer: Any) -> Any:
    pytest.importorskip("accelerate", exc_type=ImportError)
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    Accelerator(cpu=True)
    return AcceleratedOptimizer(optimizer, device_placement=False)


def in_derived_wrapper(optimizer: Any) -> Any:
    wrapped = in_accelerate(optimizer)

    class Changing(type(wrapped)):  # type: ignore[misc]
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].copy_(optimizer.sevens[0])
            super().step(closure)

    wrapped.__class__ = Changing
    return wrapped


def in_replaced_wrapper(optimizer: Any) -> Any:
    wrapped = in_accelerate(optimizer)
    wrapped.sevens = optimizer.sevens
    return replaced(wrapped)


def twice(optimizer: Any) -> Any:
    return in_accelerate(in_fabric(optimizer))


@pytest.fixture(autouse=True)
def no_state_of_accelerate():
    yield
    try:
        from accelerate.state import AcceleratorState, GradientState
    except ImportError:
        return
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


HOOKED = {
    "torch": lambda optimizer: optimizer,
    "scheduler": scheduled,
    "put back": put_back,
    "Fabric": in_fabric,
    "Lightning": in_lightning,
    "Accelerate": in_accelerate,
    "Fabric in Accelerate": twice,
    "scheduler of Accelerate's": lambda optimizer: scheduled(in_accelerate(optimizer)),
    "scheduler in Accelerate": lambda optimizer: in_accelerate(scheduled(optimizer)),
}
NOT_HOOKED = {
    "Lookahead": Lookahead,
    "SAM": Perturbing,
    "replaced step": replaced,
    "compiled step": compiled,
    "step of another": bound_elsewhere,
    "derived from Accelerate's": in_derived_wrapper,
    "replaced step of Accelerate's": in_replaced_wrapper,
    "Lookahead in Accelerate": lambda optimizer: in_accelerate(Lookahead(optimizer)),
}
KINDS = {**HOOKED, **NOT_HOOKED}


def overwriting(device: str) -> tuple[torch.Tensor, Overwriting]:
    parameter = torch.nn.Parameter(torch.full((LARGE,), 3.0, device=device))
    return parameter, Overwriting([parameter])


@pytest.mark.parametrize("given", ["in the state", "as an argument", "stager"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_the_snapshot(device, stall, reading_stream, kind, given):
    parameter, optimizer = overwriting(device)
    wrapped = KINDS[kind](optimizer)
    tdcopier.snapshot([parameter]).get()  # pins memory
    wrapped.step()  # compiles, if it is to be compiled
    with torch.no_grad():
        parameter.fill_(3)
    stager = tdcopier.checkpoint.SnapshotStager(optimizer=wrapped)
    with stall(reading_stream):
        if given == "in the state":
            taken = tdcopier.snapshot({"x": parameter, "o": wrapped})
        elif given == "as an argument":
            taken = tdcopier.snapshot({"x": parameter}, optimizer=wrapped)
        else:
            taken = stager.stage({"x": parameter})
        wrapped.step()
    got = taken.result() if given == "stager" else taken.get()
    assert got["x"].eq(3).all()
    stager.close()
    assert parameter.eq(3 if kind == "step of another" else 7).all()


@pytest.mark.parametrize("made", [Overwriting, Derived])
@pytest.mark.parametrize("by", ["step", "closure"])
def test_a_step_of_a_derived_class_and_its_closure_wait(device, stall, reading_stream, made, by):
    parameter = torch.nn.Parameter(torch.full((LARGE,), 3.0, device=device))
    sevens = torch.full_like(parameter, 7)
    optimizer = made([parameter])
    tdcopier.snapshot([parameter]).get()
    with stall(reading_stream):
        taken = tdcopier.snapshot([parameter, optimizer])
        with torch.no_grad():
            optimizer.step(functools.partial(parameter.copy_, sevens) if by == "closure" else None)
    assert taken.get()[0].eq(3).all()


OF_TORCH = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": torch.optim.AdamW,
    "AdamW, one by one": functools.partial(torch.optim.AdamW, foreach=False),
    "Adam, capturable": functools.partial(torch.optim.Adam, capturable=True),
    "Adam, fused": functools.partial(torch.optim.Adam, fused=True),
    "LBFGS": functools.partial(torch.optim.LBFGS, max_iter=2),
}


@pytest.mark.parametrize("elements", [LARGE, 3 << 20])
@pytest.mark.parametrize("kind", OF_TORCH)
def test_a_step_of_torchs_own_optimizers_waits(device, stall, reading_stream, kind, elements):
    if device.startswith("sim") and "capturable" in kind:
        pytest.skip("torch's capturable optimizers know no simulated device")
    parameter = torch.nn.Parameter(torch.full((elements,), 3.0, device=device))
    try:
        optimizer = OF_TORCH[kind]([parameter])
    except RuntimeError as error:  # of a fused one
        pytest.skip(str(error).splitlines()[0])

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # makes its state
    expected = parameter.detach().cpu()
    tdcopier.snapshot([parameter, optimizer]).get()
    with stall(reading_stream):
        taken = tdcopier.snapshot([parameter, optimizer])
        # Where the simulated device lets torch's host code compute, that waits for the stall.
        thread = threading.Thread(target=optimizer.step, args=(closure,))
        thread.start()
        time.sleep(0.1)
    thread.join()
    assert torch.equal(taken.get()[0], expected)
    assert not torch.equal(parameter.detach().cpu(), expected)


@pytest.mark.sim
@pytest.mark.parametrize("kind", HOOKED)
def test_work_before_the_step_runs_beside_the_snapshot(sim, kind):
    parameter, optimizer = overwriting("sim")
    wrapped = HOOKED[kind](optimizer)
    tdcopier.snapshot([parameter]).get()
    with sim.hold(tdcopier._C.copy_stream("sim:0", "from_device")):
        taken = tdcopier.snapshot([parameter], optimizer=wrapped)
        assert (parameter * 2).sum().item() == 6 * LARGE  # the host would wait for ever
        assert not taken.ready()
    assert taken.get()[0].eq(3).all()


def test_the_hooks_of_a_wrapper_and_its_optimizer_are_one(device):
    parameter, optimizer = overwriting(device)
    wrapped = in_accelerate(in_fabric(optimizer))
    for each in (wrapped, optimizer, wrapped.optimizer):
        tdcopier.snapshot([parameter], optimizer=each).get()
    assert len(optimizer._optimizer_step_pre_hooks) == 1


def test_a_dropped_optimizer_is_freed(device):
    parameter, optimizer = overwriting(device)
    tdcopier.snapshot([parameter], optimizer=optimizer).get()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


def test_a_step_in_a_compiled_function_waits(device, stall, reading_stream):
    parameter, optimizer = overwriting(device)
    tdcopier.snapshot([parameter]).get()

    def train() -> None:
        optimizer.step()

    run = torch.compile(train, backend="eager")
    run()
    with torch.no_grad():
        parameter.fill_(3)
    with stall(reading_stream):
        taken = tdcopier.snapshot([parameter], optimizer=optimizer)
        run()
    assert taken.get()[0].eq(3).all()
    assert parameter.eq(7).all()
