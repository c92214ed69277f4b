"""The module ``torch.sim``: the names that ``torch.cuda`` has, for the simulated device.

Functions that take a device accept an index, a string, a ``torch.device`` or None, which is the
current device. They raise ValueError for a device of another type, and RuntimeError for an index
that is out of range.
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
    """A ``torch.Stream`` that is on the simulated device unless told otherwise.

    New streams are the 32 of a pool in turn, and of a second pool for negative priorities.
    """

    def __new__(cls, device: DeviceLike = None, priority: int = 0, **ids: Any) -> Stream:
        """A new stream; or an existing one, by ``stream_id``, ``device_index``, ``device_type``."""
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, device=f"sim:{device_index(device)}", priority=priority)


def Event(device: DeviceLike = None, *, enable_timing: bool = False) -> torch.Event:
    """A ``torch.Event`` on a simulated device that has not been recorded.

    Not a class: torch takes only the very class ``torch.Event`` for ``elapsed_time`` and others.
    """
    return torch.Event(f"sim:{device_index(device)}", enable_timing=enable_timing)


def is_available() -> bool:
    """Whether there is a simulated device."""
    return _sim.device_count() > 0


def is_initialized() -> bool:
    """Whether there is a simulated device: it needs no further initialisation."""
    return is_available()


def init() -> None:
    """Nothing: the device needs no further initialisation."""


def _lazy_init() -> None:
    """Nothing, for torch's device-independent code."""


def _is_in_bad_fork() -> bool:
    return _sim.in_forked_child()


def device_count() -> int:
    """The number of simulated devices."""
    return _sim.device_count()


def current_device() -> int:
    """The index of the calling thread's current device."""
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
    """The calling thread's current stream on a device."""
    index = device_index(device)
    return _existing(index, torch.accelerator.current_stream(index).stream_id)


def default_stream(device: DeviceLike = None) -> Stream:
    """The default stream of a device."""
    return _existing(device_index(device), 0)


def set_stream(stream: torch.Stream) -> None:
    """Make a stream the calling thread's current one of its device, and that device current."""
    index, stream_id = stream_key(stream)
    _sim.exchange_device(index)
    _sim.exchange_stream(index, stream_id)


@contextlib.contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """:func:`set_stream` within a ``with``; None changes nothing."""
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
    """Bytes of device memory that are in use."""
    return memory_stats(device).allocated_bytes


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The highest :func:`memory_allocated` since the last :func:`reset_peak_memory_stats`."""
    return memory_stats(device).peak_allocated_bytes


def memory_reserved(device: DeviceLike = None) -> int:
    """Bytes of device memory that are in use or kept for reuse."""
    return memory_stats(device).reserved_bytes


def max_memory_reserved(device: DeviceLike = None) -> int:
    """The highest :func:`memory_reserved` since the last :func:`reset_peak_memory_stats`."""
    return memory_stats(device).peak_reserved_bytes


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Make the present amounts of memory the peaks."""
    _sim.reset_peak_memory_stats(device_index(device))


def empty_cache() -> None:
    """Give back the memory of all devices that is not in use and that no pending work can touch."""
    _sim.empty_cache()


def manual_seed(seed: int) -> None:
    """Seed the host's generator, from which random numbers of the device come too."""
    torch.default_generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """The same as :func:`manual_seed`: the devices share one generator."""
    manual_seed(seed)


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """The state of the generator, a uint8 tensor of one dimension on the host."""
    device_index(device)
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = None) -> None:
    """Set the state of the generator to what :func:`get_rng_state` has returned."""
    device_index(device)
    torch.default_generator.set_state(new_state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    """The dtypes that autocast may be used with."""
    return [torch.float16, torch.bfloat16]
