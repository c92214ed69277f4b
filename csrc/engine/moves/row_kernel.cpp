// Cuts rows into units, and launches the kernel.
#include "engine/moves/row_kernel.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "base/internal_error.h"
#include "engine/device/cuda_driver.h"
#include "engine/moves/cuda_kernels.h"
#include "engine/moves/transport.h"
#include "kernels/read_rows_ptx.h"

namespace tdcopier {
namespace {

// As many reads as keep the link busy: the other multiprocessors are left to the caller's kernels.
// On an H200, 16 blocks take up to 1.4 times as long, and 64 are no faster.
constexpr unsigned kRowBlocks = 32;
constexpr unsigned kRowThreads = 256;

enum class KernelUse : uint8_t { kWhereThereIsAKernel, kAlways, kNever };
std::atomic<KernelUse> g_use = KernelUse::kWhereThereIsAKernel;

const CudaKernels::Loaded& row_kernel_of(c10::Device device) {
  static constexpr const char* kNames[] = {"read_rows"};
  static auto& kernels = *new CudaKernels(kReadRowsPtx, kNames);
  return kernels.on(device);
}

uint32_t unit_of(uint64_t numbers) {
  uint32_t unit = 16;
  while (numbers % unit != 0) unit /= 2;
  return unit;
}

}  // namespace

bool RowReads::add(const std::byte* table, RowLayout layout, std::byte* to,
                   uint64_t most_request_bytes) {
  const auto rows = reinterpret_cast<uint64_t>(table);
  const auto target = reinterpret_cast<uint64_t>(to);
  const auto stride = static_cast<uint64_t>(layout.stride_bytes);
  const uint32_t unit = unit_of(rows | target | stride | layout.row_bytes);
  const uint64_t of_row = layout.row_bytes / unit;
  if (of_row * numbers_.size() > kMostRowBytes - units_) return false;
  if (request_bytes() + sizeof(RowTableRead) > most_request_bytes) return false;
  tables_.push_back(
      {rows, target, layout.stride_bytes, units_, static_cast<uint32_t>(of_row), unit});
  units_ += static_cast<uint32_t>(of_row * numbers_.size());
  bytes_ += layout.row_bytes * numbers_.size();
  return true;
}

void RowReads::write(std::byte* request) const {
  const size_t tables = tables_.size() * sizeof(RowTableRead);
  std::memcpy(request, tables_.data(), tables);
  std::memcpy(request + tables, numbers_.data(), numbers_.size_bytes());
}

void RowReads::enqueue(const c10::Stream& stream, const std::byte* request) const {
  if (stream.device_type() != c10::DeviceType::CUDA) {
    for (const RowTableRead& table : tables_) {
      const uint64_t row_bytes = uint64_t{table.units_of_row} * table.unit_bytes;
      auto* to = reinterpret_cast<std::byte*>(table.to);
      for (const int64_t row : numbers_) {
        const auto* from = reinterpret_cast<const std::byte*>(table.rows);
        enqueue_to_device(stream, to, from + row * table.stride_bytes, row_bytes);
        to += row_bytes;
      }
    }
    return;
  }
  const CudaKernels::Loaded& kernel = row_kernel_of(stream.device());
  check_invariant(kernel.lack.empty(), "rows are read where there is a kernel for it");
  const CurrentContext here(*cuda_driver(), kernel.context);
  const std::byte* numbers = request + tables_.size() * sizeof(RowTableRead);
  auto count = static_cast<uint32_t>(tables_.size());
  uint32_t units = units_;
  const unsigned blocks = std::min(kRowBlocks, (units + kRowThreads - 1) / kRowThreads);
  void* arguments[] = {&request, &count, &numbers, &units};
  const int result = cuda_driver()->launch(kernel.functions[0], blocks, 1, 1, kRowThreads, 1, 1, 0,
                                           native_handle(stream), arguments, nullptr);
  TORCH_CHECK(result == 0, "CUDA error: cuLaunchKernel returned ", result, " for a read of rows");
}

bool reads_rows(c10::Device device) {
  const KernelUse use = g_use.load(std::memory_order_relaxed);
  if (use == KernelUse::kNever) return false;
  if (device.type() == c10::DeviceType::CUDA) return row_kernel_of(device).lack.empty();
  return use == KernelUse::kAlways;
}

void use_row_kernel(bool use) {
  g_use = use ? KernelUse::kAlways : KernelUse::kNever;
}

}  // namespace tdcopier
