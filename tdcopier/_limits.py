"""Limits of the whole process, and the environment variables that set them at import."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable

from tdcopier import _C
from tdcopier._compile import keep_out_of_graphs
from tdcopier._options import LARGEST_CHUNK_BYTES

_STAGING_LIMIT_VARIABLE = "TDCOPIER_STAGING_LIMIT_BYTES"
_PINNED_LIMIT_VARIABLE = "TDCOPIER_PINNED_LIMIT_BYTES"
_SLAB_LIMIT_VARIABLE = "TDCOPIER_SLAB_LIMIT_BYTES"
_GATHER_VARIABLE = "TDCOPIER_GATHER"
_WORKERS_VARIABLE = "TDCOPIER_WORKERS"
_PROGRESS_VARIABLE = "TDCOPIER_PROGRESS"
_MOST_WORKERS = 256


class _LimitsInForce:
    """The limits last passed to the engine, which has no getters for them."""

    staging_limit_bytes = _C.DEFAULT_STAGING_LIMIT_BYTES
    run_ahead_batches = _C.DEFAULT_RUN_AHEAD_LIMIT


limits_in_force = _LimitsInForce()


def integer(name: str, value: object) -> int:
    """Return the value as an int.

    Raises:
        TypeError: it is no integer.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        found = f"the {type(value).__qualname__} {value!r}"
        raise TypeError(f"{name} must be an integer; got {found}") from None


@keep_out_of_graphs("limits.set_staging_bytes()")
def set_staging_bytes(limit_bytes: int) -> None:
    """Set the limit on the pinned memory that stages copies to one device; default 64 MiB.

    For example::

        tdcopier.limits.set_staging_bytes(256 * 1024**2)

    The limit applies to each device separately. A copy that finds every staging buffer (2 MiB each)
    in use waits for one. Copies into existing memory of the device use at most half of the buffers,
    and copies from the device into existing memory of the host at most a quarter, so that copies
    that wait for no kernel can proceed. Each of the three uses may always have one buffer, so up to
    6 MiB are used even if the limit is lower. A lower limit takes effect as buffers are returned.
    Batches that `prefetch` stages ahead have pinned memory of their own, up to four times this
    limit; batches that do not fit there are sent at once. The environment variable
    `TDCOPIER_STAGING_LIMIT_BYTES` sets the limit at import.

    Raises:
        ValueError: the limit is less than one buffer.
    """
    limit = integer("limit_bytes", limit_bytes)
    if limit < _C.STAGING_BUFFER_BYTES:
        raise ValueError(
            f"limit_bytes must be at least {_C.STAGING_BUFFER_BYTES} (one buffer); got {limit}"
        )
    limit = min(limit, LARGEST_CHUNK_BYTES)
    _C.set_staging_limit_bytes(limit)
    limits_in_force.staging_limit_bytes = limit


@keep_out_of_graphs("limits.set_pinned_bytes()")
def set_pinned_bytes(limit_bytes: int) -> None:
    """Set the limit on the memory of the pool of pinned memory; default: half of the machine's.

    For example::

        tdcopier.limits.set_pinned_bytes(16 * 1024**3)  # in a container with 32 GiB

    It applies to the process, to leased and free memory together. A lease that would exceed it
    first frees blocks that are not in use, then waits for copies in flight, then raises
    `MemoryError`; a large result on the host goes to torch's allocator instead, which this does not
    limit. A limit below what the pool has frees the blocks that are not in use; what is
    leased stays. Several processes on one machine share its memory, and a
    container may have less: set a lower limit there. The environment variable
    `TDCOPIER_PINNED_LIMIT_BYTES` sets the limit at import. Staging has a limit of its own, see
    `limits.set_staging_bytes`.

    Raises:
        ValueError: the limit is negative.
    """
    _C.set_pinned_limit_bytes(_bytes_of_limit(limit_bytes))


@keep_out_of_graphs("limits.set_slab_bytes()")
def set_slab_bytes(limit_bytes: int) -> None:
    """Set the limit on the pinned memory through which a loader's workers send; default 2 GiB.

    For example::

        tdcopier.limits.set_slab_bytes(4 * 1024**3)  # for 12 workers

    The limit applies to the process, to the slabs of all loaders together (see the guide "From a
    DataLoader to the GPU"). Six workers that prepare two batches each, of 64 MB, and a loop with
    two more ahead need 1.4 GiB. Batches that come in a slab over the limit are not lost: the slab
    is not pinned, and they are staged. A lower limit applies to slabs that come later. The
    environment variable `TDCOPIER_SLAB_LIMIT_BYTES` sets the limit at import.

    Raises:
        ValueError: the limit is negative.
    """
    _C.set_slab_limit_bytes(_bytes_of_limit(limit_bytes))


@keep_out_of_graphs("limits.set_run_ahead()")
def set_run_ahead(batches: int) -> None:
    """Set how many handed-over batches the host may be ahead of the device; default 4.

    For example::

        tdcopier.limits.set_run_ahead(2)  # less device memory in large batches

    A dropped batch keeps its device memory until the device has read it, so without a bound a loop
    that is limited by the device would accumulate memory. `start_copy` therefore waits until the
    device has reached all but `batches - 1` of the earlier hand-overs (`get` or `wait`).

    Raises:
        ValueError: `batches` is less than 1.
    """
    limit = integer("batches", batches)
    if limit < 1:
        raise ValueError(f"batches must be at least 1; got {limit}")
    limit = min(limit, 0xFFFFFFFF)
    _C.set_run_ahead_limit(limit)
    limits_in_force.run_ahead_batches = limit


def _bytes_of_limit(limit_bytes: object) -> int:
    limit = integer("limit_bytes", limit_bytes)
    if limit < 0:
        raise ValueError(f"limit_bytes must not be negative; got {limit}")
    return min(limit, LARGEST_CHUNK_BYTES)


def _limit_from_environment(variable: str, set_limit: Callable[[int], None]) -> None:
    text = os.environ.get(variable)
    if not text:
        return
    try:
        if not text.isdecimal():
            raise ValueError("give a number of bytes")
        set_limit(int(text))
    except ValueError as error:
        raise ValueError(f"{variable}={text!r}: {error}") from None


def _workers_from_environment() -> None:
    text = os.environ.get(_WORKERS_VARIABLE)
    if not text:
        return
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_WORKERS:
        raise ValueError(f"{_WORKERS_VARIABLE}={text!r}: give a number from 1 to {_MOST_WORKERS}")
    _C.set_most_workers(int(text))


def _gather_from_environment() -> None:
    text = os.environ.get(_GATHER_VARIABLE) or "kernel"
    if text not in ("kernel", "portable"):
        raise ValueError(f'{_GATHER_VARIABLE}={text!r}: give "kernel" or "portable"')
    _C.use_segment_kernel(text == "kernel")


def is_on(variable: str, default: str = "0") -> bool:
    """Return whether an environment variable turns something on.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    text = os.environ.get(variable) or default
    if text not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1; got {text!r}")
    return text == "1"


_limit_from_environment(_STAGING_LIMIT_VARIABLE, set_staging_bytes)
_limit_from_environment(_PINNED_LIMIT_VARIABLE, set_pinned_bytes)
_limit_from_environment(_SLAB_LIMIT_VARIABLE, set_slab_bytes)
_gather_from_environment()
_workers_from_environment()
shows_progress = is_on(_PROGRESS_VARIABLE, "1")
"""Whether long work shows its progress where stderr is a terminal."""
