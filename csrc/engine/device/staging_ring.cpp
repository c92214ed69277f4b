// Staging buffers are pinned once and cycle: free, leased, in flight (used by the device).
#include "engine/device/staging_ring.h"

#include <ATen/core/CachingHostAllocator.h>

#include <algorithm>
#include <utility>

#include "base/interleaver.h"
#include "base/polling_wait.h"
#include "engine/device/fallbacks.h"

namespace tdcopier {
namespace {

std::atomic<uint64_t> g_limit_bytes = kDefaultStagingLimitBytes;

}  // namespace

StagingLease::StagingLease(StagingRing& ring, StagingUse use, std::unique_ptr<StagingBuffer> buffer)
    : ring_(&ring), use_(use), buffer_(std::move(buffer)) {}

StagingLease::~StagingLease() {
  if (buffer_) ring_->give_back(use_, std::move(buffer_));
}

void StagingLease::in_flight_until(EventRef event) {
  ring_->give_back_after(use_, std::move(buffer_), std::move(event));
}

void StagingRing::set_limit_bytes(uint64_t bytes) {
  g_limit_bytes = bytes;
}

uint64_t StagingRing::limit_bytes() {
  return g_limit_bytes;
}

bool StagingRing::is_exhausted(StagingUse use) noexcept {
  const std::lock_guard lock(mutex_);
  collect_if_needed(use);
  return !has_share_left(use) || (free_.empty() && !may_grow(use));
}

bool StagingRing::has_in_flight(StagingUse use, size_t least) {
  const std::lock_guard lock(mutex_);
  if (share(use).in_flight.size() >= least) collect_done(use);
  return share(use).in_flight.size() >= least;
}

uint64_t StagingRing::pinned_bytes() {
  const std::lock_guard lock(mutex_);
  collect_done();
  drop_over_limit();
  return pinned_bytes_;
}

void StagingRing::drop_free() {
  const std::lock_guard lock(mutex_);
  collect_done();
  pinned_bytes_ -= free_.size() * kStagingBufferBytes;
  free_.clear();
}

std::optional<StagingLease> StagingRing::acquire(StagingUse use,
                                                 const std::function<bool()>& is_wanted,
                                                 bool pins) {
  bool grow = pins;
  std::unique_ptr<StagingBuffer> buffer;
  std::unique_lock lock(mutex_);
  for (;;) {
    if (!is_wanted()) return std::nullopt;
    switch (look_for_room(use, grow, buffer)) {
      case Room::kTaken:
        return StagingLease(*this, use, std::move(buffer));
      case Room::kNever:
        if (pins) return std::nullopt;
        [[fallthrough]];
      case Room::kNone:
        wait_for_return(use, lock, is_wanted);
        break;
      case Room::kReserved:
        lock.unlock();
        buffer = allocate_reserved(use);
        if (buffer) return StagingLease(*this, use, std::move(buffer));
        note_fallback();
        grow = false;  // no more memory can be pinned: wait for a buffer
        lock.lock();
    }
  }
}

std::optional<StagingLease> StagingRing::acquire_free(StagingUse use) {
  std::unique_ptr<StagingBuffer> buffer;
  const std::lock_guard lock(mutex_);
  if (look_for_room(use, /*grow=*/false, buffer) != Room::kTaken) return std::nullopt;
  return StagingLease(*this, use, std::move(buffer));
}

// Reserves a quarter of the buffers for copies that do not wait for kernels.
bool StagingRing::has_share_left(StagingUse use) {
  const size_t all = limit_bytes() / kStagingBufferBytes;
  size_t most = all;
  if (use == StagingUse::kToDeviceOrdered) most = all / 2;
  if (use == StagingUse::kFromDevice) most = all / 4;
  return share(use).buffers < std::max<size_t>(most, 1);
}

// If the limit is less than one buffer for each use, each may have one nevertheless.
bool StagingRing::may_grow(StagingUse use) {
  if (pinned_bytes_ + kStagingBufferBytes <= limit_bytes()) return true;
  const bool is_first = share(use).buffers == 0;
  return is_first && pinned_bytes_ < kStagingUses * kStagingBufferBytes;
}

// Returns the event of the next buffer to come back: one of this use if its share is taken, else
// preferably one that waits for no kernel.
EventRef StagingRing::next_return(StagingUse use) {
  const auto front = [this](StagingUse of) {
    const std::deque<InFlight>& in_flight = share(of).in_flight;
    return in_flight.empty() ? nullptr : in_flight.front().event;
  };
  if (!has_share_left(use)) return front(use);
  const EventRef first = front(StagingUse::kToDevice);
  return first ? first : front(use);
}

StagingRing::Room StagingRing::look_for_room(StagingUse use, bool grow,
                                             std::unique_ptr<StagingBuffer>& buffer) {
  collect_if_needed(use);
  // No buffer comes back, except those that wait for kernels of another copy.
  const bool is_alone =
      free_.empty() && share(use).buffers == 0 && share(StagingUse::kToDevice).buffers == 0;
  if (!grow && is_alone) return Room::kNever;
  if (!has_share_left(use)) return Room::kNone;
  if (!free_.empty()) {
    buffer = std::move(free_.back());
    free_.pop_back();
    ++share(use).buffers;
    return Room::kTaken;
  }
  if (!grow || !may_grow(use)) return Room::kNone;
  pinned_bytes_ += kStagingBufferBytes;
  ++share(use).buffers;
  return Room::kReserved;
}

void StagingRing::wait_for_return(StagingUse use, std::unique_lock<Mutex>& lock,
                                  const std::function<bool()>& is_wanted) {
  // One thread for each use polls the device, and wakes the others.
  bool& is_watched = share(use).is_watched;
  const EventRef next = next_return(use);
  if (is_interleaved() && !next) return returned_.wait(lock);
  // The watching thread may be running a signal handler, so the others look for themselves too.
  static constexpr std::chrono::milliseconds kLookInterval{20};
  if (is_watched) return returned_.wait_for(lock, kLookInterval);
  is_watched = true;
  const uint64_t returns = returns_;
  lock.unlock();
  struct StopWatching {
    StagingRing& ring;
    std::unique_lock<Mutex>& lock;
    bool& is_watched;
    ~StopWatching() {
      lock.lock();
      is_watched = false;
      ring.returned_.notify_all();
    }
  } stop{*this, lock, is_watched};
  if (is_interleaved()) return wait_until_ended(*next);
  poll_until([&] { return returns_ != returns || !is_wanted() || has_ended_any(); });
}

bool StagingRing::has_ended_any() {
  std::vector<EventRef> events;
  {
    const std::lock_guard lock(mutex_);
    for (const Share& those : shares_) {
      for (const InFlight& one : those.in_flight) events.push_back(one.event);
    }
  }
  return std::any_of(events.begin(), events.end(),
                     [](const EventRef& event) { return has_ended(*event); });
}

std::unique_ptr<StagingBuffer> StagingRing::allocate_reserved(StagingUse use) noexcept {
  try {
    at::HostAllocator* allocator = at::getHostAllocator(type_);
    return std::make_unique<StagingBuffer>(StagingBuffer{allocator->allocate(kStagingBufferBytes)});
  } catch (...) {
  }
  {
    const std::lock_guard lock(mutex_);
    pinned_bytes_ -= kStagingBufferBytes;
    --share(use).buffers;
  }
  returned_.notify_all();
  return nullptr;
}

void StagingRing::give_back(StagingUse use, std::unique_ptr<StagingBuffer> buffer) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(buffer));
    --share(use).buffers;
    ++returns_;
  }
  returned_.notify_all();
}

