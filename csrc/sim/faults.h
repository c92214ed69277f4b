// Injected failures: the n-th allocation, transfer, event call or new thread from now on fails.
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

// What a fault counts, and how it fails.
enum class FaultKind : std::uint8_t {
  kDeviceAllocation,
  kPinnedAllocation,
  kEnqueue,      // a transfer: the call raises
  kExecution,    // a transfer: the call succeeds, and the transfer fails when it runs
  kEventRecord,  // the recording of an event
  kEventQuery,   // the question whether an event has been reached
  kThread,       // a thread that the engine makes
};

// Which calls a fault counts, and which of those it makes fail.
struct FaultPlan {
  FaultKind kind;
  std::int64_t n = 1;                                 // the first call that fails, from 1
  std::int64_t times = 1;                             // how many calls fail, one after the other
  std::optional<Direction> direction = std::nullopt;  // of transfers; nullopt: any
  std::optional<c10::DeviceIndex> device = std::nullopt;  // nullopt: any; a transfer has up to two
  std::int32_t code = 0;                                  // the error code of a query that fails
};

// A fault strikes even where a cache would have served the call. Any thread may call any member.
class Fault {
 public:
  // Counts from now on.
  static std::shared_ptr<Fault> arm(const FaultPlan& plan);

  // Nothing fails because of it from now on, and a device that it has broken is repaired.
  void disarm();

  // The last call that it made fail; empty if there was none. A transfer that fails when it runs
  // is chosen when it is enqueued.
  std::string struck() const;

 private:
  friend class DueFaults;
  explicit Fault(const FaultPlan& plan) : plan_(plan) {}

  const FaultPlan plan_;

  // Guarded by the registry's mutex.
  std::int64_t seen_ = 0;
  std::string struck_;
  std::shared_ptr<LastingFailure> lasting_;
};

// The simulation calls each of these once for every call of its kind. They throw if a fault
// strikes it.
void strike_device_allocation(c10::DeviceIndex device, std::size_t bytes);
void strike_pinned_allocation(std::size_t bytes);
void strike_event_record(c10::DeviceIndex device);
void strike_event_query(c10::DeviceIndex device);
// Throws std::system_error, as std::thread does where the process may have no more threads.
void strike_thread();
// Returns how the transfer will fail when it runs; null: it will not.
std::shared_ptr<const LastingFailure> strike_transfer(const Transfer& transfer);

}  // namespace tdcopier::sim
