// The bounded set of pinned buffers that all transfers to one device read from.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

#include <array>
#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/monitor.h"
#include "engine/event_pool.h"

namespace tdcopier {

// Every staging buffer has this size: large enough for the link's full rate, small enough that the
// first transfer starts early and the ring stays in the processor's cache.
inline constexpr uint64_t kStagingBufferBytes = 2 * 1024 * 1024;
inline constexpr uint64_t kDefaultStagingLimitBytes = 64 * 1024 * 1024;

// The stream whose transfers use a buffer. Those of the last two may wait for the caller's kernels,
// so each has a share of its own: they never keep what the first needs to go on.
enum class StagingUse : uint8_t { kToDevice, kOrdered, kFromDevice };
inline constexpr size_t kStagingUses = 3;

struct StagingBuffer {
  c10::DataPtr memory;  // kStagingBufferBytes, pinned
};

class StagingRing;

// A buffer in the caller's hands. Dropped without `in_flight_until`, it is free again at once.
class StagingLease {
 public:
  StagingLease(StagingRing& ring, StagingUse use, std::unique_ptr<StagingBuffer> buffer);
  ~StagingLease();
  StagingLease(StagingLease&&) = default;
  StagingLease& operator=(StagingLease&&) = default;
  StagingLease(const StagingLease&) = delete;
  StagingLease& operator=(const StagingLease&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(buffer_->memory.get()); }
  // The device uses the buffer until `event` is done; null: it does no longer.
  void in_flight_until(EventRef event);

 private:
  StagingRing* ring_;
  StagingUse use_;
  std::unique_ptr<StagingBuffer> buffer_;
};

// Thread: any. Lifetime: outlives every lease (device state is never destroyed).
class StagingRing {
 public:
  explicit StagingRing(c10::DeviceType type) : type_(type) {}
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  // Blocks: while every buffer that the limit allows for this use is being filled or read by the
  // device. nullopt: no memory can be pinned, and none will come back. GIL: must not be held.
  // Throws: Interrupted.
  std::optional<StagingLease> acquire(StagingUse use);

  // Would acquire() wait? An answer for now only: others take buffers too.
  bool is_exhausted(StagingUse use) noexcept;

  uint64_t pinned_bytes();
  void drop_free();  // gives back what no transfer needs just now

  // Pinned bytes per device, all rings; one buffer for each use at least, if it asks for one. A
  // lower limit is reached as buffers come back. Thread: any.
  static void set_limit_bytes(uint64_t bytes);
  static uint64_t limit_bytes();

 private:
  friend class StagingLease;
  struct InFlight {
    std::unique_ptr<StagingBuffer> buffer;
    EventRef event;
  };

  struct Share {
    size_t buffers = 0;              // leased and in flight
    bool is_watched = false;         // a thread waits for the device to give one back
    std::deque<InFlight> in_flight;  // oldest first
  };

  enum class Room { kTaken, kReserved, kNone, kNever };
  // kTaken: `buffer` is one. kReserved: there is room for one more. `grow`: may there be?
  Room look_for_room(StagingUse use, bool grow, std::unique_ptr<StagingBuffer>& buffer);
  std::unique_ptr<StagingBuffer> allocate_reserved(StagingUse use) noexcept;  // null: none
  void wait_for_return(StagingUse use, std::unique_lock<Mutex>& lock);
  bool has_ended_any();  // mutex_ not held
  void give_back(StagingUse use, std::unique_ptr<StagingBuffer> buffer);
  void give_back_after(StagingUse use, std::unique_ptr<StagingBuffer> buffer, EventRef event);
  // All of these: mutex_ held.
  Share& share(StagingUse use) { return shares_[static_cast<size_t>(use)]; }
  bool has_share_left(StagingUse use);
  bool may_grow(StagingUse use);
  EventRef next_return(StagingUse use);  // null: a thread has to give one back first
  void collect_if_needed(StagingUse use);
  void collect_done();
  void drop_over_limit();

  const c10::DeviceType type_;
  Mutex mutex_;
  Condition returned_;
  std::vector<std::unique_ptr<StagingBuffer>> free_;  // the last used is the warmest: taken first
  std::array<Share, kStagingUses> shares_;
  uint64_t pinned_bytes_ = 0;          // free, leased and in flight
  std::atomic<uint64_t> returns_ = 0;  // buffers that have become free
};

}  // namespace tdcopier
