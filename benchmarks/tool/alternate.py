"""Lets two processes time the same suites in turns of a round; used by compare.py.

On a shared host a virtual processor can lose half its speed for seconds. In turns of milliseconds,
on one processor, both processes lose the same.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable

MESSAGE = struct.Struct("ii")  # processor of the last round, suite
ANY_PROCESSOR = -1
LAST_SUITE = 2**31 - 1


class Turns:
    """One end of a connection between two processes, of which one at a time is in a round.

    The leader has the first turn of all, and chooses the processors. A process whose partner has
    ended, or that has none, goes on alone.
    """

    def __init__(self, end: socket.socket | None = None, *, leads: bool = True) -> None:
        self._end = end
        self._leads = leads
        self._has_turn = not leads  # passed on when both are ready
        self._processor = ANY_PROCESSOR  # of the last round
        self._suite = -1
        self._theirs = (ANY_PROCESSOR, -1)

    def begin_suite(self, number: int) -> None:
        """Wait until the partner is at this suite or a later one. Numbers ascend."""
        self._suite = number
        while self._end is not None and self._theirs[1] < number:
            self._exchange()

    def begin_round(self, seek: Callable[[], None]) -> None:
        """End the turn that this process has, and wait for the next.

        Then move this thread to the processor of the partner's round, or call ``seek``, which may
        move it to another one.
        """
        self._exchange()
        if self._end is None or self._leads or self._theirs[0] == ANY_PROCESSOR:
            seek()
        else:
            os.sched_setaffinity(0, {self._theirs[0]})
        self._processor = _bound_processor()

    def end(self) -> None:
        """Wait until the partner has timed its last suite too."""
        self.begin_suite(LAST_SUITE)
        if self._end is not None:
            self._end.close()

    def _exchange(self) -> None:
        """Pass the turn on, and wait until it comes back with the partner's message."""
        if self._end is None:
            return
        try:
            if self._has_turn:
                self._end.sendall(MESSAGE.pack(self._processor, self._suite))
            received = self._end.recv(MESSAGE.size, socket.MSG_WAITALL)
        except (BrokenPipeError, ConnectionResetError):
            received = b""
        self._has_turn = True
        if len(received) == MESSAGE.size:
            self._theirs = MESSAGE.unpack(received)
        else:
            self._end.close()
            self._end = None


def _bound_processor() -> int:
    """Return the only processor that this thread may use, or else ANY_PROCESSOR."""
    if not hasattr(os, "sched_getaffinity"):
        return ANY_PROCESSOR
    allowed = os.sched_getaffinity(0)
    return next(iter(allowed)) if len(allowed) == 1 else ANY_PROCESSOR
