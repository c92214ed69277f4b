"""One order of events at a time, picked by a seed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tdcopier import _C, _sim
from tdcopier.sim._devices import device_index

if TYPE_CHECKING:
    from typing_extensions import Self

DeadlockError = _sim.DeadlockError
DeadlockError.__doc__ = "Everybody waits and nobody can go on. Its text says who waits for what."
DeadlockError.__module__ = "tdcopier.sim"


class ScheduledThread:
    """A thread that takes part in a schedule. Made by :meth:`Schedule.thread`."""

    def __init__(self, schedule: Schedule, function: Callable[[], Any], name: str) -> None:
        """Start it; it stands still until its turn comes."""
        self._schedule = schedule
        self._function: Callable[[], Any] | None = function
        self._error: BaseException | None = None
        self._result: Any = None
        self._joined = False
        self._number = _sim.schedule_announce_thread(name)
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()
        _sim.schedule_await_thread(self._number)

    def _run(self) -> None:
        _sim.schedule_enter(self._number)
        try:
            assert self._function is not None
            self._result = self._function()
        except BaseException as error:
            self._error = error
        finally:
            self._function = None  # what it refers to goes while this thread has the turn
            _sim.schedule_leave()

    @property
    def is_joined(self) -> bool:
        """Whether :meth:`join` has returned or raised what the function did."""
        return self._joined

    def join(self) -> Any:
        """Let the others go on until the thread has ended.

        Returns:
            What its function returned; the same at each call.

        Raises:
            BaseException: what its function raised.
            DeadlockError: nobody can go on.

        """
        if not self._joined:
            if self._schedule.is_on:
                _sim.schedule_wait_for_leave(self._number)
            self._thread.join()
            self._joined = True
        if self._error is not None:
            raise self._error
        return self._result


class Schedule:
    """One order of events, while its ``with`` lasts. Made by :func:`schedule`."""

    def __init__(self, seed: int, timeout_s: float) -> None:
        """Check the arguments; nothing begins before ``with``."""
        device_index(None)
        if not 0 <= seed < 2**64:
            raise ValueError(f"a seed must be between 0 and 2**64 - 1, got {seed}")
        if not 0 < timeout_s <= 3600:
            raise ValueError(f"the timeout must be between 0 and 3600 seconds, got {timeout_s}")
        self.seed = seed
        self._timeout_s = timeout_s
        self._threads: list[ScheduledThread] = []
        self._record: tuple[list[str], int, int, int, str, bool] | None = None
        self._collects = False
        self._is_on = False

    def __enter__(self) -> Self:
        if self._is_on:
            raise RuntimeError("this schedule is on already")
        _C.set_interleaver(_sim.interleaver())
        self._threads.clear()
        self._record = None
        # What an earlier copy has left to be noticed would be noticed in this schedule.
        _sim.run_dry()
        _C.settle()
        _C.drop_staging()
        _sim.schedule_begin(self.seed, self._timeout_s)
        try:
            _sim.schedule_await_workers(_C.wake_workers())
        except BaseException:
            _sim.schedule_end()
            raise
        # A collection frees what it finds, when it comes: not the seed's doing.
        self._collects = gc.isenabled()
        gc.disable()
        self._is_on = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failure = error
        for thread in self._threads:
            if thread.is_joined:
                continue
            try:
                thread.join()
            except BaseException as raised:
                failure = failure or raised
        self._threads.clear()
        self._is_on = False
        _sim.schedule_end()
        self._record = _sim.schedule_record()
        if self._collects:
            gc.enable()
        *_, deadlock, abandoned = self._record
        # Where it was raised through torch, it has become a RuntimeError.
        # There may have been others since, of threads that are left waiting.
        passing = isinstance(failure, RuntimeError) and "deadlock: nobody" in str(failure)
        if deadlock and (passing or abandoned) and not isinstance(failure, DeadlockError):
            raise DeadlockError(deadlock) from failure
        if failure is not None:
            if hasattr(failure, "add_note"):
                failure.add_note(f"tdcopier.sim: in the schedule with seed {self.seed}")
            if failure is not error:
                raise failure

    @property
    def is_on(self) -> bool:
        """Whether its ``with`` lasts."""
        return self._is_on

    def thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> ScheduledThread:
        """Start a thread that takes part: it goes on whenever the seed picks it.

        Other threads run beside the schedule, and what they do is not repeatable. A thread that
        takes part must wait for another one by :meth:`ScheduledThread.join`, or by what the device
        and tdcopier offer, since a lock of Python's would keep it from giving the turn away.
        """
        if not self._is_on:
            raise RuntimeError("a thread can be started only while the schedule is on")
        name = f"thread {len(self._threads)}"
        thread = ScheduledThread(self, lambda: function(*args, **kwargs), name)
        self._threads.append(thread)
        return thread

    def point(self) -> None:
        """Let others go on here. Every call of the device is such a point anyway."""
        _sim.schedule_point()

    def _recorded(self) -> tuple[list[str], int, int, int, str, bool]:
        return self._record if self._record is not None else _sim.schedule_record()

    @property
    def steps(self) -> tuple[str, ...]:
        """Who went on and what it did, one after the other: a stream's operation, or a thread."""
        return tuple(self._recorded()[0])

    @property
    def fingerprint(self) -> int:
        """The same for schedules in which the same choices were made, in 64 bits."""
        return self._recorded()[1]

    @property
    def choices(self) -> int:
        """How often there was more than one that could go on."""
        return self._recorded()[2]

    @property
    def most_transfers_in_flight(self) -> int:
        """How many transfers there were at most that had been enqueued and had not run."""
        return self._recorded()[3]


def schedule(seed: int, *, timeout_s: float = 30.0) -> Schedule:
    """Run what is in the ``with`` in an order that ``seed`` picks, one step at a time.

    Streams do not run by themselves then. At each call of the device, and wherever tdcopier's own
    threads wait or take work, the seed picks who goes on: the calling thread, another one that
    takes part (:meth:`Schedule.thread`), one of tdcopier's workers, or a stream, of which one
    operation runs. So each seed is one order of events that a real device may show, the same seed
    shows it again, and many seeds find what a fast device hides::

        for seed in range(1000):
            with sim.schedule(seed):
                train_one_step()  # a failure names the seed

    Whoever waits lets the others go on. If nobody can, :class:`DeadlockError` is raised, with who
    waits for what, instead of a hang. Who polls instead of waiting may have to ask some thousand
    times, since the seed may favour it by as much. Time does not pass: :func:`busy` and
    :func:`pace` take as long as the seed likes. At the end everybody goes on until there is nothing
    left to do, and threads are joined.

    For a repeatable order the code must be repeatable: no decision by time or address, random
    numbers from a seed. Automatic garbage collection is off meanwhile.

    Args:
        seed: 0 to 2**64 - 1.
        timeout_s: how many seconds a thread may take from one point to the next while others wait
            for their turn. Beyond that, it is taken for blocked outside of the simulation.

    Returns:
        The schedule, which is a context manager.

    Raises:
        ValueError: the seed or the timeout is out of range.
        RuntimeError: the simulation is not enabled; at ``with``: a stream is held, or another
            schedule is on.
        DeadlockError: in or at the end of the ``with``.

    """
    return Schedule(seed, timeout_s)
