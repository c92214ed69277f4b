"""Makes the reader of a prefetched source part of a schedule: its thread, and its waits.

The package runs the reader in a Python thread that waits in Python queues, which a schedule cannot
control. Here both are replaced: the seed also picks when the reader continues, and a wait that
cannot end is reported as a deadlock, with the names of its threads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tdcopier._prefetch import reader as _prefetch_reader
from tdcopier.sim import Gate, Schedule, ScheduledThread


class GateQueue:
    """Stands in for `queue.SimpleQueue`; a thread that waits for an item waits at a gate."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._gate = Gate()  # opens when the next item is put

    def put(self, item: Any) -> None:
        self._items.append(item)
        gate, self._gate = self._gate, Gate()
        gate.open()

    def get(self, timeout: float | None = None) -> Any:
        """Waits for an item without a timeout: no time passes in a schedule."""
        while True:
            gate = self._gate
            try:
                return self._items.popleft()
            except IndexError:
                gate.wait_until_reached()

    def get_nowait(self) -> Any:
        try:
            return self._items.popleft()
        except IndexError:
            raise Empty from None

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


@contextmanager
def scheduled_reader(schedule: Schedule) -> Iterator[None]:
    """Makes readers of passes that begin in the block take part in the schedule."""

    class Thread:
        def __init__(
            self, *, target: Callable[..., None], args: tuple[Any, ...], name: str, daemon: bool
        ) -> None:
            self._run = lambda: target(*args)
            self._thread: ScheduledThread | None = None

        def start(self) -> None:
            self._thread = schedule.thread(self._run)

        @property
        def ident(self) -> int | None:  # None: not started
            return None if self._thread is None else id(self._thread)

        def join(self, timeout_s: float | None = None) -> None:
            if self._thread is not None:
                self._thread.join()

    instead = SimpleNamespace(Thread=Thread, current_thread=threading.current_thread)
    with (
        mock.patch.object(_prefetch_reader, "threading", instead),
        mock.patch.object(_prefetch_reader, "SimpleQueue", GateQueue),
    ):
        yield
