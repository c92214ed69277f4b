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

std::atomic<bool>* answer_for(c10::Device device, c10::Device peer) {
  static std::array<std::array<std::atomic<bool>, kMostCudaDevices>, kMostCudaDevices> answers{};
  const auto from = static_cast<size_t>(device.index());
  const auto to = static_cast<size_t>(peer.index());
  const bool is_known =
      device.is_cuda() && peer.is_cuda() && from < kMostCudaDevices && to < kMostCudaDevices;
  return is_known ? &answers[from][to] : nullptr;
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
  void* const context = primary_context(*driver, device);
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
