"""Slabs: shared memory that a loader's workers pack batches into, used again and again.

A worker makes its slabs, and packs into one that is free. The process that trains maps each once,
pins it once, and sends batches to the device from there; when the device has read a batch, the
worker may write to its slab again. A worker that finds none free makes another one, so nothing ever
waits for a slab.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from multiprocessing.connection import wait as wait_for_any
from typing import NamedTuple

import torch

from tdcopier import _C

SLAB_FROM_BYTES = 16 * 1024
"""From this size a batch is packed into a slab, and below it is sent as bytes."""

_BATCHES_UNUSED = 64
"""A worker lets go of a slab that it has not used for this number of batches."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SlabMessage(NamedTuple):
    """What a worker sends in the place of a batch."""

    process: int
    descriptor: int
    token: bytes
    nbytes: int


# ---- in the worker -------------------------------------------------------------------------------


class _Made:
    """A slab of this process."""

    def __init__(self, slab: _C.Slab) -> None:
        self.slab = slab
        self.used_at = 0  # as a number of batches


class _Ring:
    """The slabs of one worker, the one that was taken last first."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._slabs: list[_Made] = []
        self._batches = 0

    def memory(self, nbytes: int) -> torch.Tensor | None:
        """Return memory for a batch, in a free slab or a new one; None if no memory can be had."""
        self._batches += 1
        self._slabs = [made for made in self._slabs if not self._lets_go_of(made)]
        for made in self._slabs:
            if (memory := self._take(made, nbytes)) is not None:
                return memory
        try:
            made = _Made(_C.Slab.make(with_room(nbytes)))
        except (OSError, MemoryError):
            return None
        self._slabs.append(made)
        return self._take(made, nbytes)

    def _take(self, made: _Made, nbytes: int) -> torch.Tensor | None:
        memory = made.slab.take(nbytes) if nbytes <= made.slab.nbytes else None
        if memory is not None:
            made.used_at = self._batches
            self._slabs.remove(made)
            self._slabs.insert(0, made)
        return memory

    def _lets_go_of(self, made: _Made) -> bool:
        made.slab.close_if_received()
        return self._batches - made.used_at > _BATCHES_UNUSED and made.slab.retire()


_ring: _Ring | None = None


def memory_in_slab(nbytes: int) -> torch.Tensor | None:
    """Return memory of this worker's slabs for a batch.

    None if the batch is small, if the system has no memory, or if others cannot open it.
    """
    global _ring
    if _ring is None or _ring.process != os.getpid():
        _ring = _Ring()  # a process that a worker has forked makes its own
        _watch_parent()
    if nbytes < SLAB_FROM_BYTES or not _can_be_opened():
        return None
    return _ring.memory(nbytes)


def with_room(nbytes: int) -> int:
    """Return the size of a new slab: whole pages, and at most a quarter more than is needed.

    So a batch that is a little larger finds room too.
    """
    step = max(1 << max(nbytes.bit_length() - 3, 0), _PAGE_BYTES)
    return -(-nbytes // step) * step


_opens: bool | None = None


def _can_be_opened() -> bool:
    """Return whether the parent can probably open this process's memory, as it could the parent's.

    The system asks the same of both: the same user, and a `/proc` that shows processes.
    """
    global _opens
    if _opens is None:
        parent = multiprocessing.parent_process()
        try:
            _opens = parent is not None and bool(os.readlink(f"/proc/{parent.pid}/cwd"))
        except OSError:
            _opens = False
    return _opens


def _watch_parent() -> None:
    """End this process when the one that trains ends, in whatever way."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        watched = (parent.pid, parent.sentinel)
        threading.Thread(target=_end_with, args=watched, name="tdcopier-end", daemon=True).start()


def _end_with(process: int, sentinel: int) -> None:
    """Wait for the end of a process, and end.

    A worker of torch asks for its parent's number from time to time, which under forkserver is
    another process's, and it may wait for ever at a pipe that has no reader.
    """
    try:
        ended = os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(1)
    except (OSError, AttributeError):  # an old kernel, or a Python that was built on one
        # The pipe tells it once no process that was forked has it.
        ended = sentinel
    wait_for_any([ended])
    os._exit(1)


def has(memory: torch.Tensor) -> bool:
    """Return whether the memory is in a slab."""
    return _C.Slab.of_tensor(memory) is not None


def message_of(memory: torch.Tensor, nbytes: int) -> SlabMessage | None:
    """Return a message for a batch in a slab, to be sent once; None if it was, or is in none."""
    slab = _C.Slab.of_tensor(memory)
    if slab is None or not slab.send():
        return None
    return SlabMessage(os.getpid(), slab.descriptor, slab.token, nbytes)


