// Staging buffers are pinned once and cycle: free, leased (being filled), in flight (being read).
#include "engine/staging_ring.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <utility>

#include "engine/byte_tensor.h"
#include "engine/graph_capture.h"

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

bool StagingRing::is_exhausted() {
  const std::lock_guard lock(mutex_);
  if (!free_.empty() || pinned_bytes_ + kStagingBufferBytes <= limit_bytes()) return false;
  collect_done();
  return free_.empty();
}

uint64_t StagingRing::pinned_bytes() {
  const std::lock_guard lock(mutex_);
  collect_done();
  drop_over_limit();
  return pinned_bytes_;
}

StagingLease StagingRing::acquire() {
  std::unique_lock lock(mutex_);
  for (;;) {
    collect_done();
    drop_over_limit();
    if (!free_.empty()) {
      std::unique_ptr<StagingBuffer> buffer = std::move(free_.back());
      free_.pop_back();
      return {*this, std::move(buffer)};
    }
    if (pinned_bytes_ + kStagingBufferBytes <= limit_bytes()) break;
    if (in_flight_.empty()) {
      returned_.wait(lock);
      continue;
    }
    // Keep a reference and let the others in while the device works.
    const EventRef oldest = in_flight_.front().event;
    lock.unlock();
    {
      const RelaxedCapture relaxed(type_);
      oldest->synchronize();
    }
    lock.lock();
  }
  pinned_bytes_ += kStagingBufferBytes;  // reserved before the lock is given up
  lock.unlock();
  try {
    return {*this, allocate()};
  } catch (...) {
    lock.lock();
    pinned_bytes_ -= kStagingBufferBytes;
    returned_.notify_one();
    throw;
  }
}

std::unique_ptr<StagingBuffer> StagingRing::allocate() const {
  at::HostAllocator* allocator = at::getHostAllocator(type_);
  return std::make_unique<StagingBuffer>(
      StagingBuffer{byte_tensor(allocator->allocate(kStagingBufferBytes), kStagingBufferBytes)});
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

void StagingRing::collect_done() {
  const RelaxedCapture relaxed(type_);
  while (!in_flight_.empty() && in_flight_.front().event->query()) {
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
