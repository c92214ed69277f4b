"""Shows the progress of long work on stderr: a tqdm bar, or a line a second without tqdm.

Only where stderr is a terminal, and unless the environment variable `TDCOPIER_PROGRESS` is 0.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tdcopier import _limits

_DELAY_S = 1.0
"""Work that ends sooner shows nothing."""
_LINE_S = 1.0
_BAR_S = 0.1


def _has_terminal() -> bool:
    """Return whether to show anything: of the processes of torchrun, the first of a host does."""
    if not _limits.shows_progress or os.environ.get("LOCAL_RANK", "0") != "0":
        return False
    try:
        return bool(sys.stderr.isatty())
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


def _bar_class() -> Any:
    """Return tqdm's class, or None if tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm


class Progress:
    """A context for work on bytes in the main thread, which calls `add` after each of its steps.

    It is shown once the work has taken a second, unless another one is: a signal handler may wait,
    too. In other threads, it shows nothing.
    """

    def __init__(self, label: str, total_bytes: int) -> None:
        """Show nothing yet."""
        self._label = f"tdcopier: {label}"
        self._total_bytes = total_bytes
        self._done_bytes = 0
        is_main = threading.current_thread() is threading.main_thread()
        self._next_s = time.monotonic() + _DELAY_S if is_main else math.inf
        self._is_shown = False
        self._bar: Any = None

    def __enter__(self) -> Progress:
        """Return it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar, also after an error or Ctrl-C."""
        global _shown
        if self._is_shown:
            _shown = None
        if self._bar is not None:
            with contextlib.suppress(Exception):  # the terminal is gone
                self._bar.close()

    def add(self, n_bytes: int) -> None:
        """Note that more bytes are done, and show it, if that was not done just now."""
        self._done_bytes = min(self._done_bytes + n_bytes, self._total_bytes)  # may have padding
        if time.monotonic() < self._next_s:
            return
        try:
            self._next_s = time.monotonic() + self._show()
        except Exception:  # the terminal is gone, or what stands for it: the work goes on
            self._next_s = math.inf

    def _show(self) -> float:
        """Show what is done, and return after how many seconds to do so again."""
        global _shown
        if not self._is_shown:
            if not _has_terminal() or (_shown is not None and _shown() is not None):
                return math.inf
            self._is_shown, _shown = True, weakref.ref(self)
            bar_class = _bar_class()
            if bar_class is not None:
                self._bar = bar_class(
                    desc=self._label,
                    total=self._total_bytes,
                    initial=self._done_bytes,
                    unit="B",
                    unit_scale=True,
                    mininterval=0,  # `add` limits the rate
                    miniters=0,
                    leave=False,
                    file=sys.stderr,
                )
                return _BAR_S
        if self._bar is not None:
            self._bar.update(self._done_bytes - self._bar.n)
            return _BAR_S
        done, total = (f"{n_bytes / 1e6:,.0f}" for n_bytes in (self._done_bytes, self._total_bytes))
        print(f"{self._label}: {done} of {total} MB", file=sys.stderr, flush=True)
        return _LINE_S


_shown: weakref.ref[Progress] | None = None


@contextlib.contextmanager
def polled(label: str, total_bytes: int, count_bytes: Callable[[], int]) -> Iterator[None]:
    """Show the progress of a call that is one step.

    A thread asks `count_bytes` ten times a second, which grows by what is done, while the caller
    waits without the GIL. There is no such thread where nothing would be shown.
    """
    if threading.current_thread() is not threading.main_thread() or not _has_terminal():
        yield
        return
    progress = Progress(label, total_bytes)
    begin = count_bytes()
    is_ended = threading.Event()

    def poll() -> None:
        most = 0
        with progress:
            while not is_ended.wait(_BAR_S):
                done = max(most, min(count_bytes() - begin, total_bytes))
                progress.add(done - most)
                most = done

    poller = threading.Thread(target=poll, name="tdc-progress", daemon=True)
    poller.start()
    try:
        yield
    finally:
        is_ended.set()
        poller.join()


def show_rounds(label: str) -> Callable[[Iterable[int]], Iterable[int]]:
    """Return a wrapper for the rounds of a benchmark: a tqdm bar on a terminal, or two lines."""
    if not _limits.shows_progress:
        return lambda rounds: rounds
    bar_class = _bar_class() if _has_terminal() else None
    if bar_class is not None:
        return lambda rounds: bar_class(rounds, desc=label, leave=False)
    return lambda rounds: _with_lines(label, rounds)


def _with_lines(label: str, rounds: Iterable[int]) -> Iterator[int]:
    begin = time.monotonic()
    print(f"{label} ...", file=sys.stderr, flush=True)
    yield from rounds
    print(f"{label}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
