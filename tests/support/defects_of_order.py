"""Broken engines in which streams do not wait for each other."""

from __future__ import annotations

from defect import Defect

ORDER: dict[str, Defect] = {
    "rows_given_back_early": Defect(
        "Order",
        "python/handle/handle.cpp",
        "  const std::vector<c10::Stream> producing = producers();\n  if (is_of_parent()) {",
        "  if ({defect}) return;\n"
        "  const std::vector<c10::Stream> producing = producers();\n  if (is_of_parent()) {",
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
    "parked_memory_not_recorded": Defect(
        "Parking",
        "python/calls/storage_memory.cpp",
        "    if (stream.device() == device) backend.recordDataPtrOnStream(memory, stream);",
        "    if (stream.device() == device && !{defect})\n"
        "      backend.recordDataPtrOnStream(memory, stream);",
        "parked_memory_is_used_for_something_else",
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
        "engine/jobs/from_device_job.cpp",
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
        "python/walk/delegated_outputs.cpp",
        "  if (made) made->block(consumer);",
        "  if (made && !{defect}) made->block(consumer);",
        "delegated_leaves_for_another_stream",
        "AssertionError",
        "unordered",
    ),
    "delegated_not_recorded": Defect(
        "Order",
        "python/walk/delegated_outputs.cpp",
        "    record_stream(storage, consumer);",
        "    if (!{defect}) record_stream(storage, consumer);",
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
        "engine/jobs/from_device_job.cpp",
        "  if (destinations_ready_) destinations_ready_->block(stream_);",
        "  if (destinations_ready_ && !{defect}) destinations_ready_->block(stream_);",
        "between_devices_into_memory_that_exists",
        "AssertionError",
        "unordered",
    ),
    "source_for_the_host_not_waited_for": Defect(
        "Order",
        "engine/jobs/into_host_job.cpp",
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
        "python/handle/handle.cpp",
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
        "python/handle/handle.cpp",
        "  order_after_reads(producing);\n  return result_;",
        "  if (!{defect}) order_after_reads(producing);\n  return result_;",
        "device_sources_are_overwritten_after_wait",
        "AssertionError",
        "unordered",
    ),
    "scratch_belongs_to_the_default_stream": Defect(
        "Order",
        "engine/jobs/from_device_job.cpp",
        "  const c10::Storage scratch =\n"
        "      allocate_on_device(source_.device(), plan_.chunks[last - 1].end() - begin);\n",
        "  std::optional<c10::StreamGuard> on_default;\n"
        "  if ({defect})\n"
        "    on_default.emplace(c10::Stream(c10::Stream::DEFAULT, source_.device()));\n"
        "  const c10::Storage scratch =\n"
        "      allocate_on_device(source_.device(), plan_.chunks[last - 1].end() - begin);\n"
        "  on_default.reset();\n",
        "device_sources_are_freed_at_once",
        "AssertionError",
    ),
}
