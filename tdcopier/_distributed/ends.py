"""Common parts of the ends of channels: errors, and waits."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing import util
from typing import Any

from typing_extensions import Self

from tdcopier import _C
from tdcopier._distributed.link import Link

_LOOKS_S = 1.0
"""Between two looks in a wait, whether or not the bell rings."""


class ChannelClosedError(EOFError):
    """The other end, or this one, has closed the channel.

    For example::

        try:
            tx.start(batch)
        except tdcopier.distributed.ChannelClosedError:
            print("the learner has stopped")
    """


class PeerLostError(ConnectionError):
    """The process at the other end has ended, or has not answered for the channel's timeout.

    For example::

        try:
            batch = rx.next(timeout_s=60).wait()
        except tdcopier.distributed.PeerLostError as error:
            start_sender_again(error)
    """


ChannelClosedError.__module__ = PeerLostError.__module__ = "tdcopier.distributed"


class Deadline:
    """When a call is late, however many things it waits for."""

    def __init__(self, timeout_s: float | None) -> None:
        """Begin now; None: it is never late."""
        self.timeout_s = timeout_s
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    @property
    def left_s(self) -> float | None:
        """The rest of the time, 0 if there is none; None: without limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)


class End:
    """One end of a channel. Threads may share it. `with` closes it."""

    _what = "an end of a channel"

    def __init__(self, peer_timeout_s: float) -> None:
        self._peer_timeout_s, self._process = peer_timeout_s, os.getpid()
        self._bell = _C.Bell()
        """Rings when a link, or this end, has changed."""
        self._is_closed = self._is_open = False

    def _opened(self) -> None:
        """Close it when the process exits. Called last by constructors."""
        self._is_open = True
        _open_ends.add(self)
        _close_where_processes_exit()

    def _all_links(self) -> Sequence[Link]:
        raise NotImplementedError

    def _end(self) -> None:
        """End the threads of all links: both ends have closed, or the other one is left."""
        for link in self._all_links():
            link.abandon()
        _open_ends.discard(self)

    def _wait(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until something is so, which changes when the bell rings; return False if late."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            count = self._bell.count
            if is_so():
                return True
            left_s = _LOOKS_S if end is None else min(end - time.monotonic(), _LOOKS_S)
            if left_s <= 0:
                return False
            self._bell.wait(count, left_s)

    def _is_forked(self) -> bool:
        return self._process != os.getpid()

    def _check_process(self) -> None:
        if self._is_forked():
            raise RuntimeError(f"this {self._what} belongs to the process that forked this one")

    def close(self, *, timeout_s: float | None = None) -> None:
        """Close this end."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._is_forked():
            return f"<{type(self).__name__} of the process that forked this one>"
        return f"<{type(self).__name__} {self._state()}>"

    def _state(self) -> str:
        raise NotImplementedError

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} belongs to its process: make one in each")


_open_ends: weakref.WeakSet[End] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for end in list(_open_ends):
        with contextlib.suppress(TimeoutError, ConnectionError):  # the other end cannot be told
            end.close(timeout_s=end._peer_timeout_s)
        if not end._is_forked():
            end._end()


_closing_processes: set[int] = set()


def _close_where_processes_exit() -> None:
    """Close open ends at the end of a process of `multiprocessing` too: it calls no `atexit`."""
    if os.getpid() not in _closing_processes:
        _closing_processes.add(os.getpid())
        util.Finalize(None, _close_at_exit, exitpriority=100)
