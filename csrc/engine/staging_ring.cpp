// Staging buffers are pinned once and cycle: free, leased (being filled), in flight (being read).
#include "engine/staging_ring.h"

#include <ATen/core/CachingHostAllocator.h>

#include <utility>

#include "engine/byte_tensor.h"

namespace tdcopier {
namespace {

std::atomic<uint64_t> g_limit_bytes = kDefaultStagingLimitBytes;

}  // namespace

StagingLease::StagingLease(StagingRing& ring, std::unique_ptr<StagingBuffer> buffer)
    : ring_(ring), buffer_(std::move(buffer)) {}

StagingLease::~StagingLease() {
  if (buffer_) ring_.give_back(std::move(buffer_));
}

void StagingLease::in_flight_until(EventRef event) {
  ring_.give_back_after(std::move(buffer_), std::move(event));
}

void StagingRing::set_limit_bytes(uint64_t bytes) {
  g_limit_bytes = bytes;
}

uint64_t StagingRing::limit_bytes() {
  return g_limit_bytes;
}

bool StagingRing::is_exhausted() noexcept {
  const std::lock_guard lock(mutex_);
  collect_done();
  drop_over_limit();
  return free_.empty() && pinned_bytes_ + kStagingBufferBytes > limit_bytes();
}

uint64_t StagingRing::pinned_bytes() {
  const std::lock_guard lock(mutex_);
  collect_done();
  drop_over_limit();
  return pinned_bytes_;
}

StagingLease StagingRing::acquire() {
  try {
    std::unique_ptr<StagingBuffer> buffer = take_or_reserve();
    return {*this, buffer ? std::move(buffer) : allocate_reserved()};
  } catch (...) {
    returned_.notify_all();  // the wake-up that this thread may have used up
    throw;
  }
}

std::unique_ptr<StagingBuffer> StagingRing::take_or_reserve() {
  std::unique_lock lock(mutex_);
  for (;;) {
    collect_done();
    drop_over_limit();
    if (!free_.empty()) {
      std::unique_ptr<StagingBuffer> buffer = std::move(free_.back());
      free_.pop_back();
      return buffer;
    }
    if (pinned_bytes_ + kStagingBufferBytes <= limit_bytes()) {
      pinned_bytes_ += kStagingBufferBytes;
      return nullptr;
    }
    if (in_flight_.empty()) {
      returned_.wait(lock);
      continue;
    }
    // Keep a reference and let the others in while the device works.
    const EventRef oldest = in_flight_.front().event;
    lock.unlock();
    wait_until_ended(*oldest);
    lock.lock();
  }
}

std::unique_ptr<StagingBuffer> StagingRing::allocate_reserved() {
  try {
    at::HostAllocator* allocator = at::getHostAllocator(type_);
    return std::make_unique<StagingBuffer>(
        StagingBuffer{byte_tensor(allocator->allocate(kStagingBufferBytes), kStagingBufferBytes)});
  } catch (...) {
    const std::lock_guard lock(mutex_);
    pinned_bytes_ -= kStagingBufferBytes;
    throw;
  }
}

void StagingRing::give_back(std::unique_ptr<StagingBuffer> buffer) {
  {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(buffer));
  }
  returned_.notify_one();
}

void StagingRing::give_back_after(std::unique_ptr<StagingBuffer> buffer, EventRef event) {
  {
    const std::lock_guard lock(mutex_);
    in_flight_.push_back({std::move(buffer), std::move(event)});
  }
  returned_.notify_one();
}

// A device that has failed reads no more: its buffers are free, or the ring would be blocked for
// ever.
void StagingRing::collect_done() {
  while (!in_flight_.empty() && has_ended(*in_flight_.front().event)) {
    free_.push_back(std::move(in_flight_.front().buffer));
    in_flight_.pop_front();
  }
}

void StagingRing::drop_over_limit() {
  while (!free_.empty() && pinned_bytes_ > limit_bytes()) {
    free_.pop_back();
    pinned_bytes_ -= kStagingBufferBytes;
  }
}

}  // namespace tdcopier
