"""Common parts of the ends of channels: errors, waits, and the thread that gives signs of life."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import Self

from tdcopier._distributed.link import Link

# The functions of `signal` look for names of numbers, which takes ten times as long.
_signal: Any = importlib.import_module("_signal")
_SIGINT = int(signal.SIGINT)

_TURNS_S = 0.05
"""Between two looks of the thread."""
_SHORTEST_S, _LONGEST_S, _SHARE = 20e-6, 2e-3, 0.1
"""Of a nap in a wait: this share of the time waited so far, within these limits."""


class ChannelClosed(EOFError):
    """The other end, or this one, has closed the channel."""


class PeerLost(ConnectionError):
    """The process at the other end has ended, or has not answered for the channel's timeout."""


class Uninterrupted:
    """A block that Ctrl-C does not end in the middle: the interrupt is raised after it.

    Memory that was given to gloo, and what is known of it, must not differ.
    """

    def __init__(self, lock: AbstractContextManager[Any] | None = None) -> None:
        self._lock = contextlib.nullcontext() if lock is None else lock
        self._before: list[tuple[Any, list[Any]]] = []
        """For each block of the main thread, since blocks may be within others."""

    def __enter__(self) -> None:
        if threading.get_ident() == threading.main_thread().ident:
            noted: list[Any] = []
            handler = _signal.getsignal(_SIGINT)
            is_ours = callable(handler)  # else it raises nothing
            self._before.append((handler if is_ours else None, noted))
            if is_ours:
                _signal.signal(_SIGINT, lambda *arguments: noted.append(arguments))
        self._lock.__enter__()

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(None, None, None)
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler, noted = self._before.pop()
        if handler is not None:
            _signal.signal(_SIGINT, handler)
            if noted:
                handler(*noted[0])


class End:
    """One end of a channel. Threads may share it. `with` closes it."""

    _what = "an end of a channel"

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s, self._process = timeout_s, os.getpid()
        self._lock = Uninterrupted(threading.RLock())
        """Of the links, and of what their messages change."""
        self._is_closed = False
        self._ending: list[Link] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tdcopier-channel", daemon=True)

    def _begin(self) -> None:
        """Start the thread, which calls `_turn` until `_end`."""
        self._thread.start()
        _open_ends.add(self)

    def _end(self) -> None:
        self._wait(self._are_gone, None)
        self._stopped.set()
        _open_ends.discard(self)
        self._thread.join()  # in gloo's code it would end a process that exits

    def _run(self) -> None:
        while not self._stopped.wait(_TURNS_S):
            with self._lock:
                try:
                    self._turn()
                    self._are_gone()
                except Exception as error:  # no one else would hear of it
                    for link in self._all_links():
                        link.lose(error)

    def _are_gone(self) -> bool:
        self._ending = [link for link in self._ending if not link.is_gone()]
        return not self._ending

    def _has_ended(self, link: Link) -> bool:
        """End a link if both of its ends have closed, or the other one is lost."""
        has_ended = link.has_ended or link.end()
        if has_ended and link not in self._ending:
            self._ending.append(link)
        return has_ended

    def _all_links(self) -> Sequence[Link]:
        raise NotImplementedError

    def _turn(self) -> None:
        """Do what is due, with the lock."""
        raise NotImplementedError

    def _wait(self, is_so: Callable[[], bool], timeout_s: float | None) -> bool:
        """Wait until something is so, which is asked with the lock; return False if it is late."""
        begin = time.monotonic()
        while True:
            with self._lock:
                if is_so():
                    return True
            waited_s = time.monotonic() - begin
            if timeout_s is not None and waited_s >= timeout_s:
                return False
            nap_s = min(max(waited_s * _SHARE, _SHORTEST_S), _LONGEST_S)
            time.sleep(nap_s if timeout_s is None else min(nap_s, timeout_s - waited_s))

    def _is_forked(self) -> bool:
        return self._process != os.getpid()

    def _check_process(self) -> None:
        if self._is_forked():
            raise RuntimeError(f"this {self._what} belongs to the process that forked this one")

    def close(self, timeout_s: float | None = None) -> None:
        """Close this end."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(f"a {type(self).__name__} belongs to its process: make one in each")


_open_ends: weakref.WeakSet[End] = weakref.WeakSet()


@atexit.register
def _close_at_exit() -> None:
    for end in list(_open_ends):
        with contextlib.suppress(TimeoutError, ConnectionError):  # the other end cannot be told
            end.close(timeout_s=end.timeout_s)
