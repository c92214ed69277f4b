"""Uses one accelerator per test process: the simulated one, or CUDA.

TDCOPIER_TEST_DEVICE=cuda selects CUDA. Enabling the simulated device makes it torch.accelerator's,
so the two never share a process.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.metadata
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from container_classes import Box, flatten_box, unflatten_box

import tdcopier
from tdcopier import _C
from tdcopier._containers import registry as container_registry
from tdcopier._containers import unknown

DEVICE_TYPE = os.environ.get("TDCOPIER_TEST_DEVICE", "sim")
if DEVICE_TYPE == "sim":
    # If torch sees CUDA, `pin_memory=True` always means CUDA's pinned memory.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
DETECT = os.environ.get("TDCOPIER_TEST_DETECT") == "1"
TENSORDICT = os.environ.get("TDCOPIER_TEST_TENSORDICT")  # required version, for example 0.14
FAIL_WITHOUT_CUDA = os.environ.get("FAIL_WITHOUT_CUDA") == "1"


def pytest_configure(config: pytest.Config) -> None:
    # Shells start background jobs with SIGINT ignored, and the interpreter keeps that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes share the tests, so they have every core already, and most tensors are tiny. The
    # variable is for the processes that tests start.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A worker that shares nothing with its parent is forked from a server that has imported these.
    multiprocessing.set_forkserver_preload(["torch", "tensordict"])
    if DEVICE_TYPE not in ("sim", "cuda"):
        raise pytest.UsageError(f"TDCOPIER_TEST_DEVICE={DEVICE_TYPE!r}: give sim or cuda")
    if DEVICE_TYPE == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("TDCOPIER_TEST_DEVICE=cuda, but torch sees no CUDA device")
    if FAIL_WITHOUT_CUDA and DEVICE_TYPE != "cuda":
        raise pytest.UsageError("FAIL_WITHOUT_CUDA=1, but these tests would not run on CUDA")
    if TENSORDICT is not None:
        found = importlib.metadata.version("tensordict")
        if not found.startswith(f"{TENSORDICT}."):
            raise pytest.UsageError(
                f"TDCOPIER_TEST_TENSORDICT={TENSORDICT}, but tensordict {found} is here"
            )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collects no garbage meanwhile: nearly all objects that are made then stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    other = "sim" if DEVICE_TYPE == "cuda" else "cuda"
    for item in items:
        if item.get_closest_marker(other):
            item.add_marker(pytest.mark.skip(reason=f"runs with TDCOPIER_TEST_DEVICE={other}"))


@pytest.fixture(scope="session")
def sim() -> ModuleType:
    """Returns `tdcopier.sim`, enabled with two devices."""
    if DEVICE_TYPE != "sim":
        pytest.skip("runs with TDCOPIER_TEST_DEVICE=sim")
    from tdcopier import sim as module

    module.enable(devices=2)
    return module


@pytest.fixture(scope="module", autouse=True)
def nothing_old_is_collected() -> None:
    """Freezes the half a million objects of packages and pytest that exist before a module's tests.

    Garbage collections in a test, and in TensorDict's `unlock_()`, then skip them. Memory that is
    free, 2 GB of the simulated devices mostly, goes back to the system, because every fork copies
    the table of a process's pages.
    """
    gc.collect()
    gc.freeze()
    if hasattr(torch, "sim"):
        torch.sim.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(autouse=True)
def detection(request: pytest.FixtureRequest) -> Iterator[None]:
    """With TDCOPIER_TEST_DETECT=1, fails each test that has a hazard without its marker."""
    wanted = DETECT and not request.node.get_closest_marker("hazardous")
    if not wanted or DEVICE_TYPE != "sim":
        yield
        return
    sim = request.getfixturevalue("sim")
    with sim.poison(), sim.detect():
        yield


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Returns the accelerator's first device, "sim:0" or "cuda:0"."""
    if DEVICE_TYPE == "sim":
        request.getfixturevalue("sim")
    return f"{DEVICE_TYPE}:0"


@pytest.fixture
def accelerator(device: str) -> ModuleType:
    """Returns `torch.sim` or `torch.cuda`."""
    return torch.get_device_module(device)


