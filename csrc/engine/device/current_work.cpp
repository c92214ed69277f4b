// Asks each stream first: most have nothing to do, and then no event is needed.
#include "engine/device/current_work.h"

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "engine/device/graph_capture.h"

namespace tdcopier {

std::optional<std::vector<EventRef>> CurrentWork::record(
    c10::DeviceType type, std::span<const c10::Stream> others) noexcept {
  std::vector<EventRef> events;
  // Returns false if the stream is capturing.
  const auto record_on = [&](const c10::Stream& stream) {
    if (is_capturing(stream)) return false;
    if (stream.query()) return true;
    auto& pool = events_[stream.device_index()];
    if (!pool) pool = std::make_unique<EventPool>(type);
    events.push_back(pool->record(stream));
    return true;
  };
  try {
    const RelaxedCapture relaxed(type);
    const c10::impl::VirtualGuardImpl backend(type);
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
    for (c10::DeviceIndex i = 0; i < backend.deviceCount(); ++i) {
      const c10::Device device(type, i);
      if (!hooks.hasPrimaryContext(i)) continue;
      if (!record_on(backend.getStream(device))) return std::nullopt;
    }
    for (const c10::Stream& stream : others) {
      if (!record_on(stream)) return std::nullopt;
    }
  } catch (...) {
    return std::nullopt;
  }
  return events;
}

}  // namespace tdcopier
