// Windows as for a copy to new memory; what differs is where their bytes go.
#include "engine/host_into_device_job.h"

#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "engine/scatter.h"
#include "engine/transport.h"

namespace tdcopier {

HostIntoDeviceJob::HostIntoDeviceJob(Accelerator& target, LeafPairs pairs, IntoPlan plan,
                                     bool use_pinned_staging, WindowBytes window_bytes,
                                     IntoHolds holds, ThreadPool& reclaimer)
    : IntoJob(target, target.ordered_stream(), target.device(), std::move(pairs),
              std::move(plan.pack), std::move(holds), reclaimer),
      use_pinned_staging_(use_pinned_staging),
      runs_(std::move(plan.runs)),
      chunk_runs_(std::move(plan.chunks)),
      windows_(cut_windows(plan_, leaves_, window_bytes)),
      used_(target.record_current()) {}

size_t HostIntoDeviceJob::chunks() const {
  return static_cast<size_t>(std::count_if(chunk_runs_.begin(), chunk_runs_.end(),
                                           [](const ChunkRuns& chunk) { return chunk.scattered; }));
}

void HostIntoDeviceJob::allocate_chunks() {
  used_->block(stream_);
  if (chunks() == 0) return;
  const c10::StreamGuard on_copy_stream(stream_);
  scattered_.resize(plan_.chunks.size());
  for (size_t i = 0; i < plan_.chunks.size(); ++i) {
    if (!chunk_runs_[i].scattered) continue;
    scattered_[i] = allocate_chunk(c10::GetAllocator(target_.type()), target_, plan_.chunks[i]);
  }
}

void HostIntoDeviceJob::transfer_all() {
  const c10::StreamGuard on_copy_stream(stream_);
  claim_windows(windows_, [this](const Window& window) { transfer(window); });
}

template <typename Send>
void HostIntoDeviceJob::send_parts(const Window& window, const Send& send) {
  const ChunkRuns& chunk = chunk_runs_[window.chunk];
  const auto counted = [&](uint64_t at, std::byte* address, uint64_t bytes) {
    send(at, address, bytes);
    count_transfer(bytes);
  };
  if (chunk.scattered) {
    counted(0, scattered_[window.chunk].at(window.begin), window.end - window.begin);
    return;
  }
  for (uint32_t i = chunk.first; i < chunk.last; ++i) {
    const Run& run = runs_[i];
    const uint64_t begin = std::max(run.offset, window.begin);
    const uint64_t end = std::min(run.offset + run.bytes, window.end);
    if (begin < end) counted(begin - window.begin, run.to + (begin - run.offset), end - begin);
  }
}

void HostIntoDeviceJob::transfer(const Window& window) {
  if (!use_pinned_staging_) {
    ByteViewPool::Lease views = accelerator_.views().take();
    const auto staged = std::make_unique_for_overwrite<std::byte[]>(window.end - window.begin);
    stage(window, staged.get());
    const StepRange range(steps_, Step::kEnqueue);
    send_parts(window, [&](uint64_t at, std::byte* address, uint64_t bytes) {
      copy_from_pageable(*views, staged.get() + at, address, bytes);
    });
    return;
  }
  StagingLease lease = accelerator_.staging().acquire(StagingUse::kOrdered);
  stage(window, static_cast<std::byte*>(lease.bytes().mutable_data_ptr()));
  staged_.add({window, std::move(lease)},
              [this](StagedWindow staged) { enqueue(std::move(staged)); });
}

void HostIntoDeviceJob::enqueue(StagedWindow staged) {
  const StepRange range(steps_, Step::kEnqueue);
  ByteViewPool::Lease views = accelerator_.views().take();
  auto& [window, lease] = staged;
  const auto leave_to_device = [&] {
    EventRef read = accelerator_.events().record(stream_);
    // The only participant, and nothing comes behind: no second event is needed.
    if (windows_.size() == 1 && scattered_.empty() && !somebody_failed()) arrived_ = read;
    lease.in_flight_until(std::move(read));
  };
  try {
    send_parts(window, [&](uint64_t at, std::byte* address, uint64_t bytes) {
      enqueue_from_pinned(stream_, *views, lease.bytes(), at, address, bytes);
    });
  } catch (...) {
    leave_to_device();  // which may be reading for those before
    throw;
  }
  leave_to_device();
}

void HostIntoDeviceJob::finish_transfers() {
  const c10::StreamGuard on_copy_stream(stream_);
  for (size_t i = 0; i < scattered_.size(); ++i) {
    if (!chunk_runs_[i].scattered) continue;
    scatter(accelerator_, stream_, plan_, plan_.chunks[i], leaves_, destinations_,
            scattered_[i].at(0));
  }
}

void HostIntoDeviceJob::finish_reading() noexcept {
  scattered_.clear();  // used again in the order of the copy stream
  sources_->give_back();
  give_back_destinations();
}

}  // namespace tdcopier
