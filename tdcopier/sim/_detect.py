"""Detection of hazards: accesses to memory that no synchronisation makes safe, and leaks.

This module switches the detector on and raises what it found. The detector itself is
`csrc/sim/tracker.cpp`, with the accesses in `csrc/sim/history.h`.
"""

from __future__ import annotations

import gc
import time
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple

from tdcopier import _C, _sim
from tdcopier.sim._devices import device_index

if TYPE_CHECKING:
    from typing_extensions import Self

_WORKER_RELEASE_TIMEOUT_S = 0.3


class Hazard(NamedTuple):
    """An access or a leak that :func:`detect` reports; the kinds are listed there.

    For example::

        with sim.detect() as detector:
            train_one_step()
            kinds = {hazard.kind for hazard in detector.hazards}

    Attributes:
        kind: Its name, for example "unordered".
        message: The accesses, or the leak, in words.
    """

    kind: str
    message: str


class HazardError(RuntimeError):
    """Raised with the hazards that :func:`detect` has found.

    For example::

        try:
            with sim.detect():
                train_one_step()
        except sim.HazardError as error:
            print(error.hazards[0].message)
    """

    def __init__(self, hazards: tuple[Hazard, ...]) -> None:
        """Describe the hazards, of which there is at least one."""
        super().__init__(_described(hazards))
        self.hazards = hazards

    def __reduce__(self) -> tuple[type[HazardError], tuple[tuple[Hazard, ...]]]:
        return type(self), (self.hazards,)


HazardError.__module__ = "tdcopier.sim"


def _described(hazards: tuple[Hazard, ...]) -> str:
    lines = [f"[{hazard.kind}] {hazard.message}" for hazard in hazards]
    return "\n".join([f"{len(hazards)} hazard{'s' if len(hazards) != 1 else ''} found:", *lines])


class Detector:
    """Looks for hazards during its ``with``. Made by :func:`detect`.

    For example::

        with sim.detect(leaks=True) as detector:
            train_one_step()
        print(detector)  # the number of hazards
    """

    def __init__(self, leaks: bool) -> None:
        """Check that the simulation is enabled. The detection begins at ``with``."""
        device_index(None)
        self._leaks = leaks
        self._found: tuple[Hazard, ...] | None = None

    def __repr__(self) -> str:
        """Return how many hazards were found, or that it has not begun."""
        found = "not begun" if self._found is None else f"{len(self._found)} hazards"
        return f"<tdcopier.sim.Detector: {found}>"

    def __enter__(self) -> Self:
        _staging_bytes()  # frees buffers beyond the limit before anything is counted
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
        gc.collect()  # slow, and seldom needed
        # A worker may still hold a reference to a job that it has just reported as done.
        deadline = time.monotonic() + _WORKER_RELEASE_TIMEOUT_S
        while leaks := self._leaked() if self._all_has_run() else ():
            if time.monotonic() > deadline:
                return leaks
            time.sleep(0.001)
        return ()

    def _all_has_run(self) -> bool:
        if not _sim.run_dry():
            return False
        _C.testing.settle()
        _C.testing.drop_deferred_memory()
        return True

    def _leaked(self) -> tuple[Hazard, ...]:
        # All staging buffers have one size, and the engine reports their total. Those added since
        # the beginning are the increase of the total, plus the older buffers freed since then.
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
        """The hazards found so far, in order."""
        if self._found is not None:
            return self._found
        return tuple(Hazard(*hazard) for hazard in _sim.detect_hazards())


def _staging_bytes() -> int:
    return sum(_C.staging_bytes(f"sim:{index}") for index in range(_sim.device_count()))


def detect(*, leaks: bool = False) -> Detector:
    """Find hazards in the body of the ``with``, and raise at its end if there are any.

    A race corrupts data only if the streams happen to run in the wrong order. Most hazards are
    found whatever the order: they are reported because nothing that the program requested rules
    them out, however fast the streams are::

        with sim.detect():
            train_one_step()

    The kinds of hazards:

    ``"changed"``
        The host changes the source of a transfer before the transfer reads it, or the target before
        the transfer writes it. Found by checksums, so only if it does happen and the bytes differ.
    ``"reused"``
        Memory is allocated again before an earlier access to it is known to be done, for example
        because ``record_stream`` was not called or pinned memory was freed too early.
    ``"unordered"``
        A write and another access to the same bytes of pinned or device memory are on two streams,
        neither of which waits for the other, and the host did not wait in between. This includes
        the first use of memory on a stream other than that of its allocation, without a wait for
        its former user.
    ``"freed"``
        An operation is enqueued that touches freed memory, or bytes beyond its block.
    ``"leak"``
        Only with ``leaks``: a block of device or pinned memory that was allocated in the ``with``
        is still in use at its end, after a garbage collection. Staging buffers that tdcopier keeps
        are not reported: pinned blocks of their size are ignored, as many as ``staging_bytes()``
        has grown by.

    An operator, which the simulation runs on the host at once, counts as a kernel that is enqueued
    on the current stream without a wait. All threads of the host count as ordered. Work enqueued
    before the ``with`` counts as done. The end of the ``with`` waits for all streams, unless one is
    held or an exception is propagating. Each kind is reported once for each pair of operations with
    the same description, and at most 100 hazards in all. Two strided tensors of more than 4096
    pieces each are not compared, and only the last 4096 accesses to a block are remembered.

    Within :func:`schedule`, the same seed gives the same reports.

    Args:
        leaks: report blocks that are in use at the end.

    Returns:
        The detector, which is a context manager.

    Raises:
        HazardError: at the end of the ``with``, if anything was found. If an exception is
            propagating, the hazards are added to it as a note instead, from Python 3.11 on.
        RuntimeError: the simulation is not enabled; at ``with``: another detection is active.

    """
    return Detector(leaks)
