"""Schedules: a seed picks the order in which threads and streams run, one step at a time."""

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
DeadlockError.__doc__ = """\
Every thread waits, and none can continue. The text says what each waits for.

For example::

    try:
        with sim.schedule(seed):
            train_one_step()
    except sim.DeadlockError as error:
        print(error)
"""
DeadlockError.__module__ = "tdcopier.sim"


class ScheduledThread:
    """A thread that takes part in a schedule. Made by :meth:`Schedule.thread`.

    For example::

        with sim.schedule(seed=7) as schedule:
            reader = schedule.thread(read_batch, loader)
            batch = reader.join()
    """

    def __init__(self, schedule: Schedule, function: Callable[[], Any], name: str) -> None:
        """Start the thread; it blocks until its turn comes."""
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
            self._function = None  # drops its references while this thread has the turn
            _sim.schedule_leave()

    def __repr__(self) -> str:
        """Return its name, and whether it has been joined."""
        state = "joined" if self._joined else "not joined"
        return f"<tdcopier.sim.ScheduledThread {self._thread.name!r}: {state}>"

    @property
    def is_joined(self) -> bool:
        """Whether :meth:`join` has returned the function's result or raised its exception."""
        return self._joined

    def join(self) -> Any:
        """Let other threads and streams run until the thread has ended.

        Returns:
            The result of its function; the same object at each call.

        Raises:
            BaseException: the exception that its function raised.
            DeadlockError: no thread or stream can continue.

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
    """Imposes one order of events during its ``with``. Made by :func:`schedule`.

    For example::

        with sim.schedule(seed=7) as schedule:
            train_one_step()
        print(f"{schedule.choices} choices, {len(schedule.steps)} steps: {schedule.fingerprint:x}")
    """

    def __init__(self, seed: int, timeout_s: float) -> None:
        """Check the arguments. The schedule begins at ``with``."""
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

    def __repr__(self) -> str:
        """Return the seed, and whether it is active."""
        return f"<tdcopier.sim.Schedule {self.seed}: {'active' if self._is_on else 'not active'}>"

    def __enter__(self) -> Self:
        if self._is_on:
            raise RuntimeError("this schedule is already active")
        _C.testing.set_interleaver(_sim.interleaver())
        self._threads.clear()
        self._record = None
        # Completions of earlier copies would otherwise be processed within this schedule.
        _sim.run_dry()
        _C.testing.settle()
        _C.raise_bad_rows()  # asks the device about gathers that were dropped
        _C.testing.drop_staging()
        _sim.schedule_begin(self.seed, self._timeout_s)
        try:
            _sim.schedule_await_workers(_C.testing.wake_workers())
        except BaseException:
            _sim.schedule_end()
            raise
        # A garbage collection would free objects at a time that the seed does not determine.
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
        # A DeadlockError that was raised through torch has become a RuntimeError.
        # Threads that were still waiting may have raised others since.
        passing = isinstance(failure, RuntimeError) and "deadlock: no thread" in str(failure)
        if deadlock and (passing or abandoned) and not isinstance(failure, DeadlockError):
            raise DeadlockError(deadlock) from failure
        if failure is not None:
            if hasattr(failure, "add_note"):
                failure.add_note(f"tdcopier.sim: in the schedule with seed {self.seed}")
            if failure is not error:
                raise failure

    @property
    def is_on(self) -> bool:
        """Whether the schedule is active."""
        return self._is_on

    def thread(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> ScheduledThread:
        """Start a thread that takes part in the schedule: it runs whenever the seed picks it.

        Other threads run outside the schedule, so their effects are not repeatable. A thread that
        takes part must wait for others with :meth:`ScheduledThread.join`, or with the waits of the
        device and of tdcopier: while it waits for a Python lock, it cannot pass on its turn.
        """
        if not self._is_on:
            raise RuntimeError("a thread can be started only while the schedule is on")
        name = f"thread {len(self._threads)}"
        thread = ScheduledThread(self, lambda: function(*args, **kwargs), name)
        self._threads.append(thread)
        return thread

    def point(self) -> None:
        """Let another thread or stream run here. Every call of the device is such a point too."""
        _sim.schedule_point()

    def _recorded(self) -> tuple[list[str], int, int, int, str, bool]:
        return self._record if self._record is not None else _sim.schedule_record()

    @property
    def steps(self) -> tuple[str, ...]:
        """The steps in order, each an operation of a stream or a thread that ran."""
        return tuple(self._recorded()[0])

    @property
    def fingerprint(self) -> int:
        """A 64-bit hash that is the same for schedules with the same choices."""
        return self._recorded()[1]

    @property
    def choices(self) -> int:
        """How often more than one thread or stream could run."""
        return self._recorded()[2]

    @property
    def most_transfers_in_flight(self) -> int:
        """The highest number of transfers that were enqueued and had not run."""
        return self._recorded()[3]


def schedule(seed: int, *, timeout_s: float = 30.0) -> Schedule:
    """Run the body of the ``with`` in an order that ``seed`` picks, one step at a time.

    Streams do not run by themselves in it. At each call of the device, and wherever tdcopier's own
    threads wait or take work, the seed picks which one runs next: the calling thread, another one
    that takes part (:meth:`Schedule.thread`), one of tdcopier's workers, or one operation of a
    stream. So each seed is one order of events that a real device may show, the same seed repeats
    it, and many seeds find races that a fast device hides::

        for seed in range(1000):
            with sim.schedule(seed):
                train_one_step()  # a failure names the seed

    A thread that waits lets the others run. If none of them can, :class:`DeadlockError` is raised
    instead of a hang, and its message says which thread waits for what. A thread that polls instead
    of waiting may have to poll some thousand times, because the seed may keep picking it. Time does
    not pass: the seed decides how long :func:`busy` and :func:`pace` take. At the end all threads
    and streams run until they have nothing left to do, and threads are joined.

    For a repeatable order the code must be repeatable: it must not depend on time or addresses, and
    its random numbers must be seeded. Automatic garbage collection is off during the schedule.

    Args:
        seed: 0 to 2**64 - 1.
        timeout_s: how many seconds a thread may take from one point to the next while others wait
            for their turn. After that, it counts as blocked outside the simulation.

    Returns:
        The schedule, which is a context manager.

    Raises:
        ValueError: the seed or the timeout is out of range.
        RuntimeError: the simulation is not enabled; at ``with``: a stream is held, or another
            schedule is active.
        IndexError: at ``with``: a gather that was dropped had a row number out of range.
        DeadlockError: in or at the end of the ``with``, no thread or stream can continue.

    """
    return Schedule(seed, timeout_s)
