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
  // High priority: that pool is the one that callers use least, so the stream is our own in
  // practice.
  return c10::impl::VirtualGuardImpl(device.type())
      .getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

}  // namespace

Accelerator& Accelerator::of(c10::Device device) {
  static std::mutex mutex;
  static auto* devices = new std::map<std::pair<int, int>, std::unique_ptr<Accelerator>>();
  const std::lock_guard lock(mutex);
  auto& entry = (*devices)[{static_cast<int>(device.type()), device.index()}];
  if (!entry) entry.reset(new Accelerator(device));
  return *entry;
}

Accelerator::Accelerator(c10::Device device)
    : device_(device),
      copy_stream_(make_copy_stream(device)),
      events_(device.type()),
      staging_(device.type()),
      run_ahead_(events_),
      views_(device) {}

}  // namespace tdcopier
