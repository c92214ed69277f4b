// The faults that are armed, and whom they strike.
#include "sim/faults.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <utility>

namespace tdcopier::sim {

namespace {

constexpr std::int32_t kMemoryAllocation = 2;  // as in CUDA
constexpr std::int32_t kUnknown = 999;         // as in CUDA

std::mutex mutex;
std::vector<std::shared_ptr<Fault>> armed;  // guarded by mutex
std::atomic<bool> any_armed{false};         // a look without the lock

[[noreturn]] void raise_device_error(std::int32_t code, const std::string& message) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, code, message);
}

}  // namespace

// Asks all faults that are armed about one event.
class DueFaults {
 public:
  struct Strike {
    std::shared_ptr<LastingFailure> lasting;  // of a transfer that fails when it runs
  };

  // Counts the event for the faults of this kind; the first that is due strikes.
  template <typename Passes>
  static std::optional<Strike> count(FaultKind kind, const std::string& what, Passes passes) {
    std::optional<Strike> strike;
    const std::lock_guard lock(mutex);
    for (const auto& fault : armed) {
      if (fault->kind_ != kind || !passes(fault->direction_, fault->device_)) continue;
      if (++fault->seen_ != fault->n_) continue;
      fault->struck_ = what;
      if (kind == FaultKind::kExecution) {
        fault->lasting_ =
            std::make_shared<LastingFailure>(c10::str(what, " was made to fail when it ran"));
      }
      if (!strike) strike = Strike{fault->lasting_};
    }
    return strike;
  }
};

std::shared_ptr<Fault> Fault::arm(FaultKind kind, std::int64_t n,
                                  std::optional<Direction> direction,
                                  std::optional<c10::DeviceIndex> device) {
  std::shared_ptr<Fault> fault(new Fault(kind, n, direction, device));
  const std::lock_guard lock(mutex);
  armed.push_back(fault);
  any_armed.store(true, std::memory_order_release);
  return fault;
}

void Fault::disarm() {
  std::shared_ptr<LastingFailure> lasting;
  {
    const std::lock_guard lock(mutex);
    std::erase_if(armed, [this](const auto& fault) { return fault.get() == this; });
    any_armed.store(!armed.empty(), std::memory_order_release);
    lasting = lasting_;
  }
  if (lasting) lasting->end();
}

std::string Fault::struck() const {
  const std::lock_guard lock(mutex);
  return struck_;
}

void strike_device_allocation(c10::DeviceIndex device, std::size_t bytes) {
  if (!any_armed.load(std::memory_order_acquire)) return;
  const auto what = c10::str("an allocation of ", bytes, " bytes on sim:", int{device});
  const auto strike = DueFaults::count(FaultKind::kDeviceAllocation, what, [&](auto, auto wanted) {
    return !wanted || *wanted == device;
  });
  TORCH_CHECK_WITH(OutOfMemoryError, !strike, "sim:", int{device}, " is out of memory: ", what,
                   " was made to fail");
}

void strike_pinned_allocation(std::size_t bytes) {
  if (!any_armed.load(std::memory_order_acquire)) return;
  const auto what = c10::str("an allocation of ", bytes, " pinned bytes");
  if (DueFaults::count(FaultKind::kPinnedAllocation, what, [](auto, auto) { return true; })) {
    raise_device_error(kMemoryAllocation,
                       c10::str("out of memory that can be pinned: ", what, " was made to fail"));
  }
}

std::shared_ptr<const LastingFailure> strike_transfer(const Transfer& transfer) {
  if (!any_armed.load(std::memory_order_acquire)) return nullptr;
  const auto what = describe(transfer);
  const auto passes = [&](std::optional<Direction> direction,
                          std::optional<c10::DeviceIndex> device) {
    return (!direction || *direction == transfer.direction) &&
           (!device || *device == transfer.source || *device == transfer.target);
  };
  if (DueFaults::count(FaultKind::kEnqueue, what, passes)) {
    raise_device_error(kUnknown, c10::str(what, " was made to fail when it was enqueued"));
  }
  const auto strike = DueFaults::count(FaultKind::kExecution, what, passes);
  return strike ? strike->lasting : nullptr;
}

}  // namespace tdcopier::sim
