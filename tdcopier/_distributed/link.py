"""One of the two ends of a pair, and how it knows that the other one is there.

Both ends tell each other their state: a few numbers, in a message of 64 bytes. An end has given
memory for several before, says how many it has read, and gets no more than it has memory for; so
none waits in gloo. A state that has not changed is told too, as a sign of life.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from tdcopier._distributed.pair import HEADER_BYTES, Header, Kind, clear, finish, has_come
from tdcopier._distributed.rendezvous import Found

BATCHES, _STATES = 0, 1
"""Tags of messages."""
_AHEAD = 8
"""States that an end has memory for."""
_LINGERS_S = 1.0
"""How long to wait for the other end to close the pair."""
_BEATS = 5
"""In the time after which the other end takes this one for lost."""


class _Place(NamedTuple):
    """Memory for a state."""

    memory: torch.Tensor
    view: memoryview
    work: Any


class Link:
    """One end of a pair. Its owner calls `turn` often, and all but `say_heard` with its lock."""

    def __init__(
        self, found: Found, timeout_s: float, what: str, lock: AbstractContextManager[Any]
    ) -> None:
        self.peer, self.timeout_s, self.lock = found.peer, timeout_s, lock
        self.pair = found.pair
        self.their = Header(Kind.STATE)
        """The state of the other end."""
        self.lost: str | None = None
        """Why the other end is no longer there."""
        self.has_ended = False
        """Both ends have closed, or the other one is lost."""
        self.is_closing = self._has_told_last = self._is_dropped = False
        self._last = sys.maxsize
        """Number of the first state that says that this end closes."""
        self._what, self._beat_s = what, found.timeout_s / _BEATS
        self._own = Header(Kind.STATE)
        self._is_untold = False
        self._told = self.heard = self._heard_of_told = self._told_heard = 0
        self._told_at = self._heard_at = time.monotonic()
        self._sent: deque[tuple[torch.Tensor, Any]] = deque(maxlen=_AHEAD)
        self._places: deque[_Place] = deque()
        try:
            for _ in range(_AHEAD):
                self._give(_new_place())
        except RuntimeError as error:
            self.lose(error)

    @property
    def peer_closes(self) -> bool:
        """Whether the other end has said that it closes."""
        return self.their.kind is Kind.CLOSE

    def tell(self, *, room: int = 0, begin: int = 0, messages: int = 0) -> None:
        """Tell the other end this state, now or as soon as it has memory for it."""
        self._own = Header(Kind.STATE, room=room, begin=begin, messages=messages)
        self._tell()

    def close(self, messages: int = 0) -> None:
        """Tell the other end that this one closes, and how many messages came before."""
        if not self.is_closing:
            self.is_closing = True
            self._own = self._own._replace(messages=messages)
            self._tell()

    def hear(self) -> None:
        """Read the states that have come."""
        try:
            while self._places and self._places[0].view[0] and has_come(self._places[0].view):
                place = self._places.popleft()
                finish(place.work, self.timeout_s)
                self.their = Header.read(place.view)
                self.heard += 1
                self.is_heard(self.their.heard)
                self._give(place)
            if self.heard - self._told_heard >= _AHEAD // 2:  # or the other end could say no more
                self._tell()
        except (RuntimeError, ValueError) as error:
            self.lose(error)

    def say_heard(self) -> int:
        """Return how many states were read, for the header of another message."""
        self._told_heard = self.heard
        return self.heard

    def is_heard(self, states: int | None = None) -> None:
        """Note a sign of life, and how many states the other end has read."""
        self._heard_at = time.monotonic()
        if states is not None:
            self._heard_of_told = max(self._heard_of_told, states)

    def turn(self) -> None:
        """Read and tell what is due, and see whether the other end is there."""
        self.hear()
        if self.has_ended:
            return
        now = time.monotonic()
        if self._is_untold or now - self._told_at > self._beat_s:
            self._tell()
        if now - self._heard_at > self.timeout_s:
            self.lose(TimeoutError("nothing has come"))

    def end(self) -> bool:
        """End, if both ends have said that they close. `is_gone` must be asked from then on."""
        if not (self.peer_closes and self._has_told_last):
            return False
        self.has_ended = True
        if self._told_heard < self.heard:  # they closed at the same time, and neither knows
            self._tell()
        return True

    def is_gone(self) -> bool:
        """Return whether the pair is closed, which is done if the other end needs it no more.

        An end that closes the pair may destroy what the other one has not read. So it does that
        when it knows that its last state was read, or else waits for the other one to do so.
        """
        if self._is_dropped:
            return True
        self.hear()
        has_read = self.their.heard > self._last
        if has_read or self.pair.is_closed() or time.monotonic() - self._told_at > _LINGERS_S:
            self._drop()
        return self._is_dropped

    def lose(self, error: Exception) -> None:
        """Give up: the other end has ended, or does not answer, or one of the two is at fault."""
        if self.has_ended:
            return
        gone = f"has ended or has not answered for {self.timeout_s:g} s"
        is_of_gloo = type(error) is RuntimeError or isinstance(error, (TimeoutError, OSError))
        how = gone if is_of_gloo else "is given up"
        self.lost = f"the {self._what}, {self.peer}, {how}: {_first_line(error)}"
        self._drop()

    def _drop(self) -> None:
        self.pair.close()
        self.has_ended = self._is_dropped = True
        self._places.clear()
        self._sent.clear()

    def _tell(self) -> None:
        is_full = self._told - self._heard_of_told >= _AHEAD
        self._is_untold = is_full
        if is_full or self._is_dropped:
            return
        kind = Kind.CLOSE if self.is_closing else Kind.STATE
        memory = torch.empty(HEADER_BYTES, dtype=torch.uint8, device="cpu")
        header = self._own._replace(kind=kind, number=self._told, heard=self.heard)
        header.write(memory.numpy().data)
        self._told_heard = self.heard
        if self.is_closing:
            self._has_told_last = True
            self._last = min(self._last, self._told)
        self._told += 1
        self._told_at = time.monotonic()
        try:
            self._sent.append((memory, self.pair.send(memory, _STATES)))
        except RuntimeError as error:
            self.lose(error)

    def _give(self, place: _Place) -> None:
        clear(place.view)
        work = self.pair.receive(place.memory, _STATES)
        self._places.append(place._replace(work=work))


def _new_place() -> _Place:
    memory = torch.zeros(HEADER_BYTES, dtype=torch.uint8, device="cpu")
    return _Place(memory, memory.numpy().data, None)


def _first_line(error: Exception) -> str:
    """Return the begin of an error's text, as gloo's go on about hosts and causes."""
    return str(error).strip().partition("\n")[0]
