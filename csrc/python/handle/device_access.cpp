#include "python/handle/device_access.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <utility>

#include "base/forks.h"
#include "engine/device/accelerator.h"
#include "python/runtime/device_argument.h"
#include "python/runtime/interrupts.h"

namespace tdcopier {

DeviceAccess::DeviceAccess(c10::Device device, std::vector<EventRef> ends)
    : device_(device), generation_(fork_generation()), ends_(std::move(ends)) {}

DeviceAccess::DeviceAccess(const c10::Stream& stream) : DeviceAccess(stream.device(), {}) {
  const WithoutGil no_gil;  // if it has to wait
  EventRef end = Accelerator::of(stream.device()).events().record_or_wait(stream);
  if (end) ends_.push_back(std::move(end));
}

DeviceAccess::~DeviceAccess() {
  // Leaks them in a forked child: a thread of the parent may have held the lock of their pool.
  if (generation_ != fork_generation()) new std::vector<EventRef>(std::move(ends_));
}

bool DeviceAccess::has_ended() {
  return generation_ != fork_generation() ||
         std::ranges::all_of(ends_, [](const auto& end) { return tdcopier::has_ended(*end); });
}

void DeviceAccess::wait() {
  if (has_ended()) return;
  const WaitWithoutGil waiting;
  for (const EventRef& end : ends_) wait_until_ended(*end);
}

void DeviceAccess::order() {
  if (ends_.empty() || generation_ != fork_generation()) return;
  const c10::Stream stream = parse_stream(pybind11::none(), device_);
  for (const EventRef& end : ends_) block_until_ended(*end, stream);
}

}  // namespace tdcopier
