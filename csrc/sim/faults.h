// Injected failures: the n-th allocation, transfer, event call or thread creation from now on
// fails.
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

// The kind of call that a fault counts, and how the call fails.
enum class FaultKind : std::uint8_t {
  kDeviceAllocation,
  kPinnedAllocation,  // or the pinning of existing memory
  kEnqueue,           // a transfer: the call raises
  kExecution,         // a transfer: the call succeeds, and the transfer fails when it runs
  kEventRecord,       // the recording of an event
  kEventQuery,        // the query whether an event has been reached
  kThread,            // the creation of a thread by the engine
};

// Selects the calls that a fault counts, and those that it makes fail.
struct FaultPlan {
  FaultKind kind;
  std::int64_t n = 1;                                 // the first call that fails, counted from 1
  std::int64_t times = 1;                             // how many calls fail in a row
  std::optional<Direction> direction = std::nullopt;  // of transfers; nullopt: any
  std::optional<c10::DeviceIndex> device = std::nullopt;  // nullopt: any; a transfer has up to two
  std::int32_t code = 0;  // the error code of a query or of a pinned allocation that fails
};

// An armed failure. It strikes even where a cache would have served the call. Thread: any.
class Fault {
 public:
  // Arms a fault, which counts the calls from now on.
  static std::shared_ptr<Fault> arm(const FaultPlan& plan);

  // Ends the fault, and repairs a device that it has broken.
  void disarm();

  // Returns the last call that it made fail; empty if there was none. A transfer that fails when it
  // runs is chosen when it is enqueued.
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

// An error code of CUDA and of HIP: no more memory.
inline constexpr std::int32_t kMemoryAllocation = 2;

// The simulation calls one of these for every call of its kind. They throw if a fault strikes the
// call.
void strike_device_allocation(c10::DeviceIndex device, std::size_t bytes);
void strike_pinned_allocation(std::size_t bytes);
void strike_event_record(c10::DeviceIndex device);
void strike_event_query(c10::DeviceIndex device);
// Throws std::system_error, as std::thread does at the process's limit of threads.
void strike_thread();
// Returns the failure that the transfer will have when it runs; null: none.
std::shared_ptr<const LastingFailure> strike_transfer(const Transfer& transfer);

}  // namespace tdcopier::sim
