// Chooses job, chunks and windows by the two ends, then threads by what the job may have to wait
// for.
#include "engine/jobs/route.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <utility>

#include "engine/device/accelerator.h"
#include "engine/device/graph_capture.h"
#include "engine/device/peer_memory.h"
#include "engine/device/staging_ring.h"
#include "engine/device/thread_pools.h"
#include "engine/jobs/host_job.h"
#include "engine/jobs/host_to_device_job.h"
#include "engine/jobs/into_host_job.h"
#include "engine/jobs/result_memory.h"
#include "engine/jobs/rows_job.h"
#include "engine/leaves/into_plan.h"
#include "engine/moves/gather_scatter.h"
#include "engine/moves/segment_kernel.h"

namespace tdcopier {
namespace {

std::atomic<uint64_t> g_max_inline_bytes = kMaxInlineBytes;
std::atomic<uint64_t> g_max_straight_bytes = kMaxStraightBytes;
std::atomic<bool> g_batches_deferred = true;

// Chunks are gathered on a device in groups of up to this size.
constexpr uint64_t kMaxGatheredBytes = 32 * 1024 * 1024;

bool is_to_new_memory(const CopyWork& work) {
  return work.kept_destinations == nullptr;
}

// Returns the leaf of a chunk that has only one, or null.
const Leaf* only_leaf(const CopyWork& work, const ChunkPlan& chunk) {
  return chunk.last - chunk.first == 1 ? &(*work.leaves)[work.plan->order[chunk.first]] : nullptr;
}

// ---- windows and chunks -------------------------------------------------------------------------

// One window per worker, but never so small that waking the worker costs more than it saves.
WindowBytes bytes_per_worker(uint64_t bytes, uint64_t least_bytes, bool background) {
  if (bytes <= least_bytes) return WindowBytes::all(least_bytes);
  // Makes no threads for copies that run in the call.
  const size_t threads = background ? std::max<size_t>(staging_workers().workers(), 1) : 1;
  const uint64_t share = bytes / threads / 4096 * 4096;
  return WindowBytes::all(std::clamp(share, least_bytes, kHostWindowBytes));
}

// Returns the sizes of windows of host sources.
WindowBytes window_bytes(const LeafGroup& group, const RouteOptions& options) {
  const uint64_t bytes = group.work.plan->total_bytes;
  const bool is_new = is_to_new_memory(group.work);
  const bool background = options.use_background_thread;
  if (group.target.is_cpu()) {
    return is_new ? bytes_per_worker(bytes, kLeastWindowBytes, background)
                  : WindowBytes::all(kHostWindowBytes);
  }
  if (options.sending != Sending::kAtOnce) {
    return bytes_per_worker(bytes, kLeastDeferredWindowBytes, background);
  }
  if (!group.mapped.empty()) return WindowBytes::all(kMappedWindowBytes);
  // A window that waits for kernels occupies a whole buffer, so no small first windows.
  if (!is_new || bytes <= g_max_inline_bytes) return WindowBytes::all(kStagingBufferBytes);
  return WindowBytes::growing(kStagingBufferBytes);
}

// Returns whether the device can read the whole chunk from the sources' memory.
bool is_straight(const CopyWork& work, const ChunkPlan& chunk) {
  const Leaf* const leaf = only_leaf(work, chunk);
  return chunk.pinned || (leaf != nullptr && leaf->pinned);
}

Route from_host_to_device(const LeafGroup& group, const RouteOptions& options) {
  const CopyWork& work = group.work;
  const std::vector<ChunkPlan>& chunks = work.plan->chunks;
  Route route{JobKind::kHostToDevice};
  if (!options.use_pinned_staging) {  // each chunk is read in one piece
    for (const ChunkPlan& chunk : chunks) {
      if (chunk.bytes != 0) route.windows.push_back({chunk.begin, chunk.end()});
    }
    return route;
  }
  const bool in_place = is_to_new_memory(work) || options.reads_pinned_in_place;
  for (size_t i = 0; in_place && i < chunks.size(); ++i) {
    if (chunks[i].bytes != 0 && is_straight(work, chunks[i])) route.straight.push_back(i);
  }
  route.windows =
      cut_windows(*work.plan, window_bytes(group, options),
                  [&](const ChunkPlan& chunk) { return !in_place || !is_straight(work, chunk); });
  return route;
}

// Returns whether the chunk is one contiguous leaf that goes straight to its destination: to pinned
// memory, or by a blocking transfer.
bool goes_straight(const CopyWork& work, const ChunkPlan& chunk, bool pinned) {
  const Leaf* const leaf = only_leaf(work, chunk);
  if (leaf == nullptr || leaf->strided) return false;
  const Destination& to = work.destinations[work.plan->order[chunk.first]];
  return !to.strided && (to.pinned || !pinned);
}

Route into_host(const CopyWork& work, const RouteOptions& options) {
  const PackPlan& plan = *work.plan;
  Route route{JobKind::kIntoHost};
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    const ChunkPlan& only = plan.chunks[i];
    if (only.bytes == 0) continue;
    if (goes_straight(work, only, options.use_pinned_staging)) {
      route.straight.push_back(i);
      route.windows.push_back({only.begin, only.end()});
      continue;
    }
    const auto is_it = [&only](const ChunkPlan& chunk) { return &chunk == &only; };
    const auto cut = cut_windows(plan, WindowBytes::all(kStagingBufferBytes), is_it);
    route.windows.insert(route.windows.end(), cut.begin(), cut.end());
  }
  return route;
}

// Returns whether the chunk is contiguous in the sources' memory, and is transferred from there.
bool is_contiguous(const CopyWork& work, const ChunkPlan& chunk) {
  const Leaf* const leaf = only_leaf(work, chunk);
  return chunk.as_source || (leaf != nullptr && !leaf->strided);
}

// Returns the end of the group of chunks that are gathered together, from `first` on.
size_t end_of_group(const CopyWork& work, size_t first) {
  const std::vector<ChunkPlan>& chunks = work.plan->chunks;
  const auto fits = [&](const ChunkPlan& chunk) {
    return chunk.packed && chunk.bytes != 0 && !is_contiguous(work, chunk) &&
           chunk.end() - chunks[first].begin <= kMaxGatheredBytes;
  };
  size_t last = first + 1;
  if (!chunks[first].packed) return last;
  while (last < chunks.size() && fits(chunks[last])) ++last;
  return last;
}

// Returns whether the source's device can write the chunks itself, and at once: pinned memory, or
// memory of a peer. If the peer's stream is late, the sources are gathered first, so that they are
// free before it gets there. Without a result, for a prediction, the peer's memory is as the last
// was.
bool can_write(const LeafGroup& group, size_t first, size_t last, bool pinned) {
  const c10::Device source = group.work.leaves->device();
  if (group.target.is_cpu()) return pinned;
  if (!is_to_new_memory(group.work)) return false;  // gathers and scatters are by chunks
  if (!could_write_peer(source, group.target) && !group.work.result) return false;
  const RelaxedCapture relaxed(group.target.type());
  if (!Accelerator::of(group.target).ordered_stream().query()) return false;
  for (size_t i = first; group.work.result && i < last; ++i) {
    const uint64_t bytes = group.work.plan->chunks[i].bytes;
    if (!can_write_peer(source, group.target, group.work.result->address(i), bytes)) return false;
  }
  return true;
}

// Returns whether a kernel can gather the chunks straight into memory that it can write.
bool can_gather_straight(const CopyWork& work, size_t first, size_t last) {
  const PackPlan& plan = *work.plan;
  const uint64_t bytes = plan.chunks[last - 1].end() - plan.chunks[first].begin;
  if (bytes > g_max_straight_bytes) return false;
  if (!has_segment_kernel(work.leaves->device(), bytes)) return false;
  return std::none_of(plan.order.begin() + plan.chunks[first].first,
                      plan.order.begin() + plan.chunks[last - 1].last,
                      [&](uint32_t leaf) { return (*work.leaves)[leaf].strided; });
}

Route from_device(const LeafGroup& group, const RouteOptions& options) {
  const CopyWork& work = group.work;
  Route route{JobKind::kFromDevice};
  const bool within = work.leaves->device() == group.target;
  const size_t chunks = within && !is_to_new_memory(work) ? 0 : work.plan->chunks.size();
  for (size_t first = 0, last = 0; first < chunks; first = last) {
    const ChunkPlan& chunk = work.plan->chunks[first];
    last = first + 1;
    if (chunk.bytes == 0) continue;
    ChunkRange::By by = ChunkRange::By::kTransfer;
    if (!is_contiguous(work, chunk)) {
      last = end_of_group(work, first);
      const bool straight = within || (can_gather_straight(work, first, last) &&
                                       can_write(group, first, last, options.use_pinned_staging));
      by = straight ? ChunkRange::By::kKernel : ChunkRange::By::kScratch;
    }
    route.ranges.push_back({first, last, by});
  }
  return route;
}

// ---- deferred batches ---------------------------------------------------------------------------

// Leases memory for a deferred batch; nullopt if the batch is not to be deferred or cannot be.
std::optional<DeferredLease> lease_batch(const LeafGroup& group, const RouteOptions& options) {
  const CopyWork& work = group.work;
  const std::vector<ChunkPlan>& chunks = work.plan->chunks;
  const bool is_to_device = work.leaves->device().is_cpu() && !group.target.is_cpu();
  if (options.sending == Sending::kAtOnce || !is_to_device || !is_to_new_memory(work)) return {};
  if (!options.use_background_thread || !options.use_pinned_staging) return {};
  const auto straight = [&](const ChunkPlan& chunk) { return is_straight(work, chunk); };
  if (work.plan->total_bytes == 0 || std::ranges::any_of(chunks, straight)) return {};
  return Accelerator::of(group.target).deferred().lease(chunks.back().end());
}

// Returns whether a copy from the host to a device holds no buffer of the staging ring.
bool needs_no_staging(const CopyWork& work) {
  const auto straight = [&](const ChunkPlan& chunk) { return is_straight(work, chunk); };
  return work.leaves->device().is_cpu() && std::ranges::all_of(work.plan->chunks, straight);
}

// ---- jobs and threads ---------------------------------------------------------------------------

// Runs the job of memory that a device accesses itself. Returns null if it is no longer pinned.
std::shared_ptr<CopyJob> run_in_place(LeafGroup& group, std::optional<PhaseRange>& planning) {
  if (is_to_new_memory(group.work)) make_result_on_device(group, /*in_callers_order=*/false);
  const PinnedRanges::Access access;
  if (group.in_place->are_pinned(access)) {
    Accelerator& device = Accelerator::of(mover(group));
    auto job = std::make_shared<RowsJob>(device, group.target, std::move(group.work));
    planning.reset();
    job->run();
    return job;
  }
  if (rows_of(group.work).on_device) {
    throw std::runtime_error("a storage was unpinned while a device was to access its rows");
  }
  return nullptr;
}

// Returns whether to run the job in the call: it is small, or to be staged there, and does not have
// to wait for a buffer, a disk or the device. Enqueueing a device's gather takes the same time for
// any number of bytes.
bool fits_in_call(const LeafGroup& group, const Route& route, const RouteOptions& options) {
  if (route.job == JobKind::kIntoHost) return false;
  if (route.job == JobKind::kFromDevice) {  // a pageable transfer waits for the caller's kernels
    return !group.target.is_cpu() || options.use_pinned_staging;
  }
  uint64_t bytes = group.work.plan->total_bytes;
  for (const size_t chunk : route.straight) bytes -= group.work.plan->chunks[chunk].bytes;
  const bool is_small = bytes <= g_max_inline_bytes;
  if (!is_small && options.sending != Sending::kDeferredAlone) return false;
  if (group.mapped.would_wait_for_disk()) return false;
  if (route.job == JobKind::kHost) return true;
  if (!options.use_pinned_staging) return false;
  if (options.sending != Sending::kAtOnce) return options.sending != Sending::kDeferredStaged;
  const bool is_new = is_to_new_memory(group.work);
  return !Accelerator::of(group.target)
              .staging()
              .is_exhausted(is_new ? StagingUse::kToDevice : StagingUse::kToDeviceOrdered);
}

ThreadPool& pool_of(const LeafGroup& group, const Route& route) {
  const c10::Device source = group.work.leaves->device();
  if (!source.is_cpu()) return from_device_workers(source);
  const bool waits = route.job == JobKind::kHostToDevice && !is_to_new_memory(group.work);
  return waits ? into_device_workers(group.target) : staging_workers();
}

std::shared_ptr<CopyJob> make_job(LeafGroup&& group, Route&& route, const RouteOptions& options,
                                  std::optional<DeferredLease> batch) {
  if (route.job == JobKind::kHost) {
    return std::make_shared<HostJob>(std::move(group.work), std::move(route.windows));
  }
  const bool pinned = options.use_pinned_staging;
  if (route.job == JobKind::kHostToDevice) {
    return std::make_shared<HostToDeviceJob>(Accelerator::of(group.target), std::move(group.work),
                                             pinned, std::move(route.straight),
                                             std::move(route.windows), std::move(batch));
  }
  Accelerator& source = Accelerator::of(group.work.leaves->device());
  if (route.job == JobKind::kIntoHost) {
    return std::make_shared<IntoHostJob>(source, std::move(group.work), pinned,
                                         std::move(route.straight), std::move(route.windows));
  }
  return std::make_shared<FromDeviceJob>(source, group.target, std::move(group.work), pinned,
                                         std::move(route.ranges));
}

}  // namespace

