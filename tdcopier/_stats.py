"""What a copy did, in numbers."""

from __future__ import annotations

from typing import Any, NamedTuple


class StepTimes(NamedTuple):
    """What one copy has spent its time on so far, in microseconds of a steady clock.

    Steps of several threads side by side add up, so `stage` and `enqueue` may exceed the copy's
    whole duration.
    """

    flatten_us: float
    """Taking the tree apart, and looking at each leaf; of `copy_into`, at each pair."""
    plan_us: float
    """Deciding where each leaf goes, and allocating memory for it."""
    stage_us: float
    """Reading leaves into staging memory, or enqueuing the kernel that gathers them; of
    `copy_into`, writing what has arrived on the host to where it belongs, too."""
    enqueue_us: float
    """Putting transfers on tdcopier's streams; those of pageable memory block meanwhile."""
    outputs_us: float
    """Making the tensors of the result."""
    unflatten_us: float
    """Making the containers of the result, and Python's side of its tensors."""
    wait_us: float
    """The host was blocked: in `get`, in a `wait` until the host sources are read or the result has
    arrived on the host, or by `set_run_ahead_limit`."""


class CopyStats(NamedTuple):
    """Counts of one copy. Transfers and bytes are complete once the handle is `ready()`.

    Of `copy_into`, leaves up to 256 KiB count as packed and larger ones as alone, also where there
    is no transfer, and chunks are those on the target that are scattered to their destinations.

    Every leaf is counted once: `packed_leaves + alone_leaves + delegated_leaves + reused_leaves` is
    the number of tensors and arrays in the tree, where a TensorDict (or a part of one) that is left
    to its own `.to` counts as one.
    """

    packed_leaves: int
    """Leaves that share a chunk with others."""
    alone_leaves: int
    """Leaves with a chunk of their own, being larger than 256 KiB or `max_packed_chunk_bytes`, or
    because packing is off."""
    delegated_leaves: int
    """Leaves that were left to their own `.to`, inside the call; it may have blocked."""
    reused_leaves: int
    """Leaves that are on the target already and are returned as they are."""
    opaque_leaves: int
    """Values that are neither containers nor leaves, passed through unchanged."""
    chunks: int
    """Allocations on the target."""
    transfers: int
    """Transfers that the engine enqueued; those of delegated leaves are not among them. A kernel
    that gathers leaves of a CUDA device straight into pinned memory, up to 4 MiB, is one."""
    transfer_bytes: int
    """Bytes of these transfers, padding between slots included."""
    background: bool
    """Whether workers staged the copy, rather than the call itself."""
    fallbacks: int
    """Operations that took a slower path because the fast one was unavailable. On CUDA: gathers,
    scatters and transfers by torch's own calls. On any device: memory that could not be pinned, an
    event that could not be recorded, tables whose rows their own code has read. Delegated leaves
    are not among them."""
    steps: StepTimes | None = None
    """Where its time went so far; None unless `time_steps` was on at the call."""


def stats_of(*fields: Any) -> CopyStats:
    """The counts that a handle has, in the order of the fields."""
    stats = CopyStats(*fields)
    return stats if stats.steps is None else stats._replace(steps=StepTimes(*stats.steps))
