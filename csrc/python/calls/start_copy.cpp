// The steps of one call: device, capture check, walk, run-ahead limit, plan, staging and transfers,
// delegated leaves.
#include "python/calls/start_copy.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/core/CachingHostAllocator.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/forks.h"
#include "engine/device/fallbacks.h"
#include "engine/device/graph_capture.h"
#include "engine/device/thread_pools.h"
#include "engine/jobs/from_device_job.h"
#include "engine/jobs/host_job.h"
#include "engine/jobs/host_to_device_job.h"
#include "engine/jobs/rows_job.h"
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

std::atomic<uint64_t> g_max_inline_bytes = kMaxInlineBytes;

// Returns how many threads may stage a copy. Makes no threads for copies that run in the call.
size_t staging_threads(bool background) {
  return background ? std::max<size_t>(staging_workers().workers(), 1) : 1;
}

// One window per worker, but never so small that waking the worker costs more than it saves.
WindowBytes rows_window_bytes(const PackPlan& plan, uint64_t least_bytes, bool background) {
  if (plan.total_bytes <= least_bytes) return WindowBytes::all(least_bytes);
  const uint64_t share = plan.total_bytes / staging_threads(background) / 4096 * 4096;
  return WindowBytes::all(std::clamp(share, least_bytes, kHostWindowBytes));
}

// The smallest windows. Those of deferred batches are larger: no thread waits for such a batch, and
// more workers would only slow down the loop's own thread.
constexpr uint64_t kLeastWindowBytes = 64 * 1024;
constexpr uint64_t kLeastDeferredWindowBytes = 512 * 1024;

// Returns the allocator of pinned memory if the accelerator is in use already, or else null, for
// pageable memory. Null in a forked child too, where the allocator may be locked.
c10::Allocator* pinned_allocator() {
  const std::optional<c10::DeviceType> type = at::getAccelerator();
  if (fork_generation() != 0 || !type || !has_engine_transfers(c10::Device(*type, 0))) {
    return nullptr;
  }
  return is_in_use(*type) ? at::getHostAllocator(*type) : nullptr;
}

// Leases memory for a deferred batch; nullopt if the batch is not to be deferred or cannot be.
std::optional<DeferredLease> deferred_memory(Accelerator& accelerator, const CopyWork& work,
                                             const CopyOptions& options) {
  const PackPlan& plan = *work.plan;
  if (options.sending == Sending::kAtOnce || plan.total_bytes == 0) return std::nullopt;
  if (!options.use_background_thread || !options.use_pinned_staging) return std::nullopt;
  const auto straight = [&](const ChunkPlan& chunk) {
    return is_straight(chunk, plan, *work.leaves);
  };
  if (std::any_of(plan.chunks.begin(), plan.chunks.end(), straight)) return std::nullopt;
  return accelerator.deferred().lease(plan.chunks.back().end());
}

// Returns whether an allocation failed for lack of memory, and not because of an earlier failure of
// the device, which torch may report in any call.
bool is_lack_of_memory(const c10::Error& error) {
  constexpr int32_t kOutOfMemory = 2;  // of CUDA and HIP
  const auto* const told = dynamic_cast<const c10::AcceleratorError*>(&error);
  return told == nullptr || told->get_error_code() == kOutOfMemory;
}

// Makes the job of one group of leaves, and decides where it should run.
class GroupStart {
 public:
  GroupStart(SourceGroup& group, std::shared_ptr<const PackPlan> plan, c10::Device target,
             const CopyOptions& options)
      : mapped_(group.mapped),
        in_place_(std::move(group.in_place)),
        source_(group.leaves.device()),
        target_(target),
        options_(options),
        work_{std::make_shared<const LeafTable>(std::move(group.leaves)), std::move(plan),
              std::move(group.sources)},
        bytes_(work_.plan->total_bytes) {
    if (source_.is_cpu() && target.is_cpu() && options.use_pinned_staging) {
      pinned_ = pinned_allocator();
    }
  }

