"""What a prefetcher counts."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

__all__ = ["PrefetchStats"]


@dataclass(frozen=True)
class PrefetchStats:
    """Totals over all passes of a `Prefetcher` so far. Times are in microseconds.

    For example::

        batches = tdcopier.prefetch(loader, "cuda")
        train(batches)
        print(f"{batches.stats.late_batches} of {batches.stats.batches} batches were late")

    If `waited_us` is small compared with the duration of the loop, no tuning is needed. If it is
    large and `idle_us` is near 0, the reader is always busy: the source or the copy is slower than
    the loop, and a larger `depth` does not help. If both are large, batches arrive unevenly: try a
    larger `depth`. (Without a reader thread, `idle_us` is always 0.)

    Attributes:
        batches: Batches that were yielded.
        late_batches: Yielded batches that had not been read when the consumer asked for them.
        waited_us: Time that consumers waited for these batches: until they were read and, if the
            host is the target, until they had arrived. Without a reader thread it includes
            `read_us` and `copy_us`.
        read_us: Time that the source took to return its batches.
        copy_us: Time that the reader spent starting copies and waiting until their sources were
            read.
        idle_us: Time that the reader waited for room, because `depth` batches were in flight.
        packed_batches: Batches that were read as parcels: the workers of the source have packed
            them.
        slab_batches: Of these, batches that the device reads straight from a worker's slab.
        why_unpacked: Why workers do not pack, or why the last batch that was not packed was not;
            None if all batches that workers made were.
        why_not_in_place: Why the last packed batch that the device could not read in place was not
            in a pinned slab; None if all were.
    """

    batches: int
    late_batches: int
    waited_us: float
    read_us: float
    copy_us: float
    idle_us: float
    packed_batches: int = 0
    slab_batches: int = 0
    why_unpacked: str | None = None
    why_not_in_place: str | None = None


@dataclass
class PrefetchCounters:
    """Counts and times of all passes over one source."""

    batches: int = 0
    late_batches: int = 0
    waited_ns: int = 0
    read_ns: int = 0
    copy_ns: int = 0
    idle_ns: int = 0
    packed_batches: int = 0
    slab_batches: int = 0
    why_unpacked: str | None = None
    why_not_in_place: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards what consumers count

    def count_batch(self, is_late: bool, began_ns: int) -> None:
        """Count a yielded batch that a consumer asked for at `began_ns`."""
        with self.lock:
            self.batches += 1
            self.late_batches += is_late
            self.waited_ns += time.perf_counter_ns() - began_ns

    def stats(self) -> PrefetchStats:
        """Return the totals so far."""
        return PrefetchStats(
            self.batches,
            self.late_batches,
            self.waited_ns / 1000,
            self.read_ns / 1000,
            self.copy_ns / 1000,
            self.idle_ns / 1000,
            self.packed_batches,
            self.slab_batches,
            self.why_unpacked,
            self.why_not_in_place,
        )
