// Tells when devices have done all that they may do with host memory whose last user drops it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Stream.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/device/events.h"

namespace tdcopier {

// Records events after the work that the calling thread's current streams have, one for each device
// that is in use, and after that of given streams. Thread: any, but one at a time. Lifetime:
// outlives its events.
class CurrentWork {
 public:
  // Returns the events that have not ended; nullopt if they cannot be recorded now, for example
  // since a stream is capturing a graph.
  std::optional<std::vector<EventRef>> record(c10::DeviceType type,
                                              std::span<const c10::Stream> others = {}) noexcept;

 private:
  std::map<c10::DeviceIndex, std::unique_ptr<EventPool>> events_;
};

}  // namespace tdcopier
