"""`time_steps`: turns on the timing of each phase of a copy, for `stats.steps`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tdcopier import _C
from tdcopier._compile import keep_out_of_graphs
from tdcopier._limits import is_on

_VARIABLE = "TDCOPIER_TIME_STEPS"

_lock = threading.Lock()
_wanted = 0  # number of open blocks; guarded by _lock


@keep_out_of_graphs("time_steps()")
@contextmanager
def time_steps() -> Iterator[None]:
    """Time the phases of each copy that starts within the block, for `handle.stats.steps`.

    For example::

        with tdcopier.stats.time_steps():
            handle = plan.start_copy(batch)
        print(handle.stats.steps)

    Applies to the whole process, in every thread, until all threads have left their blocks. The
    environment variable `TDCOPIER_TIME_STEPS=1` has the same effect from the import on. When timing
    is off, a phase costs two checks of a flag.

    While `torch.profiler` records, the phases appear there as ranges ("tdcopier: stage" and so on),
    whether or not they are timed.
    """
    _want(1)
    try:
        yield
    finally:
        _want(-1)


def _want(change: int) -> None:
    global _wanted
    with _lock:
        _wanted += change
        _C.time_steps(_wanted > 0)


if is_on(_VARIABLE):
    _want(1)
