// Device memory: a caching allocator with the stream semantics of CUDA's. block_cache.h has the
// blocks, which it reuses and poisons.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include "sim/block_cache.h"
#include "sim/runtime.h"

namespace tdcopier::sim {

// All in bytes except `allocations`, which counts the requests for memory since the last reset.
struct MemoryStats {
  std::int64_t allocated = 0;
  std::int64_t peak_allocated = 0;
  std::int64_t reserved = 0;
  std::int64_t peak_reserved = 0;
  std::int64_t allocations = 0;
};

// A block belongs to the stream that is current when it is allocated, on the device that is current
// then. BlockCache describes when it is reused.
class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  static DeviceAllocator& get();

  // Throws c10::OutOfMemoryError if the device's limit would be exceeded even after unused blocks
  // were given back. For zero bytes, returns a null pointer on the current device.
  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* target, const void* source, std::size_t bytes) const override;

  bool initialized() override { return device_count() > 0; }
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  // Ignores pointers that are not this allocator's.
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;

  MemoryStats stats(c10::DeviceIndex device) const;

  // Limits the reserved bytes of a device; nullopt: no limit.
  void set_limit(c10::DeviceIndex device, std::optional<std::int64_t> bytes);

  // Returns the device of an address within a block; nullopt if the block is not this allocator's.
  std::optional<c10::DeviceIndex> device_of(const void* data) const;
  std::optional<Place> place_of(const void* data) const;

 private:
  struct Device {
    MemoryStats stats;
    std::optional<std::int64_t> limit;
  };

  static void free_data(void* data);
  Device& device_at(std::int64_t index) { return devices_[static_cast<std::size_t>(index)]; }
  void trim(std::int64_t device);
  bool has_room(c10::DeviceIndex device, std::size_t size);
  // Makes room for a block if unused blocks take it. Blocks: while work that was pending when they
  // were freed may use them; meanwhile without the lock.
  void wait_for_unused(c10::DeviceIndex device, std::size_t size,
                       std::unique_lock<std::mutex>& lock);
  Block* allocate_block(c10::DeviceIndex device, std::int64_t pool, std::size_t size);

  mutable std::mutex mutex_;
  BlockCache cache_;
  std::array<Device, kMaxDevices> devices_;
};

}  // namespace tdcopier::sim
