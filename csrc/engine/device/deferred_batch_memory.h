// Pinned memory for deferred batches, which are staged as a whole and sent later.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "base/monitor.h"
#include "engine/device/events.h"

namespace tdcopier {

// The limit, as a multiple of the staging limit. The two are separate: batches that are never sent
// could otherwise keep every staging buffer, and a copy that needs one would wait forever.
inline constexpr uint64_t kDeferredLimitFactor = 4;

class DeferredBatchMemory;

// A lease of memory for one batch. If dropped without `in_flight_until`, the memory is free at
// once.
class DeferredLease {
 public:
  DeferredLease(DeferredBatchMemory& memory, at::Tensor block)
      : memory_(memory), block_(std::move(block)) {}
  ~DeferredLease();
  DeferredLease(DeferredLease&&) noexcept = default;
  DeferredLease(const DeferredLease&) = delete;
  DeferredLease& operator=(const DeferredLease&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(block_.mutable_data_ptr()); }
  // Gives the memory back when `event` is done: the device reads it until then.
  void in_flight_until(EventRef event);

 private:
  DeferredBatchMemory& memory_;
  at::Tensor block_;  // undefined: nothing to give back
};

// The memory for deferred batches of one device. Thread: any. Lifetime: outlives every lease
// (device state is never destroyed).
class DeferredBatchMemory {
 public:
  explicit DeferredBatchMemory(c10::DeviceType type) : type_(type) {}
  DeferredBatchMemory(const DeferredBatchMemory&) = delete;
  DeferredBatchMemory& operator=(const DeferredBatchMemory&) = delete;

  // Leases at least `bytes`. Returns nullopt if that would exceed the limit now, or if memory
  // cannot be pinned, which counts as a fallback. Blocks: while new memory is pinned.
  std::optional<DeferredLease> lease(uint64_t bytes);

  uint64_t pinned_bytes();
  void drop_free();

 private:
  friend class DeferredLease;
  struct Block {
    at::Tensor bytes;
    EventRef event;  // the device reads the bytes until it is done
  };

  void give_back(at::Tensor block, EventRef event);
  void collect_done();             // mutex_ held
  void make_room(uint64_t limit);  // mutex_ held; drops free blocks down to `limit`

  const c10::DeviceType type_;
  Mutex mutex_;
  std::vector<at::Tensor> free_;  // the last used is in cache: taken first
  std::deque<Block> in_flight_;   // oldest first
  uint64_t pinned_bytes_ = 0;     // free, leased and in flight
};

}  // namespace tdcopier