void StagingRing::give_back_after(StagingUse use, std::unique_ptr<StagingBuffer> buffer,
                                  EventRef event) {
  if (!event) return give_back(use, std::move(buffer));
  {
    const std::lock_guard lock(mutex_);
    share(use).in_flight.push_back({std::move(buffer), std::move(event)});
  }
  returned_.notify_all();
}

// Queries the device only if the answer matters: each query takes about a microsecond.
void StagingRing::collect_if_needed(StagingUse use) {
  if (free_.empty() || pinned_bytes_ > limit_bytes() || !has_share_left(use)) collect_done();
  drop_over_limit();
}

void StagingRing::collect_done() {
  collect_done(StagingUse::kToDevice);
  collect_done(StagingUse::kToDeviceOrdered);
  collect_done(StagingUse::kFromDevice);
}

// Buffers of a device that has failed count as free, or the ring would be blocked forever.
// Transfers of the first use end in order; those of the others are on several streams.
void StagingRing::collect_done(StagingUse use) {
  const bool in_order = use == StagingUse::kToDevice;
  const uint64_t before = returns_;
  Share& those = share(use);
  for (auto one = those.in_flight.begin(); one != those.in_flight.end();) {
    if (!has_ended(*one->event)) {
      if (in_order) break;
      ++one;
      continue;
    }
    free_.push_back(std::move(one->buffer));
    one = those.in_flight.erase(one);
    --those.buffers;
    ++returns_;
  }
  if (returns_ != before) returned_.notify_all();
}

void StagingRing::drop_over_limit() {
  while (!free_.empty() && pinned_bytes_ > limit_bytes()) {
    free_.pop_back();
    pinned_bytes_ -= kStagingBufferBytes;
  }
}

}  // namespace tdcopier
