"""Controls that a real device lacks: stopping streams, and counting transfers and memory."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tdcopier import _sim
from tdcopier.sim._devices import DeviceLike, device_index, stream_key
from tdcopier.sim._scope import Scope


class Hold(Scope):
    """Keeps a stream from starting operations, until :meth:`release` or the end of a ``with``.

    For example::

        held = sim.hold(stream)
        handle = tdcopier.start_copy(batch, "sim")  # returns although the stream does not run
        held.release()

    Made by :func:`hold`. A hold that is dropped without being released keeps holding its stream.
    """

    def __init__(self, stream: torch.Stream | None) -> None:
        """Hold ``stream``, or the current stream."""
        self._key = stream_key(stream)
        _sim.hold(*self._key)
        super().__init__()

    def _end(self) -> None:
        _sim.release(*self._key)

    def release(self) -> None:
        """Let the stream continue, unless other holds remain. A second call does nothing."""
        self._end_once()


def hold(stream: torch.Stream | None = None) -> Hold:
    """Keep a stream from starting operations, both those already enqueued and later ones.

    For example::

        with sim.hold():
            on_device = pinned.to("sim", non_blocking=True)  # enqueued: it runs after the block

    An operation that is running finishes. Holds of one stream are counted: it continues when all
    have been released. Until then every wait for the stream blocks, including blocking copies and
    operators that run on the host. The end of the process releases all streams.

    Args:
        stream: a stream of a simulated device; None is the current stream of the current device.

    Returns:
        The hold, which is a context manager.

    Raises:
        ValueError: the stream does not belong to a simulated device.
        RuntimeError: the simulation is not enabled.

    """
    return Hold(stream)


def busy(work: float | _sim.Gate, stream: torch.Stream | None = None) -> None:
    """Enqueue an operation that takes some time, like a long kernel. Return at once.

    For example::

        sim.busy(0.01)  # the current stream has 10 ms of work

    Args:
        work: how many seconds the operation takes, or the gate that it waits for.
        stream: as for :func:`hold`.

    Raises:
        ValueError: the time is not between 0 and 3600 seconds, or the stream does not belong to a
            simulated device.
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
    """A number of transfers, and their total size in bytes.

    For example::

        transfers, nbytes = sim.counts().h2d

    Attributes:
        transfers: How many.
        nbytes: Their bytes.
    """

    transfers: int
    nbytes: int


class Counts(NamedTuple):
    """Transfers by direction.

    For example::

        sent, received, between, within = sim.counts()
        assert received.nbytes < sent.nbytes

    Attributes:
        h2d: From the host to a device.
        d2h: From a device to the host.
        d2d: From one device to another.
        within: Within one device.
    """

    h2d: Transfers
    d2h: Transfers
    d2d: Transfers
    within: Transfers


def counts() -> Counts:
    """Return the transfers enqueued on all devices since the last :func:`reset_counts`.

    For example::

        sim.reset_counts()
        tdcopier.copy([torch.ones(3), torch.zeros(4)], "sim")
        assert sim.counts().h2d.transfers == 1  # for both

    Bytes are those of the target. Reading a scalar from the device (``item()``) is a transfer.
    Copies of no elements, and data that moves so that an operator can run on the host, are not.
    """
    return Counts(*(Transfers(*pair) for pair in _sim.transfer_counts()))


class EventCounts(NamedTuple):
    """Calls about events; on CUDA each is a call of the driver.

    For example::

        records, stream_waits, queries, host_waits = sim.event_counts()

    Attributes:
        records: Of an event on a stream.
        stream_waits: Of a stream for an event.
        queries: Whether an event has been reached.
        host_waits: Of the calling thread for an event.
    """

    records: int
    stream_waits: int
    queries: int
    host_waits: int


def event_counts() -> EventCounts:
    """Return the event calls of all threads since the last :func:`reset_counts`.

    For example::

        sim.reset_counts()
        tdcopier.start_copy(batch, "sim").wait()
        assert sim.event_counts().host_waits == 0

    Those of memory allocators, which CUDA's make too, are not counted.
    """
    return EventCounts(*_sim.event_counts())


def reset_counts() -> None:
    """Start counting transfers and event calls from zero.

    For example::

        sim.reset_counts()
        train_one_step()
        assert sim.counts().d2h.transfers <= 1
    """
    _sim.reset_counts()


class MemoryStats(NamedTuple):
    """The memory of one device. All but the last are bytes, in multiples of 512.

    For example::

        peak = sim.memory_stats("sim:1").peak_allocated_bytes

    Attributes:
        allocated_bytes: In blocks that are in use.
        peak_allocated_bytes: The most of these.
        reserved_bytes: In all blocks, in use or kept for reuse.
        peak_reserved_bytes: The most of these.
        allocations: Number of non-empty allocations.
    """

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    allocations: int


def memory_stats(device: DeviceLike = None) -> MemoryStats:
    """Return the memory statistics of a device; None is the current one.

    For example::

        before = sim.memory_stats().allocations
        batch = tdcopier.copy(batch, "sim")
        print(f"{sim.memory_stats().allocations - before} chunks")

    Raises:
        ValueError: the device is of another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    return MemoryStats(*_sim.memory_stats(device_index(device)))


def set_memory_limit_bytes(device: DeviceLike, limit_bytes: int | None) -> None:
    """Let a device reserve no more than ``limit_bytes``; None removes the limit.

    For example::

        sim.set_memory_limit_bytes("sim:0", 64 * 1024**2)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(128 * 1024**2, dtype=torch.uint8, device="sim:0")
        sim.set_memory_limit_bytes("sim:0", None)

    An allocation that would exceed the limit first frees cached memory that no pending work can
    touch, and raises ``torch.OutOfMemoryError`` if that is not enough.

    Raises:
        ValueError: the limit is negative, or the device is of another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    _sim.set_memory_limit_bytes(device_index(device), limit_bytes)


class PinnedBytes(NamedTuple):
    """Pinned host memory, in bytes, in multiples of 512.

    For example::

        in_use, current, peak = sim.pinned_bytes()

    Attributes:
        in_use: Allocated.
        current: Taken from the system, allocated or kept for reuse.
        peak: The highest `current` since the last `reset_peak_pinned_bytes`.
    """

    in_use: int
    current: int
    peak: int


def pinned_bytes() -> PinnedBytes:
    """Return how much host memory is pinned, without that of the pool: see `pinned.usage`.

    For example::

        print(f"{sim.pinned_bytes().in_use / 2**20:.0f} MiB are in use")
    """
    return PinnedBytes(*_sim.pinned_bytes())


def reset_peak_pinned_bytes() -> None:
    """Reset the peak to the current amount of pinned memory.

    For example::

        sim.reset_peak_pinned_bytes()
        train_one_step()
        print(sim.pinned_bytes().peak)
    """
    _sim.reset_peak_pinned_bytes()


def empty_pinned_cache() -> None:
    """Return unused pinned memory that no pending work can touch to the system.

    For example::

        sim.empty_pinned_cache()
        assert sim.pinned_bytes().current == sim.pinned_bytes().in_use
    """
    _sim.empty_pinned_cache()


def synchronize(device: DeviceLike = None) -> None:
    """Block until the work enqueued so far on all streams of a device is done.

    For example::

        on_device = pinned.to("sim", non_blocking=True)
        sim.synchronize("sim:0")
        pinned.zero_()  # has been read

    Args:
        device: a simulated device; None is the current one.

    Raises:
        ValueError: the device is of another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    _sim.synchronize(device_index(device))
