"""Promises that the engine does not keep yet, by the scenario that shows it.

A scenario in this list must fail, so that one which passes is taken out of it. The state machine
leaves out what they are about.
"""

from __future__ import annotations

_IN_PLACE = "wait() returns while the device still reads pinned memory in place"
_SOURCES = "wait() does not order the current stream of the sources' device after its reads"
_ONE_STREAM = "one copy stream serves every direction, and waits for the callers' kernels"
_INTERRUPT = "an interrupted copy_into goes on writing its destinations"
_QUERY = "any error of an event's query counts as the end of the work before it"
_RECORD = "memory is given back while a transfer uses it, if no event could be recorded"

NOT_YET: dict[str, str] = {
    "a_large_pinned_source_is_refilled_after_wait": _IN_PLACE,
    "a_pinned_run_is_refilled_after_wait": _IN_PLACE,
    "a_pinned_source_of_a_plan_is_refilled_after_wait": _IN_PLACE,
    "device_sources_are_overwritten_after_wait": _SOURCES,
    "device_sources_of_copy_into_are_overwritten_after_wait": _SOURCES,
    "sources_on_the_same_device_are_overwritten_after_wait": _SOURCES,
    "to_the_device_beside_a_copy_to_the_host": _ONE_STREAM,
    "to_the_device_beside_a_copy_to_another_device": _ONE_STREAM,
    "to_the_device_beside_filling_a_device": _ONE_STREAM,
    "to_the_device_beside_filling_the_host": _ONE_STREAM,
    "to_the_device_beside_filling_another_device": _ONE_STREAM,
    "to_the_device_beside_filling_the_same_device": _ONE_STREAM,
    "to_the_device_beside_a_scatter": _ONE_STREAM,
    "to_the_host_beside_a_copy_to_the_host": _ONE_STREAM,
    "to_the_host_beside_a_copy_to_another_device": _ONE_STREAM,
    "to_the_host_beside_filling_a_device": _ONE_STREAM,
    "to_the_host_beside_filling_the_host": _ONE_STREAM,
    "to_the_host_beside_filling_another_device": _ONE_STREAM,
    "to_the_host_beside_filling_the_same_device": _ONE_STREAM,
    "to_the_host_beside_a_scatter": _ONE_STREAM,
    "to_the_other_device_beside_a_copy_from_this_one": _ONE_STREAM,
    "buffers_come_back_beside_one_that_waits_for_kernels": _ONE_STREAM,
    "staging_goes_on_when_all_buffers_wait_for_kernels": _ONE_STREAM,
    "prefetching_goes_on_beside_a_copy_to_the_host": _ONE_STREAM,
    "sources_of_an_idle_device_are_released_beside_a_busy_one": "one thread reclaims, in order",
    "filling_a_device_is_interrupted": _INTERRUPT,
    "filling_another_device_is_interrupted": _INTERRUPT,
    "filling_the_host_is_interrupted": _INTERRUPT,
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

_DIES = "the process dies: bytes are divided by the number of workers, which is 0"
_POOLS = "pools of threads are made for work that is done in the call"

NOT_YET_WITHOUT_THREADS: dict[str, str] = {
    "gather to the host": _DIES,
    "prefetch in the loop": _DIES,
    "H2D inline": _POOLS,
    "gather to the host inline": _POOLS,
    "filling a device inline": _POOLS,
    "filling the host inline": _POOLS,
}
"""The same of the calls of `test_without_threads.py`."""

NOT_YET_INTERRUPTED: dict[str, str] = {
    "reader": "room for a batch is lost, and with depth=1 the next next() waits for ever",
}
"""The same of the loops of `test_prefetch_interrupts.py`."""
