// Lasting failures, and the error that reports them.
#include "sim/lasting_failure.h"

#include <utility>

#include "sim/runtime.h"

namespace tdcopier::sim {

namespace {

constexpr std::int32_t kLaunchFailure = 719;  // as in CUDA, where this error lasts too

}  // namespace

void LastingFailure::end() {
  const std::lock_guard lock(mutex_);
  if (has_ended()) return;
  for (const Point& point : last_positions()) last_.emplace(point.stream, point.position);
  ended_.store(true, std::memory_order_release);
}

bool LastingFailure::covers(const StreamQueue* stream, std::uint64_t position) const {
  const std::lock_guard lock(mutex_);
  return !has_ended() || position <= last_.at(stream);
}

DeviceError::DeviceError(std::shared_ptr<const LastingFailure> failure)
    : c10::AcceleratorError({__func__, __FILE__, __LINE__}, kLaunchFailure, failure->message()),
      failure_(std::move(failure)) {}

}  // namespace tdcopier::sim
