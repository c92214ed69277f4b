"""Simulated latency and bandwidth of transfers."""

from __future__ import annotations

from tdcopier import _sim
from tdcopier.sim._devices import Direction, device_index, direction_index
from tdcopier.sim._scope import Scope


class Pace(Scope):
    """Makes transfers take time, until :meth:`end` or the end of a ``with``. Made by :func:`pace`.

    For example::

        slow = sim.pace("d2h", latency_us=500)
        tdcopier.copy(on_device, "cpu")
        slow.end()

    A pace that is dropped without being ended stays active.
    """

    def __init__(self, native: _sim.Pace) -> None:
        """Wrap a native pace that is already active."""
        self._native = native
        super().__init__()

    def _end(self) -> None:
        self._native.end()

    def end(self) -> None:
        """Restore the pace that was active before. A second call does nothing.

        Transfers that are already enqueued keep their time.
        """
        self._end_once()


def pace(
    direction: Direction,
    *,
    latency_us: float = 0.0,
    bandwidth_bytes_per_s: float = float("inf"),
) -> Pace:
    """Make each transfer of a direction take ``latency_us`` + its bytes / the bandwidth.

    For example::

        with sim.pace("h2d", latency_us=10, bandwidth_bytes_per_s=12e9):
            train_one_step()

    The time, an hour at most, passes on the transfer's stream before its bytes move. It applies to
    transfers that are enqueued while the pace is active; of several paces for one direction the
    last one applies. Without a pace, a transfer takes as long as a copy in host memory. Streams do
    not share the bandwidth: each has all of it.

    Args:
        direction: ``"h2d"``, ``"d2h"``, ``"d2d"`` or ``"within"``, as in :class:`Counts`.
        latency_us: fixed time of each transfer in microseconds; the host's timers add about 50.
        bandwidth_bytes_per_s: bytes per second; infinity means that bytes take no time.

    Returns:
        The pace, which is a context manager.

    Raises:
        ValueError: the direction is unknown, the latency is negative or not finite, or the
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
