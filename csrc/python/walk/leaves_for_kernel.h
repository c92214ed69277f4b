// Finds small pinned leaves that a kernel of the target reads in place, so that no host thread
// stages them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "engine/device/pinned_ranges.h"

namespace tdcopier {

// Those of one copy. One launch reads them all (RowsJob), if there is enough to read. Leaves that
// share an allocation are left to PinnedLeaves, and larger ones to transfers.
class LeavesForKernel {
 public:
  // `target`: any, also one without kernels.
  explicit LeavesForKernel(c10::Device target);

  // Returns whether this host tensor is such a leaf, and counts it if so. Requires: its storage
  // stays alive until the last call.
  bool take(const at::Tensor& tensor);
  // Returns whether the kernel is quicker for them than staging.
  bool are_enough() const { return bytes_ >= kLeastBytes; }
  PinnedTables take_tables();

 private:
  // Measured on an H200: 64 leaves of 16 KiB arrive in 77 us by the kernel and in 208 when staged,
  // 4 of 64 KiB in 57 and 44.
  static constexpr uint64_t kLeastBytes = 512 * 1024;

  const c10::Device target_;
  const bool is_used_;
  std::optional<bool> has_kernel_;  // the target
  PinnedLookup pinned_;
  std::vector<const void*> registered_;
  uint64_t bytes_ = 0;
};

// Turns the kernel for leaves off, or on again, for tests and comparisons. Thread: any.
void use_kernel_for_leaves(bool use);

}  // namespace tdcopier
