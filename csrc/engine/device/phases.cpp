// Times phases. The only file that uses torch's profiler ranges.
#include "engine/device/phases.h"

#include <ATen/record_function.h>

#include <memory>
#include <optional>
#include <utility>

namespace tdcopier {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<bool> g_timed = false;

constexpr std::array<const char*, kPhases> kPhaseNames = {
    "tdcopier: flatten", "tdcopier: plan",      "tdcopier: stage", "tdcopier: enqueue",
    "tdcopier: outputs", "tdcopier: unflatten", "tdcopier: wait"};

// Starts a profiler range. Returns null if no profiler records.
void* begin_profiled(Phase phase) {
  std::optional<at::StepCallbacks> callbacks =
      at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks) return nullptr;
  auto range = std::make_unique<at::RecordFunction>(std::move(*callbacks));
  range->before(kPhaseNames[static_cast<size_t>(phase)]);
  return range.release();
}

}  // namespace

void time_phases(bool on) {
  g_timed = on;
}

bool are_phases_timed() {
  return g_timed.load(std::memory_order_relaxed);
}

PhaseRange::PhaseRange(PhaseTimes& times, Phase phase) : phase_(phase) {
  profiled_ = begin_profiled(phase);
  if (!are_phases_timed()) return;
  times_ = &times;
  begin_ = Clock::now();
}

void PhaseRange::end() noexcept {
  if (times_ != nullptr) {
    times_->add(phase_,
                static_cast<uint64_t>(std::chrono::nanoseconds(Clock::now() - begin_).count()));
  }
  delete static_cast<at::RecordFunction*>(profiled_);
}

}  // namespace tdcopier