void set_max_inline_bytes(uint64_t bytes) {
  g_max_inline_bytes = bytes;
}

void set_max_straight_bytes(uint64_t bytes) {
  g_max_straight_bytes = bytes;
}

void use_deferred_batches(bool use) {
  g_batches_deferred = use;
}

Sending usable(Sending asked) {
  return g_batches_deferred.load(std::memory_order_relaxed) ? asked : Sending::kAtOnce;
}

void make_plan(LeafGroup& group, const RouteOptions& options) {
  CopyWork& work = group.work;
  const LeafTable& leaves = *work.leaves;
  const auto keep = [&work](PackPlan plan) {
    work.plan = std::make_shared<const PackPlan>(std::move(plan));
  };
  if (is_to_new_memory(work)) {
    // Runs depend on the addresses of the leaves, which differ from batch to batch.
    const std::vector<LeafSeries> runs = leaves.pinned_runs(options.pack);
    if (work.plan && runs.empty()) return;
    keep(make_pack_plan(leaves.extents(), options.pack, runs));
  } else if (group.target.is_cpu() || group.in_place) {
    PackOptions pack;
    pack.max_chunk_bytes = kStagingBufferBytes;
    pack.by_kind = false;
    keep(make_pack_plan(leaves.extents(), pack));
  } else {
    IntoPlan plan = make_into_plan(leaves, work.destinations, kMaxGatheredBytes);
    keep(std::move(plan.pack));
    work.to = std::move(plan.to);
  }
}

