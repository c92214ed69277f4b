// Workers claim windows one by one: fill a staging buffer, enqueue its transfer, go on.
#include "engine/host_source_job.h"

#include <c10/core/StreamGuard.h>

#include <numeric>
#include <utility>

#include "engine/graph_capture.h"
#include "engine/reclaim.h"
#include "engine/transport.h"

namespace tdcopier {

bool goes_straight(const ChunkPlan& chunk, const PackPlan& plan, const LeafTable& leaves) {
  return chunk.as_source ||
         (chunk.last - chunk.first == 1 && leaves[plan.order[chunk.first]].pinned);
}

HostSourceJob::HostSourceJob(Accelerator& target, LeafTable leaves,
                             std::shared_ptr<const PackPlan> plan, bool use_pinned_staging,
                             WindowBytes window_bytes, std::shared_ptr<SourceHold> sources,
                             ThreadPool& reclaimer)
    : CopyJob(target, target.to_device_stream(), target.device(), std::move(leaves),
              std::move(plan), std::move(sources)),
      use_pinned_staging_(use_pinned_staging),
      windows_(make_windows(window_bytes)),
      host_bytes_(std::accumulate(plan_.chunks.begin(), plan_.chunks.end(), uint64_t{0},
                                  [this](uint64_t sum, const ChunkPlan& chunk) {
                                    return is_straight(chunk) ? sum : sum + chunk.bytes;
                                  })),
      reclaimer_(reclaimer) {}

bool HostSourceJob::is_straight(const ChunkPlan& chunk) const {
  return use_pinned_staging_ && goes_straight(chunk, plan_, leaves_);
}

// A chunk that is not staged in parts is one window.
std::vector<Window> HostSourceJob::make_windows(WindowBytes window_bytes) const {
  std::vector<Window> windows;
  for (const Window& window : cut_windows(plan_, leaves_, window_bytes)) {
    const ChunkPlan& chunk = plan_.chunks[window.chunk];
    if (use_pinned_staging_ && !is_straight(chunk)) {
      windows.push_back(window);
    } else if (window.begin == 0) {
      windows.push_back({window.chunk, 0, chunk.bytes});
    }
  }
  return windows;
}

void HostSourceJob::allocate_chunks() {
  const c10::StreamGuard on_copy_stream(stream_);
  c10::Allocator* allocator = c10::GetAllocator(target_.type());
  chunks_.reserve(plan_.chunks.size());
  for (const ChunkPlan& chunk : plan_.chunks) {
    chunks_.push_back(allocate_chunk(allocator, target_, chunk));
  }
}

void HostSourceJob::transfer_all() {
  const c10::StreamGuard on_copy_stream(stream_);
  claim_windows(windows_, [this](const Window& window) { transfer(window); });
}

void HostSourceJob::transfer(const Window& window) {
  const ChunkPlan& chunk = plan_.chunks[window.chunk];
  if (is_straight(chunk)) {
    const StepRange range(steps_, Step::kEnqueue);
    enqueue_from_pinned(stream_, chunks_[window.chunk], leaves_[plan_.order[chunk.first]].data,
                        chunk.bytes);
  } else if (use_pinned_staging_) {
    return transfer_staged(window);
  } else {
    transfer_pageable(window);
  }
  count_transfer(window.end - window.begin);
}

void HostSourceJob::transfer_staged(const Window& window) {
  StagingLease lease = accelerator_.staging().acquire(StagingUse::kToDevice);
  stage(window, static_cast<std::byte*>(lease.bytes().mutable_data_ptr()));
  staged_.add({window, std::move(lease)},
              [this](StagedWindow staged) { enqueue(std::move(staged)); });
}

void HostSourceJob::enqueue(StagedWindow staged) {
  const StepRange range(steps_, Step::kEnqueue);
  const auto& [window, lease] = staged;
  enqueue_from_pinned(stream_, chunks_[window.chunk], window.begin, lease.bytes(),
                      window.end - window.begin);
  EventRef read = accelerator_.events().record(stream_);
  if (windows_.size() == 1) arrived_ = read;  // the only participant: no second event is needed
  staged.lease.in_flight_until(std::move(read));
  count_transfer(window.end - window.begin);
}

void HostSourceJob::transfer_pageable(const Window& window) {
  const ChunkPlan& plan = plan_.chunks[window.chunk];
  const Chunk& chunk = chunks_[window.chunk];
  const Leaf& first = leaves_[plan_.order[plan.first]];
  if (plan.as_source || (!plan.packed && !first.strided)) {
    const StepRange range(steps_, Step::kEnqueue);
    return copy_from_pageable(chunk, 0, first.data, plan.bytes);
  }
  const auto staged = std::make_unique_for_overwrite<std::byte[]>(plan.bytes);
  stage(window, staged.get());
  const StepRange range(steps_, Step::kEnqueue);
  copy_from_pageable(chunk, 0, staged.get(), plan.bytes);
}

void HostSourceJob::finish_reading() noexcept {
  if (host_bytes_ == plan_.total_bytes) return sources_->give_back();
  try {
    const RelaxedCapture relaxed(accelerator_.device().type());
    // A job that failed has no event of its own, and the device may be reading for it all the same.
    read_ = arrived_ ? arrived_ : accelerator_.events().record(stream_);
  } catch (...) {  // the device has failed: it reads no more, and get() says how
    return sources_->give_back();
  }
  give_back_behind(read_, sources_, reclaimer_);
}

bool HostSourceJob::are_reads_enqueued() const {
  if (!is_enqueued()) return false;
  const RelaxedCapture relaxed(accelerator_.device().type());
  return !read_ || has_ended(*read_);
}

void HostSourceJob::wait_reads_enqueued() {
  wait_enqueued();
  const RelaxedCapture relaxed(accelerator_.device().type());
  if (read_) wait_until_ended(*read_);
}

}  // namespace tdcopier
