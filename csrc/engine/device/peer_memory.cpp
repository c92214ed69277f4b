// Asks the driver about each address: devices that are connected may still not be allowed to reach
// an allocation, for example of a virtual memory allocator of the user's.
#include "engine/device/peer_memory.h"

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "engine/device/cuda_driver.h"

namespace tdcopier {
namespace {

constexpr size_t kMostDevices = 64;  // of larger numbers the answer is no

std::atomic<bool>* answer_for(c10::Device device, c10::Device peer) {
  static std::array<std::array<std::atomic<bool>, kMostDevices>, kMostDevices> answers{};
  const auto from = static_cast<size_t>(device.index());
  const auto to = static_cast<size_t>(peer.index());
  const bool is_known =
      device.is_cuda() && peer.is_cuda() && from < kMostDevices && to < kMostDevices;
  return is_known ? &answers[from][to] : nullptr;
}

// Returns the context of `device` that torch uses, kept for the life of the process; null: none.
void* context_of(const CudaDriver& driver, c10::Device device) {
  static std::array<std::atomic<void*>, kMostDevices> contexts{};
  std::atomic<void*>& known = contexts[static_cast<size_t>(device.index())];
  void* context = known.load(std::memory_order_acquire);
  if (context != nullptr || driver.retain_context(&context, device.index()) != 0) return context;
  known.store(context, std::memory_order_release);
  return context;
}

// Requires: the context that asks is the current one.
bool is_writable(const CudaDriver& driver, const std::byte* address) {
  constexpr int kDevicePointer = 3;  // CU_POINTER_ATTRIBUTE_DEVICE_POINTER
  uint64_t as_seen_here = 0;
  const auto wanted = reinterpret_cast<uint64_t>(address);
  return driver.pointer_attribute(&as_seen_here, kDevicePointer, wanted) == 0 &&
         as_seen_here == wanted;
}

}  // namespace

bool can_write_peer(c10::Device device, c10::Device peer, const std::byte* begin, uint64_t bytes) {
  std::atomic<bool>* const answer = answer_for(device, peer);
  if (answer == nullptr) return false;
  const CudaDriver* const driver = cuda_driver();
  if (driver == nullptr || !driver->can_copy_to_peers()) return false;
  void* const context = context_of(*driver, device);
  if (context == nullptr) return false;
  const CurrentContext here(*driver, context);
  // Both ends: an allocation may be made of several, each with permissions of its own.
  const bool can = is_writable(*driver, begin) && is_writable(*driver, begin + bytes - 1);
  answer->store(can, std::memory_order_relaxed);
  return can;
}

bool could_write_peer(c10::Device device, c10::Device peer) {
  const std::atomic<bool>* const answer = answer_for(device, peer);
  return answer != nullptr && answer->load(std::memory_order_relaxed);
}

}  // namespace tdcopier
