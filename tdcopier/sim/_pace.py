"""Transfers that take their time."""

from __future__ import annotations

from tdcopier import _sim
from tdcopier.sim._devices import Direction, device_index, direction_index
from tdcopier.sim._scope import Scope


class Pace(Scope):
    """Makes transfers take time, until :meth:`end` or the end of a ``with``. Made by :func:`pace`.

    One that is dropped without being ended stays in force.
    """

    def __init__(self, native: _sim.Pace) -> None:
        """Wrap what is in force."""
        self._native = native
        super().__init__()

    def _end(self) -> None:
        self._native.end()

    def end(self) -> None:
        """Put the pace that was in force before into force again. The second call does nothing.

        What has been enqueued keeps its time.
        """
        self._end_once()


def pace(
    direction: Direction,
    *,
    latency_us: float = 0.0,
    bandwidth_bytes_per_s: float = float("inf"),
) -> Pace:
    """Make each transfer of a direction take ``latency_us`` + its bytes / the bandwidth.

    The time passes on the transfer's stream, before its bytes move; it is an hour at most. What is
    enqueued while the pace is in force has it; of several for one direction the last one counts.
    Without any, which is so at first, a transfer takes what the host's memory takes. Streams do not
    share the bandwidth: two at a time have it each.

    Args:
        direction: ``"h2d"``, ``"d2h"``, ``"d2d"`` or ``"within"``, as in :class:`Counts`.
        latency_us: what each takes, in microseconds; the host's timers add some 50 to that.
        bandwidth_bytes_per_s: bytes per second; infinity means that they take no time.

    Returns:
        The pace, which is a context manager.

    Raises:
        ValueError: there is no such direction, the latency is negative or not finite, or the
            bandwidth is not positive.
        RuntimeError: the simulation is not enabled.

    """
    device_index(None)
    way = direction_index(direction)
    if not 0 <= latency_us < float("inf"):
        raise ValueError(f"the latency must be a time that is not negative, got {latency_us}")
    if not bandwidth_bytes_per_s > 0:
        raise ValueError(f"the bandwidth must be positive, got {bandwidth_bytes_per_s}")
    return Pace(_sim.pace(way, latency_us, bandwidth_bytes_per_s))
