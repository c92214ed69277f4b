"""Counts of a replay server."""

from __future__ import annotations

from typing import NamedTuple


class ReplayStats(NamedTuple):
    """Counts of a replay server, as of one moment.

    For example::

        server = tdcopier.replay.ReplayServer(buffer, store=store)
        if server.stats.sample_wait_s > server.stats.insert_wait_s:
            print(f"the learner waits: {server.stats.samples_per_insert:.1f} samples per row")
    """

    size: int
    """Rows in the buffer."""
    inserted: int
    """Rows that were written, by all."""
    sampled: int
    """Rows that were drawn, by all."""
    samples_per_insert: float
    """Rows that were drawn for each that was written, the first ones included; 0 while none was."""
    insert_waits: int
    """Calls of `extend` and `add` that had to wait for samples."""
    insert_wait_s: float
    """How long they have waited, in seconds."""
    sample_waits: int
    """Calls of `sample` that had to wait for rows."""
    sample_wait_s: float
    """How long they have waited, in seconds. Samples that clients ask for ahead count."""
    repeats: int
    """Batches that a client sent again, and that were in the buffer already."""
    write_count: int
    """The buffer's own count of rows, if it has one."""
    clients: int
    """Now."""
    closed_clients: int
    """Clients that have said that they go. Those that are here when the server closes do not count:
    it has told them to go."""
    lost_clients: int
    """Clients that have ended without it, or did not answer, before the server closed."""
