"""Counts of a replay server."""

from __future__ import annotations

from typing import NamedTuple


class ReplayStats(NamedTuple):
    """Counts of a replay server, as of one moment.

    For example::

        server = tdcopier.replay.ReplayServer(buffer, store=store)
        if server.stats.sample_wait_s > server.stats.insert_wait_s:
            print(f"the learner waits: {server.stats.samples_per_insert:.1f} samples per row")

    Attributes:
        size: Rows in the buffer.
        inserted: Rows that were written, by all.
        sampled: Rows that were drawn, by all.
        samples_per_insert: Rows that were drawn for each that was written, the first ones included;
            0 while none was.
        insert_waits: Calls of `extend` and `add` that had to wait for samples.
        insert_wait_s: How long they have waited, in seconds.
        sample_waits: Calls of `sample` that had to wait for rows.
        sample_wait_s: How long they have waited, in seconds. Samples that clients ask for ahead
            count.
        repeats: Batches that a client sent again, and that were in the buffer already.
        write_count: The buffer's own count of rows, if it has one.
        clients: Now.
        closed_clients: Clients that have said that they go. Those that are here when the server
            closes do not count: it has told them to go.
        lost_clients: Clients that have ended without it, or did not answer, before the server
            closed.
    """

    size: int
    inserted: int
    sampled: int
    samples_per_insert: float
    insert_waits: int
    insert_wait_s: float
    sample_waits: int
    sample_wait_s: float
    repeats: int
    write_count: int
    clients: int
    closed_clients: int
    lost_clients: int
