"""Interrupts a call at each of its points in turn, as Ctrl-C would.

There are two kinds of points. "lines": before each line of the package's own modules. "calls":
where the interpreter can deliver signals, that is, at the start of a Python function and right
after a call of a C function, whose result is then lost.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import tdcopier

_PACKAGE = str(Path(tdcopier.__file__).parent)
KINDS = ("lines", "calls")


class Interrupt(KeyboardInterrupt):
    """The interrupt that a test raises."""


class Interrupter:
    """Interrupts this thread at the point `at`, counted from 1, inside its `with` block.

    The interrupt ends the block and does not propagate. The call must leave torch's grad mode as it
    was. Garbage collection is off meanwhile: a `__del__` would swallow the interrupt.
    """

    def __init__(self, kind: str, at: int) -> None:
        self._kind = kind
        self._at = at
        self._seen = 0
        self.where = "nowhere"
        self._before: tuple[Any, Any] = (None, None)
        self._grad = True

    @property
    def has_interrupted(self) -> bool:
        return self._seen == self._at

    def __enter__(self) -> Interrupter:
        gc.collect()
        gc.disable()
        self._before = sys.gettrace(), sys.getprofile()
        self._grad = torch.is_grad_enabled()
        if self._kind == "lines":
            sys.settrace(self._trace)
        else:
            sys.setprofile(self._profile)
        return self

    def __exit__(self, kind: type[BaseException] | None, *others: Any) -> bool:
        sys.settrace(self._before[0])
        sys.setprofile(self._before[1])
        gc.enable()
        grad, was = torch.is_grad_enabled(), self._grad
        torch.set_grad_enabled(was)
        assert grad == was, f"the interrupt at {self.where} left the grad mode changed"
        return kind is not None and issubclass(kind, Interrupt)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._trace_lines if _is_ours(frame.f_code.co_filename) else None

    def _trace_lines(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lasti not in _ends_of_with(frame.f_code):
            self._pass(frame)
        return self._trace_lines

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and _is_ours(frame.f_code.co_filename):
            self._pass(frame)

    def _pass(self, frame: FrameType) -> None:
        if self._seen < self._at:
            self._seen += 1
            if self._seen == self._at:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise Interrupt


@functools.cache
def _is_ours(file: str) -> bool:
    return file.startswith(_PACKAGE) or file == contextlib.__file__


@functools.cache
def _ends_of_with(code: CodeType) -> frozenset[int]:
    """Returns the offsets where a `with` block ends and `__exit__` is called.

    The interpreter delivers no signal between the last call in a block and this one, so a lock that
    `with` acquired is always released.
    """
    steps = list(dis.get_instructions(code))
    ends = set()
    for i, step in enumerate(steps):
        following = steps[i : i + 4]
        if step.opname == "WITH_EXCEPT_START":
            ends.add(steps[i - 1].offset)
        nones = [s.opname == "LOAD_CONST" and s.argval is None for s in following[:3]]
        if all(nones) and following[-1].opname in ("PRECALL", "CALL"):
            ends |= {step.offset, steps[i - 1].offset}  # a returned result is swapped
    return frozenset(ends)


def interrupted_everywhere(kind: str, scene: Callable[[Interrupter], None]) -> int:
    """Plays a scene once for each point of a call, until no point is left.

    The scene makes the call inside the interrupter it is given, and then checks the state.

    Returns:
        The number of points.
    """
    if sys.version_info < (3, 11):
        pytest.skip("an older interpreter delivers signals in other places")
    gc.collect()
    gc.freeze()  # what is there already: garbage is collected before each interrupt
    for at in itertools.count(1):
        interrupter = Interrupter(kind, at)
        try:
            scene(interrupter)
        except BaseException as error:
            raise AssertionError(f"interrupted at {interrupter.where}") from error
        if not interrupter.has_interrupted:
            return at - 1
    raise AssertionError


def in_time(function: Callable[[], Any], within_s: float = 10) -> Any:
    """Returns the function's result, computed in another thread; fails if that waits for long."""
    result: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            result.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(within_s)
    assert not thread.is_alive(), "it waits for ever"
    if failure:
        raise failure[0]
    return result[0]
