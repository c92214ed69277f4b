// The registry of accelerators.
#include "engine/accelerator.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

namespace tdcopier {
namespace {

c10::Stream make_copy_stream(c10::Device device) {
  if (device.is_cpu()) return c10::Stream(c10::Stream::DEFAULT, device);  // it has none
  // High priority: that pool is the one that callers use least, so the stream is our own in
  // practice.
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

struct Registry {
  std::mutex mutex;
  std::map<std::pair<int, int>, std::unique_ptr<Accelerator>> accelerators;  // by type and index
};

Registry& registry() {
  static auto* const made = new Registry();
  return *made;
}

}  // namespace

Accelerator& Accelerator::of(c10::Device device) {
  auto& [mutex, accelerators] = registry();
  const std::lock_guard lock(mutex);
  auto& entry = accelerators[{static_cast<int>(device.type()), device.index()}];
  if (!entry) entry.reset(new Accelerator(device));
  return *entry;
}

void Accelerator::settle_all() {
  auto& [mutex, accelerators] = registry();
  const std::lock_guard lock(mutex);
  for (const auto& [key, accelerator] : accelerators) {
    accelerator->staging().pinned_bytes();
    accelerator->held().pinned_bytes();
    accelerator->run_ahead().has_room();
  }
}

void Accelerator::drop_held_memory() {
  auto& [mutex, accelerators] = registry();
  const std::lock_guard lock(mutex);
  for (const auto& [key, accelerator] : accelerators) accelerator->held().drop_free();
}

EventRef Accelerator::record_current() {
  return events_.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

Accelerator::Accelerator(c10::Device device)
    : device_(device),
      copy_stream_(make_copy_stream(device)),
      events_(device.type()),
      staging_(device.type()),
      held_(device.type()),
      run_ahead_(events_),
      views_(device) {}

}  // namespace tdcopier