Route find_route(const LeafGroup& group, const RouteOptions& options) {
  const bool is_from_host = group.work.leaves->device().is_cpu();
  if (group.in_place && options.use_pinned_staging) return {JobKind::kRows};
  if (is_from_host && group.target.is_cpu()) {
    const WindowBytes bytes = window_bytes(group, options);
    return {JobKind::kHost, {}, cut_windows(*group.work.plan, bytes)};
  }
  if (is_from_host) return from_host_to_device(group, options);
  const bool fills_host = group.target.is_cpu() && !is_to_new_memory(group.work);
  return fills_host ? into_host(group.work, options) : from_device(group, options);
}

TransferCounts transfers_of(const Route& route, const LeafGroup& group) {
  const PackPlan& plan = *group.work.plan;
  if (route.job == JobKind::kRows) {
    RowMoves moves(rows_of(group.work).rows);
    for (const LeafExtent& leaf : group.work.leaves->extents()) {
      if (leaf.bytes != 0) moves.add(nullptr, {0, leaf.bytes}, nullptr);
    }
    return {moves.launches(), moves.bytes(), 0};
  }
  TransferCounts counts{route.straight.size(), plan.total_bytes, 0};
  for (const Window& window : route.windows) {
    for_each_chunk_in_window(plan, window,
                             [&](size_t, uint64_t, uint64_t, uint64_t) { ++counts.transfers; });
  }
  for (const auto& [first, last, by] : route.ranges) {
    const bool by_kernel = by == ChunkRange::By::kKernel;
    counts.transfers +=
        by_kernel ? gather_launches(plan, *group.work.leaves, first, last) : last - first;
  }
  return counts;
}

