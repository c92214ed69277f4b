"""Memory that does not read as anything a program has written."""

from __future__ import annotations

from tdcopier import _sim
from tdcopier.sim._scope import Scope


class Poison(Scope):
    """Says when memory is poisoned, until :meth:`end` or the end of a ``with``.

    Made by :func:`poison`. One that is dropped without being ended stays in force.
    """

    def __init__(self, at_allocation: bool, at_free: bool) -> None:
        """Put it into force."""
        self._previous = _sim.exchange_poison(at_allocation, at_free)
        super().__init__()

    def _end(self) -> None:
        _sim.exchange_poison(*self._previous)

    def end(self) -> None:
        """Put back what was in force before. The second call does nothing."""
        self._end_once()


def poison(*, at_allocation: bool = True, at_free: bool = True) -> Poison:
    """Fill device and pinned memory with a pattern when it is allocated, and when it is freed.

    Without a call, memory is filled when it comes from the system, and not when it is freed. What
    is freed and used again keeps its bytes then, so a use after free may find what it expects.

    Memory is filled at its free if its own stream, and those that were recorded for it, have no
    work; otherwise behind the own stream's work, once the allocator sees that the others are done,
    which is at a later allocation or free. So whoever is entitled to read it finds what it should.

    Args:
        at_allocation: fill memory that comes from the system with the byte 0xA5.
        at_free: fill memory that is freed with the byte 0xDD, which it has when it is used again.

    Returns:
        The setting, which is a context manager.

    """
    return Poison(at_allocation, at_free)
