"""What a real device does not have: its streams can be stopped, and everything is counted."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tdcopier import _sim
from tdcopier.sim._devices import DeviceLike, device_index, stream_key
from tdcopier.sim._scope import Scope


class Hold(Scope):
    """Keeps a stream from beginning operations, until :meth:`release` or the end of a ``with``.

    Made by :func:`hold`. One that is dropped without being released goes on holding its stream.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        """Hold ``stream``, or the current stream."""
        self._key = stream_key(stream)
        _sim.hold(*self._key)
        super().__init__()

    def _end(self) -> None:
        _sim.release(*self._key)

    def release(self) -> None:
        """Let the stream go on, as far as others do not hold it. The second call does nothing."""
        self._end_once()


def hold(stream: torch.Stream | None = None) -> Hold:
    """Keep a stream from beginning operations, those that it has and those that it will be given.

    An operation that is running finishes. Holds of one stream are counted: it goes on when all have
    been released. Whoever waits for a held stream waits until then; that includes blocking copies
    and operators that run on the host. The end of the process releases all streams.

    Args:
        stream: a stream of a simulated device; the current one of the current device if None.

    Returns:
        The hold, which is a context manager.

    Raises:
        ValueError: the stream is not one of a simulated device.
        RuntimeError: the simulation is not enabled.

    """
    return Hold(stream)


def busy(work: float | _sim.Gate, stream: torch.Stream | None = None) -> None:
    """Enqueue an operation that takes its time, in place of a long kernel. Returns at once.

    Args:
        work: how many seconds the operation takes, or the gate that it waits for.
        stream: as for :func:`hold`.

    Raises:
        ValueError: the time is negative or not finite, or the stream is not one of a simulated
            device.
        RuntimeError: the simulation is not enabled.

    """
    key = stream_key(stream)
    if isinstance(work, _sim.Gate):
        _sim.busy_until_open(*key, work)
        return
    if not 0 <= work <= 3600:
        raise ValueError(f"the time must be between 0 and 3600 seconds, got {work}")
    _sim.busy_for(*key, work)


class Transfers(NamedTuple):
    """How many transfers, and of how many bytes together."""

    transfers: int
    bytes: int


class Counts(NamedTuple):
    """Transfers by direction."""

    h2d: Transfers  #: from the host to a device
    d2h: Transfers  #: from a device to the host
    d2d: Transfers  #: from one device to another
    within: Transfers  #: from one place of a device to another


def counts() -> Counts:
    """The transfers that have been enqueued since the last :func:`reset_counts`, on all devices.

    Bytes are those of the target. Reading a scalar from the device (``item()``) is a transfer;
    what moves so that an operator can run on the host is not, nor is a copy of no elements.
    """
    return Counts(*(Transfers(*pair) for pair in _sim.transfer_counts()))


def reset_counts() -> None:
    """Start counting transfers from zero."""
    _sim.reset_counts()


class MemoryStats(NamedTuple):
    """The memory of one device. All but the last are bytes, in multiples of 512."""

    allocated_bytes: int  #: of blocks that are in use
    peak_allocated_bytes: int
    reserved_bytes: int  #: of all blocks, in use or kept for reuse
    peak_reserved_bytes: int
    allocations: int  #: requests for memory that is not empty


def memory_stats(device: DeviceLike = None) -> MemoryStats:
    """The memory of a device, the current one if None.

    Raises:
        ValueError: it is a device of another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    return MemoryStats(*_sim.memory_stats(device_index(device)))


def set_memory_limit_bytes(device: DeviceLike, limit: int | None) -> None:
    """Let a device reserve no more than ``limit`` bytes; None takes the limit away.

    Beyond it, ``torch.OutOfMemoryError`` is raised if what is kept for reuse, and what no pending
    work can touch, does not make enough room.

    Raises:
        ValueError: the limit is negative, or the device is of another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    _sim.set_memory_limit_bytes(device_index(device), limit)


class PinnedBytes(NamedTuple):
    """Pinned host memory, in bytes, in multiples of 512."""

    in_use: int  #: handed out
    current: int  #: taken from the system: in use, or kept for reuse
    peak: int  #: the highest ``current`` since the last :func:`reset_peak_pinned_bytes`


def pinned_bytes() -> PinnedBytes:
    """How much host memory is pinned."""
    return PinnedBytes(*_sim.pinned_bytes())


def reset_peak_pinned_bytes() -> None:
    """Make the present amount of pinned memory the peak."""
    _sim.reset_peak_pinned_bytes()


def empty_pinned_cache() -> None:
    """Give back the pinned memory that is not in use and that no pending work can touch."""
    _sim.empty_pinned_cache()


def synchronize(device: DeviceLike = None) -> None:
    """Block until the work that all streams of a device have been given so far is done.

    Args:
        device: a simulated device, the current one if None.

    Raises:
        ValueError: it is a device of another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    _sim.synchronize(device_index(device))
