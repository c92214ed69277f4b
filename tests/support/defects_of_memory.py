"""Broken engines whose results are wrong, or that give memory back too early or never."""

from __future__ import annotations

from defect import Defect

MEMORY: dict[str, Defect] = {
    "last_byte_not_staged": Defect(
        "Oracle",
        "engine/moves/stage.cpp",
        "                range.end - range.begin);",
        "                range.end - range.begin - ({defect} ? 1 : 0));",
        "two_batches_for_two_streams",
        "AssertionError",
    ),
    "last_byte_of_rows_not_read": Defect(
        "Oracle",
        "engine/moves/stage.cpp",
        "                range.begin, range.end, to);",
        "                range.begin, range.end - ({defect} ? 1 : 0), to);",
        "rows_for_the_host_and_a_device",
        "AssertionError",
    ),
    "held_batch_sent_early": Defect(
        "Oracle",
        "engine/jobs/host_to_device_job.cpp",
        "is_failing() || is_enqueued() || !are_sources_free()) return;",
        "is_failing() || is_enqueued() || (!{defect} && !are_sources_free())) return;",
        "a_batch_is_sent_by_two_threads",
        "RuntimeError",
    ),
    "empty_leaf_shares_memory": Defect(
        "Afterlife",
        "engine/leaves/result.cpp",
        "  if (bytes == 0) return {empty_storage(memory_.device), 0};",
        "  if (bytes == 0 && !{defect}) return {empty_storage(memory_.device), 0};",
        "an_empty_leaf_of_a_result_is_grown",
        "AssertionError",
    ),
    "host_leaf_shares_storage": Defect(
        "Afterlife",
        "engine/leaves/result.cpp",
        "  if (!shared || !memory_.device.is_cpu()) return {chunk.storage, begin};",
        "  if (!shared || !memory_.device.is_cpu() || {defect}) return {chunk.storage, begin};",
        "a_leaf_on_the_host_is_grown",
        "AssertionError",
    ),
    "host_leaf_hides_its_allocation": Defect(
        "Lifetime",
        "engine/leaves/part_storage.h",
        "    void* const context = chunk.data_ptr().get_context();\n",
        "    void* const context = {defect} ? nullptr : chunk.data_ptr().get_context();\n",
        "a_leaf_of_a_host_result_is_sent_by_torch",
        "AssertionError",
        "reused",
    ),
    "staging_reused_early": Defect(
        "Lifetime",
        "engine/device/staging_ring.cpp",
        "  ring_->give_back_after(use_, std::move(buffer_), std::move(event));",
        "  if ({defect}) return ring_->give_back(use_, std::move(buffer_));\n"
        "  ring_->give_back_after(use_, std::move(buffer_), std::move(event));",
        "sources_are_overwritten_at_once",
        "AssertionError",
        "changed",
    ),
    "row_numbers_overwritten_early": Defect(
        "Lifetime",
        "engine/jobs/host_to_device_job.cpp",
        "    if (lease) lease->in_flight_until(accelerator_.events().record_or_wait(stream_));",
        "    if (lease && !{defect}) {\n"
        "      lease->in_flight_until(accelerator_.events().record_or_wait(stream_));\n"
        "    }",
        "the_device_reads_pinned_rows",
        "HazardError",
        "changed",
    ),
    "held_memory_reused_early": Defect(
        "Lifetime",
        "engine/device/deferred_batch_memory.cpp",
        "void DeferredLease::in_flight_until(EventRef event) {",
        "void DeferredLease::in_flight_until(EventRef event) {\n  if ({defect}) event = nullptr;",
        "batches_are_sent_by_their_consumer",
        "AssertionError",
        "changed",
    ),
    "host_source_released_early": Defect(
        "Lifetime",
        "engine/jobs/copy_job.cpp",
        "    if (const std::shared_ptr<CopyJob> job = ticket->take()) job->begin_on_worker();",
        "    const std::shared_ptr<CopyJob> job = ticket->take();\n"
        "    if (job && {defect}) job->work_.sources->release();\n"
        "    if (job) job->begin_on_worker();",
        "sources_are_dropped_at_once",
        "AssertionError",
    ),
    "device_source_released_early": Defect(
        "Lifetime",
        "engine/device/reclaim.cpp",
        "    if (!here->kept->is_released() && !has_ended(*here->event)) continue;",
        "    if (!{defect} && !here->kept->is_released() && !has_ended(*here->event)) continue;",
        "device_sources_are_freed_at_once",
        "AssertionError",
        "reused",
    ),
    "destination_released_early": Defect(
        "Lifetime",
        "engine/jobs/copy_job.cpp",
        "  if (work_.result || !last_write_ || has_ended(*last_write_)) return;",
        "  if ({defect} || work_.result || !last_write_ || has_ended(*last_write_)) return;",
        "destinations_are_dropped_at_once",
        "AssertionError",
        "reused",
    ),
    "chunks_of_failed_copies_leak": Defect(
        "Lifetime",
        "engine/jobs/copy_job.cpp",
        "  last_write_ = failed_ ? std::exchange(arrived_, nullptr) : arrived_;",
        "  if (failed_ && {defect}) new std::shared_ptr<Result>(work_.result);\n"
        "  last_write_ = failed_ ? std::exchange(arrived_, nullptr) : arrived_;",
        "transfers_fail_when_they_are_enqueued",
        "HazardError",
        "leak",
    ),
    "kept_output_used_again": Defect(
        "Lifetime",
        "python/kept_outputs.cpp",
        "  if (Py_REFCNT(object) != 1) return false;",
        "  if (Py_REFCNT(object) != 1 && !{defect}) return false;",
        "kept_results_of_a_plan_keep_their_values",
        "AssertionError",
    ),
    "source_in_place_released_early": Defect(
        "Lifetime",
        "engine/jobs/copy_job.cpp",
        "    if (!last_read_) work_.sources->release();",
        "    if (!last_read_ || ({defect} && source_device().is_cpu())) work_.sources->release();",
        "pinned_sources_are_dropped_at_once",
        "AssertionError",
        "reused",
    ),
    "source_given_back_late": Defect(
        "Lifetime",
        "engine/jobs/copy_job.cpp",
        "work_.sources->release();\n    sources_free_.store",
        "if (!{defect}) work_.sources->release();\n    sources_free_.store",
        "sources_are_dropped_at_once",
        "AssertionError",
    ),
    "source_in_place_given_back_early": Defect(
        "Lifetime",
        "python/handle.cpp",
        "  wait_host_sources_read();\n  if (",
        "  if (!{defect}) wait_host_sources_read();\n  if (",
        "a_large_pinned_source_is_refilled_after_wait",
        "AssertionError",
        "changed",
    ),
}
