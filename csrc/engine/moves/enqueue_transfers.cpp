// CUDA's transfers from and to pinned memory go through the driver, all others through ATen's copy,
// which every backend has.
#include "engine/moves/enqueue_transfers.h"

#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "engine/device/byte_tensor.h"
#include "engine/device/cuda_driver.h"
#include "engine/device/fallbacks.h"

namespace tdcopier {
namespace {

std::atomic<bool> g_batches_used = true;

constexpr bool kNonBlocking = true;

// Returns a tensor over host memory that it does not own: the data pointer has no deleter.
at::Tensor on_host(const void* address, uint64_t bytes) {
  return byte_tensor(c10::DataPtr(const_cast<void*>(address), c10::Device(c10::kCPU)), bytes);
}

// Returns the driver, which takes about 2 us where ATen's copy takes 7 to 16; null if this kind of
// device has none. If a driver call fails, ATen's copy succeeds (on a thread's first use of the
// device), or fails with torch's own error.
const CudaDriver* driver_for(const c10::Stream& stream) {
  return stream.device_type() == c10::DeviceType::CUDA ? cuda_driver() : nullptr;
}

// CUmemcpyAttributes: sources are read in the order of the stream, and no hints.
struct BatchAttributes {
  int source_access_order = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
  int source_location[2] = {};
  int target_location[2] = {};
  unsigned flags = 0;
};

constexpr size_t kMostInBatch = 64;
// Eight transfers of 64 KiB take 28 us together and 40 us one by one, but the three of a batch of
// 150 KB 4 % longer together: the driver writes small ones into its commands.
constexpr uint64_t kLeastBatchBytes = 64 * 1024;  // for each transfer

uint64_t number(const void* address) {
  return reinterpret_cast<uint64_t>(address);
}

// Enqueues the transfers as one piece of work. Returns whether it did. Unlike single ones, they
// need a current context, which a worker that has made no other call of CUDA does not have.
bool enqueue_batch(const CudaDriver& driver, const c10::Stream& stream,
                   std::span<const Transfer> transfers) {
  void* const context = primary_context(driver, stream.device());
  if (context == nullptr) return false;
  const CurrentContext here(driver, context);
  std::array<uint64_t, kMostInBatch> to;
  std::array<uint64_t, kMostInBatch> from;
  std::array<size_t, kMostInBatch> bytes;
  for (size_t i = 0; i < transfers.size(); ++i) {
    to[i] = number(transfers[i].to);
    from[i] = number(transfers[i].from);
    bytes[i] = transfers[i].bytes;
  }
  BatchAttributes attributes;
  size_t attributes_from = 0;
  size_t failed = 0;
  return driver.copy_batch(to.data(), from.data(), bytes.data(), transfers.size(), &attributes,
                           &attributes_from, 1, &failed, native_handle(stream)) == 0;
}

bool go_together(const CudaDriver* driver, const c10::Stream& stream,
                 std::span<const Transfer> transfers) {
  if (transfers.size() < 2 || driver == nullptr || !may_go_together(stream)) return false;
  uint64_t bytes = 0;
  for (const Transfer& transfer : transfers) bytes += transfer.bytes;
  return bytes >= transfers.size() * kLeastBatchBytes;
}

// Enqueues all transfers: together where that is faster, the others by single(transfer).
template <typename Single>
void enqueue_all(const CudaDriver* driver, const c10::Stream& stream,
                 std::span<const Transfer> transfers, const Single& single) {
  while (!transfers.empty()) {
    const auto next = transfers.first(std::min(transfers.size(), kMostInBatch));
    transfers = transfers.subspan(next.size());
    if (go_together(driver, stream, next)) {
      if (enqueue_batch(*driver, stream, next)) continue;
      note_fallback();
    }
    for (const Transfer& transfer : next) single(transfer);
  }
}

}  // namespace

void use_batch_transfers(bool use) {
  g_batches_used = use;
}

// The driver takes no batches on CUDA's default streams, which a caller's may be.
bool may_go_together(const c10::Stream& stream) {
  constexpr uint64_t kLastDefaultStream = 2;  // CU_STREAM_PER_THREAD; 0 and 1 are the legacy one
  if (!g_batches_used.load(std::memory_order_relaxed)) return false;
  if (stream.device_type() != c10::DeviceType::CUDA) return true;
  const CudaDriver* const driver = cuda_driver();
  return driver != nullptr && driver->copy_batch != nullptr &&
         number(native_handle(stream)) > kLastDefaultStream;
}

void enqueue_to_device(const c10::Stream& stream, std::span<const Transfer> transfers) {
  const CudaDriver* driver = driver_for(stream);
  enqueue_all(driver, stream, transfers, [&](const Transfer& transfer) {
    const auto [to, pinned, bytes] = transfer;
    if (driver != nullptr &&
        driver->copy_host_to_device(number(to), pinned, bytes, native_handle(stream)) == 0) {
      return;
    }
    note_fallback(stream.device_type());
    const c10::InferenceMode no_autograd;
    bytes_at(stream.device(), to, bytes).copy_(on_host(pinned, bytes), kNonBlocking);
  });
}

void enqueue_to_host(const c10::Stream& stream, std::span<const Transfer> transfers) {
  const CudaDriver* driver = driver_for(stream);
  enqueue_all(driver, stream, transfers, [&](const Transfer& transfer) {
    const auto [pinned, from, bytes] = transfer;
    if (driver != nullptr &&
        driver->copy_device_to_host(pinned, number(from), bytes, native_handle(stream)) == 0) {
      return;
    }
    note_fallback(stream.device_type());
    const c10::InferenceMode no_autograd;
    on_host(pinned, bytes).copy_(bytes_at(stream.device(), from, bytes), kNonBlocking);
  });
}

void copy_from_pageable(const c10::Stream& stream, std::byte* to, const void* host,
                        uint64_t bytes) {
  const c10::InferenceMode no_autograd;
  bytes_at(stream.device(), to, bytes).copy_(on_host(host, bytes));
}

void copy_to_pageable(const c10::Stream& stream, std::byte* host, const void* from,
                      uint64_t bytes) {
  const c10::InferenceMode no_autograd;
  on_host(host, bytes).copy_(bytes_at(stream.device(), from, bytes));
}

void enqueue_between(const c10::Stream& target, const c10::Stream& source,
                     std::span<const Transfer> transfers, bool is_writable) {
  const CudaDriver* driver = is_writable ? cuda_driver() : nullptr;
  enqueue_all(driver, source, transfers, [&](const Transfer& transfer) {
    const auto [to, from, bytes] = transfer;
    if (is_writable &&
        driver->copy_any(number(to), number(from), bytes, native_handle(source)) == 0) {
      return;
    }
    if (is_writable) note_fallback(source.device_type());
    const c10::InferenceMode no_autograd;
    bytes_at(target.device(), to, bytes)
        .copy_(bytes_at(source.device(), from, bytes), kNonBlocking);
  });
}

}  // namespace tdcopier
