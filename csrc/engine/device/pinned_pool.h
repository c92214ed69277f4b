// The process's pool of pinned memory: blocks of exact sizes, whose parts are leased and come back.
// pinned_lease.h makes its blocks. (Copies are staged in the buffers of staging_ring.h, and small
// results are made with torch's allocator, by jobs/route.cpp.)
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/anonymous_memory.h"
#include "base/free_ranges.h"
#include "base/monitor.h"
#include "engine/device/current_work.h"
#include "engine/device/events.h"
#include "engine/device/pinned_ranges.h"

namespace tdcopier {

// The memory asked for would exceed the pool's limit, or the system does not have it.
class PinnedMemoryError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Memory of the pool's own, and its one registration.
class PinnedBlock {
 public:
  // Blocks: see PinnedRanges. Throws: PinningError.
  PinnedBlock(c10::Device device, AnonymousMemory memory);
  // Requires: no device accesses the memory any more.
  ~PinnedBlock();
  PinnedBlock(const PinnedBlock&) = delete;
  PinnedBlock& operator=(const PinnedBlock&) = delete;

  MemoryRange range() const {
    return {reinterpret_cast<uintptr_t>(memory_.bytes().data()), memory_.bytes().size()};
  }

 private:
  const AnonymousMemory memory_;
  PinnedRanges pinned_;  // ended before the memory
};

// Thread: any. GIL: may be held for give_back() and bytes() alone. Lifetime: never destroyed, since
// tensors may be freed at any time. A forked child has a new, empty one.
class PinnedPool {
 public:
  struct Bytes {
    uint64_t leased;  // by tensors, by devices that may still use it, and in the making
    uint64_t free;
  };

  static PinnedPool& get();

  // Sets the limit on leased and free bytes together. A lower one takes effect at the next lease.
  static void set_limit_bytes(uint64_t bytes);
  static uint64_t limit_bytes();

  // Takes a range of each size, which is in whole pages; all or none. Returns their beginnings. 0:
  // no free range fits, and the caller may make a block of that size for adopt(), or cancel().
  // Frees idle blocks if the limit demands it, or, with `waits`, waits until a device no longer
  // uses returned memory, if that is enough. Blocks: for that. Throws: PinnedMemoryError;
  // Interrupted.
  std::vector<uintptr_t> take(std::span<const size_t> sizes, bool waits);
  // Adds a new block, all of it taken.
  void adopt(std::unique_ptr<PinnedBlock> block);
  void cancel(size_t bytes) noexcept;

  // Frees a range that no device uses.
  void give_back(MemoryRange range) noexcept;
  // Begins the use of a taken range by tensors.
  void begin_use(MemoryRange range);
  // Notes that work on the stream uses a range that contains the address. Returns whether there is
  // one. See watched_host_allocator.h.
  bool note_use(const void* address, const c10::Stream& stream);
  // Frees a range once all work is done that the calling thread's current streams have now, and the
  // streams of which a use was noted. If a stream is capturing a graph, a later call records the
  // events, on the streams of its thread.
  void give_back_after_work(MemoryRange range, c10::DeviceType type) noexcept;

  // Returns blocks that are wholly free to the system. Returns their size. Blocks: for 0.1 s per
  // gigabyte or less.
  uint64_t trim();
  Bytes bytes();
  uint64_t largest_free_bytes();

 private:
  struct InUse {
    size_t bytes;
    std::vector<c10::Stream> streams;
  };
  struct Returned {
    MemoryRange range;
    c10::DeviceType type;
    std::vector<c10::Stream> streams;
    bool has_events;
    std::vector<EventRef> events;
  };
  using Blocks = std::vector<std::unique_ptr<PinnedBlock>>;

  // Requires, for all of these: mutex_ is held.
  bool record_events(Returned& returned) noexcept;
  bool has_come_back(Returned& returned) noexcept;
  void collect() noexcept;
  std::optional<std::vector<uintptr_t>> take_within_limit(std::span<const size_t> sizes,
                                                          Blocks& dropped);
  uint64_t drop(MemoryRange idle, Blocks& dropped);
  std::vector<EventRef> next_return(uint64_t wanted) const;
  [[noreturn]] void refuse(std::span<const size_t> sizes) const;

  Mutex mutex_;                                               // guards all below
  std::map<uintptr_t, std::unique_ptr<PinnedBlock>> blocks_;  // by beginning
  FreeRanges ranges_;
  uint64_t bytes_ = 0;                 // of blocks, and of those in the making
  std::map<uintptr_t, InUse> in_use_;  // by tensors; by beginning
  std::list<Returned> returned_;       // that a device may still use
  CurrentWork current_work_;
};

}  // namespace tdcopier
