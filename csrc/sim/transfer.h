// What a transfer is: it is counted, takes its time, and may be made to fail.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <functional>
#include <optional>
#include <string>

#include "sim/counters.h"
#include "sim/operation.h"

namespace tdcopier::sim {

struct Transfer {
  Direction direction;
  std::size_t bytes;
  std::optional<c10::DeviceIndex> source;  // none: the host
  std::optional<c10::DeviceIndex> target;
};

// "a transfer h2d of 4096 bytes from the host to sim:0"; for what stands in for a kernel, "the
// operator aten::add (4096 bytes)".
std::string describe(const Transfer& transfer);

// Counts the transfer, which is about to be enqueued, and returns `move` as it is to be enqueued:
// behind the time that it takes, or failing. Throws if it fails now; then it is not counted.
// What only stands in for kernels (Uncounted) is let through.
Operation begin_transfer(const Transfer& transfer, std::function<void()> move);

}  // namespace tdcopier::sim
