"""A simulated accelerator: the device ``sim`` of torch, for tests of asynchronous code.

Its memory is host memory, but it is as asynchronous as a GPU: a stream is a queue of operations
that a thread of its own runs, and streams run concurrently. A stream can be *held*, to show the
effects of work that is enqueued and has not run yet::

    from tdcopier import sim

    sim.enable(devices=2)
    staging = torch.ones(4).pin_memory()
    with sim.hold(torch.sim.current_stream()):
        on_device = staging.to("sim", non_blocking=True)
        staging.fill_(2)  # too early: the copy has not read the buffer yet
    on_device.tolist()  # [2.0, 2.0, 2.0, 2.0]

It has CUDA's semantics of events, of the two caching allocators (a freed block is reused in stream
order; ``record_stream`` delays that), of copies to and from pinned and pageable memory, and of
current devices and streams per thread. It has no kernels: an operator that is not a copy, on
strided or sparse tensors, waits for the current streams of its devices and then runs on the host.

Failures can be injected: :func:`fail_device_allocation`, :func:`fail_pinned_allocation`,
:func:`fail_transfer`, :func:`fail_event_record`, :func:`fail_event_query` and :func:`fail_thread`
make the n-th call of their kind from now on fail. :func:`pace` makes transfers take as long as on a
real link, and :func:`poison` exposes reads of freed memory. :func:`detect` finds races, memory that
is reused too early, and leaks, even in a run that happens to succeed.

Importing this module changes nothing; :func:`enable` registers the device, once per process.
"""

from tdcopier._sim import Gate
from tdcopier.sim._control import (
    Counts,
    EventCounts,
    Hold,
    MemoryStats,
    PinnedBytes,
    Transfers,
    busy,
    counts,
    empty_pinned_cache,
    event_counts,
    hold,
    memory_stats,
    pinned_bytes,
    reset_counts,
    reset_peak_pinned_bytes,
    set_memory_limit_bytes,
    synchronize,
)
from tdcopier.sim._detect import Detector, Hazard, HazardError, detect
from tdcopier.sim._enable import enable, is_enabled
from tdcopier.sim._faults import (
    Fault,
    fail_device_allocation,
    fail_event_query,
    fail_event_record,
    fail_pinned_allocation,
    fail_thread,
    fail_transfer,
)
from tdcopier.sim._pace import Pace, pace
from tdcopier.sim._poison import Poison, poison
from tdcopier.sim._schedule import DeadlockError, Schedule, ScheduledThread, schedule

Gate.__module__ = "tdcopier.sim"

__all__ = [
    "Counts",
    "DeadlockError",
    "Detector",
    "EventCounts",
    "Fault",
    "Gate",
    "Hazard",
    "HazardError",
    "Hold",
    "MemoryStats",
    "Pace",
    "PinnedBytes",
    "Poison",
    "Schedule",
    "ScheduledThread",
    "Transfers",
    "busy",
    "counts",
    "detect",
    "empty_pinned_cache",
    "enable",
    "event_counts",
    "fail_device_allocation",
    "fail_event_query",
    "fail_event_record",
    "fail_pinned_allocation",
    "fail_thread",
    "fail_transfer",
    "hold",
    "is_enabled",
    "memory_stats",
    "pace",
    "pinned_bytes",
    "poison",
    "reset_counts",
    "reset_peak_pinned_bytes",
    "schedule",
    "set_memory_limit_bytes",
    "synchronize",
]
