// Transfers: they are counted, take time, and can be made to fail.
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

// Returns, for example, "a transfer h2d of 4096 bytes from the host to sim:0"; for a stand-in for a
// kernel, "the operator aten::add (4096 bytes)".
std::string describe(const Transfer& transfer);

// Counts the transfer and returns the operation to enqueue: `move` after the time that it takes, or
// a failure. If the transfer fails now, throws and does not count it. Passes stand-ins for kernels
// (Uncounted) through.
Operation begin_transfer(const Transfer& transfer, std::function<void()> move);

}  // namespace tdcopier::sim