  // Makes the job of memory that the target reads itself, with a result, to be run during `access`.
  // Returns null if there are none, or if they are no longer pinned.
  std::shared_ptr<CopyJob> make_in_place(std::optional<PinnedRanges::Access>& access) {
    if (!in_place_ || !options_.use_pinned_staging) return nullptr;
    Accelerator& accelerator = Accelerator::of(target_);
    const bool waits = rows_of(work_).on_device.has_value();
    make_result({target_, waits ? &accelerator.ordered_stream() : &accelerator.to_device_stream()});
    if (in_place_->are_pinned(access.emplace())) {
      return std::make_shared<RowsJob>(accelerator, target_, std::move(work_));
    }
    if (waits)
      throw std::runtime_error("a storage was unpinned while a device was to access its rows");
    access.reset();
    work_.result.reset();
    return nullptr;
  }

  // Makes the job, and the memory of its result.
  std::shared_ptr<CopyJob> make() {
    if (source_.is_cpu()) return target_.is_cpu() ? make_on_host() : make_to_device();
    return make_from_device();
  }

  // Returns whether the job should run in the call for any number of bytes.
  bool is_alone() const { return is_alone_; }

  // Returns whether running the job in the call may block: on a buffer, a disk or a pageable
  // transfer. Also true if workers must stage it (kDeferredStaged).
  bool may_block() const { return may_block_; }

  // A transfer to pageable memory occupies its thread while it waits for the caller's kernels.
  ThreadPool& pool() const {
    return waits_for_kernels_ ? from_device_workers(source_) : staging_workers();
  }

 private:
  std::shared_ptr<CopyJob> make_on_host() {
    may_block_ = mapped_.would_wait_for_disk();
    make_result_on_host(pinned_);
    const WindowBytes window_bytes =
        rows_window_bytes(*work_.plan, kLeastWindowBytes, options_.use_background_thread);
    return std::make_shared<HostJob>(std::move(work_), window_bytes);
  }

  std::shared_ptr<CopyJob> make_to_device() {
    Accelerator& accelerator = Accelerator::of(target_);
    may_block_ = !options_.use_pinned_staging;
    std::optional<DeferredLease> deferred = deferred_memory(accelerator, work_, options_);
    is_alone_ = deferred && options_.sending == Sending::kDeferredAlone;
    may_block_ |= (is_alone_ || bytes_ <= g_max_inline_bytes) && mapped_.would_wait_for_disk();
    WindowBytes window_bytes{};
    if (deferred) {
      may_block_ |= options_.sending == Sending::kDeferredStaged;
      window_bytes =
          rows_window_bytes(*work_.plan, kLeastDeferredWindowBytes, options_.use_background_thread);
    } else {
      may_block_ |= accelerator.staging().is_exhausted(StagingUse::kToDevice);
      window_bytes = best_window_bytes(*work_.plan, /*mapped=*/!mapped_.empty());
    }
    make_result({target_, &accelerator.to_device_stream()});
    return std::make_shared<HostToDeviceJob>(
        accelerator, std::move(work_),
        HostToDeviceOptions{options_.use_pinned_staging, window_bytes}, std::move(deferred));
  }

  std::shared_ptr<CopyJob> make_from_device() {
    bool pinned = options_.use_pinned_staging;
    if (target_.is_cpu()) {
      pinned = make_result_on_host(pinned ? at::getHostAllocator(source_.type()) : nullptr);
      waits_for_kernels_ = !pinned;
      may_block_ = !pinned;
    } else {
      make_result({target_, &Accelerator::of(target_).ordered_stream()});
    }
    return std::make_shared<FromDeviceJob>(Accelerator::of(source_), target_, std::move(work_),
                                           pinned);
  }

  void make_result(const MemoryOf& memory) {
    auto result = std::make_shared<Result>(memory, work_.leaves, work_.plan);
    result->allocate();
    work_.result = std::move(result);
  }

  // Makes a result in pinned memory (`pinned`: its allocator, null if there is none), or in
  // pageable memory if no more can be pinned and the caller does not insist. Returns whether it is
  // pinned.
  bool make_result_on_host(c10::Allocator* pinned) {
    if (pinned == nullptr && options_.requires_pinned_results) {
      throw std::runtime_error(
          "require_pinned_results=True: no memory can be pinned here, because this process has "
          "used no accelerator, or is a forked child");
    }
    try {
      make_result({target_, nullptr, pinned});
      return pinned != nullptr;
    } catch (const c10::Error& error) {
      const bool is_required = pinned == nullptr || options_.requires_pinned_results;
      if (is_required || !is_lack_of_memory(error)) throw;
    }
    note_fallback();
    make_result({target_, nullptr, nullptr});
    return false;
  }

