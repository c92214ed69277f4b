"""Channels in a schedule.

Both ends are in this process. A schedule cannot control gloo or the threads of an end, so both are
replaced: a message is written to the memory that was given for it by a thread of the schedule, part
by part, and an end's thread takes a turn whenever something has happened.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from scenario_world import ScenarioWorld

from tdcopier import distributed
from tdcopier._distributed import ends, follower, incoming, publisher, receiver, sender
from tdcopier._distributed.pair import HEADER_BYTES, Address
from tdcopier._distributed.rendezvous import Found
from tdcopier.sim import Gate

TIMEOUT_S = 1e6  # of the ends: no time passes in a schedule
FIRST_BYTES = 512  # that a slot has: batches of a few hundred integers need more
FEW_NAPS, MOST_NAPS = 4, 5_000  # in a row in which nothing happens
SOME_POINTS, JUNK = 16, 165
STATES = 1  # the tag of the messages that are a header; those above it have none
DEVICES = ("sim:0", "sim:1")

# ---- what replaces gloo, the store and the threads -----------------------------------------------


class Exchange:
    """Carries the messages of all pairs of a schedule, in a thread of the schedule."""

    def __init__(self, schedule: Any) -> None:
        self.schedule, self.happenings, self.has_ended = schedule, 0, False
        self.error: BaseException | None = None
        self.listeners: dict[str, Callable[[Found], None]] = {}
        self.links: list[incoming.Incoming] = []
        """Those with slots, which belong to the main thread."""
        self._gate, self._naps, self._threads = Gate(), 0, list[Any]()
        self._ends: list[PairEnd] = []

    def happens(self) -> None:
        """Lets those go on that wait for something to happen."""
        self.happenings, self._naps = self.happenings + 1, 0
        gate, self._gate = self._gate, Gate()
        gate.open()

    def await_more_than(self, happenings: int) -> int:
        if self.happenings == happenings:
            self._gate.wait_until_reached()
        return self.happenings

    def nap(self, _: float = 0.0) -> None:
        """Lets others go on: a few times, and then until something happens.

        That the device has read a slot is no such thing, so its owner looks again and again.
        """
        self._naps += 1
        if self.error is not None:
            raise RuntimeError("another thread of the schedule has failed") from self.error
        assert not self.has_ended, "the scenario has ended"
        assert self._naps < MOST_NAPS, "a wait that does not end"
        if self._naps <= FEW_NAPS:
            self.schedule.point()
        elif threading.current_thread() is threading.main_thread() and self._awaits_device():
            self.await_device()
        else:
            self._gate.wait_until_reached()

    def _awaits_device(self) -> bool:
        return any(link._pinned and not link._given for link in self.links)

    def await_device(self) -> None:
        for device in DEVICES:
            torch.sim.synchronize(device)
        for _ in range(SOME_POINTS):  # workers then let go of sources
            self.schedule.point()

    def thread(self, function: Callable[[], None]) -> Any:
        """Starts a thread of the schedule. An error in it ends the waits of the others."""

        def run() -> None:
            try:
                function()
            except BaseException as error:
                self.error = error
                self.happens()
                raise

        self._threads.append(self.schedule.thread(run))
        return self._threads[-1]

    def pair(self) -> tuple[PairEnd, PairEnd]:
        one, other = PairEnd(self), PairEnd(self)
        one.other, other.other = other, one
        self._ends += one, other
        return one, other

    def end(self) -> None:
        """Ends all threads, of which some wait if one has failed."""
        self.has_ended = True
        self.happens()
        for thread in self._threads:
            with suppress(BaseException):  # the schedule raises it
                thread.join()
        # No garbage is collected in a schedule.
        for end in self._ends:
            end.__dict__.clear()
        self.__dict__.clear()

    def carry(self) -> None:
        """Writes messages to the memory that was given for them, until the schedule ends."""
        seen = -1
        while not self.has_ended:
            seen = self.await_more_than(seen)
            while sum(self._carry_one(end) for end in list(self._ends)):
                pass

    def _carry_one(self, end: PairEnd) -> bool:
        """Writes the first message that has memory, as one connection keeps their order."""
        first = next((each for each in end.coming if end.given[each[0]]), None)
        if first is None or end.is_closed():
            return False
        end.coming.remove(first)
        tag, message, sent = first
        memory, received = end.given[tag].popleft()
        target = memory.numpy().data
        assert len(message) <= len(target), "a message is larger than the memory for it"
        # The begin is there before the rest, and the end last.
        for part in (slice(HEADER_BYTES), slice(HEADER_BYTES, None)):
            target[: len(message)][part] = message[part]
            self.schedule.point()
        sent.is_done = received.is_done = True
        self.happens()
        return True


class Work:
    """Stands in for what gloo returns for a message."""

    def __init__(self, end: PairEnd) -> None:
        self.is_done, self._end = False, end

    def wait(self, _: Any) -> None:
        seen = -1
        while not self.is_done:
            if self._end.is_closed():
                raise RuntimeError("the pair is closed")
            seen = self._end.exchange.await_more_than(seen)


class PairEnd:
    """Stands in for `Pair`: one end of two in this process."""

    other: PairEnd

    def __init__(self, exchange: Exchange) -> None:
        self.exchange, self.is_open = exchange, True
        self.given: defaultdict[int, deque[tuple[torch.Tensor, Work]]] = defaultdict(deque)
        self.coming: deque[tuple[int, Any, Work]] = deque()

    def is_closed(self) -> bool:
        return not (self.is_open and self.other.is_open)

    def close(self) -> None:
        self.is_open = False
        self.exchange.happens()

    def send(self, memory: torch.Tensor, tag: int) -> Work:
        work = self._work()
        self.other.coming.append((tag, memory.numpy().data, work))
        self.exchange.happens()
        return work

    def receive(self, memory: torch.Tensor, tag: int) -> Work:
        work = self._work()
        # It is the pair's now, and may be seen by mistake. A header is clear until it comes.
        memory.numpy()[0 if tag > STATES else HEADER_BYTES :] = JUNK
        self.given[tag].append((memory, work))
        self.exchange.happens()
        return work

    def _work(self) -> Work:
        if self.is_closed():
            raise RuntimeError("the pair is closed")
        return Work(self)


@contextmanager
def channels(world: ScenarioWorld) -> Iterator[Exchange]:
    """Makes ends that are made in the block take part in the schedule."""
    exchange = Exchange(world.schedule)

    class Lock:
        def __init__(self) -> None:
            self._lock, self._released = threading.RLock(), Gate()
            self._waiting = 0

        def __enter__(self) -> None:
            world.schedule.point()
            while not self._lock.acquire(blocking=False):
                self._waiting += 1
                self._released.wait_until_reached()
                self._waiting -= 1

        def __exit__(self, *_: object) -> None:
            self._lock.release()
            if self._waiting:
                gate, self._released = self._released, Gate()
                gate.open()

    class Event:
        def __init__(self) -> None:
            self._is_set, self._seen = False, -1

        def set(self) -> None:
            self._is_set = True
            exchange.happens()

        def wait(self, _: float) -> bool:  # for the next turn of an end's thread
            self._seen = exchange.await_more_than(self._seen)
            return self._is_set or exchange.has_ended

    class Thread:
        def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
            self._target: Callable[[], None] | None = target
            self._thread: Any = None

        def start(self) -> None:
            assert self._target is not None
            self._thread, self._target = exchange.thread(self._target), None

        def join(self) -> None:
            self._thread.join()

    class Incoming(incoming.Incoming):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            exchange.links.append(self)

    class Listener:
        def __init__(self, options: Any, came: Callable[[Found], None]) -> None:
            self.failures: list[str] = []
            self._name = options.name
            exchange.listeners[self._name] = came
            exchange.happens()

        def close(self, _: float | None = None) -> None:
            exchange.listeners.pop(self._name, None)

    def join(options: Any, what: str = "receiver") -> Found:
        seen = -1
        while options.name not in exchange.listeners:
            seen = exchange.await_more_than(seen)
        here, there = exchange.pair()
        exchange.listeners[options.name](Found(there, what, TIMEOUT_S))
        return Found(here, what, TIMEOUT_S)

    instead = SimpleNamespace(
        RLock=Lock, Event=Event, Thread=Thread,
        get_ident=threading.get_ident, main_thread=threading.main_thread,
    )  # fmt: skip
    with ExitStack() as stack:
        for where, name, value in (
            (ends, "threading", instead),
            (ends, "_open_ends", weakref.WeakSet()),  # those that fail are not closed at exit
            (ends, "time", SimpleNamespace(monotonic=time.monotonic, sleep=exchange.nap)),
            (incoming, "_FIRST_BYTES", FIRST_BYTES),
            (receiver, "Incoming", Incoming),
            (follower, "Incoming", Incoming),
            (receiver, "Listener", Listener),
            (publisher, "Listener", Listener),
            (sender, "join", join),
            (follower, "join", join),
            (Address, "check", lambda self: None),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.callback(exchange.end)
        exchange.thread(exchange.carry)
        yield exchange


def sender_of(slots: int = 2) -> distributed.Sender:
    return distributed.sender(store=STORE, slots=slots, timeout_s=TIMEOUT_S)


def receiver_on(device: str) -> distributed.Receiver:
    return distributed.receiver(device=device, store=STORE, slots=2, timeout_s=TIMEOUT_S)


STORE: Any = object()  # nothing asks it


def check_empty(exchange: Exchange) -> None:
    """Checks that the device and results give back all slots."""

    def is_empty() -> bool:
        slots = [slot for link in exchange.links for slot in link._away]  # and none else
        return not any(slot.is_full or slot.is_in_use() for slot in slots)

    for _ in range(MOST_NAPS):
        if is_empty():
            return
        exchange.await_device()
    raise AssertionError("a slot is not given back")
