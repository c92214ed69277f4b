"""A pool of pinned memory, which costs less than torch's, and calls that say and trim what it has.

Its blocks are anonymous memory whose pages several threads make, in huge pages where the system has
them, and which is then registered with the device's driver. torch's allocator takes memory of the
next power of two, makes it in one thread, and keeps it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from tdcopier import _C
from tdcopier._compile import keep_out_of_graphs
from tdcopier._limits import integer
from tdcopier._options import Device
from tdcopier._progress import polled

_MEMORY = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MOST_BYTES = 1 << 60
_MOST_WAITS = 32
"""Copies in flight that a lease waits for: other threads may start more all the time."""


@dataclass(frozen=True)
class Usage:
    """The pinned memory of this process, in bytes: see `pinned.usage`.

    For example::

        usage = tdcopier.pinned.usage()
        print(f"{usage.leased_bytes + usage.free_bytes} of {usage.limit_bytes} bytes in the pool")

    Attributes:
        leased_bytes: Of the pool: in use by tensors, by a device that has not finished with memory
            that came back, or not yet made.
        free_bytes: Of the pool: pinned, and ready for the next lease.
        limit_bytes: The limit on the two above together: see `limits.set_pinned_bytes`.
        staging_bytes: Memory that stages copies to and from all devices, batches of `prefetch`
            included.
        torch_bytes: Memory that torch's allocator has, in use or kept for reuse. None: this torch
            does not tell. Results on the host are there.
        slab_bytes: Memory through which a loader's workers send batches: see
            `limits.set_slab_bytes`.
    """

    leased_bytes: int
    free_bytes: int
    limit_bytes: int
    staging_bytes: int
    torch_bytes: int | None
    slab_bytes: int


@keep_out_of_graphs("lease()")
def lease(sizes_bytes: Iterable[int]) -> Iterator[torch.Tensor]:
    """Lease pinned memory from the pool: yield a uint8 tensor of each size, in order.

    Each tensor is yielded as soon as it is ready, while threads make those that follow. Its bytes
    are undefined. It is aligned to 64 bytes, and to 4 KiB from 16 MiB on. Sizes of less than 16 MiB
    share pieces of 64 MiB or a little more, which come back to the pool as a whole.

    A tensor's memory comes back when its last reference is gone. Copies of tdcopier keep it until
    they are done. It is used again after the work on those streams that are current in the thread
    which drops it, and after `non_blocking` copies of torch on any stream. A kernel of yours that
    reads it on another stream is not known: keep the tensor until that has run.

    Drop the iterator, and what it has not yielded comes back.

    Raises:
        ValueError: a size is negative, or all are more than 2**60 together.
        MemoryError: the memory would exceed the limit (see `limits.set_pinned_bytes`), and then
            nothing is leased, as if the system has not that many addresses; or it has no such
            memory, and then this comes instead of the first tensor that is missing.
        RuntimeError: there is no accelerator, this is a forked child, or, instead of the first
            tensor that is missing, the driver refuses to pin more.
    """
    sizes = [integer("each of sizes_bytes", size) for size in sizes_bytes]
    if any(size < 0 for size in sizes) or sum(sizes) > _MOST_BYTES:
        raise ValueError(f"sizes_bytes must not be negative, nor more than 2**60; got {sizes}")
    device = _accelerator()
    for _ in range(_MOST_WAITS):
        try:
            return _C.LeasedTensors(sizes, device)
        except MemoryError:  # copies in flight may have the memory
            if not _C.wait_for_release():
                break
    return _C.LeasedTensors(sizes, device)


@keep_out_of_graphs("pinned.usage()")
def usage() -> Usage:
    """Return how much pinned memory the process has, and for what. Never blocks for long.

    For example::

        if tdcopier.pinned.usage().free_bytes > 8 * 1024**3:
            tdcopier.pinned.trim()

    Memory that `pin_memory_` has pinned is not counted.
    """
    return Usage(*_C.pinned_use(), _C.pinned_slab_bytes())


@keep_out_of_graphs("pinned.staging_bytes()")
def staging_bytes(device: Device) -> int:
    """Return the number of bytes of pinned memory that currently stage copies to and from `device`.

    For example::

        print(tdcopier.pinned.staging_bytes("cuda:0") // 2**20, "MiB")

    Prefetched batches that wait to be sent have memory of their own, which is not counted here: see
    `limits.set_staging_bytes`.
    """
    return _C.staging_bytes(device)


@keep_out_of_graphs("pinned.reserve()")
def reserve(nbytes: int) -> int:
    """Pin `nbytes` and 0.1 % more beforehand, in one piece; return how many bytes were pinned.

    For example::

        tdcopier.pinned.reserve(sum(weight.nbytes for weight in model.parameters()))
        parked = tdcopier.park(model)  # need not wait for memory

    Later leases of `nbytes` together take their memory from there without a wait: each is rounded
    up, for which the 0.1 % are. If the pool has a free piece of that size, nothing is pinned and 0
    is returned. Blocks until the memory is pinned.

    Raises:
        ValueError: `nbytes` is negative, or more than 2**60.
        MemoryError: the pool would exceed its limit, or the system has not that much memory.
        RuntimeError: there is no accelerator, this is a forked child, or the driver refuses it.
    """
    wanted = integer("nbytes", nbytes)
    if not 0 <= wanted <= _MOST_BYTES:
        raise ValueError(f"nbytes must be from 0 to 2**60; got {wanted}")
    device = _accelerator()
    pinned_bytes = wanted + wanted // 1000
    # Threads make the pages, and then the driver registers the whole piece in one call.
    with polled("making pages of pinned memory", pinned_bytes, _resident_bytes):
        return _C.reserve_pinned(pinned_bytes, device)


@keep_out_of_graphs("pinned.trim()")
def trim() -> int:
    """Return the pool's blocks that are wholly free to the system; return how many bytes they had.

    For example::

        freed_bytes = tdcopier.pinned.trim()

    Memory that is leased stays, and so does a block of which a part is leased.
    """
    return _C.trim_pinned()


def _resident_bytes() -> int:
    """Return how much memory the process has; 0 if the system does not tell."""
    try:
        return int(_MEMORY.read_text().split()[1]) * _PAGE_BYTES
    except FileNotFoundError:
        return 0


def _accelerator() -> torch.device:
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        raise RuntimeError("there is no accelerator that could access pinned memory")
    return device
