// Participants claim and stage parts, and send windows; or they stage all, and the thread that
// uses the batch sends it.
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

// While the device has this number of buffers to read, a staged window may be held, and sent
// together with the next one. With batches of transfers that saves 4 % of the time for 52 MB of
// images, and 3 % for 256 MiB (one H200); groups of four or eight windows saved no more.
constexpr size_t kBusyBuffers = 2;

// Chunks that the device reads in place are claimed in groups, each of which goes together.
constexpr size_t kStraightGroup = 16;

// Scope in which one of a job's participants may pin a buffer: a window needs only one.
class GrowingRing {
 public:
  GrowingRing(std::atomic<bool>& is_growing, StagingRing& ring)
      : is_growing_(is_growing), ring_(ring), is_it_(!is_growing.exchange(true)) {}
  ~GrowingRing() {
    if (!is_it_) return;
    is_growing_ = false;
    ring_.recheck_wanted();  // another one may now
  }
  GrowingRing(const GrowingRing&) = delete;
  GrowingRing& operator=(const GrowingRing&) = delete;
  bool is_it() const { return is_it_; }

 private:
  std::atomic<bool>& is_growing_;
  StagingRing& ring_;
  const bool is_it_;
};

std::vector<WindowPart> whole(const std::vector<Window>& windows) {
  std::vector<WindowPart> parts;
  for (size_t i = 0; i < windows.size(); ++i)
    parts.push_back({i, windows[i].begin, windows[i].end});
  return parts;
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
      parts_(use_pinned_staging && !batch ? cut_parts(windows_) : whole(windows_)),
      open_(use_pinned_staging && !batch ? windows_.size() : 0),
      batch_(std::move(batch)) {
  for (const WindowPart& part : parts_) {
    if (!open_.empty()) ++open_[part.window].unstaged_parts;
  }
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
  return batch_ ? std::min(windows_.size(), kMostDeferredParticipants) : parts_.size();
}

// Chunks that are read in place come first: their transfers run while the rest is staged. leave()
// relies on that: once all windows are claimed, so are these.
void HostToDeviceJob::transfer_all() {
  const std::span<const size_t> straight(straight_);
  while (!is_failing()) {
    const size_t next = next_straight_.fetch_add(kStraightGroup);
    if (next >= straight.size()) break;
    transfer_straight(straight.subspan(next, std::min(kStraightGroup, straight.size() - next)));
  }
  while (is_part_left()) {
    interleave();
    transfer_next();
  }
}

// Waits before it claims a part, so that an interrupted participant leaves none undone. Waits with
// the caller's streams current, because signal handlers may run meanwhile.
void HostToDeviceJob::transfer_next() {
  if (!open_.empty()) return stage_next();
  if (!batch_ && destinations_ready_)
    wait_until_ended(*destinations_ready_);  // the transfer cannot be interrupted
  const size_t claimed = claim();
  if (claimed >= windows_.size()) return;
  const Window& window = windows_[claimed];
  if (!batch_) return transfer_pageable(window);
  stage(window, batch_->data() + window.begin, StoreTo::kMemory);
}

void HostToDeviceJob::stage_next() {
  std::optional<StagingLease> lease;
  std::optional<WindowPart> part = claim_part(lease);
  while (!part && is_part_left()) {
    const std::optional<Window> unstaged = open_next(lease, part);
    if (unstaged) return transfer_pageable(*unstaged);
  }
  lease.reset();  // another participant has opened the window
  if (part) stage_part(*part);
}

// Leases a buffer for the next window, and claims a part. If none can be had, claims and returns
// the whole window. May do neither, if another participant has opened the window.
std::optional<Window> HostToDeviceJob::open_next(std::optional<StagingLease>& lease,
                                                 std::optional<WindowPart>& part) {
  const GrowingRing growing(is_growing_, accelerator_.staging());
  bool is_refused = false;
  lease = lease_buffer(growing.is_it(), is_refused);
  if (is_refused) {  // no memory can be pinned
    if (destinations_ready_) wait_until_ended(*destinations_ready_);
    const std::optional<Window> window = claim_window();
    if (window) note_fallback();
    return window;
  }
  part = claim_part(lease);
  return std::nullopt;
}

// Claims the next part if its window has a buffer, or gets one: a free one, or the one that is
// leased. With the lock held, so that not all participants look for a buffer at the same time.
std::optional<WindowPart> HostToDeviceJob::claim_part(std::optional<StagingLease>& lease) {
  bool is_opened = false;
  std::optional<WindowPart> part;
  {
    const std::lock_guard lock(claiming_);
    if (!is_part_left()) return std::nullopt;
    const WindowPart& next = parts_[next_part()];
    is_opened = next.window == opened_;
    if (is_opened && !lease) lease = accelerator_.staging().acquire_free(staging_use());
    if (is_opened && !lease) return std::nullopt;
    if (is_opened) {
      open_[next.window].lease = std::exchange(lease, std::nullopt);
      ++opened_;
    }
    claim();
    part = next;
  }
  if (is_opened) accelerator_.staging().recheck_wanted();
  return part;
}

// Claims all of the next window, if it has no buffer.
std::optional<Window> HostToDeviceJob::claim_window() {
  const std::lock_guard lock(claiming_);
  if (!needs_buffer()) return std::nullopt;
  ++refused_;
  const size_t window = opened_++;
  while (next_part() < parts_.size() && parts_[next_part()].window == window) claim();
  return windows_[window];
}

// Returns whether a part is left, and the next one's window has no buffer.
bool HostToDeviceJob::needs_buffer() const {
  const size_t opened = opened_;  // read first, so it may only be old
  const size_t next = next_part();
  return is_part_left() && next < parts_.size() && parts_[next].window >= opened;
}

StagingUse HostToDeviceJob::staging_use() const {
  return destinations_ready_ ? StagingUse::kToDeviceOrdered : StagingUse::kToDevice;
}

// Leases a buffer for a window, unless none is needed any more. Tells if none can be had.
std::optional<StagingLease> HostToDeviceJob::lease_buffer(bool pins, bool& is_refused) {
  bool is_needed = true;
  const auto is_wanted = [&] {
    is_needed = needs_buffer();
    return is_needed && (pins || is_growing_);
  };
  try {
    const WithoutPart waiting(*this);
    std::optional<StagingLease> lease =
        accelerator_.staging().acquire(staging_use(), is_wanted, pins);
    is_refused = !lease && is_needed && pins;
    return lease;
  } catch (const Interrupted&) {
    throw;
  } catch (...) {
    if (is_part_left()) throw;
    return std::nullopt;  // the job may have ended, and must not fail any more
  }
}

void HostToDeviceJob::stage_part(const WindowPart& part) {
  OpenWindow& open = open_[part.window];
  const Window& window = windows_[part.window];
  stage({part.begin, part.end}, open.lease->data() + (part.begin - window.begin),
        is_far_ahead(part.begin) ? StoreTo::kSharedCache : StoreTo::kMemory);
  if (--open.unstaged_parts != 0) return;
  staged_.add({part.window, std::move(*open.lease)},
              [this](StagedWindow next) { enqueue(std::move(next)); });
}

// Sends the window, or holds it until the next one is staged.
void HostToDeviceJob::enqueue(StagedWindow staged) {
  ++added_;
  const bool holds = can_hold(staged.window);
  unsent_.push_back(std::move(staged));
  if (!holds) send_windows();
}

// A window is held only if another one has its buffer and is not staged: then nothing that others
// have is needed for both to be sent. Nor is it held if its transfer may wait for kernels, or if
// the next one is larger, as among the first, and takes longer to be staged.
bool HostToDeviceJob::can_hold(size_t window) {
  const size_t opened = opened_;  // read before refused_, so it may only be old
  if (!unsent_.empty() || added_ + refused_ >= opened) return false;
  if (destinations_ready_ || !may_go_together(stream_)) return false;
  const bool is_last = window + 1 == windows_.size();
  if (!is_last && windows_[window + 1].bytes() > windows_[window].bytes()) return false;
  return accelerator_.staging().has_in_flight(StagingUse::kToDevice, kBusyBuffers);
}

// Small jobs, and processors that cannot make use of the answer, do not ask the device. Nor do
// copies that wait for the caller's kernels: they need no bandwidth meanwhile.
bool HostToDeviceJob::is_far_ahead(uint64_t next) {
  if (destinations_ready_ || windows_.size() <= kFarAhead || !has_shared_cache_store())
    return false;
  const uint64_t left = windows_.back().end - next;
  return accelerator_.staging().has_in_flight(StagingUse::kToDevice,
                                              left > kManyLeftBytes ? kFarAheadOfMany : kFarAhead);
}

void HostToDeviceJob::stage(const Window& window, std::byte* to, StoreTo store) {
  const PhaseRange range(phases_, Phase::kStage);
  stage_window(plan_, leaves_, window, to, store);
}

void HostToDeviceJob::transfer_straight(std::span<const size_t> chunks) {
  const PhaseRange range(phases_, Phase::kEnqueue);
  const c10::StreamGuard on_stream(stream_);
  std::vector<Transfer> transfers;
  std::vector<size_t> unpinned;
  transfers.reserve(chunks.size());
  {
    const PinnedRanges::Access access;
    for (const size_t chunk : chunks) {
      const ChunkPlan& plan = plan_.chunks[chunk];
      const auto* const from = static_cast<const std::byte*>(leaves_[plan_.order[plan.first]].data);
      if (PinnedRanges::find({from, plan.bytes}) == PinnedRanges::Found::kNot) {
        unpinned.push_back(chunk);
      } else {
        transfers.push_back({address(chunk), from, plan.bytes});
      }
    }
    send(transfers);
  }
  for (const size_t chunk : unpinned) copy_unpinned(chunk);
}

// Copies a chunk that is about to be unpinned, so that the device must not read it.
void HostToDeviceJob::copy_unpinned(size_t chunk) {
  note_fallback();
  const ChunkPlan& plan = plan_.chunks[chunk];
  const auto* const from = static_cast<const std::byte*>(leaves_[plan_.order[plan.first]].data);
  const auto staged =
      std::make_unique_for_overwrite<std::byte[]>(std::min(plan.bytes, kStagingBufferBytes));
  for (uint64_t begin = 0; begin < plan.bytes; begin += kStagingBufferBytes) {
    const uint64_t bytes = std::min(plan.bytes - begin, kStagingBufferBytes);
    std::memcpy(staged.get(), from + begin, bytes);
    copy_from_pageable(stream_, address(chunk) + begin, staged.get(), bytes);
  }
  count_transfer(plan.bytes);
}

void HostToDeviceJob::send_windows() {
  const PhaseRange range(phases_, Phase::kEnqueue);
  const c10::StreamGuard on_stream(stream_);
  const auto leave_to_device = [this] {
    const EventRef read = accelerator_.events().record_or_wait(stream_);
    // If this is the only window and nothing follows it, the event also marks the arrival.
    const bool is_last = windows_.size() == 1 && read_stream_ == nullptr && scratch_.empty();
    if (is_last && !is_failing()) arrived_ = read;
    for (StagedWindow& staged : unsent_) staged.lease.in_flight_until(read);
    unsent_.clear();
  };
  try {
    std::vector<Transfer> transfers;
    for (const StagedWindow& staged : unsent_)
      add_parts(windows_[staged.window], staged.lease.data(), transfers);
    send(transfers);
  } catch (...) {
    leave_to_device();  // the device may be reading for earlier transfers
    throw;
  }
  leave_to_device();
}

void HostToDeviceJob::add_parts(const Window& window, const std::byte* staged,
                                std::vector<Transfer>& transfers) {
  for_each_chunk_in_window(
      plan_, window, [&](size_t chunk, uint64_t begin, uint64_t end, uint64_t at) {
        transfers.push_back({address(chunk) + begin, staged + at, end - begin});
      });
}

void HostToDeviceJob::send(std::span<const Transfer> transfers) {
  enqueue_to_device(stream_, transfers);
  for (const Transfer& transfer : transfers) count_transfer(transfer.bytes);
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
        stage(window, staged.get(), StoreTo::kOwnCache);
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
  if (is_failing()) {  // some may not have been sent
    for (OpenWindow& window : open_) window.lease.reset();
    unsent_.clear();
  }
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
    std::vector<Transfer> transfers;
    add_parts({0, plan_.chunks.back().end()}, batch_->data(), transfers);
    send(transfers);
  } catch (...) {
    leave_to_device();
    throw;
  }
  leave_to_device();
}

}  // namespace tdcopier