class Stall:
    """Delays a stream's later work: holds a simulated stream, runs a long kernel on CUDA."""

    def __init__(self, device: str) -> None:
        self.device = device

    @contextmanager
    def __call__(self, stream: torch.Stream) -> Iterator[None]:
        if DEVICE_TYPE == "sim":
            from tdcopier import sim

            with sim.hold(stream):
                yield
        else:
            with torch.cuda.stream(_as_cuda(stream)):
                torch.cuda._sleep(1_000_000_000)  # about 0.5 s
                end = torch.cuda.Event()
                end.record()
            try:
                yield
            except AssertionError as error:
                if end.query():
                    error.args = (f"the stall has ended, perhaps too early: {error}",)
                raise


def _as_cuda(stream: torch.Stream) -> Any:
    return torch.cuda.Stream(
        stream_id=stream.stream_id,
        device_index=stream.device_index,
        device_type=stream.device_type,
    )


@pytest.fixture(scope="session")
def loaded_kernels() -> None:
    """Triggers CUDA's lazy loading, which takes longer than a stall lasts."""
    if DEVICE_TYPE != "cuda":
        return
    places = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    for source in places:
        leaves = [torch.full((n,), 1.0, device=source) for n in (10, 20)]
        for target in places:
            copied = tdcopier.copy([*leaves, leaves[0].clone().requires_grad_()], target)
            for leaf in copied:
                leaf.detach().fill_(2).sum().item()
                torch.empty_like(leaf).copy_(leaf)
            # Of whole words, and of single bytes.
            into = [torch.empty_like(leaf) for leaf in leaves]
            tdcopier.copy_into([leaves[0], leaves[1].char()], [into[0], into[1].char()])


@pytest.fixture
def stall(device: str, loaded_kernels: None) -> Stall:
    return Stall(device)


@pytest.fixture
def slow_link(device: str) -> AbstractContextManager[Any]:
    """Slows down transfers from the host, on a device that supports it."""
    if DEVICE_TYPE != "sim":
        return nullcontext()
    from tdcopier import sim

    return sim.pace("h2d", latency_us=1_000)


@pytest.fixture
def copy_stream(device: str) -> torch.Stream:
    """Returns the engine's stream for copies from the host to new memory on `device`."""
    return _C.copy_stream(device, "to_device")


@pytest.fixture
def reading_stream(device: str) -> torch.Stream:
    """Returns the engine's stream for copies from `device`."""
    return _C.copy_stream(device, "from_device")


@pytest.fixture
def ordered_stream(device: str) -> torch.Stream:
    """Returns the engine's stream for writes to `device` that wait for the caller's kernels."""
    return _C.copy_stream(device, "ordered")


@pytest.fixture(autouse=True)
def restore_limits() -> Iterator[None]:
    yield
    tdcopier.limits.set_staging_bytes(_C.DEFAULT_STAGING_LIMIT_BYTES)
    tdcopier.limits.set_run_ahead(4)
    tdcopier.limits.set_slab_bytes(2 << 30)


@pytest.fixture
def registry() -> Iterator[None]:
    """Removes the test's registrations when it ends."""
    before = dict(container_registry._registered)
    yield
    container_registry._registered.clear()
    container_registry._registered.update(before)
    container_registry._forget_rules()


@pytest.fixture
def registered_box(registry: None) -> None:
    """Registers `Box` as a container, as `oracle` expects."""
    tdcopier.containers.register(Box, flatten_box, unflatten_box)


@pytest.fixture(params=["D2H", "D2D"])
def away(request: pytest.FixtureRequest, device: str, accelerator: ModuleType) -> tuple[str, str]:
    """Returns source and target of a copy from the accelerator's first device."""
    if request.param == "D2H":
        return device, "cpu"
    if accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    return device, device[:-1] + "1"


@pytest.fixture(params=["H2D", "D2H", "D2D"])
def ends(request: pytest.FixtureRequest, device: str, accelerator: ModuleType) -> tuple[str, str]:
    """Returns source and target of a copy in each direction."""
    if request.param == "D2D" and accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    other = device[:-1] + "1"
    return {"H2D": ("cpu", device), "D2H": (device, "cpu"), "D2D": (other, device)}[request.param]


@pytest.fixture
def nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each test be warned of classes of which another has been."""
    monkeypatch.setattr(unknown, "_told", {})


@pytest.fixture
def other_device(device: str, accelerator: ModuleType) -> str:
    """Returns the accelerator's second device."""
    if accelerator.device_count() < 2:
        pytest.skip("needs two devices")
    return device[:-1] + "1"
