// The bounded set of pinned buffers for the transfers to and from one device, and the share of each
// use. Batches that are sent later have memory of their own (deferred_batch_memory.h).
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/monitor.h"
#include "engine/device/events.h"

namespace tdcopier {

// Every staging buffer has this size: large enough for nearly the link's rate, of which each
// transfer takes 2.6 us away, and small enough that many small copies may be in flight.
inline constexpr uint64_t kStagingBufferBytes = 2 * 1024 * 1024;
inline constexpr uint64_t kDefaultStagingLimitBytes = 64 * 1024 * 1024;

// The kind of stream whose transfers use a buffer. Those of the last two may wait for the caller's
// kernels, so each use has a share of its own: the last two never keep buffers that the first
// needs.
enum class StagingUse : uint8_t { kToDevice, kToDeviceOrdered, kFromDevice };
inline constexpr size_t kStagingUses = 3;

struct StagingBuffer {
  c10::DataPtr memory;  // kStagingBufferBytes, pinned
};

class StagingRing;

// A lease of one buffer. If dropped without `in_flight_until`, the buffer is free at once.
class StagingLease {
 public:
  StagingLease(StagingRing& ring, StagingUse use, std::unique_ptr<StagingBuffer> buffer);
  ~StagingLease();
  StagingLease(StagingLease&&) = default;
  StagingLease& operator=(StagingLease&&) = default;
  StagingLease(const StagingLease&) = delete;
  StagingLease& operator=(const StagingLease&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(buffer_->memory.get()); }
  // Gives the buffer back when `event` is done: the device uses it until then. null: it no longer
  // does.
  void in_flight_until(EventRef event);

 private:
  StagingRing* ring_;
  StagingUse use_;
  std::unique_ptr<StagingBuffer> buffer_;
};

// The staging buffers of one device. Thread: any. Lifetime: outlives every lease (device state is
// never destroyed).
class StagingRing {
 public:
  explicit StagingRing(c10::DeviceType type) : type_(type) {}
  StagingRing(const StagingRing&) = delete;
  StagingRing& operator=(const StagingRing&) = delete;

  // Leases a buffer. Returns nullopt if no memory can be pinned, and no buffer will come back, or
  // if is_wanted() returns false, which is called before and during a wait, perhaps with a lock
  // held. `pins`: whether it may pin one more; if not, it waits until one comes back. Blocks:
  // while every buffer that the limit allows for this use is being filled or used by
  // the device. GIL: must not be held. Throws: Interrupted.
  std::optional<StagingLease> acquire(
      StagingUse use, const std::function<bool()>& is_wanted = [] { return true; },
      bool pins = true);

  // Returns whether acquire() would wait now. Other threads take buffers too, so that may change.
  bool is_exhausted(StagingUse use) noexcept;

  // Leases a buffer that is free now. Returns nullopt if there is none. Never blocks.
  std::optional<StagingLease> acquire_free(StagingUse use);

  // Makes threads that wait in acquire() ask again whether a buffer is wanted.
  void recheck_wanted() { returned_.notify_all(); }

  // Returns whether the device uses at least this number of buffers for transfers of this use.
  bool has_in_flight(StagingUse use, size_t least);

  uint64_t pinned_bytes();
  void drop_free();  // frees buffers that are not in use

  // Sets the limit of pinned bytes per device, for all rings. Each use may have one buffer, even
  // above the limit. A lower limit is reached as buffers come back. Thread: any.
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
    bool is_watched = false;         // a thread polls the device for a returned one
    std::deque<InFlight> in_flight;  // oldest first
  };

  enum class Room { kTaken, kReserved, kNone, kNever };
  // Looks for a buffer. kTaken: `buffer` has one. kReserved: the caller may pin one more. kNone:
  // wait. kNever: none will come back. `grow`: whether more memory may be pinned.
  Room look_for_room(StagingUse use, bool grow, std::unique_ptr<StagingBuffer>& buffer);
  std::unique_ptr<StagingBuffer> allocate_reserved(StagingUse use) noexcept;  // null: failed
  void wait_for_return(StagingUse use, std::unique_lock<Mutex>& lock,
                       const std::function<bool()>& is_wanted);
  bool has_ended_any();  // mutex_ not held
  void give_back(StagingUse use, std::unique_ptr<StagingBuffer> buffer);
  void give_back_after(StagingUse use, std::unique_ptr<StagingBuffer> buffer, EventRef event);
  // Requires, for all of these: mutex_ is held.
  Share& share(StagingUse use) { return shares_[static_cast<size_t>(use)]; }
  bool has_share_left(StagingUse use);
  bool may_grow(StagingUse use);
  EventRef next_return(StagingUse use);  // null: a thread must give one back first
  void collect_if_needed(StagingUse use);
  void collect_done();
  void collect_done(StagingUse use);
  void drop_over_limit();

  const c10::DeviceType type_;
  Mutex mutex_;
  Condition returned_;
  std::vector<std::unique_ptr<StagingBuffer>> free_;  // the last used is in cache: taken first
  std::array<Share, kStagingUses> shares_;
  uint64_t pinned_bytes_ = 0;          // free, leased and in flight
  std::atomic<uint64_t> returns_ = 0;  // number of buffers that came back
};

}  // namespace tdcopier