  const MappedLeaves mapped_;
  const std::optional<PinnedTables> in_place_;
  const c10::Device source_;
  const c10::Device target_;
  const CopyOptions& options_;
  c10::Allocator* pinned_ = nullptr;
  CopyWork work_;
  const uint64_t bytes_;
  bool is_alone_ = false;
  bool may_block_ = false;
  bool waits_for_kernels_ = false;
};

// Makes a job, and gives it to workers if it should run there. Returns whether it did. The memory
// is made first, although workers need it only after staging: a thread that wakes others may lose
// its processor to them.
bool prepare(std::shared_ptr<CopyJob>& job, GroupStart& start, const CopyOptions& options) {
  job = start.make();
  // Runs in the call if it is small and does not have to wait. Enqueueing a device's gather takes
  // the same time for any number of bytes.
  const bool is_small = job->host_bytes() <= g_max_inline_bytes;
  const bool at_once = (is_small || start.is_alone()) && !start.may_block();
  return options.use_background_thread && !at_once && job->run_in_background(start.pool());
}

// Starts the copy of the leaves of one device. `plan`: null, or a pack plan for such leaves.
void start_group(Handle& handle, SourceGroup group, std::shared_ptr<const PackPlan> plan,
                 c10::Device target, const CopyOptions& options) {
  const c10::Device source = group.leaves.device();
  const RelaxedCapture relaxed(target.is_cpu() ? source.type() : target.type());
  std::shared_ptr<CopyJob> job;
  bool is_running = false;
  bool background = false;
  try {
    std::optional<PhaseRange> range(std::in_place, handle.phases(), Phase::kPlan);
    plan = plan_of(group.leaves, options.pack, std::move(plan));
    GroupStart start(group, std::move(plan), target, options);
    const CountFallbacks counted(handle.fallbacks());
    const WithoutGil no_gil;  // an allocation may wait for the device
    // Ends before the thread wants the GIL back, which it may never get: unpinning waits for it.
    std::optional<PinnedRanges::Access> access;
    job = start.make_in_place(access);
    if (job) {
      range.reset();
      job->run();
    } else {
      background = prepare(job, start, options);
    }
    is_running = access || background;
  } catch (...) {
    return handle.fail_with(std::current_exception());
  }
  if (!is_running) {
    const WaitWithoutGil waiting;
    job->run();
  }
  handle.attach(std::move(job), background);
  raise_if_interrupted();
}

}  // namespace

uint64_t max_inline_bytes() {
  return g_max_inline_bytes;
}

WindowBytes best_window_bytes(const PackPlan& plan, bool mapped) {
  if (mapped) return WindowBytes::all(kMappedWindowBytes);
  if (plan.total_bytes <= g_max_inline_bytes) return WindowBytes::all(kStagingBufferBytes);
  return WindowBytes::growing(kStagingBufferBytes);
}

void set_max_inline_bytes(uint64_t bytes) {
  g_max_inline_bytes = bytes;
}

std::shared_ptr<const PackPlan> plan_of(const LeafTable& leaves, const PackOptions& options,
                                        std::shared_ptr<const PackPlan> prepared) {
  // Runs depend on the addresses of the leaves, which differ from batch to batch.
  const std::vector<LeafSeries> runs = leaves.pinned_runs(options);
  if (prepared != nullptr && runs.empty()) return prepared;
  return std::make_shared<const PackPlan>(make_pack_plan(leaves.extents(), options, runs));
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
    start_group(*handle, std::move(flat.groups[i]), fits ? prepared->plan(i) : nullptr, target,
                options);
  }
  if (fits) prepared->offer_outputs(*handle);
  if (!flat.delegated.empty()) call_to(*handle, data, flat.delegated, target);
  handle->build_early();
  return handle;
}

}  // namespace tdcopier
