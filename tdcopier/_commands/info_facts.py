"""`tdcopier.info`: reports versions, devices, limits in force, threads and switches.

Each entry is found separately. An entry that cannot be determined says why instead of raising.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import torch

import tdcopier
from tdcopier import _C, _checking, _limits

_Answer = TypeVar("_Answer")

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_NVIDIA_SMI = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
_THREADS = Path("/proc/self/task")
_PCI_DEVICES = Path("/sys/bus/pci/devices")

_OTHER_VARIABLES = (
    "CUDA_DEVICE_ORDER",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_WORLD_SIZE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
"""Variables that other software reads and that affect copies."""


class UnavailableError(Exception):
    """The answer is not available; the message says why."""


class Unknown(TypedDict):
    """Stands in for an answer that is not available."""

    unknown: str
    """Why."""


class Versions(TypedDict):
    """Versions of packages; None for a package that is not installed."""

    tdcopier: str
    python: str
    torch: str
    numpy: str | Unknown | None
    tensordict: str | Unknown | None
    torchrl: str | Unknown | None
    cuda: str | Unknown
    """The version that torch was built with."""
    driver: str | Unknown
    """The NVIDIA driver's version."""
    system: str | Unknown


class DeviceInfo(TypedDict):
    """One device that the engine copies to and from."""

    device: str
    """For example `"cuda:0"`."""
    name: str | Unknown
    memory_bytes: int | Unknown
    pci_address: str | Unknown
    pci_link: str | Unknown
    """Speed and width now, and their maximum: an idle device slows its link down."""
    staging_bytes: int | Unknown
    """Pinned memory that currently stages copies to and from the device."""
    gather: str | Unknown
    """How leaves on the device are gathered into chunks."""


class Limits(TypedDict):
    """Limits in force in this process."""

    staging_limit_bytes: int
    """Per device; set by `limits.set_staging_bytes`."""
    staging_buffer_bytes: int
    """Size of a staging buffer, and so the maximum size of a staged transfer."""
    pinned_limit_bytes: int
    """Of the pool of pinned memory, in this process; set by `limits.set_pinned_bytes`."""
    slab_limit_bytes: int
    """Of pinned slabs, in this process; set by `limits.set_slab_bytes`."""
    run_ahead_batches: int
    """Set by `limits.set_run_ahead`."""
    inline_bytes: int
    """Host sources of up to this size are staged in the call."""
    straight_bytes: int
    """Up to this size, the kernel gathers the leaves of a chunk directly into pinned memory."""


class Workers(TypedDict):
    """The threads that stage large copies. The first large copy starts all of them."""

    wanted: int
    """How many threads the first large copy would start if this thread made it now."""
    follows: str
    """How that number is determined."""
    running: int | Unknown
    allowed_processors: int | Unknown
    processors: int | Unknown
    """Processors of the machine."""


class Switches(TypedDict):
    """Modes, and whether they are on."""

    check_mode: bool
    """`TDCOPIER_CHECK`."""
    tensordict_backend_installed: bool
    """Process-wide: `tensordict.install_backend`."""
    tensordict_backend_here: bool
    """In the calling thread: `tensordict.backend`."""
    steps_timed: bool
    """`time_steps`."""
    progress: bool
    """Long work shows its progress where stderr is a terminal: `TDCOPIER_PROGRESS`."""


class Info(TypedDict):
    """The report that `info` returns."""

    versions: Versions
    devices: list[DeviceInfo]
    missing_devices: dict[str, str]
    """Kinds of device that are not available, and why."""
    limits: Limits
    workers: Workers
    switches: Switches
    environment: dict[str, str]
    """The variables that are set, among tdcopier's own and a few others that affect copies."""


