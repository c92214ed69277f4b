// Participants claim, stage and send windows; or they stage all, and the thread that uses the batch
// sends it.
#include "engine/jobs/host_to_device_job.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include "base/forks.h"
#include "base/polling_wait.h"
#include "engine/device/pinned_ranges.h"
#include "engine/moves/enqueue_transfers.h"
#include "engine/moves/gather_scatter.h"
#include "engine/moves/stage.h"

namespace tdcopier {
namespace {

// With this number of buffers in flight, the participants are far ahead of the device. They need
// not be as fast as they can then, and leave the memory's bandwidth to it. Two suffice while many
// bytes are left, most of which the device will read during the staging. Towards the end it is
// better to stage fast, because after the staging the device reads alone.
constexpr size_t kFarAhead = 8;
constexpr size_t kFarAheadOfMany = 2;
constexpr uint64_t kManyLeftBytes = 64 * 1024 * 1024;

const c10::Stream& stream_of(Accelerator& target, const CopyWork& work) {
  if (!work.result) return target.ordered_stream();
  return work.result->writer() ? *work.result->writer() : target.to_device_stream();
}

// Returns whether the caller's stream may still use the memory that is to be written.
bool is_in_callers_order(const CopyWork& work) {
  return !work.result || work.result->writer() != nullptr;
}

}  // namespace

HostToDeviceJob::HostToDeviceJob(Accelerator& target, CopyWork work, bool use_pinned_staging,
                                 std::vector<size_t> straight, std::vector<Window> windows,
                                 std::optional<DeferredLease> batch)
    : CopyJob(target, stream_of(target, work),
              straight.empty() ? nullptr : &stream_of(target, work), target.device(),
              std::move(work)),
      use_pinned_staging_(use_pinned_staging),
      generation_(fork_generation()),
      destinations_ready_(is_in_callers_order(work_) ? target.record_current() : nullptr),
      straight_(std::move(straight)),
      windows_(std::move(windows)),
      batch_(std::move(batch)) {
  if (destinations_ready_) destinations_ready_->block(stream_);
  if (chunks() == 0 || work_.result) return;
  const c10::StreamGuard on_stream(stream_);
  scratch_.resize(plan_.chunks.size());
  for (size_t i = 0; i < scratch_.size(); ++i) {
    const ChunkPlan& chunk = plan_.chunks[i];
    if (chunk.scattered) scratch_[i] = allocate_on_device(target_, chunk.bytes);
  }
}

std::byte* HostToDeviceJob::address(size_t chunk) const {
  if (work_.result) return work_.result->address(chunk);
  if (work_.to[chunk] != nullptr) return work_.to[chunk];
  return static_cast<std::byte*>(scratch_[chunk].mutable_data());
}

size_t HostToDeviceJob::most_participants() const {
  return batch_ ? std::min(windows_.size(), kMostDeferredParticipants) : windows_.size();
}

// Chunks that are read in place come first: their transfers run while the rest is staged. leave()
// relies on that: once all windows are claimed, so are these.
void HostToDeviceJob::transfer_all() {
  while (!is_failing()) {
    const size_t next = next_straight_++;
    if (next >= straight_.size()) break;
    transfer_straight(straight_[next]);
  }
  while (is_part_left()) {
    interleave();
    transfer_window();
  }
}

// Leases a buffer for a window. Returns nullopt if none can be had, or if no window is left.
std::optional<StagingLease> HostToDeviceJob::lease_buffer() {
  const StagingUse use = destinations_ready_ ? StagingUse::kToDeviceOrdered : StagingUse::kToDevice;
  try {
    const WithoutPart waiting(*this);
    return accelerator_.staging().acquire(use, [this] { return is_part_left(); });
  } catch (const Interrupted&) {
    throw;
  } catch (...) {
    if (is_part_left()) throw;
    return std::nullopt;  // the job may have ended, and must not fail any more
  }
}

// Waits before it claims a window, so that an interrupted participant leaves none undone. Waits
// with the caller's streams current, because signal handlers may run meanwhile.
void HostToDeviceJob::transfer_window() {
  std::optional<StagingLease> lease;
  if (use_pinned_staging_ && !batch_) {
    lease = lease_buffer();
    if (!is_part_left()) return;
    if (!lease) note_fallback();
  }
  const bool is_pageable = !batch_ && !lease;
  if (is_pageable && destinations_ready_)
    wait_until_ended(*destinations_ready_);  // the transfer cannot be interrupted
  const size_t claimed = claim();
  if (claimed >= windows_.size()) return;
  const Window& window = windows_[claimed];
  if (is_pageable) return transfer_pageable(window);
  if (batch_) return stage(window, batch_->data() + window.begin, StoreTo::kMemory);
  stage(window, lease->data(), is_far_ahead(window) ? StoreTo::kSharedCache : StoreTo::kMemory);
  staged_.add({window, std::move(*lease)},
              [this](StagedWindow staged) { enqueue(std::move(staged)); });
}

// Small jobs, and processors that cannot make use of the answer, do not ask the device. Nor do
// copies that wait for the caller's kernels: they need no bandwidth meanwhile.
bool HostToDeviceJob::is_far_ahead(const Window& next) {
  if (destinations_ready_ || windows_.size() <= kFarAhead || !has_shared_cache_store())
    return false;
  const uint64_t left = windows_.back().end - next.begin;
  return accelerator_.staging().has_in_flight(StagingUse::kToDevice,
                                              left > kManyLeftBytes ? kFarAheadOfMany : kFarAhead);
}

void HostToDeviceJob::stage(const Window& window, std::byte* to, StoreTo store) {
  const PhaseRange range(phases_, Phase::kStage);
  stage_window(plan_, leaves_, window, to, store);
}

void HostToDeviceJob::transfer_straight(size_t chunk) {
  const PhaseRange range(phases_, Phase::kEnqueue);
  const c10::StreamGuard on_stream(stream_);
  const ChunkPlan& plan = plan_.chunks[chunk];
  const auto* const from = static_cast<const std::byte*>(leaves_[plan_.order[plan.first]].data);
  const PinnedRanges::Access access;
  if (PinnedRanges::find({from, plan.bytes}) != PinnedRanges::Found::kNot) {
    enqueue_to_device(stream_, address(chunk), from, plan.bytes);
  } else {  // it is about to be unpinned, so the device must not read it
    note_fallback();
    const auto staged =
        std::make_unique_for_overwrite<std::byte[]>(std::min(plan.bytes, kStagingBufferBytes));
    for (uint64_t begin = 0; begin < plan.bytes; begin += kStagingBufferBytes) {
      const uint64_t bytes = std::min(plan.bytes - begin, kStagingBufferBytes);
      std::memcpy(staged.get(), from + begin, bytes);
      copy_from_pageable(stream_, address(chunk) + begin, staged.get(), bytes);
    }
  }
  count_transfer(plan.bytes);
}

void HostToDeviceJob::enqueue(StagedWindow staged) {
  const PhaseRange range(phases_, Phase::kEnqueue);
  const c10::StreamGuard on_stream(stream_);
  const auto leave_to_device = [&] {
    EventRef read = accelerator_.events().record_or_wait(stream_);
    // If this is the only window and nothing follows it, the event also marks the arrival.
    const bool is_last = windows_.size() == 1 && read_stream_ == nullptr && scratch_.empty();
    if (is_last && !is_failing()) arrived_ = read;
    staged.lease.in_flight_until(std::move(read));
  };
  try {
    send_parts(staged.window, staged.lease.data());
  } catch (...) {
    leave_to_device();  // the device may be reading for earlier transfers
    throw;
  }
  leave_to_device();
}

void HostToDeviceJob::send_parts(const Window& window, const std::byte* staged) {
  for_each_chunk_in_window(
      plan_, window, [&](size_t chunk, uint64_t begin, uint64_t end, uint64_t at) {
        enqueue_to_device(stream_, address(chunk) + begin, staged + at, end - begin);
        count_transfer(end - begin);
      });
}

void HostToDeviceJob::transfer_pageable(const Window& window) {
  const c10::StreamGuard on_stream(stream_);
  std::unique_ptr<std::byte[]> staged;
  const auto send = [&](size_t index, uint64_t begin, uint64_t end, uint64_t at) {
    const ChunkPlan& chunk = plan_.chunks[index];
    const Leaf& first = leaves_[plan_.order[chunk.first]];
    const std::byte* from = static_cast<const std::byte*>(first.data) + begin;
    const PinnedRanges::Access access;  // the device may read it directly
    const bool is_in_place =
        (chunk.as_source || (chunk.last - chunk.first == 1 && !first.strided)) &&
        PinnedRanges::find({from, end - begin}) != PinnedRanges::Found::kNot;
    if (!is_in_place) {
      if (!staged) {
        staged = std::make_unique_for_overwrite<std::byte[]>(window.bytes());
        stage(window, staged.get(), StoreTo::kMemory);
      }
      from = staged.get() + at;
    }
    const PhaseRange range(phases_, Phase::kEnqueue);
    copy_from_pageable(stream_, address(index) + begin, from, end - begin);
    count_transfer(end - begin);
  };
  for_each_chunk_in_window(plan_, window, send);
}

void HostToDeviceJob::complete() {
  if (scratch_.empty()) return;
  const c10::StreamGuard on_stream(stream_);
  for (size_t i = 0; i < scratch_.size(); ++i) {
    if (!plan_.chunks[i].scattered) continue;
    std::byte* const from[] = {address(i)};
    scatter(stream_, plan_, leaves_, work_.destinations, {i, i + 1, from});
  }
  scratch_.clear();  // freed in the order of the stream
}

// ---- deferred -----------------------------------------------------------------------------------

void HostToDeviceJob::finish() noexcept {
  if (!batch_ || is_failing()) return finish_enqueued();
  note_sources_free(nullptr);
}

void HostToDeviceJob::send() noexcept {
  if (!batch_ || is_failing() || is_enqueued() || !are_sources_free()) return;
  if (generation_ != fork_generation()) return;
  // Use a worker's dispatch state: the modes of this thread do not concern the copy, and may need
  // the GIL.
  const c10::impl::ForceDispatchKeyGuard plain(
      c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{}));
  const std::lock_guard lock(sending_);
  if (is_enqueued()) return;
  attempt([this] { send_batch(); });
  finish_enqueued();
}

void HostToDeviceJob::send_batch() {
  const PhaseRange range(phases_, Phase::kEnqueue);
  const c10::StreamGuard on_stream(stream_);
  const auto leave_to_device = [this] {
    EventRef read = accelerator_.events().record_or_wait(stream_);
    if (!is_failing()) arrived_ = read;
    batch_->in_flight_until(std::move(read));
  };
  try {
    send_parts({0, plan_.chunks.back().end()}, batch_->data());
  } catch (...) {
    leave_to_device();
    throw;
  }
  leave_to_device();
}

}  // namespace tdcopier
