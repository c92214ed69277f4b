// Asks each stream first: most have nothing to do, and then no event is needed.
#include "engine/device/current_work.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "engine/device/graph_capture.h"

namespace tdcopier {

std::optional<std::vector<EventRef>> CurrentWork::record(c10::DeviceType type) noexcept {
  std::vector<EventRef> events;
  try {
    const RelaxedCapture relaxed(type);
    const c10::impl::VirtualGuardImpl backend(type);
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
    for (c10::DeviceIndex i = 0; i < backend.deviceCount(); ++i) {
      const c10::Device device(type, i);
      if (!hooks.hasPrimaryContext(i)) continue;
      const c10::Stream stream = backend.getStream(device);
      if (is_capturing(stream)) return std::nullopt;
      if (stream.query()) continue;
      auto& pool = events_[i];
      if (!pool) pool = std::make_unique<EventPool>(type);
      events.push_back(pool->record(stream));
    }
  } catch (...) {
    return std::nullopt;
  }
  return events;
}

}  // namespace tdcopier
