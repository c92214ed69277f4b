"""Promises that the engine does not keep yet, by the scenario that shows it.

A scenario in this list must fail, so that one which passes is taken out of it. The state machine
leaves out what they are about.
"""

from __future__ import annotations

_ONE_STREAM = "one stream serves all that leaves a device, and waits for the callers' kernels"
_QUERY = "any error of an event's query counts as the end of the work before it"
_RECORD = "memory is given back while a transfer uses it, if no event could be recorded"

NOT_YET: dict[str, str] = {
    "to_the_host_beside_a_copy_to_the_host": _ONE_STREAM,
    "to_the_host_beside_a_copy_to_another_device": _ONE_STREAM,
    "to_the_host_beside_filling_the_host": _ONE_STREAM,
    "to_the_host_beside_filling_another_device": _ONE_STREAM,
    "to_the_host_beside_a_scatter": _ONE_STREAM,
    "sources_of_an_idle_device_are_released_beside_a_busy_one": "one thread reclaims, in order",
    "a_signal_arrives_while_the_host_waits": "signals are not looked at while a call waits",
    "queries_fail_while_staging_buffers_turn": _QUERY,
    "queries_fail_while_batches_are_sent_by_their_consumer": _QUERY,
    "queries_fail_while_a_copy_is_polled": _QUERY,
    "queries_fail_while_a_pinned_source_is_polled": _QUERY,
    "queries_fail_when_filled_memory_is_dropped": _QUERY,
    "recordings_fail_while_staging_buffers_turn": _RECORD,
    "recordings_fail_while_a_device_is_filled": _RECORD,
    "pinning_fails_while_buffers_come_back": "a pinned allocation that fails fails the copy",
}

_POOLS = "pools of threads are made for work that is done in the call"

NOT_YET_WITHOUT_THREADS: dict[str, str] = {
    "H2D inline": _POOLS,
    "filling a device inline": _POOLS,
    "filling the host inline": _POOLS,
}
"""The same of the calls of `test_without_threads.py`."""

NOT_YET_INTERRUPTED: dict[str, str] = {
    "reader": "room for a batch is lost, and with depth=1 the next next() waits for ever",
}
"""The same of the loops of `test_prefetch_interrupts.py`."""
