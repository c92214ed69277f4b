// The only file that knows torch's ranges.
#include "engine/steps.h"

#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <utility>

namespace tdcopier {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> g_timed = false;

constexpr std::array<const char*, kSteps> kNames = {
    "tdcopier: flatten", "tdcopier: plan",      "tdcopier: stage", "tdcopier: enqueue",
    "tdcopier: outputs", "tdcopier: unflatten", "tdcopier: wait"};

// What it was; null where nobody records.
void* begin_profiled(Step step) {
  std::optional<at::StepCallbacks> callbacks =
      at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  auto range = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  range->before(kNames[static_cast<size_t>(step)]);
  return range.release();
}

}  // namespace

void time_steps(bool on) {
  g_timed = on;
}

bool are_steps_timed() {
  return g_timed.load(std::memory_order_relaxed);
}

StepRange::StepRange(StepTimes& times, Step step) : step_(step) {
  profiled_ = begin_profiled(step);
  if (!are_steps_timed()) return;
  times_ = &times;
  begin_ = Clock::now();
}

void StepRange::end() noexcept {
  if (times_ != nullptr) {
    times_->add(step_,
                static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - begin_).count()));
  }
  delete static_cast<at::RecordFunction*>(profiled_);
}

}  // namespace tdcopier
