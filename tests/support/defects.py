"""Defects that an engine might have, each breaking one promise; see `broken_engines.py`.

The table quotes the engine's source literally: when that changes, the table must follow.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Defect:
    promise: str  # its name in docs/concepts/promises.md
    file: str  # under csrc/
    code: str  # the correct code
    broken: str  # the code of the test build; {defect} tests whether this defect is selected
    scenario: str  # the scenario that detects it
    error: str  # the class of the exception that it causes
    hazard: str | None = None  # the kind of hazard that the detectors report, if any


DEFECTS: dict[str, Defect] = {
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
        "  c10::Storage storage = leaf.bytes != 0 ? chunk.storage : empty_storage(memory_.device);",
        "  c10::Storage storage =\n"
        "      leaf.bytes != 0 || {defect} ? chunk.storage : empty_storage(memory_.device);",
        "an_empty_leaf_of_a_result_is_grown",
        "AssertionError",
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
    "held_memory_reused_early": Defect(
        "Lifetime",
        "engine/device/deferred_memory.cpp",
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
        "  if (last_read_) {\n    Reclaimer::get()",
        "  if (last_read_ && !({defect} && source_device().is_cpu())) {\n    Reclaimer::get()",
        "pinned_sources_are_dropped_at_once",
        "AssertionError",
        "reused",
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
    "rows_given_back_early": Defect(
        "Order",
        "python/handle.cpp",
        '  const std::vector<c10::Stream> producing = producers("wait_staged()");',
        "  if ({defect}) return;\n"
        '  const std::vector<c10::Stream> producing = producers("wait_staged()");',
        "rows_are_overwritten_when_they_are_gathered",
        "AssertionError",
    ),
    "result_not_recorded": Defect(
        "Order",
        "engine/jobs/copy_job.cpp",
        "  if (work_.result) work_.result->record_on(stream);",
        "  if (work_.result && !{defect}) work_.result->record_on(stream);",
        "results_are_dropped_and_their_memory_used_again",
        "AssertionError",
        "reused",
    ),
    "consumer_does_not_wait": Defect(
        "Order",
        "engine/jobs/copy_job.cpp",
        "  if (arrived_ && !host_knows_arrival_) arrived_->block(stream);",
        "  if (arrived_ && !host_knows_arrival_ && !{defect}) arrived_->block(stream);",
        "two_batches_for_two_streams",
        "AssertionError",
        "unordered",
    ),
    "source_not_waited_for": Defect(
        "Order",
        "engine/jobs/device_job.cpp",
        "  sources_ready_->block(*read_stream_);",
        "  if (!{defect}) sources_ready_->block(*read_stream_);",
        "device_sources_are_overwritten_behind_wait_staged",
        "AssertionError",
        "unordered",
    ),
    "writer_does_not_wait_for_reads": Defect(
        "Order",
        "engine/jobs/copy_job.cpp",
        "  if (last_read_) block_until_ended(*last_read_, stream);",
        "  if (last_read_ && !{defect}) block_until_ended(*last_read_, stream);",
        "device_sources_are_overwritten_behind_wait_staged",
        "AssertionError",
        "unordered",
    ),
    "destination_not_waited_for": Defect(
        "Order",
        "engine/jobs/host_to_device_job.cpp",
        "  if (destinations_ready_) destinations_ready_->block(stream_);",
        "  if (destinations_ready_ && !{defect}) destinations_ready_->block(stream_);",
        "filled_behind_the_reads_before",
        "AssertionError",
        "unordered",
    ),
    "arrival_signalled_early": Defect(
        "Order",
        "engine/jobs/copy_job.cpp",
        "  if (!failed_) attempt([this] { transfer_all(); });",
        "    if ({defect}) arrived_ = accelerator_.events().record(stream_);\n"
        "  if (!failed_) attempt([this] { transfer_all(); });",
        "polled_until_ready",
        "AssertionError",
    ),
    "chunk_belongs_to_the_callers_stream": Defect(
        "Order",
        "engine/leaves/result.cpp",
        "  if (memory_.stream != nullptr) on_stream.emplace(*memory_.stream);",
        "  if (memory_.stream != nullptr && !{defect}) on_stream.emplace(*memory_.stream);",
        "handles_are_dropped_at_once",
        "AssertionError",
        "reused",
    ),
    "delegated_not_waited_for": Defect(
        "Order",
        "python/delegated_outputs.cpp",
        "  made->block(consumer);",
        "  if (!{defect}) made->block(consumer);",
        "delegated_leaves_for_another_stream",
        "AssertionError",
        "unordered",
    ),
    "delegated_not_recorded": Defect(
        "Order",
        "python/delegated_outputs.cpp",
        "    backend.recordDataPtrOnStream(",
        "    if (!{defect}) backend.recordDataPtrOnStream(",
        "delegated_leaves_for_another_stream",
        "AssertionError",
        "reused",
    ),
    "writer_does_not_wait_for_other_device": Defect(
        "Order",
        "engine/jobs/copy_job.cpp",
        "void CopyJob::order_after_reads(const c10::Stream& stream) const {",
        "void CopyJob::order_after_reads(const c10::Stream& stream) const {\n"
        "  if ({defect} && !work_.result && !target_.is_cpu()) return;",
        "one_destination_from_everywhere",
        "AssertionError",
        "unordered",
    ),
    "destination_on_other_device_not_waited_for": Defect(
        "Order",
        "engine/jobs/device_job.cpp",
        "  if (destinations_ready_) destinations_ready_->block(stream_);",
        "  if (destinations_ready_ && !{defect}) destinations_ready_->block(stream_);",
        "between_devices_into_memory_that_exists",
        "AssertionError",
        "unordered",
    ),
    "source_for_the_host_not_waited_for": Defect(
        "Order",
        "engine/jobs/device_to_host_job.cpp",
        "  sources_ready_->block(stream_);",
        "  if (!{defect}) sources_ready_->block(stream_);",
        "host_memory_is_filled_while_sources_are_overwritten",
        "AssertionError",
        "unordered",
    ),
    "writer_comes_before_participants_read": Defect(
        "Order",
        "engine/jobs/copy_job.cpp",
        "void CopyJob::wait_sources_free() {",
        "void CopyJob::wait_sources_free() {\n"
        "  if ({defect} && !work_.result && !source_device().is_cpu()) return;",
        "host_memory_is_filled_while_sources_are_overwritten",
        "AssertionError",
        "unordered",
    ),
    "source_in_place_written_early": Defect(
        "Order",
        "engine/jobs/copy_job.cpp",
        "  if (last_read_ && source_device().is_cpu()) wait_until_ended(*last_read_);",
        "  if (last_read_ && source_device().is_cpu() && !{defect}) wait_until_ended(*last_read_);",
        "one_tree_from_everywhere",
        "AssertionError",
        "changed",
    ),
    "only_first_consumer_waits": Defect(
        "Order",
        "engine/jobs/copy_job.cpp",
        "  if (!arrived_ && !work_.result) return;",
        "  if (!arrived_ && !work_.result) return;\n  if ({defect} && handed_over_) return;",
        "one_result_for_three_streams",
        "AssertionError",
        "unordered",
    ),
    "named_consumer_does_not_wait": Defect(
        "Order",
        "python/handle.cpp",
        "    streams[which] = parse_stream(given, devices[which]);",
        "    if (!{defect}) streams[which] = parse_stream(given, devices[which]);",
        "one_result_for_three_streams",
        "AssertionError",
        "unordered",
    ),
    "consumer_does_not_wait_for_filled_memory": Defect(
        "Order",
        "engine/jobs/copy_job.cpp",
        "  const RelaxedCapture relaxed(target_.type());\n",
        "  if ({defect} && !work_.result) return;\n"
        "  const RelaxedCapture relaxed(target_.type());\n",
        "filled_behind_the_reads_before",
        "AssertionError",
        "unordered",
    ),
    "wait_does_not_order_the_writer": Defect(
        "Order",
        "python/handle.cpp",
        "  order_after_reads(producing);\n  return result_;",
        "  if (!{defect}) order_after_reads(producing);\n  return result_;",
        "device_sources_are_overwritten_after_wait",
        "AssertionError",
        "unordered",
    ),
    "scratch_belongs_to_the_default_stream": Defect(
        "Order",
        "engine/jobs/device_job.cpp",
        "    const c10::Storage scratch =\n"
        "        allocate_on_device(source_.device(), plan_.chunks[last - 1].end() - begin);\n",
        "    std::optional<c10::StreamGuard> on_default;\n"
        "    if ({defect})\n"
        "      on_default.emplace(c10::Stream(c10::Stream::DEFAULT, source_.device()));\n"
        "    const c10::Storage scratch =\n"
        "        allocate_on_device(source_.device(), plan_.chunks[last - 1].end() - begin);\n"
        "    on_default.reset();\n",
        "device_sources_are_freed_at_once",
        "AssertionError",
    ),
    "new_memory_waits_for_kernels": Defect(
        "Company",
        "engine/jobs/host_to_device_job.cpp",
        "  return work.result ? target.to_device_stream() : target.ordered_stream();",
        "  if ({defect}) return target.ordered_stream();\n"
        "  return work.result ? target.to_device_stream() : target.ordered_stream();",
        "new_memory_waits_for_no_stream",
        "DeadlockError",
    ),
    "staging_waits_for_kernels": Defect(
        "Company",
        "engine/device/staging_ring.cpp",
        "  return share(use).buffers < std::max<size_t>(most, 1);",
        "  return {defect} || share(use).buffers < std::max<size_t>(most, 1);",
        "staging_goes_on_when_all_buffers_wait_for_kernels",
        "DeadlockError",
    ),
    "one_stream_for_both_directions": Defect(
        "Company",
        "engine/device/accelerator.cpp",
        "  std::call_once(made.once, [&] { made.stream = make_stream(device_); });",
        "  if ({defect}) return Accelerator::of(device_).to_device_stream();\n"
        "  std::call_once(made.once, [&] { made.stream = make_stream(device_); });",
        "to_the_device_beside_a_copy_to_the_host",
        "DeadlockError",
    ),
    "one_stream_for_all_that_leaves": Defect(
        "Company",
        "engine/device/accelerator.cpp",
        "  Made& made = made_[(id ^ id >> 5 ^ id >> 10) % made_.size()];",
        "  Made& made = made_[{defect} ? 0 : (id ^ id >> 5 ^ id >> 10) % made_.size()];",
        "to_the_host_beside_a_copy_to_the_host",
        "DeadlockError",
    ),
    "error_type_lost": Defect(
        "Errors",
        "engine/jobs/copy_job.cpp",
        "  if (!failure_) failure_ = std::current_exception();",
        "  if (!failure_) failure_ = std::current_exception();\n"
        '  if ({defect}) failure_ = std::make_exception_ptr(std::runtime_error("copy failed"));',
        "transfers_fail_when_they_are_enqueued",
        "RuntimeError",
    ),
    "error_of_the_device_swallowed": Defect(
        "Errors",
        "python/handle.cpp",
        "      if (!failure) failure = std::current_exception();",
        "      if (!failure && !{defect}) failure = std::current_exception();",
        "failures_are_told_each_time",
        "Failed",  # pytest's error: nothing was raised
    ),
    "failed_copy_still_writes": Defect(
        "Errors",
        "python/handle.cpp",
        "  if (!fills_ || (!python_failure_",
        "  if ({defect} || !fills_ || (!python_failure_",
        "a_transfer_fails_beside_rows_that_are_gathered",
        "AssertionError",
        "unordered",
    ),
    "interrupted_copy_still_writes": Defect(
        "Errors",
        "python/copy_into.cpp",
        "  if (!sorted.delegated.empty()) {\n"
        "    run_delegated(*handle, source, destination, sorted, call.fill);\n"
        "  }\n"
        "  for (IntoGroup& group : sorted.groups) {\n"
        "    if (run_signal_handlers()) break;",
        "  if ({defect}) {\n"
        "    for (IntoGroup& group : sorted.groups)\n"
        "      start_group(*handle, std::move(group), options);\n"
        "    sorted.groups.clear();\n"
        "  }\n"
        "  if (!sorted.delegated.empty()) {\n"
        "    run_delegated(*handle, source, destination, sorted, call.fill);\n"
        "  }\n"
        "  for (IntoGroup& group : sorted.groups) {\n"
        "    if (run_signal_handlers()) break;",
        "filling_the_host_is_interrupted",
        "AssertionError",
    ),
    "failed_query_taken_for_the_end": Defect(
        "Errors",
        "engine/device/event_pool.cpp",
        "      if (is_about_a_capture(error)) return false;",
        "      if (is_about_a_capture(error)) return {defect};",
        "queries_fail_while_staging_buffers_turn",
        "AssertionError",
        "changed",
    ),
    "failed_recording_taken_for_the_end": Defect(
        "Errors",
        "engine/device/event_pool.cpp",
        "  const InterruptibleWaits to_the_end(nullptr);",
        "  if ({defect}) return nullptr;\n  const InterruptibleWaits to_the_end(nullptr);",
        "recordings_fail_while_staging_buffers_turn",
        "AssertionError",
        "changed",
    ),
    "staging_limit_ignored": Defect(
        "Bounds",
        "engine/device/staging_ring.cpp",
        "  if (pinned_bytes_ + kStagingBufferBytes <= limit_bytes()) return true;",
        "  if ({defect} || pinned_bytes_ + kStagingBufferBytes <= limit_bytes()) return true;",
        "staging_is_bounded_beside_copies_that_wait_for_kernels",
        "AssertionError",
    ),
    "run_ahead_limit_ignored": Defect(
        "Bounds",
        "engine/device/run_ahead.cpp",
        "  return ahead_.size() < limit();",
        "  return {defect} || ahead_.size() < limit();",
        "the_host_is_held_back_when_it_runs_ahead",
        "AssertionError",
    ),
    "worker_drops_tensors": Defect(
        "Threads",
        "python/sources.cpp",
        "    list.objects.push_back(std::move(objects_));",
        "    if ({defect} && PyGILState_GetThisThreadState() == nullptr) {\n"
        "      const PyGILState_STATE gil = PyGILState_Ensure();\n"
        "      for (PyObject* object : objects_) Py_DECREF(object);\n"
        "      PyGILState_Release(gil);\n"
        "      return;\n"
        "    }\n"
        "    list.objects.push_back(std::move(objects_));",
        "polled_while_workers_stage",
        "DeadlockError",
    ),
    "gil_held_while_waiting": Defect(
        "Threads",
        "python/handle.cpp",
        "    const WaitWithoutGil waiting;\n    failure = synchronize(on_host_only);",
        "    std::optional<WaitWithoutGil> waiting;\n"
        "    if (!{defect}) waiting.emplace();\n    failure = synchronize(on_host_only);",
        "let_go_by_another_thread",
        "DeadlockError",
    ),
    "waiter_not_woken": Defect(
        "Threads",
        "engine/jobs/copy_job.cpp",
        "    enqueued_.store(true, std::memory_order_release);\n  }\n  milestone_.notify_all();",
        "    enqueued_.store(true, std::memory_order_release);\n  }\n"
        "  if (!{defect}) milestone_.notify_all();",
        "workers_share_two_buffers",
        "DeadlockError",
    ),
    "bytes_not_counted": Defect(
        "Counters",
        "engine/jobs/copy_job.cpp",
        "  transfer_bytes_ += bytes;",
        "  if (!{defect} || transfers_ == 1) transfer_bytes_ += bytes;",
        "counted_as_the_device_counts",
        "AssertionError",
    ),
}
