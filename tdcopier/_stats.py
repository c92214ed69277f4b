"""Statistics of one copy: counts, and the time of each phase.

`Handle::stats()` in `csrc/python/handle/handle.cpp` adds up what the copy's jobs have counted.
Leaves are counted where the tree is walked, in `start_copy.cpp` and `copy_into.cpp`.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class StepTimes(NamedTuple):
    """Time that one copy has spent in each phase so far, in microseconds of a steady clock.

    For example::

        with tdcopier.stats.time_steps():
            handle = tdcopier.start_copy(batch, "cuda")
        handle.get()
        print(f"{handle.stats.steps.stage_us:.0f} us of staging")

    The times of threads that run in parallel add up, so `stage` and `enqueue` may exceed the
    duration of the copy.

    Attributes:
        flatten_us: Taking the tree apart and inspecting each leaf; for `copy_into`, each pair of
            leaves.
        plan_us: Deciding where each leaf goes, and allocating memory for it.
        stage_us: Reading leaves into staging memory, or enqueuing the kernel that gathers them. For
            `copy_into` also writing arrived bytes to their destinations on the host.
        enqueue_us: Enqueuing transfers on tdcopier's streams; transfers of pageable memory block
            here.
        outputs_us: Making the tensors of the result.
        unflatten_us: Making the containers of the result, and the Python objects of its tensors.
        wait_us: Time that the host was blocked, in `get`, in `wait` until the host sources were
            read or the result had arrived on the host, or by `limits.set_run_ahead`.
    """

    flatten_us: float
    plan_us: float
    stage_us: float
    enqueue_us: float
    outputs_us: float
    unflatten_us: float
    wait_us: float


class CopyStats(NamedTuple):
    """Counts of one copy. Transfers and bytes are complete once the handle is `ready()`.

    Of a failed copy, those that were enqueued together with the one that failed may lack.

    For example::

        handle = tdcopier.start_copy(batch, "cuda")
        handle.get()
        print(f"{handle.stats.packed_leaves} leaves in {handle.stats.transfers} transfers")

    Every leaf is counted once: `packed_leaves + alone_leaves + delegated_leaves + reused_leaves` is
    the number of tensors and arrays in the tree. A TensorDict (or a part of one) that is delegated
    to its own ``.to`` counts as one leaf, as does any other object with a ``.to``; a jagged tensor
    counts once for each tensor in it, arrays that torch cannot take count as opaque, and a leaf
    whose own ``.to`` failed does not count.

    For `copy_into`, leaves of up to 256 KiB count as packed and larger ones as alone, even without
    a transfer, and `chunks` counts those on the target that are scattered to their destinations.

    Attributes:
        packed_leaves: Leaves that share a chunk with others.
        alone_leaves: Leaves with a chunk of their own, because they are larger than 256 KiB or
            `max_packed_chunk_bytes`, or because packing is off.
        delegated_leaves: Leaves and objects that were delegated to their own ``.to``, inside the
            call; it may have blocked. An object counts even if its ``.to`` returned the object
            itself.
        reused_leaves: Leaves that were on the target already and are returned as the same objects.
            For `copy_into`, leaves that are the same memory as their destination, and those that
            are tied to another leaf, with which they are written.
        opaque_leaves: Values that are neither containers nor leaves, passed through unchanged.
        chunks: Allocations on the target.
        transfers: Transfers that the engine enqueued, without those of delegated leaves. A kernel
            that gathers leaves of a CUDA device directly into pinned memory, up to 4 MiB, counts as
            one. A profiler shows those of a batch for the driver as one.
        transfer_bytes: Bytes of these transfers, including padding between slots.
        background: Whether worker threads staged the copy, rather than the call itself.
        fallbacks: Operations that took a slower path because the fast one was unavailable. On CUDA:
            gathers, scatters and transfers by torch's own calls, and batches of transfers that the
            driver refused. On any device: memory that could not be pinned, an event that could not
            be recorded, tables whose rows were read by their own code. Delegated leaves are not
            included.
        opaque_differences: Opaque values of the source that differ from those at the same place in
            a destination that exists, and were not copied: see `copy_opaque` of `copy_into`. 0 for
            copies to new memory.
        rows_in_place: Leaves that a kernel of the device reads from pinned memory, or writes there,
            such as rows of a storage, and in a copy the small leaves that are pinned each for
            itself. No host thread stages them.
        steps: Time spent in each phase so far; None unless `time_steps` was on at the call.
    """

    packed_leaves: int
    alone_leaves: int
    delegated_leaves: int
    reused_leaves: int
    opaque_leaves: int
    chunks: int
    transfers: int
    transfer_bytes: int
    background: bool
    fallbacks: int
    opaque_differences: int
    rows_in_place: int = 0
    steps: StepTimes | None = None


def stats_of(*fields: Any) -> CopyStats:
    """Make the statistics of a handle from its fields, in their order."""
    stats = CopyStats(*fields)
    return stats if stats.steps is None else stats._replace(steps=StepTimes(*stats.steps))
