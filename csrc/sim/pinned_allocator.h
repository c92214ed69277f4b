// Simulated page-locked host memory: blocks that copies may read and write late, and that are not
// reused before those copies are done.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "sim/block_cache.h"

namespace tdcopier::sim {

struct PinnedBytes {
  std::int64_t in_use = 0;   // handed out
  std::int64_t current = 0;  // taken from the system: in use, or kept for reuse
  std::int64_t peak = 0;     // the highest `current` since the last reset
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  static PinnedAllocator& get();

  // For zero bytes, returns a null pointer.
  c10::DataPtr allocate(std::size_t bytes) override;
  void copy_data(void* target, const void* source, std::size_t bytes) const override;

  // Records that the stream uses the block whose context is `context`, or that starts at `data`.
  // After its free the block is not handed out again until the work that the stream had by then is
  // done. Returns whether there is such a block; an address inside a block is not enough.
  bool record_event(void* data, void* context, c10::Stream stream) override;

  void empty_cache() override;
  at::HostStats get_stats() override;
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override;

  PinnedBytes bytes() const;

  // Pins memory of other owners in place, and undoes it. Work that may still access the memory then
  // is a hazard. Each returns 0, or a driver's error code.
  int pin(void* begin, std::size_t bytes) noexcept;
  int unpin(void* begin);

  // Returns whether an address is in memory that is pinned in place, or in a block that was ever
  // handed out and has not been given back to the system.
  bool is_pinned(const void* data) const;
  std::optional<Place> place_of(const void* data) const;

 private:
  static void free_block(void* context);
  std::optional<Place> pinned_in_place(const void* data) const;

  mutable std::mutex mutex_;
  BlockCache cache_;
  std::map<std::uintptr_t, std::size_t> in_place_;  // sizes by beginning; they do not overlap
  PinnedBytes bytes_;
};

}  // namespace tdcopier::sim
