"""A buffer with a lock, whose calls wait for their turn by the limiter."""

from __future__ import annotations

import contextlib
import enum
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from tdcopier._distributed.ends import ChannelClosedError
from tdcopier._replay.limiter import Limiter


class Side(enum.Enum):
    """Which of the two sides a call is on."""

    INSERT = "insert"
    SAMPLE = "sample"


Run: TypeAlias = Callable[[Exception | None], None]
"""Makes a call, or tells of the error that keeps it from being made."""


class _Waiting:
    """A call that waits for its turn."""

    def __init__(self, run: Run | None, owner: object, timeout_s: float | None) -> None:
        self.run, self.owner, self.begin = run, owner, time.monotonic()
        self.end = math.inf if timeout_s is None else self.begin + timeout_s
        self.has_waited = False


class LimitedBuffer:
    """A buffer that one call at a time uses.

    A thread of this process waits for its turn, and makes its call itself, in the order of its own
    streams. Calls of other processes wait in queues; the thread whose call has made their turn come
    makes them too.
    """

    def __init__(self, buffer: Any, limiter: Limiter, wait_timeout_s: float | None) -> None:
        self.buffer, self.limiter = buffer, limiter
        self._wait_timeout_s = wait_timeout_s
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._queues: dict[Side, deque[_Waiting]] = {side: deque() for side in Side}
        self._is_closed = False

    # ---- calls, with the lock --------------------------------------------------------------------

    def insert(self, method: str, data: Any, **options: Any) -> Any:
        """Call `extend` or `add` in a turn of its side; return the index."""
        index = getattr(self.buffer, method)(data, **options)
        self.limiter.note_inserted(1 if method == "add" else _rows_written(index, data))
        return index

    def sample(self, batch_size: int | None, return_info: bool) -> Any:
        """Call `sample` in a turn of its side."""
        sizes = () if batch_size is None else (batch_size,)
        options = {"return_info": True} if return_info else {}
        sampled = self.buffer.sample(*sizes, **options)
        self.limiter.note_sampled(_rows_of(sampled[0] if return_info else sampled))
        return sampled

    def size(self) -> int:
        """Return the number of rows."""
        return len(self.buffer)

    # ---- turns -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def turn(self, side: Side) -> Iterator[None]:
        """Wait for a turn of the calling thread, and hold the lock in it.

        Raises:
            ChannelClosedError: the server was closed.
            TimeoutError: the turn has not come in time.
        """
        waiting, queue = _Waiting(None, None, self._wait_timeout_s), self._queues[side]
        with self._changed:
            queue.append(waiting)
            try:
                while not self._is_turn_of(waiting, side):
                    waiting.has_waited = True
                    left_s = waiting.end - time.monotonic()
                    if left_s <= 0:
                        self._note(waiting, side)
                        raise self._late(side)
                    self._changed.wait(None if math.isinf(left_s) else left_s)
            finally:
                queue.remove(waiting)
            self._note(waiting, side)
            try:
                yield
            finally:
                self.go_on()

    def later(self, side: Side, run: Run, owner: object) -> None:
        """Make a call, now or in a turn to come: `run` is called with None, and raises nothing.

        If the turn does not come in time, it is called with an error, by `end_late`.
        """
        with self._changed:
            self._queues[side].append(_Waiting(run, owner, self._wait_timeout_s))
            self.go_on()

    def end_late(self) -> float | None:
        """End calls whose turn has not come in time; return how long until the next may end."""
        if self._wait_timeout_s is None:
            return None
        with self._changed:
            now, ends = time.monotonic(), math.inf
            for side, queue in self._queues.items():
                for waiting in list(queue):
                    if waiting.run is None:  # a thread ends its wait itself
                        continue
                    if waiting.end > now:
                        ends = min(ends, waiting.end)
                        continue
                    queue.remove(waiting)
                    self._note(waiting, side)
                    waiting.run(self._late(side))
            return None if math.isinf(ends) else ends - now

    def drop(self, owner: object) -> None:
        """Forget the calls of one that is gone."""
        with self._changed:
            for queue in self._queues.values():
                for waiting in [each for each in queue if each.owner is owner]:
                    queue.remove(waiting)
            self.go_on()

    def go_on(self) -> None:
        """Make the calls whose turn has come. The caller has changed something, with the lock."""
        is_moving = True
        while is_moving:
            is_moving = False
            for side, queue in self._queues.items():
                run = queue[0].run if queue else None  # None: a thread makes it itself
                if run is not None and self._may(side):
                    self._note(queue.popleft(), side)
                    run(None)
                    is_moving = True
        for queue in self._queues.values():
            for waiting in queue:
                waiting.has_waited = True
        self._changed.notify_all()

    def close(self) -> None:
        """End the waits of threads of this process, and make no calls of others any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def check_open(self) -> None:
        """Raise ChannelClosedError if it is closed."""
        if self._is_closed:
            raise ChannelClosedError("this replay server is closed")

    def _is_turn_of(self, waiting: _Waiting, side: Side) -> bool:
        self.check_open()
        return self._queues[side][0] is waiting and self._may(side)

    def _may(self, side: Side) -> bool:
        if self._is_closed:
            return False
        size = self.size()
        may = self.limiter.may_insert if side is Side.INSERT else self.limiter.may_sample
        return may(size)

    def _late(self, side: Side) -> TimeoutError:
        others = "sampled" if side is Side.INSERT else "inserted"
        return TimeoutError(
            f"no turn to {side.value} has come in {self._wait_timeout_s:g} s: too few rows are "
            f"{others}"
        )

    def _note(self, waiting: _Waiting, side: Side) -> None:
        if waiting.has_waited:
            is_insert = side is Side.INSERT
            waits = self.limiter.insert_waits if is_insert else self.limiter.sample_waits
            waits.note(waiting.begin)


def _rows_written(index: Any, data: Any) -> int:
    """Return how many rows an `extend` has written: those that have an index."""
    if getattr(index, "shape", ()):
        return int(index.shape[0])
    if isinstance(index, (list, range)):
        return len(index)
    return len(data) if isinstance(data, list) else _rows_of(data)


def _rows_of(batch: Any) -> int:
    """Return the rows of a batch: a TensorDict, or any tree whose first tensor has them."""
    size = getattr(batch, "batch_size", None)
    if isinstance(size, tuple):
        return math.prod(size)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            return int(leaf.shape[0]) if leaf.dim() else 1
    return 0
