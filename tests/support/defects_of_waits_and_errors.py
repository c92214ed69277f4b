"""Broken engines that wait, fail, exceed a limit or count where they must not."""

from __future__ import annotations

from defect import Defect

WAITS_AND_ERRORS: dict[str, Defect] = {
    "new_memory_waits_for_kernels": Defect(
        "Company",
        "engine/jobs/host_to_device_job.cpp",
        "  if (!work.result) return target.ordered_stream();",
        "  if (!work.result || {defect}) return target.ordered_stream();",
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
    "window_held_for_want_of_a_buffer": Defect(
        "Company",
        "engine/jobs/host_to_device_job.cpp",
        "  if (!unsent_.empty() || added_ + refused_ >= opened) return false;",
        "  if (!unsent_.empty() || (added_ + refused_ >= opened && !{defect})) return false;",
        "windows_are_sent_in_groups",
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
        "python/handle/handle_waits.cpp",
        "      if (!failure) failure = std::current_exception();",
        "      if (!failure && !{defect}) failure = std::current_exception();",
        "failures_are_told_each_time",
        "Failed",  # pytest's error: nothing was raised
    ),
    "failed_copy_still_writes": Defect(
        "Errors",
        "python/handle/handle_waits.cpp",
        "  if (!fills_ || is_of_parent()",
        "  if ({defect} || !fills_ || is_of_parent()",
        "a_transfer_fails_beside_rows_that_are_gathered",
        "AssertionError",
        "unordered",
    ),
    "interrupted_copy_still_writes": Defect(
        "Errors",
        "python/calls/copy_into.cpp",
        "  if (!sorted.delegated.empty()) {\n"
        "    run_delegated(*handle, source, destination, sorted, call.fill);\n"
        "  }\n"
        "  for (IntoGroup& group : sorted.groups) {\n"
        "    if (run_signal_handlers()) break;",
        "  if ({defect}) {\n"
        "    for (IntoGroup& group : sorted.groups)\n"
        "      start_group(*handle, group_for(std::move(group), options), options);\n"
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
        "engine/device/events.cpp",
        "      if (is_about_a_capture(error)) return false;",
        "      if (is_about_a_capture(error)) return {defect};",
        "queries_fail_while_staging_buffers_turn",
        "AssertionError",
        "changed",
    ),
    "failed_recording_taken_for_the_end": Defect(
        "Errors",
        "engine/device/events.cpp",
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
        "python/walk/sources.cpp",
        "    list.copies.push_back({std::move(objects_), std::move(memory_)});",
        "    if ({defect} && PyGILState_GetThisThreadState() == nullptr) {\n"
        "      const PyGILState_STATE gil = PyGILState_Ensure();\n"
        "      for (PyObject* object : objects_) Py_DECREF(object);\n"
        "      PyGILState_Release(gil);\n"
        "      return;\n"
        "    }\n"
        "    list.copies.push_back({std::move(objects_), std::move(memory_)});",
        "polled_while_workers_stage",
        "DeadlockError",
    ),
    "finished_while_a_part_is_held": Defect(
        "Order",
        "engine/jobs/copy_job.cpp",
        "  if (is_part_left() || participants_ != 0 || finished_.exchange(true)) return false;",
        "  if (is_part_left() || (participants_ != 0 && !{defect}) || finished_.exchange(true)) {\n"
        "    return false;\n"
        "  }",
        "workers_share_two_buffers",
        "HazardError",
        "unordered",
    ),
    "worker_drops_results": Defect(
        "Threads",
        "python/handle/handle.cpp",
        "  for (const auto& job : jobs_) job->drop_result();",
        "  for (const auto& job : jobs_) {{defect} ? void() : job->drop_result();}",
        "results_that_python_has_seen_are_dropped",
        "DeadlockError",
    ),
    "gil_held_while_waiting": Defect(
        "Threads",
        "python/handle/handle_waits.cpp",
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