StartedJob start(LeafGroup&& group, RouteOptions options, PhaseTimes& times) {
  std::optional<PhaseRange> planning(std::in_place, times, Phase::kPlan);
  make_plan(group, options);
  if (group.in_place && options.use_pinned_staging) {
    if (std::shared_ptr<CopyJob> job = run_in_place(group, planning))
      return {std::move(job), false};
    group.in_place.reset();
    group.work.result.reset();
    make_plan(group, options);
  }
  std::optional<DeferredLease> batch = lease_batch(group, options);
  if (!batch) options.sending = Sending::kAtOnce;
  // Memory for the result is made first, although workers need it only after staging: a thread that
  // wakes others may lose its processor to them.
  if (is_to_new_memory(group.work) && group.target.is_cpu()) {
    options.use_pinned_staging = make_result_on_host(group, options);
  } else if (is_to_new_memory(group.work)) {
    const bool may_wait = options.use_pinned_staging && (batch || needs_no_staging(group.work));
    make_result_on_device(group, options.in_callers_order && may_wait);
  }
  Route route = find_route(group, options);
  const bool in_call = !options.use_background_thread || fits_in_call(group, route, options);
  ThreadPool* const pool = in_call ? nullptr : &pool_of(group, route);
  std::shared_ptr<CopyJob> job =
      make_job(std::move(group), std::move(route), options, std::move(batch));
  const bool on_workers = pool != nullptr && job->run_in_background(*pool);
  return {std::move(job), on_workers};
}

std::shared_ptr<BadRowWatch> capture(const LeafGroup& group) {
  const PinnedRanges::Access access;
  if (!group.in_place || !group.in_place->are_pinned(access)) {
    throw std::runtime_error("a storage was unpinned during the call");
  }
  return RowsJob::capture(mover(group), group.work);
}

}  // namespace tdcopier
