"""Injected failures of allocations, transfers, events and new threads."""

from __future__ import annotations

from typing import Literal

from tdcopier import _C, _sim
from tdcopier.sim._devices import DeviceLike, Direction, device_index, direction_index
from tdcopier.sim._scope import Scope

STREAM_CAPTURE_UNSUPPORTED = 900
"""An error code of CUDA and of HIP."""


class Fault(Scope):
    """Makes a call of one kind fail, until :meth:`disarm` or the end of a ``with``.

    Made by :func:`fail_device_allocation`, :func:`fail_pinned_allocation`, :func:`fail_transfer`,
    :func:`fail_event_record`, :func:`fail_event_query` and :func:`fail_thread`. One that is dropped
    without being disarmed stays armed. Several may be armed at a time; each counts for itself, and
    each strikes once, except where ``times`` says otherwise.
    """

    def __init__(self, native: _sim.Fault) -> None:
        """Wrap what is armed."""
        self._native = native
        super().__init__()

    def _end(self) -> None:
        self._native.disarm()

    @property
    def fired(self) -> bool:
        """Whether it has been used. A transfer that fails when it runs is chosen when enqueued."""
        return self._native.struck() != ""

    @property
    def struck(self) -> str | None:
        """What has failed last, as the error names it; None if nothing has."""
        return self._native.struck() or None

    def disarm(self) -> None:
        """Let everything succeed from now on. The second call does nothing.

        This also repairs the streams that a transfer has brought down, see :func:`fail_transfer`.
        """
        self._end_once()


def fail_device_allocation(n: int = 1, *, device: DeviceLike = None) -> Fault:
    """Make the ``n``-th request for device memory from now on fail.

    It raises ``torch.OutOfMemoryError``, also where memory that is kept for reuse would have served
    it. Requests for no bytes are not counted.

    Args:
        n: which one, from 1.
        device: count the requests on this device only; on any if None.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` is less than 1, or it is a device of another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    device_index(None)
    return Fault(_sim.fail_device_allocation(_checked(n), _any_or_index(device)))


def fail_pinned_allocation(n: int = 1) -> Fault:
    """Make the ``n``-th request for pinned host memory from now on fail.

    It raises ``torch.AcceleratorError``, a ``RuntimeError``, as CUDA does where the host has no
    memory that can be pinned; also where memory that is kept for reuse would have served it.
    Requests for no bytes are not counted.

    Args:
        n: which one, from 1.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` is less than 1.
        RuntimeError: the simulation is not enabled.

    """
    device_index(None)
    return Fault(_sim.fail_pinned_allocation(_checked(n)))


def fail_transfer(
    n: int = 1,
    *,
    direction: Direction | None = None,
    device: DeviceLike = None,
    when: Literal["enqueue", "execution"] = "enqueue",
) -> Fault:
    """Make the ``n``-th transfer from now on fail with a ``torch.AcceleratorError`` that names it.

    Counted is what :func:`counts` counts, when it is enqueued.

    At ``"enqueue"`` the call raises, and nothing is enqueued or counted as a transfer.

    At ``"execution"`` the call succeeds, and the error comes when the transfer's turn has come. It
    lasts, as errors of CUDA's devices do, but for streams rather than for the device: until the
    fault is disarmed, nothing that the transfer's stream has been given after it runs, and to
    synchronize or query the stream raises each time. So it is for streams that wait for it, from
    there on. An event that was recorded behind the failure raises for ever when it is queried or
    waited for; a stream that is made to wait for it raises at once if the failure is known by then,
    and is brought down otherwise. Disarming repairs the streams: what they are given from then on
    runs. A transfer that was chosen and has not run by then fails nevertheless.

    Args:
        n: which one, from 1.
        direction: count only ``"h2d"``, ``"d2h"``, ``"d2d"`` or ``"within"``, as in
            :class:`Counts`; any if None.
        device: count only transfers to or from this device; any if None.
        when: whether it fails at ``"enqueue"`` or at ``"execution"``.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` is less than 1, there is no such direction or time, or it is a device of
            another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    device_index(None)
    if when not in ("enqueue", "execution"):
        raise ValueError(f"a transfer fails at 'enqueue' or at 'execution', not at {when!r}")
    way = None if direction is None else direction_index(direction)
    return Fault(
        _sim.fail_transfer(_checked(n), way, _any_or_index(device), when == "execution"),
    )


def fail_event_record(n: int = 1, *, device: DeviceLike = None) -> Fault:
    """Make the ``n``-th recording of an event from now on raise a ``torch.AcceleratorError``.

    Nothing is enqueued then, and the event stays as it was. Not counted are the events by which a
    copy of torch's between two devices orders its streams.

    Args:
        n: which one, from 1.
        device: count only what is recorded on a stream of this device; of any if None.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` is less than 1, or it is a device of another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    device_index(None)
    return Fault(_sim.fail_event_record(_checked(n), _any_or_index(device)))


def fail_event_query(
    n: int = 1,
    *,
    device: DeviceLike = None,
    times: int = 1,
    code: int = STREAM_CAPTURE_UNSUPPORTED,
) -> Fault:
    """Make the ``n``-th query of an event from now on raise, although nothing is broken.

    On ROCm, for example, a query raises while another thread captures a graph. The error is a
    ``torch.AcceleratorError`` with ``code`` as its ``error_code``. It says nothing about the event:
    the work before it goes on, and a later query tells whether it has been reached. Counted are
    queries of events that have been recorded.

    Args:
        n: which one is the first to raise, from 1.
        device: count only events that were recorded on a stream of this device; on any if None.
        times: how many queries raise, one after the other.
        code: the error code; as a default that of CUDA and HIP for an operation that is not
            permitted while a stream is capturing.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` or ``times`` is less than 1, or it is a device of another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    device_index(None)
    if times < 1:
        raise ValueError(f"a fault strikes at least once, got times={times}")
    return Fault(_sim.fail_event_query(_checked(n), _any_or_index(device), times, code))


def fail_thread(n: int = 1) -> Fault:
    """Make the ``n``-th attempt of tdcopier's engine to make a thread from now on fail.

    So it does where the process may have no more threads: ``std::thread`` throws a
    ``std::system_error``. The engine makes its pools of threads once, when they are first needed,
    and keeps them: pools that exist already are not affected. Threads of Python are not counted.

    Args:
        n: which one, from 1.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` is less than 1.
        RuntimeError: the simulation is not enabled.

    """
    device_index(None)
    _C.set_interleaver(_sim.interleaver())  # by which the engine asks before it makes a thread
    return Fault(_sim.fail_thread(_checked(n)))


def _checked(n: int) -> int:
    if n < 1:
        raise ValueError(f"the first one is number 1, got {n}")
    return n


def _any_or_index(device: DeviceLike) -> int | None:
    return None if device is None else device_index(device)