def info(*, make_contexts: bool = False) -> Info:
    """Return what a bug report needs: versions, devices, limits in force, threads, switches.

    For example::

        report = tdcopier.info()
        print(report["versions"]["torch"], report["limits"]["run_ahead_batches"])

    The report consists of plain dicts, lists, strings and numbers, so `json.dumps` accepts it. An
    entry that cannot be determined is `{"unknown": reason}`. `python -m tdcopier info` prints the
    report.

    **This call initialises CUDA** if there is a CUDA device, because torch needs that to report a
    device's name. Do not call it in a process that will fork and use CUDA in its children. By
    default it creates no context on a device that this process has not used, so such a device's
    `gather` is unknown.

    Args:
        make_contexts: create a context on every CUDA device, so that every entry is known. This
            takes device memory for as long as the process lives. `python -m tdcopier info` does so
            by default.

    Returns:
        A dict with `versions`, `devices` (a list), `missing_devices` (the reason, by kind),
        `limits`, `workers`, `switches` and `environment`.
    """
    devices, missing_devices = _devices(make_contexts)
    return {
        "versions": _versions(),
        "devices": devices,
        "missing_devices": missing_devices,
        "limits": {
            "staging_limit_bytes": _limits.limits_in_force.staging_limit_bytes,
            "staging_buffer_bytes": _C.STAGING_BUFFER_BYTES,
            "pinned_limit_bytes": tdcopier.pinned.usage().limit_bytes,
            "slab_limit_bytes": _C.slab_limit_bytes(),
            "run_ahead_batches": _limits.limits_in_force.run_ahead_batches,
            "inline_bytes": _C.MAX_INLINE_BYTES,
            "straight_bytes": _C.MAX_STRAIGHT_BYTES,
        },
        "workers": _workers(),
        "switches": _switches(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("TDCOPIER_") or name in _OTHER_VARIABLES
        },
    }


def gather_in_use(device: torch.device) -> str:
    """Return how the engine gathers leaves on a device into the chunks that it sends.

    On a CUDA device this creates a context and compiles the kernel, unless they exist.
    """
    lack = _C.why_no_segment_kernel(device)
    return f"torch._foreach_copy_, without the kernel: {lack}" if lack else "one kernel"


def _asked(question: Callable[[], _Answer]) -> _Answer | Unknown:
    """Return the answer, or why there is none, so that one entry cannot fail the whole report."""
    try:
        return question()
    except Exception as error:
        return {"unknown": _reason(error)}


