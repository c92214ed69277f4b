"""Injected failures of allocations, transfers, events and new threads."""

from __future__ import annotations

from typing import Literal

from tdcopier import _C, _sim
from tdcopier.sim._devices import DeviceLike, Direction, device_index, direction_index
from tdcopier.sim._scope import Scope

OUT_OF_MEMORY = 2
STREAM_CAPTURE_UNSUPPORTED = 900
"""These two are error codes of CUDA and of HIP."""


class Fault(Scope):
    """Makes a call of one kind fail, until :meth:`disarm` or the end of a ``with``.

    For example::

        with sim.fail_transfer(n=2) as fault, contextlib.suppress(torch.AcceleratorError):
            train_one_step()
        assert fault.fired
        print(fault.struck)

    Made by :func:`fail_device_allocation`, :func:`fail_pinned_allocation`, :func:`fail_transfer`,
    :func:`fail_event_record`, :func:`fail_event_query` and :func:`fail_thread`. A fault that is
    dropped without being disarmed stays armed. Several may be armed at a time; each counts calls on
    its own, and each makes one call fail unless ``times`` says otherwise.
    """

    def __init__(self, native: _sim.Fault) -> None:
        """Wrap a native fault that is already armed."""
        self._native = native
        super().__init__()

    def _end(self) -> None:
        self._native.disarm()

    @property
    def fired(self) -> bool:
        """Whether a call has been chosen to fail; a transfer is chosen when it is enqueued."""
        return self._native.struck() != ""

    @property
    def struck(self) -> str | None:
        """The last call that was made to fail, as the error names it; None if there was none."""
        return self._native.struck() or None

    def disarm(self) -> None:
        """Stop making calls fail. A second call does nothing.

        This also repairs the streams that a failed transfer has disabled, see
        :func:`fail_transfer`.
        """
        self._end_once()


