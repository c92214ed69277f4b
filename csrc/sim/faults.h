// Failures on order: the n-th allocation or transfer from now on.
#pragma once

#include <c10/core/Device.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "sim/lasting_failure.h"
#include "sim/transfer.h"

namespace tdcopier::sim {

// What is counted, and what happens to the n-th.
enum class FaultKind : std::uint8_t {
  kDeviceAllocation,
  kPinnedAllocation,
  kEnqueue,    // a transfer: the call raises
  kExecution,  // a transfer: it is enqueued, and fails when its turn comes
};

// Strikes once, also what could have been served from a cache. Any thread may call any member.
class Fault {
 public:
  // Counts from now on what the filters let pass; a transfer has up to two devices.
  static std::shared_ptr<Fault> arm(FaultKind kind, std::int64_t n,
                                    std::optional<Direction> direction,
                                    std::optional<c10::DeviceIndex> device);

  // Nothing is struck from now on, and if something was, the device is repaired.
  void disarm();

  // What was struck; empty if nothing was. A transfer that fails when it runs was struck when it
  // was enqueued.
  std::string struck() const;

 private:
  friend class DueFaults;
  Fault(FaultKind kind, std::int64_t n, std::optional<Direction> direction,
        std::optional<c10::DeviceIndex> device)
      : kind_(kind), n_(n), direction_(direction), device_(device) {}

  const FaultKind kind_;
  const std::int64_t n_;
  const std::optional<Direction> direction_;
  const std::optional<c10::DeviceIndex> device_;

  // Guarded by the registry's mutex.
  std::int64_t seen_ = 0;
  std::string struck_;
  std::shared_ptr<LastingFailure> lasting_;
};

// Each is to be called once for what it names, and throws if a fault strikes that.
void strike_device_allocation(c10::DeviceIndex device, std::size_t bytes);
void strike_pinned_allocation(std::size_t bytes);
// Returns how the transfer is to fail when it runs; null: not at all.
std::shared_ptr<const LastingFailure> strike_transfer(const Transfer& transfer);

}  // namespace tdcopier::sim
