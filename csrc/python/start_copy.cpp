// One call: device, capture check, walk, run-ahead bound, plan, stage and transfer, delegated
// leaves.
#include "python/start_copy.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "engine/device_source_job.h"
#include "engine/held_source_job.h"
#include "engine/host_into_host_job.h"
#include "engine/host_rows_job.h"
#include "engine/host_source_job.h"
#include "python/array_leaf.h"
#include "python/delegated.h"
#include "python/device_argument.h"
#include "python/flatten.h"
#include "python/prepared_copy.h"
#include "python/row_leaves.h"
#include "python/workers.h"

namespace py = pybind11;

namespace tdcopier {
namespace {

std::atomic<uint64_t> g_max_inline_bytes = kMaxInlineBytes;
thread_local Sending t_sending = Sending::kAtOnce;

// Threads that may stage a copy. Copies that are done in the call make no threads.
size_t staging_threads(bool background) {
  return background ? std::max<size_t>(workers().workers(), 1) : 1;
}

// One window per worker, but never so small that waking the worker costs more than it saves.
WindowBytes rows_window_bytes(const PackPlan& plan, uint64_t least_bytes, bool background) {
  if (plan.total_bytes <= least_bytes) return WindowBytes::all(least_bytes);
  const uint64_t share = plan.total_bytes / staging_threads(background) / 4096 * 4096;
  return WindowBytes::all(std::clamp(share, least_bytes, kHostWindowBytes));
}

// Of rows that somebody waits for, and of a batch that is held, for which nobody does: there, a
// worker too many only slows down the loop's own thread.
constexpr uint64_t kLeastWindowBytes = 64 * 1024;
constexpr uint64_t kLeastHeldWindowBytes = 512 * 1024;

// Pinned, where there is a device that could read it. A child may have been forked while its parent
// held the lock of the pinned allocator.
c10::Allocator* host_allocator(bool pinned) {
  const bool may_pin = pinned && fork_generation() == 0;
  const std::optional<c10::DeviceType> type = may_pin ? at::getAccelerator() : std::nullopt;
  if (!type || !has_engine_transfers(c10::Device(*type, 0))) return c10::GetAllocator(c10::kCPU);
  return at::getHostAllocator(*type);
}

// Memory for a batch that is sent later, if it is to be and can be.
std::optional<HeldLease> held_memory(Accelerator& accelerator, const LeafTable& leaves,
                                     const PackPlan& plan, const CopyOptions& options) {
  if (t_sending == Sending::kAtOnce || plan.total_bytes == 0) return std::nullopt;
  if (!options.use_background_thread || !options.use_pinned_staging) return std::nullopt;
  const auto straight = [&](const ChunkPlan& chunk) { return goes_straight(chunk, plan, leaves); };
  if (std::any_of(plan.chunks.begin(), plan.chunks.end(), straight)) return std::nullopt;
  return accelerator.held().reserve(plan.total_bytes);
}

// Starts the job where it is best run. Returns whether workers run it.
bool launch(const std::shared_ptr<CopyJob>& job, bool may_block, const CopyOptions& options) {
  // Done here, unless it would have to wait for staging, for a disk or for a pageable transfer:
  // small work, and
  // whatever a device gathers, since to enqueue that takes as long for any number of bytes.
  const bool little = job->host_bytes() <= g_max_inline_bytes;
  const bool at_once = little && !may_block;
  if (options.use_background_thread && !at_once && job->run_in_background(workers())) return true;
  const py::gil_scoped_release no_gil;
  job->run();
  return false;
}

// Begins to move the leaves of one device. `plan`, where it is not null, is one for such leaves.
void start_group(Handle& handle, SourceGroup group, std::shared_ptr<const PackPlan> plan,
                 c10::Device target, const CopyOptions& options) {
  const c10::Device source = group.leaves.device();
  {
    const StepRange range(handle.steps(), Step::kPlan);
    // Where leaves lie is each batch's own.
    const std::vector<LeafSeries> runs = group.leaves.pinned_runs(options.pack);
    if (plan == nullptr || !runs.empty()) {
      plan = std::make_shared<const PackPlan>(
          make_pack_plan(group.leaves.extents(), options.pack, runs));
    }
  }
  bool may_block = !options.use_pinned_staging && (source.is_cpu() || target.is_cpu());
  std::shared_ptr<CopyJob> job;
  if (source.is_cpu() && target.is_cpu()) {
    may_block = group.mapped.wait_for_disk();
    const WindowBytes window_bytes =
        rows_window_bytes(*plan, kLeastWindowBytes, options.use_background_thread);
    job = std::make_shared<HostRowsJob>(std::move(group.leaves), std::move(plan),
                                        host_allocator(options.use_pinned_staging), window_bytes,
                                        std::move(group.sources));
  } else if (source.is_cpu()) {
    Accelerator& accelerator = Accelerator::of(target);
    may_block |= plan->total_bytes <= g_max_inline_bytes && group.mapped.wait_for_disk();
    std::optional<HeldLease> held = held_memory(accelerator, group.leaves, *plan, options);
    if (held) {
      may_block |= t_sending == Sending::kHeldStaged;
      const WindowBytes window_bytes =
          rows_window_bytes(*plan, kLeastHeldWindowBytes, options.use_background_thread);
      job =
          std::make_shared<HeldSourceJob>(accelerator, std::move(group.leaves), std::move(plan),
                                          window_bytes, std::move(group.sources), std::move(*held));
    } else {
      may_block |= accelerator.staging().is_exhausted(StagingUse::kToDevice);
      const WindowBytes window_bytes = best_window_bytes(*plan, options.use_background_thread,
                                                         /*mapped=*/!group.mapped.empty());
      job = std::make_shared<HostSourceJob>(accelerator, std::move(group.leaves), std::move(plan),
                                            options.use_pinned_staging, window_bytes,
                                            std::move(group.sources), reclaimer());
    }
  } else {
    job = std::make_shared<DeviceSourceJob>(
        Accelerator::of(source), target, std::move(group.leaves), std::move(plan),
        options.use_pinned_staging, std::move(group.sources), reclaimer());
  }
  const bool background = launch(job, may_block, options);
  handle.attach(std::move(job), background);
}

// Where a leaf's own `.to` failed, as a note of the exception (from Python 3.11 on).
void note_path(const py::object& error, py::handle data, size_t node, c10::Device target) {
  if (!py::hasattr(error, "add_note")) return;
  const std::optional<std::string> path = path_of(data, node, target);
  if (path) error.attr("add_note")("tdcopier: raised by `.to` of the leaf " + *path);
}

// `Tensor.to` for each leaf that the engine leaves to it, in this thread and under its state.
void run_delegated(Handle& handle, py::handle data, const std::vector<Delegated>& delegated,
                   c10::Device target) {
  const py::object device = py::reinterpret_steal<py::object>(THPDevice_New(target));
  const py::object to_name = py::str("to");
  DelegatedOutputs outputs;
  Users readers;
  size_t node = 0;
  try {
    for (const Delegated& leaf : delegated) {
      node = leaf.node;
      const auto source = py::reinterpret_borrow<py::object>(handle.spec().value(leaf.value));
      const bool is_array = is_array_type(Py_TYPE(source.ptr()));
      const py::object tensor = is_array ? tensor_from_array(source.ptr()) : source;
      readers.note(tensor);
      py::object moved = tensor.attr(to_name)(device);
      if (moved.is(source) || (moved.is(tensor) && target.is_cpu())) {
        ++handle.counts().reused;
      } else {
        ++handle.counts().delegated;
        for (const at::Tensor& part : plain_parts(moved)) outputs.add(part);
      }
      handle.spec().replace_value(leaf.value, std::move(moved));
    }
    outputs.read = readers.events();
    if (!outputs.storages.empty() && has_engine_transfers(target)) {
      outputs.stream = parse_stream(py::none(), target);
      outputs.made = Accelerator::of(target).events().record(*outputs.stream);
    }
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;  // an interrupt is not the copy's failure
    const py::object failure = error.value();
    note_path(failure, data, node, target);
    handle.fail_with(failure);
    return;
  }
  handle.attach(std::move(outputs));
}

}  // namespace

uint64_t max_inline_bytes() {
  return g_max_inline_bytes;
}

void set_sending(Sending sending) {
  t_sending = sending;
}

WindowBytes best_window_bytes(const PackPlan& plan, bool background, bool mapped) {
  if (mapped) return WindowBytes::all(kMappedWindowBytes);
  if (plan.total_bytes <= g_max_inline_bytes) return WindowBytes::all(kStagingBufferBytes);
  return balanced_window_bytes(plan.total_bytes, staging_threads(background), kStagingBufferBytes);
}

void set_max_inline_bytes(uint64_t bytes) {
  g_max_inline_bytes = bytes;
}

std::unique_ptr<Handle> start_copy(py::handle data, py::handle device, const CopyOptions& options) {
  release_returned_sources();
  const ReleaseAtEnd release_at_end;
  return start_copy_to(parse_device(device), data, options, nullptr);
}

std::unique_ptr<Handle> start_copy_to(c10::Device target, py::handle data,
                                      const CopyOptions& options, PreparedCopy* prepared,
                                      RowLeaves* rows) {
  if (has_engine_transfers(target))
    refuse_capture(parse_stream(py::none(), target), "start_copy()");

  StepTimes steps;  // until there is a handle
  FlatTree flat = [&] {
    const StepRange range(steps, Step::kFlatten);
    if (rows != nullptr) return flatten_tables(data, target, *rows);
    return prepared != nullptr ? flatten(data, target, prepared->expected())
                               : flatten(data, target);
  }();
  for (const SourceGroup& group : flat.groups) {
    const c10::Device source = group.leaves.device();
    if (!source.is_cpu()) refuse_capture(parse_stream(py::none(), source), "start_copy()");
  }
  const bool fits = prepared != nullptr && prepared->note_fit(flat);
  LeafCounts counts;
  counts.reused = flat.reused;
  counts.opaque = flat.opaque;
  counts.left = rows != nullptr ? rows->left() : 0;
  auto handle = std::make_unique<Handle>(target, std::move(flat.spec), counts);
  handle->steps().add(Step::kFlatten, steps.ns(Step::kFlatten));

  if (!flat.groups.empty() && !target.is_cpu()) {
    RunAhead& run_ahead = Accelerator::of(target).run_ahead();
    if (!run_ahead.has_room()) {
      const StepRange range(handle->steps(), Step::kWait);
      const py::gil_scoped_release no_gil;
      run_ahead.wait_for_room();
    }
  }
  for (size_t i = 0; i < flat.groups.size(); ++i) {
    start_group(*handle, std::move(flat.groups[i]), fits ? prepared->plan(i) : nullptr, target,
                options);
  }
  if (fits) prepared->offer_outputs(*handle);
  if (!flat.delegated.empty()) run_delegated(*handle, data, flat.delegated, target);
  handle->build_early();
  return handle;
}

}  // namespace tdcopier
