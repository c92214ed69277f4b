// Pinned memory for whole batches that were staged and have not been sent yet.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceType.h>

#include <cstddef>
#include <deque>
#include <optional>
#include <utility>
#include <vector>

#include "base/monitor.h"
#include "engine/event_pool.h"

namespace tdcopier {

// As a multiple of the bound for staging. Apart from it, or batches that nobody sends could keep
// every buffer, and a copy that needs one to go on would wait for ever.
inline constexpr uint64_t kHeldLimitFactor = 4;

class HeldMemory;

// Memory for one batch. Dropped without `in_flight_until`, it is free again at once.
class HeldLease {
 public:
  HeldLease(HeldMemory& memory, at::Tensor block) : memory_(memory), block_(std::move(block)) {}
  ~HeldLease();
  HeldLease(HeldLease&&) noexcept = default;
  HeldLease(const HeldLease&) = delete;
  HeldLease& operator=(const HeldLease&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(block_.mutable_data_ptr()); }
  // The device reads it until `event` is done.
  void in_flight_until(EventRef event);

 private:
  HeldMemory& memory_;
  at::Tensor block_;  // undefined: nothing to give back
};

// Thread: any. Lifetime: outlives every lease (device state is never destroyed).
class HeldMemory {
 public:
  explicit HeldMemory(c10::DeviceType type) : type_(type) {}
  HeldMemory(const HeldMemory&) = delete;
  HeldMemory& operator=(const HeldMemory&) = delete;

  // Leases at least `bytes`. nullopt: the limit does not allow it now, or memory cannot be pinned,
  // which counts as a fallback. Blocks: while new memory is pinned.
  std::optional<HeldLease> lease(uint64_t bytes);

  uint64_t pinned_bytes();
  void drop_free();

 private:
  friend class HeldLease;
  struct Block {
    at::Tensor bytes;
    EventRef event;  // null: nobody reads it
  };

  void give_back(at::Tensor block, EventRef event);
  void collect_done();             // mutex_ held
  void make_room(uint64_t limit);  // mutex_ held; drops what is free until so much is pinned

  const c10::DeviceType type_;
  Mutex mutex_;
  std::vector<at::Tensor> free_;  // the last used is the warmest: taken first
  std::deque<Block> in_flight_;   // oldest first
  uint64_t pinned_bytes_ = 0;     // free, leased and in flight
};

}  // namespace tdcopier
