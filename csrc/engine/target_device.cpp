// The registry of target devices, and allocation on them.
#include "engine/target_device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/internal_error.h"

namespace tdcopier {
namespace {

// What every allocator of torch gives. A larger alignment is reached by a shift within a larger
// block.
constexpr uint64_t kAllocatorAlignmentBytes = 64;

c10::Stream make_copy_stream(c10::Device device) {
  // High priority: that pool is the one that callers use least, so the stream is our own in
  // practice.
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

}  // namespace

TargetDevice& TargetDevice::of(c10::Device device) {
  static std::mutex mutex;
  static auto* devices = new std::map<std::pair<int, int>, std::unique_ptr<TargetDevice>>();
  const std::lock_guard lock(mutex);
  auto& entry = (*devices)[{static_cast<int>(device.type()), device.index()}];
  if (!entry) entry.reset(new TargetDevice(device));
  return *entry;
}

TargetDevice::TargetDevice(c10::Device device)
    : device_(device),
      copy_stream_(make_copy_stream(device)),
      events_(device.type()),
      staging_(device.type()),
      run_ahead_(events_) {}

c10::Storage TargetDevice::allocate(uint64_t bytes, uint64_t alignment_bytes,
                                    uint64_t* shift_bytes) const {
  const bool aligned = kAllocatorAlignmentBytes % alignment_bytes == 0;
  const uint64_t total = bytes + (aligned ? 0 : alignment_bytes - 1);
  c10::Allocator* allocator = c10::GetAllocator(device_.type());
  c10::DataPtr memory = allocator->allocate(total);
  const auto address = reinterpret_cast<uintptr_t>(memory.get());
  *shift_bytes = aligned ? 0 : (alignment_bytes - address % alignment_bytes) % alignment_bytes;
  check_invariant((address + *shift_bytes) % alignment_bytes == 0,
                  "the device's allocator aligns memory to 64 bytes");
  return {c10::Storage::use_byte_size_t(), static_cast<size_t>(total), std::move(memory), allocator,
          /*resizable=*/true};
}

c10::Storage TargetDevice::empty_storage() const {
  return {c10::Storage::use_byte_size_t(), size_t{0}, c10::DataPtr(nullptr, device_),
          c10::GetAllocator(device_.type()), /*resizable=*/true};
}

}  // namespace tdcopier
