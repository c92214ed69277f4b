"""Switching the times of steps on, which `stats` then has."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tdcopier import _C

_VARIABLE = "TDCOPIER_TIME_STEPS"

_lock = threading.Lock()
_wanted = 0  # by how many: guarded by _lock


@contextmanager
def time_steps() -> Iterator[None]:
    """Let each copy that starts meanwhile take the time of its steps, for `handle.stats.steps`.

    It holds for the process, whatever thread asks, until all that have entered have left. The
    environment variable `TDCOPIER_TIME_STEPS=1` has the same effect from the import on. Otherwise a
    step costs two looks.

    While `torch.profiler` records, the steps show there as ranges ("tdcopier: stage" and so on)
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


if os.environ.get(_VARIABLE) == "1":
    _want(1)
