"""Switching the times of steps on, which `stats` then has."""

from __future__ import annotations

import os
from types import TracebackType

from tdcopier import _C

_VARIABLE = "TDCOPIER_TIME_STEPS"


class time_steps:
    """Let each copy that starts from now on take the time of its steps, for `handle.stats.steps`.

    As a call it holds until the next one; as a context manager it ends with its `with`, and what
    was before holds again. It is the process's, whatever thread asks. The environment variable
    `TDCOPIER_TIME_STEPS=1` has the same effect from the import on. Off, a step costs two looks.

    While `torch.profiler` records, the steps show there as ranges ("tdcopier: stage" and so on)
    whether or not they are timed.

    Args:
        on: False: no more.
    """

    def __init__(self, on: bool = True) -> None:
        self._before = _C.are_steps_timed()
        _C.time_steps(bool(on))

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _C.time_steps(self._before)


if os.environ.get(_VARIABLE) == "1":
    _C.time_steps(True)
