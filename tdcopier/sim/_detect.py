"""Hazards that are found by themselves: who touches memory that nothing says they may."""

from __future__ import annotations

import gc
import time
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from tdcopier import _C, _sim
from tdcopier.sim._devices import device_index

if TYPE_CHECKING:
    from typing_extensions import Self

_LETTING_GO_S = 0.3


class Hazard(NamedTuple):
    """Something that a program does and must not rely on. :func:`detect` has the kinds."""

    kind: str
    message: str


class HazardError(RuntimeError):
    """What :func:`detect` has found."""

    def __init__(self, hazards: tuple[Hazard, ...]) -> None:
        """With all of them, of which there is at least one."""
        super().__init__(_described(hazards))
        self.hazards = hazards

    def __reduce__(self) -> tuple[type[HazardError], tuple[tuple[Hazard, ...]]]:
        return type(self), (self.hazards,)


def _described(hazards: tuple[Hazard, ...]) -> str:
    lines = [f"[{hazard.kind}] {hazard.message}" for hazard in hazards]
    return "\n".join([f"{len(hazards)} hazard{'s' if len(hazards) != 1 else ''} found:", *lines])


class Detector:
    """Looks for hazards, while its ``with`` lasts. Made by :func:`detect`."""

    def __init__(self, leaks: bool) -> None:
        """Check that there are devices; nothing begins before ``with``."""
        device_index(None)
        self._leaks = leaks
        self._found: tuple[Hazard, ...] | None = None

    def __enter__(self) -> Self:
        _staging_bytes()  # what is over the limit is given back before anything is counted
        _sim.detect_begin()
        self._found = None
        self._staging_bytes = _staging_bytes()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            leaks = self._end() if error is None else ()
        finally:
            self._found = self.hazards
            _sim.detect_end()
        self._found += leaks
        if not self._found:
            return
        if error is None:
            raise HazardError(self._found)
        if hasattr(error, "add_note"):
            error.add_note(_described(self._found))

    def _end(self) -> tuple[Hazard, ...]:
        if not self._all_has_run() or not self._leaks:
            return ()
        if not self._leaked():
            return ()
        gc.collect()  # which takes long, and is seldom needed
        # A worker that has told of the end of its job is about to let go of it.
        deadline = time.monotonic() + _LETTING_GO_S
        while leaks := self._leaked() if self._all_has_run() else ():
            if time.monotonic() > deadline:
                return leaks
            time.sleep(0.001)
        return ()

    def _all_has_run(self) -> bool:
        if not _sim.run_dry():
            return False
        _C.settle()
        _C.drop_held_memory()
        return True

    def _leaked(self) -> tuple[Hazard, ...]:
        # Staging buffers have one size, and the engine says how many it has. How many of them have
        # come since the beginning is known but for those that were there and went, if any.
        size = _C.STAGING_BUFFER_BYTES
        staging = (_staging_bytes() - self._staging_bytes) // size
        staging += _sim.detect_older_given_back(size)
        leaks = []
        for device, block_bytes, number in _sim.detect_in_use():
            if device is None and block_bytes == size and staging > 0:
                staging -= 1
                continue
            place = "pinned memory" if device is None else f"memory of sim:{device}"
            kind = "pinned" if device is None else "device"
            leaks.append(
                Hazard(
                    "leak",
                    f"{block_bytes} bytes of {place} are still in use at the end: "
                    f"{kind} allocation number {number} since the beginning",
                )
            )
        return tuple(leaks)

    @property
    def hazards(self) -> tuple[Hazard, ...]:
        """What has been found so far, in the order in which it was found."""
        if self._found is not None:
            return self._found
        return tuple(Hazard(*hazard) for hazard in _sim.detect_hazards())


def _staging_bytes() -> int:
    return sum(_C.staging_bytes(f"sim:{index}") for index in range(_sim.device_count()))


def detect(*, leaks: bool = False) -> Detector:
    """Find hazards in what is in the ``with``, and raise at its end if there are any.

    A race shows in the data only if the streams happen to run in the wrong order. What is looked
    for here does not depend on that: a hazard is found because nothing that the program has asked
    for rules it out, however fast the streams are::

        with sim.detect():
            train_one_step()

    The kinds of hazards:

    ``"changed"``
        The host changes the source of a transfer before the transfer reads it, or the target before
        the transfer writes it. Found by checksums, so only if it happens, and the bytes differ.
    ``"reused"``
        Memory is handed out again before an earlier access to it is known to be done:
        ``record_stream`` was not called, or pinned memory was freed too early.
    ``"unordered"``
        A write and another access of the same bytes, of pinned or device memory, on two streams of
        which neither waits for the other, nor did the host in between. That includes the first use
        of memory on another stream than the one that it was allocated on, if its former user is not
        waited for.
    ``"freed"``
        Something is enqueued that touches memory which has been given back, or more than its block.
    ``"leak"``
        Only with ``leaks``: a block of device or pinned memory that was handed out in the ``with``
        and is in use at its end, after a collection of garbage. Staging buffers that tdcopier keeps
        are none: as many pinned blocks of their size are left out as ``staging_bytes()`` says that
        there are more than at the beginning.

    An operator, which the simulation runs on the host at once, counts as a kernel that is enqueued
    on the current stream and not waited for. All threads of the host count as ordered. What was
    enqueued before the ``with`` counts as done. At the end all streams are waited for, unless one
    is held or an exception is leaving. Each kind is reported once for each pair of operations that
    look the same, and no more than 100 in all. Two strided tensors of more than 4096 pieces each
    are not compared, and of the accesses to one block the last 4096 are remembered.

    Within :func:`schedule`, the same seed gives the same reports.

    Args:
        leaks: report blocks that are in use at the end.

    Returns:
        The detector, which is a context manager.

    Raises:
        HazardError: at the end of the ``with``, if anything was found. If an exception leaves it,
            the hazards are added to that as a note instead, from Python 3.11 on.
        RuntimeError: the simulation is not enabled; at ``with``: another detection is on.

    """
    return Detector(leaks)
