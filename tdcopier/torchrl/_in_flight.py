"""What a device still reads and writes in the rows of a storage after a call has returned."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tdcopier._C import DeviceAccess

MOST_READS = 64
"""Reads in flight of one storage; a further one waits for the oldest."""


class InFlight:
    """The accesses of a device to the rows of one storage. A copy of the storage has none.

    Thread: any. Methods take `lock`; those that enqueue accesses or write rows hold it until these
    are noted here, or done. A forked child has rows of its own, which no device accesses.
    """

    def __init__(self) -> None:
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self.lock = threading.RLock()
        self.reads: list[DeviceAccess] = []
        self.writes: list[DeviceAccess] = []
        self.starting: torch.device | None = None
        """Where accesses may be under way that are not noted: Ctrl-C came while they started."""
        self.host_writer: int | None = None
        """The thread that is in `host_writes`."""
        self.waits = 0
        """How often the host had to wait until the device had read rows, to write some."""

    def __reduce__(self) -> tuple[Any, ...]:
        return InFlight, ()

    @contextmanager
    def start(self, device: torch.device) -> Iterator[None]:
        """Hold the lock for a block that starts an access and notes it."""
        with self.lock:
            self._settle()
            self.starting = device
            try:
                yield
            except (TypeError, ValueError):  # refused before anything was enqueued
                self.starting = None
                raise
            self.starting = None  # not after any other error

    def add_read(self, access: DeviceAccess) -> None:
        with self.lock:
            _drop_ended(self.reads)
            if len(self.reads) == MOST_READS:
                self.reads[0].wait()
                del self.reads[0]
            self.reads.append(access)

    def add_write(self, access: DeviceAccess) -> None:
        with self.lock:
            _drop_ended(self.writes)
            self.writes.append(access)

    def has_writes(self) -> bool:
        """Return whether the device may still write rows."""
        with self.lock:
            _drop_ended(self.writes)
            return bool(self.writes)

    def order_after_writes(self) -> None:
        """Make the current stream wait until the device has written rows."""
        with self.lock:
            for access in self.writes:
                access.order()

    def order_after_reads(self) -> None:
        """Make the current stream wait until the device has read rows."""
        with self.lock:
            _drop_ended(self.reads)
            for access in self.reads:
                access.order()

    def wait_writes(self) -> None:
        """Block until the device writes no row."""
        if not self.writes and self.starting is None:
            return
        with self.lock:
            self._settle()
            _wait(self.writes)

    @contextmanager
    def host_writes(self) -> Iterator[None]:
        """Block until the device accesses no row, and let no other access begin in the block."""
        with self.lock:
            self._settle()
            _drop_ended(self.reads)
            self.waits += bool(self.reads)
            _wait(self.reads)
            _wait(self.writes)
            before, self.host_writer = self.host_writer, threading.get_ident()
            try:
                yield
            finally:
                self.host_writer = before

    def _settle(self) -> None:
        if self.starting is not None:
            torch.accelerator.synchronize(self.starting)
            self.starting = None


_all: weakref.WeakSet[InFlight] = weakref.WeakSet()
_parents: list[Any] = []
"""Accesses of the process that this one was forked from: a child cannot free what they hold."""


def _begin_in_child() -> None:
    """Forget accesses, and locks that threads of the parent may have held."""
    for each in _all:
        _parents.extend((each.reads, each.writes))
        each._begin()


os.register_at_fork(after_in_child=_begin_in_child)


def _drop_ended(accesses: list[DeviceAccess]) -> None:
    """Drop those at the beginning that have ended: they mostly end in this order."""
    while accesses and accesses[0].has_ended():
        del accesses[0]


def _wait(accesses: list[DeviceAccess]) -> None:
    while accesses:
        accesses[0].wait()
        del accesses[0]
