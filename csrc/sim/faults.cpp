// Keeps the armed faults, and makes the calls fail that they select.
#include "sim/faults.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace tdcopier::sim {

namespace {

constexpr std::int32_t kUnknown = 999;  // as in CUDA

std::mutex faults_mutex;
std::vector<std::shared_ptr<Fault>> armed;  // guarded by mutex
std::atomic<bool> any_armed{false};         // read without the lock

[[noreturn]] void raise_device_error(std::int32_t code, const std::string& message) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, message);
}

}  // namespace

// Counts a call for all armed faults.
class DueFaults {
 public:
  struct Strike {
    std::int32_t code;                        // of a query or a pinned allocation
    std::shared_ptr<LastingFailure> lasting;  // of a transfer that fails when it runs
  };

  // Counts the call for the faults of this kind for which `passes(plan)` is true. Returns the
  // strike of the first one that is due.
  template <typename Passes>
  static std::optional<Strike> count(FaultKind kind, const std::string& what, Passes passes) {
    std::optional<Strike> strike;
    const std::lock_guard lock(faults_mutex);
    for (const auto& fault : armed) {
      const FaultPlan& plan = fault->plan_;
      if (plan.kind != kind || !passes(plan)) continue;
      const auto number = ++fault->seen_;
      if (number < plan.n || number - plan.n >= plan.times) continue;
      fault->struck_ = what;
      if (kind == FaultKind::kExecution) {
        fault->lasting_ =
            std::make_shared<LastingFailure>(c10::str(what, " was made to fail when it ran"));
      }
      if (!strike) strike = Strike{plan.code, fault->lasting_};
    }
    return strike;
  }

  // The same for a call on one device.
  static std::optional<Strike> count_on(FaultKind kind, const std::string& what,
                                        c10::DeviceIndex device) {
    return count(kind, what, [device](const FaultPlan& plan) {
      return !plan.device || *plan.device == device;
    });
  }

  // The same for a call that has no device.
  static std::optional<Strike> count(FaultKind kind, const std::string& what) {
    return count(kind, what, [](const FaultPlan&) { return true; });
  }
};

std::shared_ptr<Fault> Fault::arm(const FaultPlan& plan) {
  std::shared_ptr<Fault> fault(new Fault(plan));
  const std::lock_guard lock(faults_mutex);
  armed.push_back(fault);
  any_armed.store(true, std::memory_order_release);
  return fault;
}

void Fault::disarm() {
  std::shared_ptr<LastingFailure> lasting;
  {
    const std::lock_guard lock(faults_mutex);
    std::erase_if(armed, [this](const auto& fault) { return fault.get() == this; });
    any_armed.store(!armed.empty(), std::memory_order_release);
    lasting = lasting_;
  }
  if (lasting) lasting->end();
}

std::string Fault::struck() const {
  const std::lock_guard lock(faults_mutex);
  return struck_;
}

void strike_device_allocation(c10::DeviceIndex device, std::size_t bytes) {
  if (!any_armed.load(std::memory_order_acquire)) return;
  const auto what = c10::str("an allocation of ", bytes, " bytes on sim:", int{device});
  const auto strike = DueFaults::count_on(FaultKind::kDeviceAllocation, what, device);
  TORCH_CHECK_WITH(OutOfMemoryError, !strike, "sim:", int{device}, " is out of memory: ", what,
                   " was made to fail");
}

void strike_pinned_allocation(std::size_t bytes) {
  if (!any_armed.load(std::memory_order_acquire)) return;
  const auto what = c10::str("an allocation of ", bytes, " pinned bytes");
  if (const auto strike = DueFaults::count(FaultKind::kPinnedAllocation, what)) {
    const auto* const why =
        strike->code == kMemoryAllocation ? "out of memory that can be pinned: " : "";
    raise_device_error(strike->code, c10::str(why, what, " was made to fail"));
  }
}

void strike_event_record(c10::DeviceIndex device) {
  if (!any_armed.load(std::memory_order_acquire)) return;
  const auto what = c10::str("the recording of an event on sim:", int{device});
  if (DueFaults::count_on(FaultKind::kEventRecord, what, device)) {
    raise_device_error(kUnknown, what + " was made to fail");
  }
}

void strike_event_query(c10::DeviceIndex device) {
  if (!any_armed.load(std::memory_order_acquire)) return;
  const auto what = c10::str("the query of an event of sim:", int{device});
  if (const auto strike = DueFaults::count_on(FaultKind::kEventQuery, what, device)) {
    raise_device_error(strike->code, what + " was made to fail");
  }
}

void strike_thread() {
  if (!any_armed.load(std::memory_order_acquire)) return;
  const std::string what = "the creation of a thread";
  if (DueFaults::count(FaultKind::kThread, what)) {
    throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again),
                            what + " was made to fail");
  }
}

std::shared_ptr<const LastingFailure> strike_transfer(const Transfer& transfer) {
  if (!any_armed.load(std::memory_order_acquire)) return nullptr;
  const auto what = describe(transfer);
  const auto passes = [&](const FaultPlan& plan) {
    return (!plan.direction || *plan.direction == transfer.direction) &&
           (!plan.device || *plan.device == transfer.source || *plan.device == transfer.target);
  };
  if (DueFaults::count(FaultKind::kEnqueue, what, passes)) {
    raise_device_error(kUnknown, c10::str(what, " was made to fail when it was enqueued"));
  }
  const auto strike = DueFaults::count(FaultKind::kExecution, what, passes);
  return strike ? strike->lasting : nullptr;
}

}  // namespace tdcopier::sim