def _reason(error: Exception) -> str:
    if isinstance(error, UnavailableError):
        return str(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# ---- versions ------------------------------------------------------------------------------------


def _versions() -> Versions:
    return {
        "tdcopier": tdcopier.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": _asked(lambda: _version("numpy")),
        "tensordict": _asked(lambda: _version("tensordict")),
        "torchrl": _asked(lambda: _version("torchrl")),
        "cuda": torch.version.cuda or {"unknown": "this torch was built without CUDA"},
        "driver": _asked(_driver_version),
        "system": _asked(platform.platform),
    }


def _version(package: str) -> str | None:
    """Return the installed version of a package without importing it: tensordict takes a second."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if importlib.util.find_spec(package) is None:
            return None
        raise UnavailableError(f"{package} can be imported, but has no metadata") from None


def _driver_version() -> str:
    """Return the NVIDIA driver's version, if possible from the kernel module, which is fast."""
    if _DRIVER_FILE.exists():
        found = re.search(r"\s(\d+\.\d+(\.\d+)*)\s", _DRIVER_FILE.read_text())
        if found is not None:
            return found[1]
    try:
        done = subprocess.run(_NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=True)
    except FileNotFoundError:
        raise UnavailableError(f"there is neither {_DRIVER_FILE} nor nvidia-smi") from None
    return done.stdout.strip().splitlines()[0]


# ---- devices -------------------------------------------------------------------------------------


def _devices(make_contexts: bool) -> tuple[list[DeviceInfo], dict[str, str]]:
    """Return the devices that the engine supports, and why other kinds are not available."""
    found: list[DeviceInfo] = []
    missing: dict[str, str] = {}
    for kind in ("cuda", "xpu", _registered_kind()):
        count = _asked(partial(_count, kind))
        if isinstance(count, int):
            found += [_device(torch.device(kind, index), make_contexts) for index in range(count)]
        else:
            missing[kind] = count["unknown"]
    return found, missing


def _registered_kind() -> str:
    """Return the device type registered as torch's PrivateUse1, or `"sim"` if there is none."""
    name: str = torch._C._get_privateuse1_backend_name()
    return "sim" if name == "privateuseone" else name


def _count(kind: str) -> int:
    """Return the number of devices of a kind.

    Raises:
        UnavailableError: there are none.
    """
    if kind == "sim" and not hasattr(torch, "sim"):
        raise UnavailableError("not enabled (tdcopier.sim.enable)")
    if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        raise UnavailableError("this torch was built without CUDA")
    count = int(torch.get_device_module(kind).device_count())
    if count == 0:
        raise UnavailableError(f"torch sees no {kind} device")
    return count


def _device(device: torch.device, make_contexts: bool) -> DeviceInfo:
    return {
        "device": str(device),
        "name": _asked(lambda: _name(device)),
        "memory_bytes": _asked(lambda: int(_properties(device).total_memory)),
        "pci_address": _asked(lambda: _pci_address(device)),
        "pci_link": _asked(lambda: _pci_link(_pci_address(device))),
        "staging_bytes": _asked(lambda: _staging_bytes(device)),
        "gather": _asked(lambda: _gather(device, make_contexts)),
    }


def _name(device: torch.device) -> str:
    return "simulated" if device.type == "sim" else str(_properties(device).name)


def _properties(device: torch.device) -> Any:
    """Return torch's properties of a device. May initialise CUDA, but makes no context."""
    if device.type == "sim":
        raise UnavailableError("a simulated device is the host's memory")
    return torch.get_device_module(device).get_device_properties(device)


def _pci_address(device: torch.device) -> str:
    """Return the address in the system's notation: domain, bus, device, function."""
    properties = _properties(device)
    if not hasattr(properties, "pci_bus_id"):
        raise UnavailableError(f"torch does not report it for {device.type} devices")
    domain, bus, slot = (
        getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device")
    )
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def _pci_link(address: str) -> str:
    folder = _PCI_DEVICES / address
    if not (folder / "current_link_speed").exists():
        raise UnavailableError(f"the system does not report it: {folder} has no current_link_speed")
    now, most = (_speed_and_width(folder, which) for which in ("current", "max"))
    return f"{now} now, at most {most}"


def _speed_and_width(folder: Path, which: str) -> str:
    speed, width = (
        (folder / f"{which}_link_{part}").read_text().strip() for part in ("speed", "width")
    )
    return f"{speed} x{width}"


def _gather(device: torch.device, make_contexts: bool) -> str:
    if not make_contexts and not _has_context(device):
        raise UnavailableError("this process has not initialised the device")
    return gather_in_use(device)


def _staging_bytes(device: torch.device) -> int:
    # Asking the engine would create a context. Without a context it has no staging memory.
    return _C.staging_bytes(device) if _has_context(device) else 0


def _has_context(device: torch.device) -> bool:
    """Return whether this process can use the device without creating a context."""
    if device.type != "cuda":
        return True
    return bool(torch._C._cuda_hasPrimaryContext(device.index))  # type: ignore[attr-defined]


# ---- threads and switches ------------------------------------------------------------------------


def _workers() -> Workers:
    allowed = _asked(lambda: len(os.sched_getaffinity(0)))
    return {
        "wanted": _C.default_worker_count(),
        "follows": "processors that this thread may use, or its cgroup's quota if that is less, "
        "shared by LOCAL_WORLD_SIZE processes; 12 at most",
        "running": _asked(_running_workers),
        "allowed_processors": allowed,
        "processors": _asked(_processors),
    }


def _running_workers() -> int:
    """Count the threads with a worker's name. A thread that a worker starts inherits its name."""
    if not _THREADS.exists():
        raise UnavailableError(f"there is no {_THREADS}")
    names = {_thread_name(thread) for thread in _THREADS.iterdir()}
    return sum(name.startswith("tdc-worker-") for name in names)


def _thread_name(thread: Path) -> str:
    try:
        return (thread / "comm").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the thread has ended
        return ""


def _processors() -> int:
    count = os.cpu_count()
    if count is None:
        raise UnavailableError("the system does not report it")
    return count


def _switches() -> Switches:
    # The backend can be on only if its module was imported. Do not import it: it needs tensordict.
    backend = sys.modules.get("tdcopier.tensordict._backend")
    installed, here = (False, False) if backend is None else backend.switches_on()
    return {
        "check_mode": _checking.enabled,
        "tensordict_backend_installed": installed,
        "tensordict_backend_here": here,
        "steps_timed": _C.are_steps_timed(),
        "progress": _limits.shows_progress,
    }
