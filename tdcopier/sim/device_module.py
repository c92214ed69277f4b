"""The module ``torch.sim``: the counterpart of ``torch.cuda`` for the simulated device.

Functions that take a device accept an index, a string, a ``torch.device``, or None for the current
device. They raise ValueError for a device of another type, and RuntimeError for an index that is
out of range.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tdcopier import _sim
from tdcopier.sim._control import memory_stats, synchronize
from tdcopier.sim._devices import DeviceLike, device_index, stream_key

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_rng_state",
    "init",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "max_memory_allocated",
    "max_memory_reserved",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_peak_memory_stats",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
]


class Stream(torch.Stream):
    """A ``torch.Stream`` on the simulated device.

    New streams are taken in turn from a pool of 32, or from a second one for negative priorities.
    """

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **ids: Any) -> Stream:
        """Make a stream, or wrap that of ``stream_id``, ``device_index`` and ``device_type``."""
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=f"sim:{device_index(device)}", priority=priority)


def Event(device: DeviceLike = None, *, enable_timing: bool = False) -> torch.Event:
    """Return a ``torch.Event`` on a simulated device that has not been recorded.

    This is not a class, because ``elapsed_time`` and others accept only ``torch.Event`` itself.
    """
    return torch.Event(f"sim:{device_index(device)}", enable_timing=enable_timing)


def is_available() -> bool:
    """Return whether there is a simulated device."""
    return _sim.device_count() > 0


def is_initialized() -> bool:
    """Return whether there is a simulated device, which needs no further initialisation."""
    return is_available()


def init() -> None:
    """Do nothing: the device needs no further initialisation."""


def _lazy_init() -> None:
    """Do nothing; torch's device-independent code calls it."""


def _is_in_bad_fork() -> bool:
    return _sim.in_forked_child()


def device_count() -> int:
    """Return the number of simulated devices."""
    return _sim.device_count()


def current_device() -> int:
    """Return the index of the calling thread's current device."""
    return _sim.current_device()


def set_device(device: DeviceLike) -> None:
    """Make a device the calling thread's current one."""
    _sim.exchange_device(device_index(device))


@contextlib.contextmanager
def device(device: DeviceLike) -> Iterator[None]:
    """Make a device the calling thread's current one within a ``with``."""
    previous = _sim.exchange_device(device_index(device))
    try:
        yield
    finally:
        _sim.exchange_device(previous)


def _existing(index: int, stream_id: int) -> Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1
    return Stream(stream_id=stream_id, device_index=index, device_type=kind.value)


def current_stream(device: DeviceLike = None) -> Stream:
    """Return the calling thread's current stream on a device."""
    index = device_index(device)
    return _existing(index, torch.accelerator.current_stream(index).stream_id)


def default_stream(device: DeviceLike = None) -> Stream:
    """Return the default stream of a device."""
    return _existing(device_index(device), 0)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream current for the calling thread, and make its device current too."""
    index, stream_id = stream_key(stream)
    _sim.exchange_device(index)
    _sim.exchange_stream(index, stream_id)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """Do as :func:`set_stream` within a ``with``; None changes nothing."""
    if stream is None:
        yield
        return
    index, stream_id = stream_key(stream)
    previous_device = _sim.exchange_device(index)
    previous_stream = _sim.exchange_stream(index, stream_id)
    try:
        yield
    finally:
        _sim.exchange_stream(index, previous_stream)
        _sim.exchange_device(previous_device)


def memory_allocated(device: DeviceLike = None) -> int:
    """Return how many bytes of device memory are in use."""
    return memory_stats(device).allocated_bytes


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the highest :func:`memory_allocated` since :func:`reset_peak_memory_stats`."""
    return memory_stats(device).peak_allocated_bytes


def memory_reserved(device: DeviceLike = None) -> int:
    """Return how many bytes of device memory are in use or kept for reuse."""
    return memory_stats(device).reserved_bytes


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return the highest :func:`memory_reserved` since :func:`reset_peak_memory_stats`."""
    return memory_stats(device).peak_reserved_bytes


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Reset the peaks to the current amounts of memory."""
    _sim.reset_peak_memory_stats(device_index(device))


def empty_cache() -> None:
    """Free the unused memory of all devices that no pending work can touch."""
    _sim.empty_cache()


def manual_seed(seed: int) -> None:
    """Seed the host's generator, which the device shares."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Do as :func:`manual_seed`: all devices share one generator."""
    manual_seed(seed)


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Return the state of the generator, a one-dimensional uint8 tensor on the host."""
    device_index(device)
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Set the state of the generator to one that :func:`get_rng_state` returned."""
    device_index(device)
    torch.default_generator.set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes that autocast supports."""
    return [torch.float16, torch.bfloat16]