def fail_device_allocation(n: int = 1, *, device: DeviceLike = None) -> Fault:
    """Make the ``n``-th device allocation from now on fail.

    For example::

        with sim.fail_device_allocation(), pytest.raises(torch.OutOfMemoryError):
            torch.ones(3, device="sim")

    It raises ``torch.OutOfMemoryError``, even if cached memory would have sufficed. Allocations of
    no bytes are not counted.

    Args:
        n: number of the allocation, from 1.
        device: count allocations on this device only; None counts those on all devices.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` is less than 1, or the device is of another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    device_index(None)
    return Fault(_sim.fail_device_allocation(_checked(n), _any_or_index(device)))


def fail_pinned_allocation(n: int = 1, *, code: int = OUT_OF_MEMORY) -> Fault:
    """Make the ``n``-th allocation of pinned host memory from now on fail.

    For example::

        with sim.fail_pinned_allocation():
            assert not tdcopier.copy(torch.ones(3, device="sim"), "cpu").is_pinned()

    It raises ``torch.AcceleratorError``, a ``RuntimeError``, as CUDA does if the host can pin no
    more memory, even if cached memory would have sufficed. Allocations of no bytes are not counted.
    The pinning of existing memory, as by :func:`tdcopier.pin_memory_`, counts as an allocation.

    Args:
        n: number of the allocation, from 1.
        code: the error code; the default is that of CUDA and HIP for a lack of memory. With
            another one, such as 700 (an illegal address), the call reports an earlier failure of
            the device, as a call of a real device may. The device itself is not broken.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` or ``code`` is less than 1.
        RuntimeError: the simulation is not enabled.

    """
    device_index(None)
    if code < 1:
        raise ValueError(f"code must be positive; got {code}: 0 is success")
    return Fault(_sim.fail_pinned_allocation(_checked(n), code))


def fail_transfer(
    n: int = 1,
    *,
    direction: Direction | None = None,
    device: DeviceLike = None,
    when: Literal["enqueue", "execution"] = "enqueue",
) -> Fault:
    """Make the ``n``-th transfer from now on fail with a ``torch.AcceleratorError`` that names it.

    For example::

        with sim.fail_transfer(direction="h2d", when="execution"):
            handle = tdcopier.start_copy(batch, "sim")
            with pytest.raises(torch.AcceleratorError):
                handle.get()

    Transfers are counted as by :func:`counts`, when they are enqueued.

    At ``"enqueue"`` the call raises, and nothing is enqueued or counted as a transfer.

    At ``"execution"`` the call succeeds, and the transfer fails when it runs. Like an error of a
    CUDA device the failure is permanent, but it affects streams rather than the device: until the
    fault is disarmed, nothing enqueued on the transfer's stream after it runs, and each
    synchronization or query of the stream raises. The same then holds for every stream that waits
    for this one. An event that was recorded after the failure raises at every query and wait,
    permanently. Making a stream wait for such an event raises at once if the failure is already
    known, and otherwise disables that stream too. Disarming repairs the streams: work enqueued from
    then on runs. A transfer that was chosen but has not run by then still fails.

    Args:
        n: number of the transfer, from 1.
        direction: count only ``"h2d"``, ``"d2h"``, ``"d2d"`` or ``"within"``, as in
            :class:`Counts`; None counts all.
        device: count only transfers to or from this device; None counts all.
        when: whether it fails at ``"enqueue"`` or at ``"execution"``.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` is less than 1, the direction or time is unknown, or the device is of
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

    For example::

        with sim.fail_event_record():
            batch = tdcopier.copy(batch, "sim")  # by a slower path

    Nothing is enqueued then, and the event is unchanged. The events with which torch's own copy
    between two devices orders its streams are not counted.

    Args:
        n: number of the recording, from 1.
        device: count only recordings on streams of this device; None counts all.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` is less than 1, or the device is of another type.
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

    For example::

        event = torch.sim.current_stream().record_event()
        with sim.fail_event_query(times=2), pytest.raises(torch.AcceleratorError):
            event.query()

    On ROCm, for example, a query raises while another thread captures a graph. The error is a
    ``torch.AcceleratorError`` with ``code`` as its ``error_code``. It says nothing about the event:
    the work before it continues, and a later query tells whether the event has been reached. Only
    queries of recorded events are counted.

    Args:
        n: number of the first query that raises, from 1.
        device: count only events that were recorded on streams of this device; None counts all.
        times: how many consecutive queries raise.
        code: the error code; the default is that of CUDA and HIP for an operation that is not
            permitted while a stream is capturing.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` or ``times`` is less than 1, or the device is of another type.
        RuntimeError: the simulation is not enabled, or has no such device.

    """
    device_index(None)
    if times < 1:
        raise ValueError(f"a fault strikes at least once, got times={times}")
    return Fault(_sim.fail_event_query(_checked(n), _any_or_index(device), times, code))


def fail_thread(n: int = 1) -> Fault:
    """Make the ``n``-th attempt of tdcopier's engine to start a thread from now on fail.

    For example::

        with sim.fail_thread():
            tdcopier.copy(large_batch, "sim")  # with fewer threads, or none

    This simulates a process that may start no more threads: ``std::thread`` throws a
    ``std::system_error``. The engine makes its thread pools once, when they are first needed, and
    keeps them, so existing pools are not affected. Python's threads are not counted.

    Args:
        n: number of the attempt, from 1.

    Returns:
        The fault, which is a context manager.

    Raises:
        ValueError: ``n`` is less than 1.
        RuntimeError: the simulation is not enabled.

    """
    device_index(None)
    _C.testing.set_interleaver(_sim.interleaver())  # the engine calls it before it makes a thread
    return Fault(_sim.fail_thread(_checked(n)))


def _checked(n: int) -> int:
    if n < 1:
        raise ValueError(f"the first one is number 1, got {n}")
    return n


def _any_or_index(device: DeviceLike) -> int | None:
    return None if device is None else device_index(device)
