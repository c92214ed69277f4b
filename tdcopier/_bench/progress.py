"""Shows on stderr how far a benchmark is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator


def progress(label: str) -> Callable[[Iterable[int]], Iterable[int]]:
    """A bar where tqdm is installed and somebody watches; else a line before and one after."""
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
