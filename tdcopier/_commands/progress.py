"""Shows the progress of a benchmark on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator


def progress(label: str) -> Callable[[Iterable[int]], Iterable[int]]:
    """Return a wrapper that shows a tqdm bar on a terminal, or else prints two lines."""
    try:
        from tqdm import tqdm
    except ImportError:
        tqdm = None
    if tqdm is not None and sys.stderr.isatty():
        return lambda rounds: tqdm(rounds, desc=label, leave=False)
    return lambda rounds: _lines(label, rounds)


def _lines(label: str, rounds: Iterable[int]) -> Iterator[int]:
    begin = time.monotonic()
    print(f"{label} ...", file=sys.stderr, flush=True)
    yield from rounds
    print(f"{label}: {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)
