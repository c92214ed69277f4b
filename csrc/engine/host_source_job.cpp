// Workers claim windows one by one: fill a staging buffer, enqueue its transfer, go on.
#include "engine/host_source_job.h"

#include <c10/core/StreamGuard.h>

#include <utility>

#include "engine/transport.h"

namespace tdcopier {
namespace {

std::vector<Window> whole_chunks(const PackPlan& plan) {
  std::vector<Window> windows;
  for (uint32_t chunk = 0; chunk < plan.chunks.size(); ++chunk) {
    const uint64_t bytes = plan.chunks[chunk].bytes;
    if (bytes != 0) windows.push_back({chunk, 0, bytes});
  }
  return windows;
}

}  // namespace

HostSourceJob::HostSourceJob(Accelerator& target, LeafTable leaves, PackPlan plan,
                             bool use_pinned_staging, uint64_t max_window_bytes,
                             std::shared_ptr<SourceHold> sources)
    : CopyJob(target, target.device(), std::move(leaves), std::move(plan), std::move(sources)),
      use_pinned_staging_(use_pinned_staging),
      windows_(use_pinned_staging ? cut_windows(plan_, leaves_, max_window_bytes)
                                  : whole_chunks(plan_)) {}

void HostSourceJob::allocate_chunks() {
  const c10::StreamGuard on_copy_stream(accelerator_.copy_stream());
  c10::Allocator* allocator = c10::GetAllocator(target_.type());
  chunks_.reserve(plan_.chunks.size());
  for (const ChunkPlan& chunk : plan_.chunks) {
    chunks_.push_back(allocate_chunk(allocator, target_, chunk));
  }
}

void HostSourceJob::transfer_all() {
  const c10::StreamGuard on_copy_stream(accelerator_.copy_stream());
  claim_windows(windows_, [this](const Window& window) { transfer(window); });
}

void HostSourceJob::transfer(const Window& window) {
  const Chunk& chunk = chunks_[window.chunk];
  const uint64_t bytes = window.end - window.begin;
  const Leaf& first = leaves_[plan_.order[plan_.chunks[window.chunk].first]];
  if (use_pinned_staging_) {
    StagingLease lease = accelerator_.staging().acquire();
    stage(window, static_cast<std::byte*>(lease.bytes().mutable_data_ptr()));
    const StepRange range(steps_, Step::kEnqueue);
    enqueue_from_pinned(accelerator_.copy_stream(), chunk, window.begin, lease.bytes(), bytes);
    EventRef read = accelerator_.events().record(accelerator_.copy_stream());
    if (windows_.size() == 1) arrived_ = read;  // the only participant: no second event is needed
    lease.in_flight_until(std::move(read));
  } else if (plan_.chunks[window.chunk].packed || first.strided) {
    const auto staged = std::make_unique_for_overwrite<std::byte[]>(bytes);
    stage(window, staged.get());
    const StepRange range(steps_, Step::kEnqueue);
    copy_from_pageable(chunk, window.begin, staged.get(), bytes);
  } else {
    const StepRange range(steps_, Step::kEnqueue);
    copy_from_pageable(chunk, window.begin, first.data, bytes);
  }
  count_transfer(bytes);
}

}  // namespace tdcopier
