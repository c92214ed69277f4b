// Each window: gathered if need be, one transfer, then written where it belongs.
#include "engine/device_into_host_job.h"

#include <c10/core/StreamGuard.h>

#include <memory>
#include <utility>

#include "engine/deliver.h"
#include "engine/gather.h"
#include "engine/transport.h"

namespace tdcopier {

DeviceIntoHostJob::DeviceIntoHostJob(Accelerator& source, LeafPairs pairs, PackPlan plan,
                                     bool use_pinned_staging, IntoHolds holds,
                                     ThreadPool& reclaimer)
    : IntoJob(source, source.from_device_stream(), c10::Device(c10::kCPU), std::move(pairs),
              std::move(plan), std::move(holds), reclaimer),
      use_pinned_staging_(use_pinned_staging),
      windows_(windows_of_plan()),
      written_(source.record_current()),
      unread_windows_(windows_.size()) {}

bool DeviceIntoHostJob::goes_straight(const ChunkPlan& chunk) const {
  if (chunk.last - chunk.first != 1) return false;
  const uint32_t leaf = plan_.order[chunk.first];
  const Destination& to = destinations_[leaf];
  return !leaves_[leaf].strided && !to.strided && (to.pinned || !use_pinned_staging_);
}

std::vector<Window> DeviceIntoHostJob::windows_of_plan() const {
  std::vector<Window> windows;
  for (const Window& window : cut_windows(plan_, leaves_, WindowBytes::all(kStagingBufferBytes))) {
    const ChunkPlan& chunk = plan_.chunks[window.chunk];
    if (!goes_straight(chunk)) {
      windows.push_back(window);
    } else if (window.begin == 0) {
      windows.push_back({window.chunk, 0, chunk.bytes});
    }
  }
  return windows;
}

bool DeviceIntoHostJob::is_gathered(const ChunkPlan& chunk) const {
  return chunk.last - chunk.first != 1 || leaves_[plan_.order[chunk.first]].strided;
}

void DeviceIntoHostJob::allocate_chunks() {
  const c10::StreamGuard on_copy_stream(stream_);
  written_->block(stream_);
  gathered_.resize(plan_.chunks.size());
  for (const Window& window : windows_) {
    const ChunkPlan& chunk = plan_.chunks[window.chunk];
    const bool is_whole = window.end - window.begin == chunk.bytes;
    if (is_whole || window.begin != 0 || !is_gathered(chunk)) continue;
    gathered_[window.chunk] = gather_chunk(chunk);
  }
}

void DeviceIntoHostJob::transfer_all() {
  const c10::StreamGuard on_copy_stream(stream_);
  claim_windows(windows_, [this](const Window& window) { transfer(window); });
}

void DeviceIntoHostJob::transfer(const Window& window) {
  if (goes_straight(plan_.chunks[window.chunk])) return transfer_straight(window);
  return use_pinned_staging_ ? transfer_staged(window) : transfer_pageable(window);
}

void DeviceIntoHostJob::transfer_straight(const Window& window) {
  const uint32_t leaf = plan_.order[plan_.chunks[window.chunk].first];
  const void* const from = leaves_[leaf].data;
  std::byte* const to = destinations_[leaf].data;
  const uint64_t bytes = window.end - window.begin;
  const StepRange range(steps_, Step::kEnqueue);
  ByteViewPool::Lease views = accelerator_.views().take();
  if (use_pinned_staging_) {
    enqueue_to_pinned(stream_, *views, from, to, bytes);
  } else {
    copy_to_pageable(*views, from, to, bytes);
  }
  note_read(window);
}

void DeviceIntoHostJob::transfer_staged(const Window& window) {
  // Before anything is gathered: there may be none for a while.
  StagingLease lease = accelerator_.staging().acquire(StagingUse::kFromDevice);
  auto* const staged = static_cast<std::byte*>(lease.bytes().mutable_data_ptr());
  EventRef arrived;
  {
    Chunk here;  // freed on the copy stream, in whose order the next window uses it again
    ByteViewPool::Lease views = accelerator_.views().take();
    const std::byte* const image = image_of(window, here);
    const StepRange range(steps_, Step::kEnqueue);
    enqueue_to_pinned(stream_, *views, image, staged, window.end - window.begin);
    arrived = accelerator_.events().record(stream_);
  }
  note_read(window);
  arrived->synchronize();
  deliver(window, staged);
}

void DeviceIntoHostJob::transfer_pageable(const Window& window) {
  const uint64_t bytes = window.end - window.begin;
  const auto staged = std::make_unique_for_overwrite<std::byte[]>(bytes);
  {
    Chunk here;
    ByteViewPool::Lease views = accelerator_.views().take();
    const std::byte* const image = image_of(window, here);
    const StepRange range(steps_, Step::kEnqueue);
    copy_to_pageable(*views, image, staged.get(), bytes);
  }
  note_read(window);
  deliver(window, staged.get());
}

void DeviceIntoHostJob::deliver(const Window& window, const std::byte* staged) {
  const StepRange range(steps_, Step::kStage);
  deliver_window(plan_, leaves_, destinations_, window, staged);
}

const std::byte* DeviceIntoHostJob::image_of(const Window& window, Chunk& here) {
  const ChunkPlan& chunk = plan_.chunks[window.chunk];
  if (!is_gathered(chunk)) {
    return static_cast<const std::byte*>(leaves_[plan_.order[chunk.first]].data) + window.begin;
  }
  if (gathered_[window.chunk].storage) return gathered_[window.chunk].at(window.begin);
  here = gather_chunk(chunk);
  return here.at(window.begin);
}

Chunk DeviceIntoHostJob::gather_chunk(const ChunkPlan& chunk) {
  const c10::Device device = accelerator_.device();
  Chunk gathered = allocate_chunk(c10::GetAllocator(device.type()), device, chunk);
  const StepRange range(steps_, Step::kStage);
  gather(accelerator_, stream_, plan_, chunk, leaves_, gathered.at(0));
  return gathered;
}

void DeviceIntoHostJob::note_read(const Window& window) {
  count_transfer(window.end - window.begin);
  if (--unread_windows_ == 0) note_reads_enqueued();
}

void DeviceIntoHostJob::note_reads_enqueued() noexcept {
  {
    const std::lock_guard lock(reads_mutex_);
    if (reads_enqueued_) return;
    try {
      read_ = accelerator_.events().record(stream_);
    } catch (...) {  // the device has failed: it reads no more, and get() says how
      read_ = nullptr;
    }
    reads_enqueued_.store(true, std::memory_order_release);
  }
  reads_became_enqueued_.notify_all();
}

void DeviceIntoHostJob::finish_reading() noexcept {
  note_reads_enqueued();  // of a job that has failed
  gathered_.clear();
  give_back_sources_behind(accelerator_, stream_);
  give_back_destinations();
}

void DeviceIntoHostJob::wait_reads_enqueued() {
  std::unique_lock lock(reads_mutex_);
  reads_became_enqueued_.wait(lock, [this] { return are_reads_enqueued(); });
}

void DeviceIntoHostJob::order_behind_reads(const c10::Stream& stream) {
  if (read_) block_until_ended(*read_, stream);
}

}  // namespace tdcopier
