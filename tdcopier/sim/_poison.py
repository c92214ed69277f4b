"""Patterns in allocated and freed memory, to expose reads of uninitialised or freed bytes."""

from __future__ import annotations

from tdcopier import _sim
from tdcopier.sim._scope import Scope


class Poison(Scope):
    """Sets when memory is poisoned, until :meth:`end` or the end of a ``with``.

    For example::

        setting = sim.poison(at_allocation=False)
        train_one_step()
        setting.end()

    Made by :func:`poison`. A setting that is dropped without being ended stays active.
    """

    def __init__(self, at_allocation: bool, at_free: bool) -> None:
        """Activate the setting."""
        self._previous = _sim.exchange_poison(at_allocation, at_free)
        super().__init__()

    def _end(self) -> None:
        _sim.exchange_poison(*self._previous)

    def end(self) -> None:
        """Restore the setting that was active before. A second call does nothing."""
        self._end_once()


def poison(*, at_allocation: bool = True, at_free: bool = True) -> Poison:
    """Fill device and pinned memory with a pattern when it is allocated, and when it is freed.

    For example::

        with sim.poison():
            assert train_one_step() == expected_loss

    Without this call, memory is filled when it comes from the system, but not when it is freed.
    Reused memory then keeps its old bytes, so a use after free may find the values that it expects.

    Freed memory is filled at once if its own stream, and the streams recorded for it, have no work.
    Otherwise it is filled after the work of its own stream, once the allocator sees at a later
    allocation or free that the other streams are done. So every legitimate read finds the right
    values.

    Args:
        at_allocation: fill memory that comes from the system with the byte 0xA5.
        at_free: fill freed memory with the byte 0xDD, which it still has when it is reused.

    Returns:
        The setting, which is a context manager.

    """
    return Poison(at_allocation, at_free)
