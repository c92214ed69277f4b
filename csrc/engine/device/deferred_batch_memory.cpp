// Block sizes are powers of two, as in torch's pinned allocator: the batches of one loop have about
// the same size.
#include "engine/device/deferred_batch_memory.h"

#include <ATen/core/CachingHostAllocator.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <mutex>
#include <utility>

#include "engine/device/byte_tensor.h"
#include "engine/device/fallbacks.h"
#include "engine/device/staging_ring.h"

namespace tdcopier {
namespace {

constexpr uint64_t kLeastBytes = 64 * 1024;

uint64_t limit_bytes() {
  const uint64_t staging = StagingRing::limit_bytes();
  const uint64_t most = std::numeric_limits<uint64_t>::max();
  return staging > most / kDeferredLimitFactor ? most : staging * kDeferredLimitFactor;
}

}  // namespace

DeferredLease::~DeferredLease() {
  if (block_.defined()) memory_.give_back(std::move(block_), nullptr);
}

void DeferredLease::in_flight_until(EventRef event) {
  memory_.give_back(std::move(block_), std::move(event));
}

std::optional<DeferredLease> DeferredBatchMemory::lease(uint64_t bytes) {
  const uint64_t needed = std::max(std::bit_ceil(bytes), kLeastBytes);
  {
    const std::lock_guard lock(mutex_);
    collect_done();
    make_room(limit_bytes());
    const auto fits = [needed](const at::Tensor& block) { return block.nbytes() == needed; };
    const auto found = std::find_if(free_.rbegin(), free_.rend(), fits);
    if (found != free_.rend()) {
      at::Tensor block = std::move(*found);
      free_.erase(std::next(found).base());
      return DeferredLease(*this, std::move(block));
    }
    if (needed > limit_bytes()) return std::nullopt;
    make_room(limit_bytes() - needed);
    if (pinned_bytes_ + needed > limit_bytes()) return std::nullopt;
    pinned_bytes_ += needed;
  }
  try {
    return DeferredLease(*this, byte_tensor(at::getHostAllocator(type_)->allocate(needed), needed));
  } catch (...) {
    note_fallback();
    const std::lock_guard lock(mutex_);
    pinned_bytes_ -= needed;
    return std::nullopt;
  }
}

uint64_t DeferredBatchMemory::pinned_bytes() {
  const std::lock_guard lock(mutex_);
  collect_done();
  make_room(limit_bytes());
  return pinned_bytes_;
}

void DeferredBatchMemory::drop_free() {
  const std::lock_guard lock(mutex_);
  collect_done();
  make_room(0);
}

void DeferredBatchMemory::give_back(at::Tensor block, EventRef event) {
  const std::lock_guard lock(mutex_);
  if (event) {
    in_flight_.push_back({std::move(block), std::move(event)});
  } else {
    free_.push_back(std::move(block));
  }
}

// Blocks of a device that has failed count as free: it no longer reads them.
void DeferredBatchMemory::collect_done() {
  while (!in_flight_.empty() && has_ended(*in_flight_.front().event)) {
    free_.push_back(std::move(in_flight_.front().bytes));
    in_flight_.pop_front();
  }
}

void DeferredBatchMemory::make_room(uint64_t limit) {
  while (!free_.empty() && pinned_bytes_ > limit) {
    pinned_bytes_ -= free_.front().nbytes();
    free_.erase(free_.begin());
  }
}

}  // namespace tdcopier
