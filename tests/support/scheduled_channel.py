"""Channels in a schedule.

Both ends are in this process, and a pipe in memory is between them. The threads that carry messages
take part in the schedule, as all threads of the engine do. The Python side of the ends is replaced:
their locks and threads, and how they find each other.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from scenario_world import ScenarioWorld

from tdcopier import _C, distributed
from tdcopier._distributed import ends, follower, hub, link, publisher, receiver, sender
from tdcopier._distributed.address import Address
from tdcopier._distributed.rendezvous import Found
from tdcopier.sim import Gate

TIMEOUT_S = 1e6  # of the ends: no time passes in a schedule
PIPE_BYTES = 600  # of each direction: larger batches are written part by part
SOME_POINTS, MOST_LOOKS = 16, 5_000
DEVICES = ("sim:0", "sim:1")


class Exchange:
    """Connects the ends of a schedule."""

    def __init__(self, schedule: Any) -> None:
        self.schedule = schedule
        self.listeners: dict[str, Callable[[Found], None]] = {}
        self.links: list[link.Link] = []
        self.listens = Gate()

    def thread(self, function: Callable[[], None]) -> Any:
        """Starts a thread of the schedule. An error in it ends the waits of the others."""

        def run() -> None:
            try:
                function()
            except BaseException:
                for each in self.links:
                    each.abandon()
                raise

        return self.schedule.thread(run)

    def await_device(self) -> None:
        for device in DEVICES:
            torch.sim.synchronize(device)
        for _ in range(SOME_POINTS):  # workers then let go of sources
            self.schedule.point()


@contextmanager
def channels(world: ScenarioWorld) -> Iterator[Exchange]:
    """Makes ends that are made in the block take part in the schedule."""
    exchange = Exchange(world.schedule)

    class Lock:
        def __init__(self) -> None:
            self._lock, self._released = threading.RLock(), Gate()
            self._waiting = 0

        def acquire(self, timeout: float = -1) -> bool:
            world.schedule.point()
            while not self._lock.acquire(blocking=False):
                self._waiting += 1
                self._released.wait_until_reached()
                self._waiting -= 1
            return True

        def release(self) -> None:
            self._lock.release()
            if self._waiting:
                gate, self._released = self._released, Gate()
                gate.open()

        def _is_owned(self) -> bool:
            return bool(self._lock._is_owned())  # type: ignore[attr-defined]

        def __enter__(self) -> None:
            self.acquire()

        def __exit__(self, *_: object) -> None:
            self.release()

    class Thread:
        def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
            self._target: Callable[[], None] | None = target
            self._thread: Any = None

        def start(self) -> None:
            assert self._target is not None
            self._thread, self._target = exchange.thread(self._target), None

        def join(self) -> None:
            self._thread.join()

    class Listener:
        def __init__(self, options: Any, came: Callable[[Found], None], _: str) -> None:
            self.failures: list[str] = []
            self._name = options.name
            exchange.listeners[self._name] = came
            exchange.listens.open()

        def close(self, _: float | None = None) -> None:
            exchange.listeners.pop(self._name, None)

    def join(options: Any, what: str = "receiver") -> Found:
        if options.name not in exchange.listeners:
            exchange.listens.wait_until_reached()
        here, there = _C.Connection.pipe(PIPE_BYTES)
        exchange.listeners[options.name](Found(there, what, TIMEOUT_S))
        return Found(here, what, TIMEOUT_S)

    made = link.Link.__init__

    def note_made(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        exchange.links.append(self)

    instead = SimpleNamespace(RLock=Lock, Lock=Lock, Thread=Thread)
    with ExitStack() as stack:
        for where, name, value in (
            (hub, "threading", instead),
            (sender, "threading", instead),
            (publisher, "threading", instead),
            (follower, "threading", instead),
            (ends, "_open_ends", weakref.WeakSet()),  # those that fail are not closed at exit
            (receiver, "Listener", Listener),
            (publisher, "Listener", Listener),
            (sender, "join", join),
            (follower, "join", join),
            (Address, "resolve", lambda self: "nowhere"),
            (link.Link, "__init__", note_made),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        stack.callback(lambda: exchange.__dict__.clear())  # no garbage is collected in a schedule
        yield exchange


def sender_of(slots: int = 2) -> distributed.Sender:
    return distributed.sender(store=STORE, slots=slots, peer_timeout_s=TIMEOUT_S)


def receiver_on(device: str) -> distributed.Receiver:
    return distributed.receiver(device=device, store=STORE, slots=2, peer_timeout_s=TIMEOUT_S)


STORE = dist.HashStore()  # nothing asks it


def check_empty(exchange: Exchange) -> None:
    """Checks that the device and results give back the memory of all messages."""
    for _ in range(MOST_LOOKS):
        if not any(each.in_use for each in exchange.links):
            return
        exchange.await_device()
    raise AssertionError("memory of a message is not given back")
