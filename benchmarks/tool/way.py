"""How a row is declared: one way to bring a batch to its target, called alone or in a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import cycle
from operator import methodcaller
from typing import Any, NamedTuple

from tdcopier._commands.interleave import LIMIT, PREPARED, WAY

__all__ = ["GET", "LIMIT", "PREPARED", "WAIT", "WAY", "Way", "same"]

GET, WAIT = methodcaller("get"), methodcaller("wait")
Feed = Callable[[Sequence[Any]], AbstractContextManager[Iterator[Any]]]


def same(value: Any) -> Any:
    return value


class Way(NamedTuple):
    """One way to copy. It can be timed as a contender of `interleave`, and feed a loop."""

    name: str
    start: Callable[[Any], Any] = same
    """Begins the copy of a prepared source. In a loop, called a step before the batch is needed."""
    finish: Callable[[Any], Any] = same
    """Turns what ``start`` returned into the batch."""
    prepare: Callable[[Any], Any] = same
    """Not timed, called once per source."""
    kind: str = WAY
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Entered around each burst or block, not timed."""
    feed: Feed | None = None
    """Cycles through the batches of prepared sources, for a way that is itself an iterator."""

    def run(self, source: Any) -> Any:
        return self.finish(self.start(source))

    @contextmanager
    def feeding(self, prepared: Sequence[Any], first: int = 0) -> Iterator[Iterator[Any]]:
        """Cycle through the batches of prepared sources, from that of a number on."""
        first %= len(prepared)
        order = [*prepared[first:], *prepared[:first]]
        with self.around():
            if self.feed:
                with self.feed(order) as batches:
                    yield iter(batches)
            else:
                yield self._one_ahead(cycle(order))

    def _one_ahead(self, sources: Iterator[Any]) -> Iterator[Any]:
        coming = [self.start(next(sources))]

        def next_batch(source: Any) -> Any:
            batch = self.finish(coming.pop())
            coming.append(self.start(source))
            return batch

        return map(next_batch, sources)  # a generator would keep a batch until it has the next one