# ---- in the process that trains ------------------------------------------------------------------


class _Mapped(NamedTuple):
    """A slab of another process."""

    slab: _C.Slab
    process: int
    began: str | None
    """When the process began: its number may be another one's later. None if it had ended."""

    def is_used_no_more(self) -> bool:
        """Return whether no batch will come in it any more."""
        now = _began(self.process)
        has_ended = now != self.began and _UNKNOWN not in (now, self.began)
        return self.slab.is_retired or now is None or has_ended


_mapped: dict[bytes, _Mapped] = {}
"""By token. Changed by single operations only, since the garbage collector may interrupt any."""
_sweeper: tuple[int, threading.Thread] | None = None
"""The thread that unmaps slabs, and its process."""

_SWEEP_EVERY_S = 1.0
_MOST_WAIT_S = 1.0


def receive(message: SlabMessage) -> _C.Parcel:
    """Return the parcel of a message, whose memory is the slab.

    Raises:
        RuntimeError: the worker has ended; or the batch was received before.
        OSError: its memory cannot be opened.
    """
    known = _mapped.get(message.token)
    if known is None:
        drop_ended()
        try:
            path = f"/proc/{message.process}/fd/{message.descriptor}"
            slab = _C.Slab.open(path, message.token)
        except FileNotFoundError as error:
            _wait_for_end(message.process)  # so that a loader finds why it is not there
            raise RuntimeError(
                f"the worker (process {message.process}) ended before its batch was read"
            ) from error
        except PermissionError as error:
            raise RuntimeError(
                f"this process may not open the memory of its worker (process {message.process}), "
                "although the worker may look at it: use prefetch(..., pack_in_workers=False)"
            ) from error
        made = _Mapped(slab, message.process, _began(message.process))
        known = _mapped.setdefault(message.token, made)
        _start_sweeper()
    return known.slab.receive(message.nbytes)


def drop_ended() -> None:
    """Unmap the slabs that no worker will send any more, once their batches are gone too."""
    used_no_more = [token for token, each in list(_mapped.items()) if each.is_used_no_more()]
    if used_no_more:
        gone = (_mapped.pop(token, None) for token in used_no_more)
        _C.drop_slabs([each.slab for each in gone if each is not None])


def _start_sweeper() -> None:
    """See to it that slabs are unmapped soon after their worker has ended.

    A loader does not say when its workers end, which persistent ones do at any time.
    """
    global _sweeper
    if _sweeper is None or _sweeper[0] != os.getpid() or not _sweeper[1].is_alive():
        thread = threading.Thread(target=_sweep, name="tdcopier-slabs", daemon=True)
        _sweeper = os.getpid(), thread
        thread.start()


def _sweep() -> None:
    global _sweeper
    while True:
        while _mapped:
            time.sleep(_SWEEP_EVERY_S)
            drop_ended()
        _sweeper = None  # from now on the next slab starts another thread
        if not _mapped:
            return


def _wait_for_end(process: int) -> None:
    """Wait a moment for a process that is being ended."""
    end = time.monotonic() + _MOST_WAIT_S
    while time.monotonic() < end and _began(process) is not None:
        time.sleep(0.01)


def _began(process: int) -> str | None:
    """Return when a process began, by the system's clock; None if it has ended.

    `_UNKNOWN` if the system does not tell now, for example since no descriptor is left.
    """
    try:
        with open(f"/proc/{process}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    except OSError:
        return _UNKNOWN
    return None if fields[0] in "ZX" else fields[19]


_UNKNOWN = "unknown"


def has_parcel(batch: object) -> bool:
    """Return whether the batch is a parcel in a slab."""
    return type(batch) is _C.Parcel and _C.Slab.of(batch) is not None


def why_not_in_place(parcel: _C.Parcel) -> str | None:
    """Return why a device cannot read the parcel where it is; None if it is in a slab that is
    pinned. Pins the slab if it can be.
    """
    slab = _C.Slab.of(parcel)
    if slab is None:
        if parcel.is_pinned():
            return "the loader has copied it to pinned memory: see pinned.usage()"
        if parcel.nbytes < SLAB_FROM_BYTES:
            return f"batches of less than {SLAB_FROM_BYTES} bytes are sent as bytes"
        return "it is in no slab: its worker did not pack it, or had no memory that others can open"
    device = torch.accelerator.current_accelerator()
    return "there is no accelerator" if device is None else slab.pin(device)
