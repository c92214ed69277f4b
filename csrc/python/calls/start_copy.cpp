// The steps of one call: device, capture check, walk, run-ahead limit, plan, staging and transfers,
// delegated leaves.
#include "python/calls/start_copy.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "base/forks.h"
#include "engine/device/fallbacks.h"
#include "engine/device/graph_capture.h"
#include "python/calls/call_to.h"
#include "python/calls/prepared_copy.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/interrupts.h"
#include "python/runtime/torch_state.h"
#include "python/walk/flatten.h"
#include "python/walk/row_leaves.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

// Returns the allocator of pinned memory if the accelerator is in use already, or else null, for
// pageable memory. Null in a forked child too, where the allocator may be locked.
c10::Allocator* pinned_allocator() {
  const std::optional<c10::DeviceType> type = at::getAccelerator();
  if (fork_generation() != 0 || !type || !has_engine_transfers(c10::Device(*type, 0))) {
    return nullptr;
  }
  return is_in_use(*type) ? at::getHostAllocator(*type) : nullptr;
}

}  // namespace

LeafGroup group_for(c10::Device target, SourceGroup&& group, const CopyOptions& options,
                    std::shared_ptr<const PackPlan> prepared) {
  const bool is_within_host = target.is_cpu() && group.leaves.device().is_cpu();
  const bool may_be_pinned = is_within_host && options.use_pinned_staging;
  return {target,
          {std::make_shared<const LeafTable>(std::move(group.leaves)), std::move(prepared),
           std::move(group.sources)},
          group.mapped,
          std::move(group.in_place),
          may_be_pinned ? pinned_allocator() : nullptr};
}

void start_group(Handle& handle, LeafGroup&& group, const CopyOptions& options) {
  const RelaxedCapture relaxed(mover(group).type());
  StartedJob started;
  try {
    const CountFallbacks counted(handle.fallbacks());
    const WithoutGil no_gil;  // an allocation may wait for the device
    started = start(std::move(group), options, handle.phases());
  } catch (...) {
    return handle.fail_with(std::current_exception());
  }
  if (!started.on_workers && !started.job->is_enqueued()) {
    const WaitWithoutGil waiting;
    started.job->run();
  }
  handle.attach(std::move(started.job), started.on_workers);
}

std::unique_ptr<Handle> start_copy(py::handle data, py::handle device, const CopyOptions& options) {
  Reclaimer::get().look();
  release_returned_sources();
  std::optional<ReleaseAtEnd> release_at_end;
  if (options.sending == Sending::kAtOnce) release_at_end.emplace();
  return start_copy_to(parse_device(device), data, options, nullptr);
}

std::unique_ptr<Handle> start_gather(py::handle storage, py::handle index, py::handle readers,
                                     py::handle device, const CopyOptions& options) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  const c10::Device target = parse_device(device);
  BadRowWatch::raise_of_dropped();
  RowRequest request = row_request_of(index);
  request.may_be_in_place = options.use_pinned_staging;
  if (!request.numbers_device().is_cpu() && request.numbers_device() != target) {
    throw py::value_error("the index is on " + request.numbers_device().str() +
                          ", and the rows go to " + target.str() + ": give index.cpu()");
  }
  add_readers(request, readers);
  RowLeaves rows(std::move(request));
  return start_copy_to(target, storage, options, nullptr, &rows);
}

std::unique_ptr<Handle> start_copy_to(c10::Device target, py::handle data,
                                      const CopyOptions& options, PreparedCopy* prepared,
                                      RowLeaves* rows) {
  if (has_engine_transfers(target)) refuse_capture(parse_stream(py::none(), target));

  PhaseTimes phases;  // until there is a handle
  FlatTree flat = [&] {
    const PhaseRange range(phases, Phase::kFlatten);
    return rows != nullptr ? flatten_tables(data, target, *rows) : flatten(data, target);
  }();
  check_unknown(flat, data, target, options.on_unknown);
  for (const SourceGroup& group : flat.groups) {
    const c10::Device source = group.leaves.device();
    if (!source.is_cpu()) refuse_capture(parse_stream(py::none(), source));
  }
  const bool fits = prepared != nullptr && prepared->note_fit(flat);
  LeafCounts counts;
  counts.reused = flat.reused;
  counts.opaque = flat.opaque;
  counts.left = rows != nullptr ? rows->left() : 0;
  auto handle = std::make_unique<Handle>(target, std::move(flat.spec), counts);
  handle->phases().add(Phase::kFlatten, phases.ns(Phase::kFlatten));

  if (!flat.groups.empty() && !target.is_cpu()) {
    RunAhead& run_ahead = Accelerator::of(target).run_ahead();
    if (!run_ahead.has_room()) {
      const PhaseRange range(handle->phases(), Phase::kWait);
      const WaitWithoutGil waiting;
      run_ahead.wait_for_room();
    }
  }
  // The code of a delegated leaf may give other leaves new memory, before theirs has been read.
  const auto runs_foreign_code = [](const Delegated& leaf) {
    return leaf.why != WhyDelegated::kDevice && leaf.why != WhyDelegated::kNotPlain;
  };
  if (std::ranges::any_of(flat.delegated, runs_foreign_code)) {
    for (const SourceGroup& group : flat.groups) group.sources->keep_memory_of_tensors();
  }
  for (size_t i = 0; i < flat.groups.size(); ++i) {
    std::shared_ptr<const PackPlan> plan = fits ? prepared->plan(i) : nullptr;
    if (!fits && options.pack == PackOptions()) plan = std::move(flat.groups[i].plan);
    start_group(*handle, group_for(target, std::move(flat.groups[i]), options, std::move(plan)),
                options);
    raise_if_interrupted();
  }
  if (fits) prepared->offer_outputs(*handle);
  if (!flat.delegated.empty()) call_to(*handle, data, flat.delegated, target);
  handle->build_early();
  return handle;
}

}  // namespace tdcopier
