"""Allocations and transfers that fail on order."""

from __future__ import annotations

from typing import Literal

from tdcopier import _sim
from tdcopier.sim._devices import DeviceLike, Direction, device_index, direction_index
from tdcopier.sim._scope import Scope


class Fault(Scope):
    """Makes one allocation or transfer fail, until :meth:`disarm` or the end of a ``with``.

    Made by :func:`fail_device_allocation`, :func:`fail_pinned_allocation` and
    :func:`fail_transfer`. One that is dropped without being disarmed stays armed. Several may be
    armed at a time; each counts for itself, and each strikes once.
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
        """What has failed, as the error names it; None if nothing has."""
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


def _checked(n: int) -> int:
    if n < 1:
        raise ValueError(f"the first one is number 1, got {n}")
    return n


def _any_or_index(device: DeviceLike) -> int | None:
    return None if device is None else device_index(device)
