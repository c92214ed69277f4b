// The device's memory: a caching allocator with the stream semantics of CUDA's.
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

// All in bytes but `allocations`, which counts requests for memory since the process began.
struct MemoryStats {
  std::int64_t allocated = 0;
  std::int64_t peak_allocated = 0;
  std::int64_t reserved = 0;
  std::int64_t peak_reserved = 0;
  std::int64_t allocations = 0;
};

// A block belongs to the stream that is current when it is allocated, on the device that is current
// then. See BlockCache for when it is used again.
class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  static DeviceAllocator& get();

  // Raises c10::OutOfMemoryError when the device's limit would be exceeded even after unused blocks
  // have been given back. Zero bytes give a null pointer on the current device.
  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* target, const void* source, std::size_t bytes) const override;

  bool initialized() override { return device_count() > 0; }
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  // Pointers that are not this allocator's are ignored: someone else takes care of their memory.
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;

  MemoryStats stats(c10::DeviceIndex device) const;

  // Bounds the reserved bytes of a device; none means no limit.
  void set_limit(c10::DeviceIndex device, std::optional<std::int64_t> bytes);

  // The device of an address within a block, if it is one of this allocator's.
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
  Block* allocate_block(c10::DeviceIndex device, std::int64_t pool, std::size_t size);

  mutable std::mutex mutex_;
  BlockCache cache_;
  std::array<Device, kMaxDevices> devices_;
};

}  // namespace tdcopier::sim
