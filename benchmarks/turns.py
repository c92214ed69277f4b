"""Lets two processes time their rounds in turns, on the same processor; used by compare.py.

On a shared host a virtual processor can lose half its speed for seconds. With turns of a few
milliseconds both processes lose the same.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

NUMBER = struct.Struct("i")
ANY_PROCESSOR = -1


class Turns:
    """One end of a connection between two processes, of which one at a time is in a round.

    The leader has the first turn, and chooses the processors. A process whose partner has ended
    goes on alone.
    """

    def __init__(self, end: socket.socket, *, leads: bool) -> None:
        self._end = end
        self._leads = leads
        self._has_turn = not leads  # passed on when both are ready
        self._processor = ANY_PROCESSOR  # of the last round

    def begin_round(self, seek: Callable[[], None]) -> None:
        """End the turn that this process has, and wait for the next.

        Then move this thread to the processor of the partner's round, or call ``seek``, which may
        move it to another one.
        """
        theirs = self._exchange()
        if theirs is None or self._leads:
            seek()
        elif theirs != ANY_PROCESSOR:
            os.sched_setaffinity(0, {theirs})
        self._processor = _bound_processor()

    def _exchange(self) -> int | None:
        """Return the processor of the partner's round, or None if the partner has ended."""
        try:
            if self._has_turn:
                self._end.sendall(NUMBER.pack(self._processor))
            received = self._end.recv(NUMBER.size, socket.MSG_WAITALL)
        except (BrokenPipeError, ConnectionResetError):
            received = b""
        self._has_turn = True
        return NUMBER.unpack(received)[0] if len(received) == NUMBER.size else None


def _bound_processor() -> int:
    """Return the only processor that this thread may use, or else ANY_PROCESSOR."""
    if not hasattr(os, "sched_getaffinity"):
        return ANY_PROCESSOR
    allowed = os.sched_getaffinity(0)
    return next(iter(allowed)) if len(allowed) == 1 else ANY_PROCESSOR
