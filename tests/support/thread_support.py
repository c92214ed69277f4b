"""Calls in other threads, and how often threads switch."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

LONGEST_S = 30.0


class Call:
    """Runs a call in a thread of its own; `join` returns its result or raises its error."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._result: Any = None
        self._error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> Any:
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self._error is not None:
            raise self._error
        return self._result


def in_a_thread(call: Callable[[], Any]) -> Any:
    """Returns the result of the call in another thread, or raises its error."""
    return Call(call).join()


def at_once(threads: int, work: Callable[[int], Any]) -> list[Any]:
    """Runs `work(0)`, `work(1)`, ... at once, each in a thread of its own; returns their results.

    Raises the first error, after all threads have ended.
    """
    together = threading.Barrier(threads)

    def begin(number: int) -> Any:
        together.wait()
        return work(number)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(begin, range(threads)))


@contextmanager
def switch_interval(seconds: float) -> Iterator[None]:
    """Sets how long a thread may keep the GIL while another one waits for it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def let_go_without_the_gil(hold: Any) -> Iterator[list[str]]:
    """Releases the hold in another thread, which only runs while the block gives up the GIL.

    Yields a list to which that thread appends "let go" before it does. If the block keeps the GIL,
    the process ends after some time, since pytest's own limit needs the GIL too.
    """
    told = threading.Event()
    order: list[str] = []

    def let_go() -> None:
        told.wait()
        order.append("let go")
        hold.release()

    letting_go = Call(let_go)
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    try:
        with switch_interval(1000):
            told.set()
            yield order
    finally:
        faulthandler.cancel_dump_traceback_later()
        letting_go.join()
